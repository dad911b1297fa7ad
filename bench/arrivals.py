"""When requests are due in an open loop. Pure: the same seed gives the same times.

Gaps are drawn from a Gamma distribution of shape ``burstiness``, as in vLLM's bench: 1 is Poisson
traffic, below 1 requests come in bursts, ``inf`` is a metronome. The times are then stretched so
that the last request is due at count/rate: two seeds offer the same load in the same time.
"""

from __future__ import annotations

import itertools
import math
import random

from skippy_mesh.errors import UsageError


def gaps(count: int, *, rate: float, burstiness: float, seed: str) -> list[float]:
    """Seconds between arrivals, ``1/rate`` on average."""
    if not (count > 0 and 0 < rate < math.inf and burstiness > 0):
        raise UsageError(
            f"an open loop needs a count, a rate and a burstiness above 0, "
            f"got {count}, {rate:g} and {burstiness:g}"
        )
    if math.isinf(burstiness):
        return [1 / rate] * count
    draw = random.Random(seed)
    scale = 1 / (rate * burstiness)
    return [draw.gammavariate(burstiness, scale) for _ in range(count)]


def arrival_times(count: int, *, rate: float, burstiness: float, seed: str) -> list[float]:
    """Seconds after the start at which each request is due; the last one at ``count / rate``."""
    times = list(itertools.accumulate(gaps(count, rate=rate, burstiness=burstiness, seed=seed)))
    stretch = count / rate / times[-1]
    return [time * stretch for time in times]


def probe_times(rate: float, limit_s: float) -> list[float]:
    """Probes come at even distances, so that none falls into the shadow of another."""
    return [number / rate for number in range(1, int(rate * limit_s) + 1)] if rate > 0 else []
