"""How a request wants its tokens drawn, and what its sampler must know of the past.

Everything a sampler keeps between tokens (what to penalise, where in a grammar it is) is a function
of the request's known tokens. So a lane that is computed again gets a :class:`History`, and draws
what it would have drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from skippy_mesh.errors import RequestError

MAX_LOGPROBS = 20
GrammarKind = Literal["gbnf", "json_schema", "tool_calls"]
"""What a grammar may be given as."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is drawn from a row of logits.

    In this order: bias, penalties, what is forbidden, top_k, typical_p, top_p, min_p, temperature,
    draw. A neutral value switches a step off. ``temperature`` 0 is argmax (lowest id on ties) and
    uses no random number. Logits, parameters, history, ``seed`` and the token's position determine
    the draw, so recomputing a sequence repeats it.

    ``presence_penalty`` and ``frequency_penalty`` count generated tokens; ``repetition_penalty``
    the last ``repeat_last_n`` of prompt and output (-1 is all, 0 switches it off). ``logit_bias``
    pairs an id with what is added to its logit, -inf forbids it. Of ``allowed_ids``, unless empty,
    every token is. ``suppressed_ids`` are never drawn, ``ending_ids`` not among the first
    ``min_tokens``. ``grammar`` is GBNF that is known to compile; once it is complete only an end of
    generation may follow, whatever else forbids it. ``num_logprobs`` asks for the log-probabilities
    of the drawn token and of so many of the likeliest.
    """

    temperature: float = 0.0
    top_k: int = 0
    typical_p: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    repeat_last_n: int = 64
    seed: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_ids: tuple[int, ...] = ()
    suppressed_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ending_ids: tuple[int, ...] = ()
    grammar: str = ""
    num_logprobs: int | None = None

    def __post_init__(self) -> None:
        check_range("temperature", self.temperature, 0.0, 2.0)
        check_range("min_p", self.min_p, 0.0, 1.0)
        for name, share in (("top_p", self.top_p), ("typical_p", self.typical_p)):
            check_range(name, share, 0.0, 1.0)
            if share == 0:
                raise RequestError(f"{name} must be above 0, got 0", param=name)
        check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise RequestError(
                f"repetition_penalty must be above 0 and finite, got {self.repetition_penalty}",
                param="repetition_penalty",
            )
        for name, count, least, meaning in (
            ("top_k", self.top_k, -1, "-1, 0 (both off) or positive"),
            ("repeat_last_n", self.repeat_last_n, -1, "-1 (everything), 0 (off) or positive"),
            ("min_tokens", self.min_tokens, 0, "0 or positive"),
        ):
            if count < least:
                raise RequestError(f"{name} must be {meaning}, got {count}", param=name)
        if any(bias == math.inf or math.isnan(bias) for _, bias in self.logit_bias):
            raise RequestError("a logit_bias must be a number or -inf", param="logit_bias")
        if not -(2**63) <= self.seed < 2**63:
            raise RequestError(f"seed must fit 64 bits, got {self.seed}", param="seed")
        if self.num_logprobs is not None:
            check_range("logprobs", self.num_logprobs, 0, MAX_LOGPROBS)

    @property
    def counts_prompt(self) -> bool:
        return self.repetition_penalty != 1 and self.repeat_last_n != 0

    @property
    def counts_outputs(self) -> bool:
        return self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def needs_history(self) -> bool:
        """Whether a draw depends on the tokens before it."""
        return bool(self.counts_prompt or self.counts_outputs or self.min_tokens or self.grammar)

    def history(self, prompt: Sequence[int], outputs: Sequence[int]) -> History | None:
        """What a sampler that starts behind ``outputs`` must know; None if nothing."""
        if not self.needs_history:
            return None
        recent: Sequence[int] = ()
        if self.counts_prompt:
            recent = prompt if self.repeat_last_n < 0 else prompt[-self.repeat_last_n :]
        return History(len(prompt), tuple(recent), tuple(outputs))


def check_range(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise RequestError(f"{name} must be from {low:g} to {high:g}, got {value}", param=name)


@dataclass(frozen=True, slots=True)
class History:
    """The known tokens of a request whose lane begins: the length of its prompt, as much of the
    prompt's end as its penalties count, and all that was generated."""

    num_prompt: int
    recent_prompt: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of the raw softmax, before anything was done to the logits: the drawn
    token's, and those of the likeliest tokens, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
