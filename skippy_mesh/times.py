"""When things happened to a request: in the queue, to its first token, to its last.

And what a step's report meant to the requests it names, for whoever adds that up.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class RequestTimes:
    """Seconds on one clock; None what has not happened. One thread writes, any may read.

    It was submitted, left the queue, and had its first and its last token so far.
    """

    submitted_s: float
    started_s: float | None = None
    first_s: float | None = None
    last_s: float | None = None

    def start(self, then_s: float) -> None:
        """It left the queue at ``then_s``, as far as that can be told: not before it came."""
        if self.started_s is None:
            self.started_s = max(then_s, self.submitted_s)

    def token(self, now_s: float) -> None:
        if self.first_s is None:
            self.first_s = now_s
        self.last_s = now_s

    @property
    def queue_s(self) -> float | None:
        return _between(self.submitted_s, self.started_s)

    @property
    def prefill_s(self) -> float | None:
        """From leaving the queue to the first token."""
        return _between(self.started_s, self.first_s)

    @property
    def first_token_s(self) -> float | None:
        return _between(self.submitted_s, self.first_s)

    @property
    def decode_s(self) -> float | None:
        """From the first token to the last."""
        return _between(self.first_s, self.last_s)

    @property
    def inference_s(self) -> float | None:
        """From leaving the queue to the last token."""
        return _between(self.started_s, self.last_s)


@dataclass(frozen=True, slots=True)
class FirstToken:
    """A request has its first token: so long after it came, and after it left the queue. Of
    ``num_prompt`` tokens ``num_cached`` did not have to be computed."""

    after_s: float
    prefill_s: float
    num_prompt: int
    num_cached: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestEnd:
    """A request has ended, ``e2e_s`` after it came and, if it was told to, ``cancel_s`` after
    that."""

    times: RequestTimes
    e2e_s: float
    cancel_s: float | None
    num_prompt: int
    num_output: int
    num_preemptions: int


@dataclass(slots=True)
class RequestNews:
    """What one report meant to requests. ``gaps_s`` lie between a token and the one before it."""

    firsts: list[FirstToken] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    ended: list[RequestEnd] = field(default_factory=list)


def _between(start_s: float | None, end_s: float | None) -> float | None:
    return None if start_s is None or end_s is None else end_s - start_s
