"""From a row of logits to the next token.

A draw is a pure function of logits, parameters and (seed, position): the random number comes from a
counter-based generator keyed by those two, so recomputing a sequence, or moving it to another
machine, repeats it. The filters are llama.cpp's own samplers; only the draw is ours, because
llama.cpp's keeps a generator that would have to be replayed.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence

import llama_cpp
import numpy as np

from skippy_mesh.errors import StageError
from skippy_mesh.messages import SamplingParams
from stages.batch import Floats

_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
_UINT64 = 2**64


class LaneSampler:
    """Samples one lane. Holds native filters: build on first use, :meth:`close` when done."""

    def __init__(self, params: SamplingParams):
        self.params = params
        self._chain = _filters(params) if params.temperature > 0 else None

    @property
    def is_plain_argmax(self) -> bool:
        return self._chain is None and not self.params.suppressed_ids

    def __call__(self, logits: Floats, position: int) -> int:
        """The token for ``position``, drawn from float32 ``[n_vocab]``."""
        params = self.params
        if params.suppressed_ids:
            logits = logits.copy()
            logits[list(params.suppressed_ids)] = -np.inf
        best = int(logits.argmax())  # the first NaN, if there is one; lowest id on ties
        if not np.isfinite(logits[best]):
            raise StageError(f"logits at position {position} are not finite")
        if self._chain is None:
            return best
        candidates = self._filter(logits)
        weights = np.exp(candidates["logit"].astype(np.float64) - candidates["logit"].max())
        cumulative = np.cumsum(weights)
        chosen = np.searchsorted(
            cumulative, uniform(params.seed, position) * cumulative[-1], "right"
        )
        return int(candidates["id"][min(int(chosen), len(candidates) - 1)])

    def close(self) -> None:
        if self._chain is not None:
            llama_cpp.llama_sampler_free(self._chain)
            self._chain = None

    def _filter(self, logits: Floats) -> np.ndarray[tuple[int], np.dtype[np.void]]:
        candidates = np.zeros(len(logits), _CANDIDATE)
        candidates["id"] = np.arange(len(logits), dtype=np.int32)
        candidates["logit"] = logits
        pointer = ctypes.POINTER(llama_cpp.llama_token_data)
        array = llama_cpp.llama_token_data_array(
            candidates.ctypes.data_as(pointer), len(candidates), -1, False
        )
        llama_cpp.llama_sampler_apply(self._chain, ctypes.byref(array))
        # The samplers sort and shrink in place; what is left is a prefix of our own array.
        kept: np.ndarray[tuple[int], np.dtype[np.void]] = candidates[: array.size]
        return kept


def _filters(params: SamplingParams) -> int:
    chain: int = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
    if params.top_k > 0:
        llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_top_k(params.top_k))
    if params.top_p < 1:
        llama_cpp.llama_sampler_chain_add(
            chain, llama_cpp.llama_sampler_init_top_p(params.top_p, 1)
        )
    if params.min_p > 0:
        llama_cpp.llama_sampler_chain_add(
            chain, llama_cpp.llama_sampler_init_min_p(params.min_p, 1)
        )
    llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_temp(params.temperature))
    return chain


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on its arguments alone (Philox, counter-based)."""
    bits = np.random.Philox(key=np.array([seed % _UINT64, position], np.uint64)).random_raw()
    return float(int(bits) >> 11) / 2**53


class Sampler:
    """The samplers of all lanes of the last stage."""

    def __init__(self) -> None:
        self._lanes: dict[int, LaneSampler] = {}

    def configure(
        self, new_lanes: Mapping[int, SamplingParams], forgotten_lanes: Sequence[int]
    ) -> None:
        for lane in forgotten_lanes:
            self._forget(lane)
        for lane, params in new_lanes.items():
            self._forget(lane)
            self._lanes[lane] = LaneSampler(params)

    def sample(
        self, lanes: Sequence[int], logits: Floats, positions: Sequence[int]
    ) -> tuple[dict[int, int], dict[int, str]]:
        """The tokens of ``lanes`` for ``positions``, from float32 ``[n_lanes, n_vocab]``, and why
        a lane has none: one that cannot sample fails alone."""
        tokens: dict[int, int] = {}
        failed: dict[int, str] = {}
        best = logits.argmax(axis=1).tolist()  # the first NaN, if there is one; lowest id on ties
        for row, (lane, position) in enumerate(zip(lanes, positions, strict=True)):
            sampler = self._lanes.get(lane)
            if sampler is None:
                failed[lane] = f"lane {lane} samples but was never given sampling parameters"
            elif sampler.is_plain_argmax and math.isfinite(logits[row, best[row]]):
                tokens[lane] = best[row]
            else:
                try:
                    tokens[lane] = sampler(logits[row], position)
                except StageError as error:
                    failed[lane] = str(error)
        return tokens, failed

    def clear(self) -> None:
        for lane in list(self._lanes):
            self._forget(lane)

    def _forget(self, lane: int) -> None:
        sampler = self._lanes.pop(lane, None)
        if sampler is not None:
            sampler.close()
