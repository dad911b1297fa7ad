"""Ratios of paired rounds, and whether they meet a target. Pure: numbers in, numbers out.

A round gives one ratio, of two runs of the same prompts right after one another, so a machine that
slows down slows both. Over the rounds stands the median with its interval; a target is met or
missed only if the whole interval says so.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

CONFIDENCE = 0.95
MIN_ROUNDS = 4
Verdict = Literal["met", "missed", "undecided", "no number"]

# Ours over theirs, by the key of a summary.
RATIOS = {
    "throughput": "output_throughput",
    "p50_e2e": "p50_e2el_ms",
    "p99_e2e": "p99_e2el_ms",
    "p50_ttft": "p50_ttft_ms",
    "p50_tpot": "p50_tpot_ms",
}


@dataclass(frozen=True, slots=True)
class Interval:
    median: float
    low: float
    high: float
    rounds: int

    def as_json(self) -> dict[str, float]:
        return {key: round(value, 4) for key, value in asdict(self).items()}

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


Points = dict[tuple[str, int], dict[str, Interval]]
"""By pair and clients, each metric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """``metric`` of ``pair`` at ``clients``: at least ``bound``, or at most."""

    pair: str
    clients: int
    metric: str
    bound: float
    is_floor: bool = True

    def __str__(self) -> str:
        sign = ">=" if self.is_floor else "<="
        return f"{self.pair}, N={self.clients}: {self.metric} {sign} {self.bound:g}"


def interval(values: Sequence[float]) -> Interval | None:
    """The median and, free of any assumption on their distribution, where the true one lies: the
    k-th smallest to the k-th greatest value, k as great as ``CONFIDENCE`` permits. Up to eight
    values that is the least to the greatest; with four, it holds in 7 of 8 cases."""
    if not values:
        return None
    ordered, count = sorted(values), len(values)

    def misses(cut: int) -> float:
        """How likely the true median lies outside when ``cut`` values are left off at each end."""
        return float(2 * sum(math.comb(count, k) for k in range(cut + 1)) / 2**count)

    cut = max((k for k in range((count + 1) // 2) if misses(k) <= 1 - CONFIDENCE), default=0)
    return Interval(statistics.median(ordered), ordered[cut], ordered[-1 - cut], count)


def paired_ratios(
    ours: Sequence[Mapping[str, object]], theirs: Sequence[Mapping[str, object]]
) -> dict[str, list[float]]:
    """By metric, ours over theirs of each round in which both arms have a number."""
    found: dict[str, list[float]] = {name: [] for name in RATIOS}
    for one, other in zip(ours, theirs, strict=True):
        for name, key in RATIOS.items():
            mine, yours = one.get(key), other.get(key)
            if isinstance(mine, float) and isinstance(yours, float) and yours > 0:
                found[name].append(mine / yours)
    return found


def verdict(target: Target, found: Interval | None, *, min_rounds: int = MIN_ROUNDS) -> Verdict:
    """Undecided if the bound lies within the interval, or the rounds are too few to say."""
    if found is None:
        return "no number"
    if found.rounds < min_rounds:
        return "undecided"
    sign = 1 if target.is_floor else -1
    low, high = sorted((sign * found.low, sign * found.high))
    if low >= sign * target.bound:
        return "met"
    return "missed" if high < sign * target.bound else "undecided"


def judgements(targets: Sequence[Target], found: Points) -> list[dict[str, object]]:
    """Every target whose point was measured."""
    return [
        {
            "target": str(target),
            "verdict": verdict(target, value := found[key].get(target.metric)),
            "found": value.as_json() if value else None,
        }
        for target in targets
        if (key := (target.pair, target.clients)) in found
    ]


def summarise(targets: Sequence[Target], found: Points) -> dict[str, object]:
    """The ratios of a document, and what they say of its targets."""
    ratios = {
        f"{pair} N={clients}": {key: value.as_json() for key, value in each.items()}
        for (pair, clients), each in found.items()
    }
    return {"ratios": ratios, "targets": judgements(targets, found)}
