"""One page of metrics in Prometheus text format, put together when somebody reads it.

Families are built from plain numbers at that moment, so counting costs an addition and a value
nobody knows any more is simply not on the page. Of prometheus_client only the format is used: its
own counters would add ``_created`` series, which it can switch off for a whole process only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

Kind = Literal["counter", "gauge", "histogram"]
Labels = Mapping[str, str]
_FINE_RATIO = 1.25


@dataclass(frozen=True, slots=True)
class Buckets:
    """A histogram as it was at one moment: how many were at most each of ``ends``, and more than
    the last. ``bounds`` are those of ``ends`` that a page shows."""

    bounds: Sequence[float]
    ends: Sequence[float]
    counts: Sequence[int]
    total: float

    def cumulative(self) -> list[tuple[str, int]]:
        """What a page shows: each bound and how many were at most that."""
        sums = [0, *accumulate(self.counts)]
        found = [(str(float(end)), sums[self.ends.index(end) + 1]) for end in self.bounds]
        return [*found, ("+Inf", sums[-1])]


class Histogram:
    """Counts per bucket. ``bounds`` are the inclusive upper ends of those a page shows, rising;
    at the ``finer`` ones it counts, too, for readers with other needs."""

    def __init__(self, bounds: Sequence[float], finer: Sequence[float] = ()):
        self._bounds = bounds
        self._ends = tuple(sorted({*bounds, *finer}))
        self._counts = [0] * (len(self._ends) + 1)
        self._total = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._ends, value)] += 1
        self._total += value

    def seen(self, bounds: Sequence[float] | None = None) -> Buckets:
        """As of now; shown at ``bounds``, all of which it must count at."""
        return Buckets(bounds or self._bounds, self._ends, tuple(self._counts), self._total)


Sample = tuple[Labels, float]
Value = float | Buckets


@dataclass(frozen=True, slots=True)
class Family:
    """Series of one name, which goes with its prefix and without a counter's ``_total``."""

    kind: Kind
    name: str
    text: str
    samples: Sequence[tuple[Labels, Value]]

    def metric(self) -> Metric:
        metric = Metric(self.name, self.text, self.kind)
        suffix = "_total" if self.kind == "counter" else ""
        for labels, value in self.samples:
            if isinstance(value, Buckets):
                _fill(metric, labels, value)
            else:
                metric.add_sample(self.name + suffix, dict(labels), value)
        return metric


class Page:
    """Families in the order they are added; ``labels`` go on every sample, ``prefix`` before every
    name. A family without a sample is left out."""

    def __init__(self, labels: Labels, *, prefix: str = "skippy:"):
        self.families: list[Family] = []
        self._labels = labels
        self._prefix = prefix

    def counter(self, name: str, text: str, samples: Iterable[Sample]) -> None:
        self.add("counter", name, text, samples)

    def gauge(self, name: str, text: str, samples: Iterable[Sample]) -> None:
        self.add("gauge", name, text, samples)

    def histogram(self, name: str, text: str, series: Iterable[tuple[Labels, Histogram]]) -> None:
        self.add("histogram", name, text, [(labels, each.seen()) for labels, each in series])

    def add(
        self, kind: Kind, name: str, text: str, samples: Iterable[tuple[Labels, Value]]
    ) -> None:
        found = [({**self._labels, **labels}, value) for labels, value in samples]
        if found:
            self.families.append(Family(kind, self._prefix + name, text, found))


class _Families(Collector):
    def __init__(self, families: Iterable[Family]):
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return (family.metric() for family in self._families)


def exposition(families: Iterable[Family]) -> bytes:
    """``families`` as a scraper reads them."""
    return generate_latest(_Families(families))


def geometric(first: float, last: float) -> tuple[float, ...]:
    """Bounds from ``first`` to ``last`` or a little more, each a quarter above the one before:
    close enough that the middle of a bucket stands for what is in it."""
    bounds = [first]
    while bounds[-1] < last:
        bounds.append(bounds[-1] * _FINE_RATIO)
    return tuple(bounds)


def only(value: float) -> list[Sample]:
    """The sample of a family without labels of its own."""
    return [({}, value)]


def by(label: str, values: Mapping[str, float]) -> list[Sample]:
    """A sample for each of ``values``, keyed by what ``label`` says."""
    return [({label: key}, value) for key, value in values.items()]


def by_stage(values: Iterable[float]) -> list[Sample]:
    """A sample for each stage, in their order."""
    return [({"stage": str(index)}, value) for index, value in enumerate(values)]


def _fill(metric: Metric, labels: Labels, buckets: Buckets) -> None:
    total = 0
    for le, total in buckets.cumulative():
        metric.add_sample(f"{metric.name}_bucket", {**labels, "le": le}, total)
    metric.add_sample(f"{metric.name}_count", dict(labels), total)
    metric.add_sample(f"{metric.name}_sum", dict(labels), buckets.total)
