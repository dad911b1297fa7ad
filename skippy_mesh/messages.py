"""The frozen values that cross a boundary: between threads, processes and machines.

Standard library only, so that the scheduler and every test can use them without llama.cpp, Ray or
numpy. A *lane* is a llama.cpp sequence id, the same number on every stage.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from skippy_mesh.errors import RequestError

MAX_LANES = 256
"""LLAMA_MAX_SEQ: sequence ids one llama.cpp context can tell apart."""

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is drawn from a row of logits.

    The filters apply in this order: suppression, top_k, top_p, min_p, temperature, draw. A neutral
    value switches a filter off. ``temperature`` 0 is argmax (lowest id on ties) and uses no random
    number. ``seed`` and the token's position alone determine the draw, so recomputing a sequence
    repeats it.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    suppressed_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_range("temperature", self.temperature, 0.0, 2.0)
        check_range("min_p", self.min_p, 0.0, 1.0)
        check_range("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0:
            raise RequestError("top_p must be above 0, got 0", param="top_p")
        if self.top_k < -1:
            raise RequestError(
                f"top_k must be -1, 0 (both off) or positive, got {self.top_k}", param="top_k"
            )
        if not -(2**63) <= self.seed < 2**63:
            raise RequestError(f"seed must fit 64 bits, got {self.seed}", param="seed")


def check_range(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise RequestError(f"{name} must be from {low:g} to {high:g}, got {value}", param=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One generation: complete ``token_ids`` until a stop token or ``max_tokens`` more.

    ``stop_token_ids`` end the sequence with reason ``stop``; they count as output and their text
    is not shown.
    """

    request_id: str
    token_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_token_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise RequestError("the prompt is empty", param="prompt")
        if self.max_tokens < 1:
            raise RequestError(
                f"max_tokens must be at least 1, got {self.max_tokens}", param="max_tokens"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """What the engine says of one request after one step.

    The last event of a request carries ``finish_reason``; ``error`` is set only with reason
    ``error``. ``token_id`` is None when the request ended without a new token.
    """

    request_id: str
    token_id: int | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Copy:
    """Share the cells of ``src`` at positions [p0, p1) with ``dst``."""

    src: int
    dst: int
    p0: int
    p1: int


@dataclass(frozen=True, slots=True)
class Remove:
    """Free the cells of ``lane`` at positions [p0, p1); ``p1`` -1 means to the end."""

    lane: int
    p0: int = 0
    p1: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """What every stage executes in one step: memory operations in order, then rows.

    Rows are columns of equal length: row i is token ``tokens[i]`` of lane ``lanes[i]`` at position
    ``positions[i]``; the last stage draws the next token of the lane where ``samples[i]``. A lane
    samples at most once a step. A batch may consist of operations alone.
    """

    epoch: int
    step_id: int
    operations: tuple[Copy | Remove, ...] = ()
    lanes: tuple[int, ...] = ()
    positions: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    samples: tuple[bool, ...] = ()
    new_lanes: Mapping[int, SamplingParams] = field(default_factory=dict)
    forgotten_lanes: tuple[int, ...] = ()

    @property
    def num_rows(self) -> int:
        return len(self.lanes)

    @property
    def sampled_lanes(self) -> tuple[int, ...]:
        return tuple(
            lane for lane, samples in zip(self.lanes, self.samples, strict=True) if samples
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The sampled tokens of one step, keyed by lane, never by position in a list."""

    epoch: int
    step_id: int
    tokens: Mapping[int, int]
