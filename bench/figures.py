"""From records to the numbers of one point, under vLLM bench's key names. Pure.

Definitions follow vLLM's bench: TTFT = first chunk with text - send; E2E = last chunk with text -
send; TPOT = (E2E - TTFT) / (tokens - 1); ITL = gap between chunks with text; and in an open loop a
request counts as sent when it was due. Rates are over the makespan. Goodput counts requests that
meet every limit, attainment is their share of all that were *sent*: what failed, was refused or was
still open when time was up met nothing. What is not known is None, never 0.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bench.records import Record, Run, max_in_flight

PERCENTS = (50, 90, 95, 99)
LATENCIES = ("ttft", "tpot", "itl", "e2el")
_RELATIVE = {"ttft": 5.0, "tpot": 3.0}


@dataclass(frozen=True, slots=True)
class Slo:
    """Milliseconds a request may take, by latency. ``itl`` bounds the 99th percentile of its own
    gaps."""

    limits_ms: Mapping[str, float]

    def met(self, record: Record) -> dict[str, bool]:
        """By limit. A single token has no time per token, and that is soon enough."""
        if not record.is_complete:
            return dict.fromkeys(self.limits_ms, False)
        gaps = percentile(record.gaps_s, 99)
        found = {
            "ttft": record.ttft_s,
            "tpot": record.tpot_s or 0.0,
            "itl": gaps or 0.0,
            "e2el": record.e2e_s,
        }
        return {
            name: (value := found[name]) is not None and value * 1000 <= limit
            for name, limit in self.limits_ms.items()
        }


DEFAULT_SLO = Slo({"ttft": 2000.0, "tpot": 200.0})
PRESETS = {
    "default": DEFAULT_SLO,
    "chat": Slo({"ttft": 200.0, "itl": 50.0}),
    "rag": Slo({"ttft": 300.0, "itl": 100.0}),
    "code": Slo({"ttft": 500.0, "itl": 150.0}),
    "content": Slo({"ttft": 600.0, "itl": 200.0}),
}
TARGET_ATTAINMENT = 0.95


def relative_slo(alone: Mapping[str, object]) -> Slo | None:
    """Limits as multiples of what the same server takes for a lone client; None if unknown."""
    limits = {}
    for name, times in _RELATIVE.items():
        median = alone.get(f"p50_{name}_ms")
        if not isinstance(median, float):
            return None
        limits[name] = times * median
    return Slo(limits)


def percentile(samples: Sequence[float], percent: float) -> float | None:
    """Linear between the two nearest ranks; None without samples."""
    if not samples:
        return None
    ordered = sorted(samples)
    rank = (len(ordered) - 1) * percent / 100
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def summarise(run: Run, slo: Slo = DEFAULT_SLO) -> dict[str, object]:
    """One point's numbers. Percentiles stand beside their sample count (``num_*``) and are over
    completed requests only; what a cut request had produced does not count."""
    done = [r for r in run.records if r.is_complete]
    duration = max(r.end_s for r in done) - min(r.sent_s for r in run.records) if done else None
    return {
        **_counts(run.records),
        "duration": duration,
        **_rates(done, duration),
        **_attainment(run.records, slo, duration),
        "max_concurrent_requests": max_in_flight(run.records),
        "client_cpu_share": run.client_cpu_share,
        **_latencies(done),
        **_queues(done),
        **_probes(run.probes),
    }


def _counts(records: Sequence[Record]) -> dict[str, object]:
    failed = [r for r in records if r.error is not None]
    return {
        "sent": len(records),
        "completed": sum(r.is_complete for r in records),
        "failed": len(failed),
        "timeouts": sum(r.is_cut for r in records),
        "rejected": sum(r.is_rejected for r in records),
        "aborted": sum(r.is_aborted for r in records),
        "failures": dict(Counter(r.code or r.error for r in failed)),
    }


def _rates(done: Sequence[Record], duration: float | None) -> dict[str, object]:
    inputs = _total(r.prompt_tokens for r in done)
    outputs = _total(r.completion_tokens for r in done)
    cached = [r.cached_tokens for r in done if r.cached_tokens is not None]

    def over(count: int | None) -> float | None:
        return count / duration if duration and count is not None else None

    return {
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "cached_tokens": sum(cached) if cached else None,
        "request_throughput": over(len(done)),
        "output_throughput": over(outputs),
        "total_token_throughput": over(None if inputs is None else inputs + (outputs or 0)),
        "max_output_tokens_per_s": _busiest_second(done),
    }


def _total(counts: Iterable[int | None]) -> int | None:
    """None where one is not known, or there is none."""
    found = list(counts)
    return None if not found or None in found else sum(count or 0 for count in found)


def _busiest_second(done: Sequence[Record]) -> float | None:
    """Chunks, as vLLM counts them, in the fullest second after the first send."""
    times = [time for r in done for time in r.chunk_times_s]
    if not times:
        return None
    start = min(r.sent_s for r in done)
    return float(max(Counter(int(time - start) for time in times).values()))


def _attainment(records: Sequence[Record], slo: Slo, duration: float | None) -> dict[str, object]:
    met = [slo.met(record) for record in records]
    good = sum(all(each.values()) for each in met)
    share = {
        f"attainment_{name}": (
            sum(each[name] for each in met) / len(met) if met and name in slo.limits_ms else None
        )
        for name in LATENCIES
    }
    return {
        "slo": dict(slo.limits_ms),
        "request_goodput": good / duration if duration else None,
        "attainment": good / len(records) if records else None,
        **share,
    }


def _latencies(done: Sequence[Record]) -> dict[str, object]:
    samples: dict[str, list[float | None]] = {
        "ttft": [r.ttft_s for r in done],
        "tpot": [r.tpot_s for r in done],
        "itl": [gap for r in done for gap in r.gaps_s],
        "e2el": [r.e2e_s for r in done],
    }
    summary: dict[str, object] = {}
    for name, values in samples.items():
        known = [value * 1000 for value in values if value is not None]
        summary |= {f"p{p}_{name}_ms": percentile(known, p) for p in PERCENTS}
        summary[f"mean_{name}_ms"] = statistics.fmean(known) if known else None
        summary[f"median_{name}_ms"] = summary[f"p50_{name}_ms"]
        summary[f"std_{name}_ms"] = statistics.pstdev(known) if known else None
        summary |= {f"max_{name}_ms": max(known, default=None), f"num_{name}": len(known)}
    return summary


def _queues(done: Sequence[Record]) -> dict[str, object]:
    """The client's own queue, if it had one."""
    waits = [r.queue_s * 1000 for r in done]
    if not any(waits):
        return {}
    whole = [r.e2e_with_queue_s * 1000 for r in done if r.e2e_with_queue_s is not None]
    return {
        **{f"p{p}_queue_ms": percentile(waits, p) for p in (50, 99)},
        **{f"p{p}_e2el_with_queue_ms": percentile(whole, p) for p in (50, 99)},
    }


def _probes(probes: Sequence[Record]) -> dict[str, object]:
    if not probes:
        return {}
    times = [r.e2e_s * 1000 for r in probes if r.is_complete and r.e2e_s is not None]
    return {
        "probe_completed": sum(r.is_complete for r in probes),
        "probe_failed": sum(not r.is_complete for r in probes),
        "probe_median_e2el_ms": percentile(times, 50),
        "probe_p99_e2el_ms": percentile(times, 99),
        "probe_max_e2el_ms": max(times, default=None),
    }


def details(run: Run) -> dict[str, object]:
    """A list for each of vLLM's per-request keys, in seconds, in the order of the requests."""
    records = run.records
    first = min((r.sent_s for r in records), default=0.0)
    return {
        "input_lens": [r.prompt_tokens for r in records],
        "output_lens": [r.completion_tokens for r in records],
        "ttfts": [r.ttft_s for r in records],
        "itls": [r.gaps_s for r in records],
        "latencies": [r.e2e_s for r in records],
        "start_times": [r.sent_s - first for r in records],
        "queue_times": [r.queue_s for r in records],
        "errors": [r.error or "" for r in records],
    }
