"""What a run of requests left behind. Pure: times are arguments.

Times are seconds on the client's monotonic clock. Token counts come from the server's ``usage``,
never from counting chunks: one chunk may carry several tokens, or none. What is not known is None,
never 0. ``figures.py`` makes numbers of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

_REFUSED = (429, 503)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One request. It completed, failed (``error``), or the run's time was up (``is_cut``).

    ``scheduled_s`` is when it was due, ``queue_s`` how long it then waited for the client's own
    permit, and latency counts from after that: a client that cannot keep up shows in it. ``code``
    names a failure in a word or two: ``429 queue_full``, ``RemoteProtocolError``.
    """

    index: int
    scheduled_s: float
    sent_s: float
    end_s: float
    chunk_times_s: tuple[float, ...]  # one for each chunk that carried text
    prompt_tokens: int | None
    completion_tokens: int | None
    finish_reason: str | None
    text: str
    error: str | None
    is_cut: bool
    queue_s: float = 0.0
    cached_tokens: int | None = None
    status: int | None = None
    retry_after: str | None = None
    code: str | None = None

    @property
    def is_complete(self) -> bool:
        return self.error is None and not self.is_cut

    @property
    def is_rejected(self) -> bool:
        """Turned away at the door, in so many words."""
        return self.status in _REFUSED

    @property
    def is_aborted(self) -> bool:
        return self.error is not None and self.finish_reason == "abort"

    @property
    def begun_s(self) -> float:
        return self.scheduled_s + self.queue_s

    @property
    def ttft_s(self) -> float | None:
        return self.chunk_times_s[0] - self.begun_s if self.chunk_times_s else None

    @property
    def e2e_s(self) -> float | None:
        return self.chunk_times_s[-1] - self.begun_s if self.chunk_times_s else None

    @property
    def e2e_with_queue_s(self) -> float | None:
        return self.chunk_times_s[-1] - self.scheduled_s if self.chunk_times_s else None

    @property
    def tpot_s(self) -> float | None:
        if not self.chunk_times_s or self.completion_tokens is None or self.completion_tokens < 2:
            return None
        return (self.chunk_times_s[-1] - self.chunk_times_s[0]) / (self.completion_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in itertools.pairwise(self.chunk_times_s)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    records: list[Record]
    client_cpu_share: float  # CPU of this whole process over wall time; 1.0 is one core
    probes: list[Record] = field(default_factory=list)


def max_in_flight(records: Iterable[Record]) -> int:
    """The most requests really open at one time; an end at the instant of a start comes first."""
    steps = sorted(step for r in records for step in ((r.sent_s, 1), (r.end_s, -1)))
    return max(itertools.accumulate((step for _, step in steps)), default=0)


def same_texts(ours: Run, theirs: Run) -> dict[str, int]:
    """How many answers are the same text, of those both arms finished. Kernels that depend on a
    row's company may differ; no answer in common would mean that the arms did different work."""
    texts = {r.index: r.text for r in theirs.records if r.is_complete}
    both = [r for r in ours.records if r.is_complete and r.index in texts]
    return {"equal": sum(r.text == texts[r.index] for r in both), "of": len(both)}
