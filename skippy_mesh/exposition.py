"""One page of metrics in Prometheus text format, put together when somebody reads it.

Families are built from plain numbers at that moment, so counting costs an addition and a value
nobody knows any more is simply not on the page. Of prometheus_client only the format is used: its
own counters would add ``_created`` series, which it can switch off for a whole process only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

Labels = Mapping[str, str]
Sample = tuple[Labels, float]


class Histogram:
    """Counts per bucket. ``bounds`` are the buckets' inclusive upper ends, rising."""

    def __init__(self, bounds: Sequence[float]):
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def fill(self, metric: Metric, labels: Labels) -> None:
        total = 0
        ends = (*(str(float(bound)) for bound in self._bounds), "+Inf")
        for le, count in zip(ends, self._counts, strict=True):
            total += count
            metric.add_sample(f"{metric.name}_bucket", {**labels, "le": le}, total)
        metric.add_sample(f"{metric.name}_count", dict(labels), total)
        metric.add_sample(f"{metric.name}_sum", dict(labels), self._sum)


class Page(Collector):
    """Families in the order they are added; ``labels`` go on every sample.

    Names go without ``skippy:`` and without a counter's ``_total``. A family without a sample is
    left out.
    """

    def __init__(self, labels: Labels):
        self._labels = labels
        self._families: list[Metric] = []

    def counter(self, name: str, text: str, samples: Iterable[Sample]) -> None:
        self._add(Metric(f"skippy:{name}", text, "counter"), samples, suffix="_total")

    def gauge(self, name: str, text: str, samples: Iterable[Sample]) -> None:
        self._add(Metric(f"skippy:{name}", text, "gauge"), samples)

    def histogram(self, name: str, text: str, series: Iterable[tuple[Labels, Histogram]]) -> None:
        metric = Metric(f"skippy:{name}", text, "histogram")
        for labels, histogram in series:
            histogram.fill(metric, {**self._labels, **labels})
        self._keep(metric)

    def collect(self) -> Iterable[Metric]:
        return self._families

    def text(self) -> bytes:
        return generate_latest(self)

    def _add(self, metric: Metric, samples: Iterable[Sample], suffix: str = "") -> None:
        for labels, value in samples:
            metric.add_sample(metric.name + suffix, {**self._labels, **labels}, value)
        self._keep(metric)

    def _keep(self, metric: Metric) -> None:
        if metric.samples:
            self._families.append(metric)


def only(value: float) -> list[Sample]:
    """The sample of a family without labels of its own."""
    return [({}, value)]


def by(label: str, values: Mapping[str, float]) -> list[Sample]:
    """A sample for each of ``values``, keyed by what ``label`` says."""
    return [({label: key}, value) for key, value in values.items()]
