"""llama.cpp's penalties, asked about the tokens a request has seen and no others.

The native sampler looks every candidate up in a hash map. A token it has not seen keeps its logit,
so it is given the seen ones alone: a few hundred instead of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable

import llama_cpp
import numpy as np

from skippy_mesh.messages import History, SamplingParams
from stages.batch import Floats
from stages.candidates import Candidates

_NUM_VOCAB = 0  # only samplers on a GPU read it


class Penalty:
    """One native sampler. ``window`` is how many tokens, the latest, it counts."""

    def __init__(
        self,
        *,
        window: int,
        tokens: Iterable[int],
        repetition: float = 1.0,
        frequency: float = 0.0,
        presence: float = 0.0,
    ):
        self._native: int = llama_cpp.llama_sampler_init_penalties(
            _NUM_VOCAB, window, repetition, frequency, presence
        )
        self._seen: set[int] = set()
        self._ids = np.empty(64, np.int32)  # the seen ones, and room for more
        for token in tokens:
            self.accept(token)

    def accept(self, token: int) -> None:
        llama_cpp.llama_sampler_accept(self._native, token)
        if token not in self._seen:
            count = len(self._seen)
            if count == len(self._ids):
                self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
            self._ids[count] = token
            self._seen.add(token)

    def apply(self, logits: Floats) -> None:
        """Change ``logits`` in place."""
        ids = self._ids[: len(self._seen)]
        candidates = Candidates(ids, logits[ids])
        candidates.apply(self._native)
        logits[ids] = candidates.rows["logit"]

    def close(self) -> None:
        llama_cpp.llama_sampler_free(self._native)


def penalties_of(params: SamplingParams, history: History, *, max_tokens: int) -> list[Penalty]:
    """The penalties ``params`` ask for, over at most ``max_tokens``, as they stand behind
    ``history``."""
    penalties = []
    if params.counts_prompt:
        last = params.repeat_last_n
        penalties.append(
            Penalty(
                window=max_tokens if last < 0 else min(last, max_tokens),
                tokens=(*history.recent_prompt, *history.outputs),
                repetition=params.repetition_penalty,
            )
        )
    if params.counts_outputs:
        penalties.append(
            Penalty(
                window=max_tokens,
                tokens=history.outputs,
                frequency=params.frequency_penalty,
                presence=params.presence_penalty,
            )
        )
    return penalties
