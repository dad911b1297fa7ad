"""The frozen values that cross a boundary: between threads, processes and machines.

Standard library only, so that the scheduler and every test can use them without llama.cpp, Ray or
numpy. A *lane* is a llama.cpp sequence id, the same number on every stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from skippy_mesh.errors import RequestError
from skippy_mesh.sampling import History as History
from skippy_mesh.sampling import SamplingParams as SamplingParams
from skippy_mesh.sampling import TokenLogprobs as TokenLogprobs

MAX_LANES = 256
"""LLAMA_MAX_SEQ: sequence ids one llama.cpp context can tell apart."""

FinishReason = Literal["stop", "length", "tool_calls", "abort", "error", "timeout"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One generation: complete ``token_ids`` until a stop token or ``max_tokens`` more.

    ``stop_token_ids`` end the sequence with reason ``stop``; they count as output and their text
    is not shown. ``session_id`` names the conversation it belongs to. Among waiting requests a
    lower ``priority`` goes first, where the ordering policy says so. Only requests of the same
    ``namespace`` share computed prefixes, and none at all unless it ``shares_prefix``. The first
    ``history_end`` tokens are what the conversation's next prompt begins with, 0 if unknown.

    ``outputs`` were generated already, by an engine that is gone: they count as output and are not
    reported again. One that ``was_running`` when that engine died is computed alone at first, for
    it may be the reason.
    """

    request_id: str
    token_ids: tuple[int, ...]
    max_tokens: int
    session_id: str = ""
    priority: int = 0
    namespace: str = ""
    shares_prefix: bool = True
    history_end: int = 0
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_token_ids: frozenset[int] = frozenset()
    outputs: tuple[int, ...] = ()
    was_running: bool = False

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise RequestError("the prompt is empty", param="prompt")
        if self.max_tokens < 1:
            raise RequestError(
                f"max_tokens must be at least 1, got {self.max_tokens}", param="max_tokens"
            )

    def check_fits(self, max_model_len: int) -> None:
        """:class:`RequestError` if no context of ``max_model_len`` tokens can ever hold it."""
        num_tokens = len(self.token_ids)
        if num_tokens + 1 > max_model_len:
            raise RequestError(
                f"the prompt has {num_tokens} tokens and the context holds {max_model_len}: "
                f"at most {max_model_len - 1} leave room for an answer; "
                f"shorten it or raise --ctx-size",
                param="prompt",
                code="context_length_exceeded",
            )

    @property
    def prefix_identity(self) -> tuple[str, tuple[int, ...]]:
        """What makes two prompts share: the namespace, and the token ids from the first one on."""
        return self.namespace, self.token_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """What the engine says of one request after one step.

    The last event of a request carries ``finish_reason``; ``error`` is set only with reason
    ``error``, and ``is_unavailable`` when it is not this request's: a stage was given up.
    ``token_id`` is None when the request ended without a new token; ``logprobs`` come with it where
    the request asked for them. ``num_cached`` tokens of its prompt did not have to be computed;
    it was preempted ``num_preemptions`` times, and ``num_recomputed`` rows were computed again.
    """

    request_id: str
    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    num_cached: int = 0
    num_preemptions: int = 0
    num_recomputed: int = 0
    is_unavailable: bool = False


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
    samples at most once a step. A batch may consist of operations alone. Of ``new_lanes``, those
    whose sampler depends on the past have it in ``histories``.
    """

    epoch: int
    step_id: int
    operations: tuple[Copy | Remove, ...] = ()
    lanes: tuple[int, ...] = ()
    positions: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    samples: tuple[bool, ...] = ()
    new_lanes: Mapping[int, SamplingParams] = field(default_factory=dict)
    histories: Mapping[int, History] = field(default_factory=dict)
    forgotten_lanes: tuple[int, ...] = ()

    @property
    def num_rows(self) -> int:
        return len(self.lanes)

    @property
    def sampled_lanes(self) -> tuple[int, ...]:
        return tuple(
            lane for lane, samples in zip(self.lanes, self.samples, strict=True) if samples
        )


@dataclass(frozen=True, slots=True)
class StageTime:
    """One stage's part of a step: seconds in all, seconds since its last step, how often it called
    llama_decode, and the bytes of hidden states it has for the next stage."""

    compute_s: float
    wait_s: float
    num_decodes: int = 1
    sent_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The sampled tokens of one step, keyed by lane, never by position in a list.

    ``failed`` says of lanes that could not sample why; ``logprobs`` belong to the tokens of lanes
    that asked for them; ``stages`` are the times of all stages.
    """

    epoch: int
    step_id: int
    tokens: Mapping[int, int]
    failed: Mapping[int, str] = field(default_factory=dict)
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    stages: tuple[StageTime, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Where the scheduler stands: how many run, how many wait and why (``memory``, ``lane``,
    ``order``, ``preempted``), the prompt tokens waiting, and each memory component by state."""

    running: int
    waiting: Mapping[str, int]
    waiting_tokens: int
    components: Mapping[str, Mapping[str, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What one step was and what it cost; the per-step telemetry.

    ``admitted``, ``resumed`` and ``preempted`` count this step's sequences; each admission is a
    prefix hit or a miss for a reason, evictions have one, too. ``state`` is the
    scheduler's after the step. ``step_s`` is from plan to sampled tokens through all stages,
    ``scheduler_s`` the host's time to plan and commit. The answer was there at ``answered_s`` on
    the engine's clock.
    """

    epoch: int
    step_id: int
    kind: Literal["prefill", "decode", "mixed"]
    state: Snapshot
    admitted: int
    resumed: int
    preempted: int
    prefill_tokens: int
    decode_tokens: int
    recompute_prompt_tokens: int
    recompute_output_tokens: int
    prefix_hits: int
    prefix_misses: Mapping[str, int]
    prefix_hit_tokens: int
    prefix_queried_tokens: int
    prefix_evictions: Mapping[str, int]
    batches_in_flight: int
    step_s: float
    scheduler_s: float
    answered_s: float
    stages: tuple[StageTime, ...]

    @property
    def num_rows(self) -> int:
        recompute = self.recompute_prompt_tokens + self.recompute_output_tokens
        return self.prefill_tokens + self.decode_tokens + recompute


@dataclass(frozen=True, slots=True)
class StageLoss:
    """``stage`` died and is started again; ``num_sequences`` that ran are computed once more."""

    stage: int
    num_sequences: int


@dataclass(frozen=True, slots=True)
class StepReport:
    """The one message a step sends to the gateway.

    ``admitted`` are the requests that left the queue with it. ``record`` is None when no rows were
    run; ``state`` says then where the scheduler stands, None if that is not known. ``loss`` is what
    happened instead of a step.
    """

    events: tuple[TokenEvent, ...]
    record: StepRecord | None = None
    state: Snapshot | None = None
    admitted: tuple[str, ...] = ()
    loss: StageLoss | None = None
