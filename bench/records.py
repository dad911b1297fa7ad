"""What a run of requests left behind, and the numbers made of it. Pure: times are arguments.

Definitions follow vLLM's bench: TTFT = first chunk with text - send; E2E = last chunk with text -
send; TPOT = (E2E - TTFT) / (tokens - 1); ITL = gap between chunks with text. Token counts come
from the server's ``usage``, never from counting chunks (one chunk may carry several tokens, or
none). What is not known is None, never 0. Times are seconds on the client's monotonic clock.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One request. It completed, failed (``error``), or the run's time was up (``is_cut``)."""

    index: int
    scheduled_s: float  # when it was due; an open loop counts waiting from here
    sent_s: float
    end_s: float
    chunk_times_s: tuple[float, ...]  # one for each chunk that carried text
    prompt_tokens: int | None
    completion_tokens: int | None
    finish_reason: str | None
    text: str
    error: str | None
    is_cut: bool

    @property
    def is_complete(self) -> bool:
        return self.error is None and not self.is_cut

    @property
    def ttft_s(self) -> float | None:
        return self.chunk_times_s[0] - self.sent_s if self.chunk_times_s else None

    @property
    def e2e_s(self) -> float | None:
        return self.chunk_times_s[-1] - self.sent_s if self.chunk_times_s else None

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


def percentile(samples: Sequence[float], percent: float) -> float | None:
    """Linear between the two nearest ranks; None without samples."""
    if not samples:
        return None
    ordered = sorted(samples)
    rank = (len(ordered) - 1) * percent / 100
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def max_in_flight(records: Iterable[Record]) -> int:
    """The most requests really open at one time; an end at the instant of a start comes first."""
    steps = sorted(step for r in records for step in ((r.sent_s, 1), (r.end_s, -1)))
    return max(itertools.accumulate((step for _, step in steps)), default=0)


def summarise(run: Run) -> dict[str, object]:
    """One point's numbers under vLLM bench's key names, so that its plotters read them.

    Rates are over the makespan: first send to the last end of a completed request; what a cut
    request had produced does not count. Percentiles stand beside their sample count (``num_*``)
    and are over completed requests only.
    """
    done = [r for r in run.records if r.is_complete]
    failed = [r for r in run.records if r.error is not None]
    output = sum(r.completion_tokens or 0 for r in done)
    duration = max(r.end_s for r in done) - min(r.sent_s for r in run.records) if done else None
    summary: dict[str, object] = {
        "sent": len(run.records),
        "completed": len(done),
        "failed": len(failed),
        "cut": sum(r.is_cut for r in run.records),
        "errors": dict(Counter(r.error for r in failed)),
        "duration": duration,
        "total_input_tokens": sum(r.prompt_tokens or 0 for r in done) if done else None,
        "total_output_tokens": output if done else None,
        "output_throughput": output / duration if duration else None,
        "request_throughput": len(done) / duration if duration else None,
        "max_concurrent_requests": max_in_flight(run.records),
        "client_cpu_share": run.client_cpu_share,
    }
    samples: dict[str, list[float | None]] = {
        "ttft": [r.ttft_s for r in done],
        "tpot": [r.tpot_s for r in done],
        "itl": [gap for r in done for gap in r.gaps_s],
        "e2el": [r.e2e_s for r in done],
    }
    for name, values in samples.items():
        known = [value * 1000 for value in values if value is not None]
        summary |= {f"p{p}_{name}_ms": percentile(known, p) for p in (50, 99)}
        summary |= {f"max_{name}_ms": max(known, default=None), f"num_{name}": len(known)}
    return summary


def same_texts(ours: Run, theirs: Run) -> dict[str, int]:
    """How many answers are the same text, of those both arms finished. Kernels that depend on a
    row's company may differ; no answer in common would mean that the arms did different work."""
    texts = {r.index: r.text for r in theirs.records if r.is_complete}
    both = [r for r in ours.records if r.is_complete and r.index in texts]
    return {"equal": sum(r.text == texts[r.index] for r in both), "of": len(both)}
