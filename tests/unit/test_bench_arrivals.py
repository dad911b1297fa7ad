"""Requests come when they should. Without these an open loop offers another load than it says."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Sequence

import pytest

from bench.arrivals import arrival_times, gaps, probe_times
from skippy_mesh.errors import UsageError

COUNT, RATE = 2000, 8.0
KS_1_PERCENT = 1.63  # of the distance times the root of the count


def misfit(samples: Sequence[float], rate: float) -> float:
    """Kolmogorov and Smirnov's distance from exponential gaps, times the root of the count."""
    ordered, count = sorted(samples), len(samples)
    found = 0.0
    for at, value in enumerate(ordered):
        expected = 1 - math.exp(-rate * value)
        found = max(found, abs(expected - at / count), abs(expected - (at + 1) / count))
    return found * math.sqrt(count)


def between(times: Sequence[float]) -> list[float]:
    return [b - a for a, b in itertools.pairwise([0.0, *times])]


def times_of(burstiness: float, seed: str = "1") -> list[float]:
    return arrival_times(COUNT, rate=RATE, burstiness=burstiness, seed=seed)


@pytest.mark.parametrize("seed", ["1", "2", "3", "4", "5"])
def test_poisson_gaps_fit(seed: str) -> None:
    assert misfit(between(times_of(1.0, seed)), RATE) < KS_1_PERCENT


@pytest.mark.parametrize("burstiness", [0.25, 0.7, 4.0, math.inf])
def test_the_fit_tells_other_arrivals_from_poisson(burstiness: float) -> None:
    assert misfit(between(times_of(burstiness)), RATE) > KS_1_PERCENT


def test_less_is_burstier_and_infinity_a_metronome() -> None:
    spreads = [statistics.pstdev(between(times_of(b))) * RATE for b in (0.25, 1.0, 4.0, math.inf)]
    assert spreads == pytest.approx([2.0, 1.0, 0.5, 0.0], rel=0.1, abs=1e-9)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, math.inf])
def test_the_last_one_is_due_when_the_rate_says(burstiness: float) -> None:
    times = times_of(burstiness)
    assert times[-1] == pytest.approx(COUNT / RATE) and times == sorted(times) and times[0] > 0
    assert len(times) == COUNT


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0, math.inf])
def test_gaps_are_of_the_rate_before_they_are_stretched(burstiness: float) -> None:
    mean = statistics.fmean(gaps(COUNT, rate=RATE, burstiness=burstiness, seed="1"))
    assert mean == pytest.approx(1 / RATE, rel=0.15)


def test_a_seed_gives_the_same_times_and_another_seed_others() -> None:
    random.seed(7)  # whatever others draw
    assert times_of(1.0) == times_of(1.0) != times_of(1.0, "2")


@pytest.mark.parametrize(("count", "rate", "burstiness"), [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_what_is_no_load_is_refused(count: int, rate: float, burstiness: float) -> None:
    with pytest.raises(UsageError, match="above 0"):
        gaps(count, rate=rate, burstiness=burstiness, seed="1")


def test_probes_come_at_even_distances() -> None:
    assert probe_times(2.0, 2.0) == [0.5, 1.0, 1.5, 2.0]
    assert probe_times(0.0, 5.0) == []
