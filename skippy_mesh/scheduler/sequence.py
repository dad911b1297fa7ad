"""One request as the scheduler sees it: how far it is, and what it still needs.

There is no prefill or decode phase. A sequence knows some tokens (the prompt, then what was
sampled) and has computed some of them; every step lets the second number catch up with the first
(vLLM v1 calls it ``num_computed_tokens``). A preempted sequence keeps its tokens and starts
catching up from zero.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from skippy_mesh.messages import FinishReason, History, Request, TokenEvent, TokenLogprobs

MAX_RESERVED_OUTPUT = 512
"""Output tokens a sequence is promised room for. Growth beyond is what preemption is for."""
RESUME_MARGIN = 32
"""Cells a resumed sequence must find free beyond its replay, or it would be preempted again."""


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """The mutable view of ``request``.

    ``turn`` is its place in the order of arrival, kept for life. ``num_scheduled`` positions have
    been handed out since it was admitted, ``num_computed`` of them are answered by every stage;
    ``num_reached`` is the most ever computed: rows below are recomputed, ``num_recomputed`` so far.
    ``num_in_flight`` counts StepBatches that hold its rows and are not answered. Until
    ``trial_end`` positions are computed it runs alone, because a step that held it failed there.
    ``num_cached`` prompt tokens did not have to be computed when it was first admitted. At each of
    ``boundaries`` a chunk must end.
    """

    request: Request
    turn: int
    max_tokens: int
    status: Status = Status.WAITING
    lane: int = -1
    outputs: list[int] = field(default_factory=list)
    num_scheduled: int = 0
    num_computed: int = 0
    num_reached: int = 0
    num_in_flight: int = 0
    num_preemptions: int = 0
    num_recomputed: int = 0
    num_bypassed: int = 0
    last_step: int = -1
    trial_end: int = 0
    num_cached: int = 0
    boundaries: list[int] = field(default_factory=list)
    is_aborted: bool = False

    @classmethod
    def of(cls, request: Request, *, turn: int, max_model_len: int) -> Sequence:
        """A new one; if it ran on an engine that is gone, as if it had been preempted here."""
        sequence = cls(
            request=request,
            turn=turn,
            max_tokens=min(request.max_tokens, max_model_len - len(request.token_ids)),
            outputs=list(request.outputs),
        )
        if request.was_running:
            sequence.status = Status.PREEMPTED
            sequence.trial_end = sequence.num_known
            sequence.num_reached = sequence.num_known - 1 if request.outputs else 0
        return sequence

    @property
    def num_prompt(self) -> int:
        return len(self.request.token_ids)

    @property
    def num_known(self) -> int:
        """Tokens there are: the prompt's and the sampled ones."""
        return len(self.request.token_ids) + len(self.outputs)

    @property
    def num_left(self) -> int:
        """Rows it could run now. 0 while the step that samples its next token is in flight."""
        return self.num_known - self.num_scheduled

    @property
    def is_on_trial(self) -> bool:
        return self.num_computed < self.trial_end

    @property
    def reservation(self) -> int:
        """Cells promised to it while it runs, whether used yet or not."""
        return self.num_prompt + min(self.max_tokens, MAX_RESERVED_OUTPUT)

    @property
    def need(self) -> int:
        """Cells that must be free to admit it: its promise, and when it resumes its whole replay
        and a little more."""
        return max(self.reservation, self.num_known + RESUME_MARGIN if self.outputs else 0)

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """The token ids at positions [start, end)."""
        prompt = self.request.token_ids
        if end <= len(prompt):
            return prompt[start:end]
        outputs = self.outputs[max(start - len(prompt), 0) : end - len(prompt)]
        return (*prompt[start:], *outputs)

    def history(self) -> History | None:
        """What its sampler must know of the tokens so far; None if nothing."""
        return self.request.sampling.history(self.request.token_ids, self.outputs)

    def event(
        self,
        token: int | None,
        finish_reason: FinishReason | None = None,
        error: str | None = None,
        *,
        logprobs: TokenLogprobs | None = None,
    ) -> TokenEvent:
        """What its client is told: a token, or its end."""
        return TokenEvent(
            request_id=self.request.request_id,
            token_id=token,
            logprobs=logprobs,
            finish_reason=finish_reason,
            error=error,
            num_cached=self.num_cached,
            num_preemptions=self.num_preemptions,
            num_recomputed=self.num_recomputed,
        )

    def rewind(self) -> None:
        """Forget what was computed, keep what is known."""
        self.num_scheduled = self.num_computed = self.num_in_flight = 0
        self.boundaries.clear()
        self.lane = -1
