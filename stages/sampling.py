"""From a row of logits to the next token.

A draw is a pure function of logits, parameters, the tokens so far and (seed, position): the random
number comes from a counter-based generator keyed by those two, so recomputing a sequence, or moving
it to another machine, repeats it. The filters are llama.cpp's own samplers; only the draw is ours,
because llama.cpp's keeps a generator that would have to be replayed.

A grammar is asked about the drawn token first, and if it refuses about the others, in the order in
which they would be drawn without replacement (Gumbel's trick). That is drawing from what it allows,
without trying a large vocabulary token by token, which costs twenty milliseconds. Only where the
filters have left nothing that it allows does it go ahead of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import llama_cpp
import numpy as np
import numpy.typing as npt

from skippy_mesh.errors import SkippyError, StageError
from skippy_mesh.messages import History, SamplingParams, TokenLogprobs
from stages.batch import Floats
from stages.candidates import Candidates, Ids
from stages.grammar import Grammar
from stages.penalties import penalties_of
from stages.tokenizer import Tokenizer

_UINT64 = 2**64
_MAX_TOKENS = 2**17
_FIRST_TRIED = 64
Kept = tuple[Ids, Floats]
"""Tokens and their logits."""
GetTokenizer = Callable[[], Tokenizer]
_NOTHING_KNOWN = History(0)


class LaneSampler:
    """Samples one lane. Holds native samplers: build on first use, :meth:`close` when done.

    ``history`` is what :meth:`SamplingParams.history` gives. No sequence may have more than
    ``max_tokens``. ``tokenizer`` is asked for by a grammar alone.
    """

    def __init__(
        self,
        params: SamplingParams,
        history: History | None = None,
        *,
        max_tokens: int = _MAX_TOKENS,
        tokenizer: GetTokenizer | None = None,
    ):
        self.params = params
        if history is None and params.needs_history:
            raise StageError("a lane begins without the history its sampling needs")
        past = history or _NOTHING_KNOWN
        self._min_position = past.num_prompt + params.min_tokens if params.min_tokens else 0
        self._edits = _Edits(params)
        self._grammar = _grammar_of(params, past, tokenizer)
        self._penalties = penalties_of(params, past, max_tokens=max_tokens)
        self._chain = _filters(params) if params.temperature > 0 else None
        self._changes_logits = bool(self._edits or self._penalties or self._min_position)
        self.is_plain_argmax = not (self._chain or self._changes_logits or self._grammar)

    def __call__(self, logits: Floats, position: int) -> int:
        """The token for ``position``, drawn from float32 ``[n_vocab]`` and remembered."""
        # argmax finds the first NaN, if there is one.
        if not np.isfinite(logits[logits.argmax()]):
            raise StageError(f"logits at position {position} are not finite")
        kept: Kept | None
        if self._changes_logits:
            changed = self._changed(logits, position)
            kept = self._kept_of(changed, position)
        else:
            changed = logits
            kept = self._filtered(_all_ids(len(logits)), logits)
        token = None if kept is None else self._draw(*kept, position)
        if self._grammar is not None and (token is None or not self._grammar.take(token)):
            token = self._draw_within(self._grammar, kept, (changed, logits), position)
        if token is None:
            raise StageError(f"every token is forbidden at position {position}")
        for penalty in self._penalties:
            penalty.accept(token)
        return token

    def close(self) -> None:
        if self._chain is not None:
            llama_cpp.llama_sampler_free(self._chain)
            self._chain = None
        if self._grammar is not None:
            self._grammar.close()
        for penalty in self._penalties:
            penalty.close()
        self._penalties = []

    def _changed(self, logits: Floats, position: int) -> Floats:
        logits = logits.copy()
        self._edits.add_bias(logits)
        for penalty in self._penalties:
            penalty.apply(logits)
        logits = self._edits.forbid(logits)
        if position < self._min_position:
            logits[list(self.params.ending_ids)] = -np.inf
        return logits

    def _draw_within(
        self, grammar: Grammar, kept: Kept | None, rows: Sequence[Floats], position: int
    ) -> int | None:
        """What the grammar takes: of ``kept``, else of the first of ``rows`` with anything."""
        if kept is not None:
            ids, scores = kept
            if self._chain is not None:
                noise = gumbel(self.params.seed, position, len(ids))
                scores = (scores + noise).astype(np.float32)
            for chunk in _best_first(scores):
                if len(allowed := grammar.allowed(ids[chunk])):
                    grammar.take(int(allowed[0]))
                    return int(allowed[0])
        for row in rows:  # the last one is untouched: what the request forbids may be all there is
            if (rest := self._kept_of(grammar.masked(row), position)) is not None:
                token = self._draw(*rest, position)
                grammar.take(token)
                return token
        return None

    def _kept_of(self, logits: Floats, position: int) -> Kept | None:
        """What may be drawn where a logit may be -inf; None if nothing."""
        best = logits.max()  # NaN, if there is one
        if best == -np.inf:
            return None
        if not np.isfinite(best):
            raise StageError(f"penalties made a logit at position {position} infinite")
        ids = _all_ids(len(logits))
        if logits.min() == -np.inf:
            # They would be candidates without a chance, which typical_p turns into NaN.
            ids = np.flatnonzero(logits != -np.inf).astype(np.int32)
            logits = logits[ids]
        return self._filtered(ids, logits)

    def _filtered(self, ids: Ids, logits: Floats) -> Kept:
        if self._chain is None:
            return ids, logits
        candidates = Candidates(ids, logits)
        candidates.apply(self._chain)
        return candidates.rows["id"], candidates.rows["logit"]

    def _draw(self, ids: Ids, logits: Floats, position: int) -> int:
        """One of ``ids``, by the position's random number."""
        if self._chain is None:
            return int(ids[logits.argmax()])  # the lowest id on ties
        weights = np.exp(logits.astype(np.float64) - logits.max())
        cumulative = np.cumsum(weights)
        share = uniform(self.params.seed, position) * cumulative[-1]
        chosen = int(np.searchsorted(cumulative, share, "right"))
        return int(ids[min(chosen, len(ids) - 1)])


def _best_first(scores: Floats) -> Iterator[npt.NDArray[np.intp]]:
    """The places of ``scores``, the highest first, a few at first and then all others."""
    if len(scores) > 2 * _FIRST_TRIED:
        best = np.argpartition(-scores, _FIRST_TRIED)[:_FIRST_TRIED]
        yield best[np.lexsort((best, -scores[best]))]
    yield np.argsort(-scores, kind="stable")


@functools.lru_cache(maxsize=4)
def _all_ids(count: int) -> Ids:
    ids = np.arange(count, dtype=np.int32)
    ids.flags.writeable = False
    return ids


class _Edits:
    """What a request does to single logits, whatever the tokens so far. False if nothing."""

    def __init__(self, params: SamplingParams):
        self._ids = np.array([token for token, _ in params.logit_bias], np.int64)
        self._bias = np.array([bias for _, bias in params.logit_bias], np.float32)
        self._allowed = np.array(params.allowed_ids, np.int64)
        self._suppressed = np.array(params.suppressed_ids, np.int64)

    def __bool__(self) -> bool:
        return bool(len(self._ids) or len(self._allowed) or len(self._suppressed))

    def add_bias(self, logits: Floats) -> None:
        np.add.at(logits, self._ids, self._bias)

    def forbid(self, logits: Floats) -> Floats:
        if len(self._allowed):
            allowed = np.full_like(logits, -np.inf)
            allowed[self._allowed] = logits[self._allowed]
            logits = allowed
        logits[self._suppressed] = -np.inf
        return logits


def _grammar_of(
    params: SamplingParams, past: History, tokenizer: GetTokenizer | None
) -> Grammar | None:
    if not params.grammar:
        return None
    if tokenizer is None:
        raise StageError("a grammar needs the model's vocabulary")
    return Grammar(tokenizer(), params.grammar, past.outputs)


def _filters(params: SamplingParams) -> int:
    chain: int = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
    filters = []
    if params.top_k > 0:
        filters.append(llama_cpp.llama_sampler_init_top_k(params.top_k))
    if params.typical_p < 1:
        filters.append(llama_cpp.llama_sampler_init_typical(params.typical_p, 1))
    if params.top_p < 1:
        filters.append(llama_cpp.llama_sampler_init_top_p(params.top_p, 1))
    if params.min_p > 0:
        filters.append(llama_cpp.llama_sampler_init_min_p(params.min_p, 1))
    filters.append(llama_cpp.llama_sampler_init_temp(params.temperature))
    for sampler in filters:
        llama_cpp.llama_sampler_chain_add(chain, sampler)
    return chain


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on its arguments alone (Philox, counter-based)."""
    bits = np.random.Philox(key=np.array([seed % _UINT64, position], np.uint64)).random_raw()
    return float(int(bits) >> 11) / 2**53


def gumbel(seed: int, position: int, count: int) -> npt.NDArray[np.float64]:
    """So many numbers of the standard Gumbel distribution, none made of what :func:`uniform` uses.

    Whoever is highest once these are added to log-weights has been drawn by those weights.
    """
    generator = np.random.Philox(key=np.array([seed % _UINT64, position], np.uint64))
    bits = generator.random_raw(count + 1)[1:]
    return -np.log(-np.log(((bits >> np.uint64(11)).astype(np.float64) + 0.5) / 2**53))


def logprobs_of(logits: Floats, token: int, count: int) -> TokenLogprobs:
    """Of ``token`` and the ``count`` likeliest, from the raw float32 ``[n_vocab]``."""
    wide = logits.astype(np.float64)
    best = wide.max()
    total = best + math.log(np.exp(wide - best).sum())
    top: tuple[tuple[int, float], ...] = ()
    if count:
        count = min(count, len(wide))
        likeliest = np.argpartition(-wide, count - 1)[:count]
        order = likeliest[np.lexsort((likeliest, -wide[likeliest]))]
        top = tuple(zip(order.tolist(), (wide[order] - total).tolist(), strict=True))
    return TokenLogprobs(float(wide[token] - total), top)


@dataclass(frozen=True, slots=True)
class Drawn:
    """What the lanes of one step drew, and why a lane has drawn nothing."""

    tokens: dict[int, int] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)


class Sampler:
    """The samplers of all lanes of the last stage, of sequences of ``max_tokens`` at most."""

    def __init__(self, *, max_tokens: int = _MAX_TOKENS, tokenizer: GetTokenizer | None = None):
        self._max_tokens = max_tokens
        self._tokenizer = tokenizer
        self._lanes: dict[int, LaneSampler] = {}
        self._unfit: dict[int, str] = {}

    def configure(
        self,
        new_lanes: Mapping[int, SamplingParams],
        forgotten_lanes: Sequence[int],
        histories: Mapping[int, History] | None = None,
    ) -> None:
        for lane in forgotten_lanes:
            self._forget(lane)
        for lane, params in new_lanes.items():
            self._forget(lane)
            try:
                self._lanes[lane] = LaneSampler(
                    params,
                    (histories or {}).get(lane),
                    max_tokens=self._max_tokens,
                    tokenizer=self._tokenizer,
                )
            except SkippyError as error:  # the lane's own trouble, told when it samples
                self._unfit[lane] = str(error)

    def sample(self, lanes: Sequence[int], logits: Floats, positions: Sequence[int]) -> Drawn:
        """The tokens of ``lanes`` for ``positions``, from float32 ``[n_lanes, n_vocab]``. A lane
        that cannot sample fails alone."""
        drawn = Drawn()
        best = logits.argmax(axis=1).tolist()  # the first NaN, if there is one; lowest id on ties
        for row, (lane, position) in enumerate(zip(lanes, positions, strict=True)):
            sampler = self._lanes.get(lane)
            if sampler is None:
                unknown = f"lane {lane} samples but was never given sampling parameters"
                drawn.failed[lane] = self._unfit.get(lane, unknown)
                continue
            if sampler.is_plain_argmax and math.isfinite(logits[row, best[row]]):
                drawn.tokens[lane] = best[row]
            else:
                try:
                    drawn.tokens[lane] = sampler(logits[row], position)
                except StageError as error:
                    drawn.failed[lane] = str(error)
                    continue
            if (count := sampler.params.num_logprobs) is not None:
                drawn.logprobs[lane] = logprobs_of(logits[row], drawn.tokens[lane], count)
        return drawn

    def clear(self) -> None:
        for lane in list(self._lanes):
            self._forget(lane)
        self._unfit.clear()

    def _forget(self, lane: int) -> None:
        self._unfit.pop(lane, None)
        sampler = self._lanes.pop(lane, None)
        if sampler is not None:
            sampler.close()
