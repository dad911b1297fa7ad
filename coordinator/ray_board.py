"""What the gateway knows, told to Ray, whose own dashboards then show it.

The page at ``/metrics`` stays the truth; this is a copy of it every few seconds. Ray takes no colon
in a name, no zero increments and no sum of a histogram, which it guesses from the middle of each
bucket: so it is told of buckets that are narrow, and the middle of each, once for every value in it
that is new. A gauge that nobody sets any more is dropped by Ray after a while, as it should be.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ray.util import metrics

from skippy_mesh.exposition import Buckets, Family, Labels

logger = logging.getLogger(__name__)

_EVERY_S = 5.0
_STOCK = frozenset(
    "vllm:" + name for name in (
        "generation_tokens", "prompt_tokens", "prefix_cache_hits", "prefix_cache_queries",
        "request_success", "kv_cache_usage_perc", "num_requests_running", "num_requests_waiting",
        "request_queue_time_seconds", "request_prefill_time_seconds",
        "request_decode_time_seconds", "time_to_first_token_seconds",
        "request_time_per_output_token_seconds", "e2e_request_latency_seconds",
        "request_prompt_tokens", "request_generation_tokens",
    )
)  # fmt: skip
"""Of vLLM's names those that Ray's boards Serve LLM and Data LLM ask for."""
_Key = tuple[str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True, slots=True)
class RayBoard:
    """What a gateway starts with it. Ray's boards know it as a deployment of ``mesh_name``."""

    mesh_name: str

    def start(self, families: Callable[[Sequence[str]], Sequence[Family]]) -> Teller:
        """Tell Ray of ``families``, ours and vLLM's, from now on."""
        return Teller(lambda: list(for_ray(families(["vllm"]), self.mesh_name)))


class Teller:
    """Tells Ray on a thread of its own what ``families`` says, until :meth:`close`."""

    def __init__(self, families: Callable[[], Sequence[Family]]):
        self._families = families
        self._metrics: dict[str, Any] = {}
        self._told: dict[_Key, float | Buckets] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ray board", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(_EVERY_S):
            try:
                self.tell()
            except Exception:  # who only watches must not end the gateway
                logger.exception("Ray's board was not told")

    def tell(self) -> None:
        """Whatever is new since the last time."""
        for family in self._families():
            for labels, value in family.samples:
                key = (family.name, tuple(sorted(labels.items())))
                self._tell(family, dict(labels), value, self._told.get(key))
                self._told[key] = value

    def _tell(
        self, family: Family, tags: dict[str, str], value: float | Buckets, told: Any
    ) -> None:
        metric = self._metric(family, value)
        if isinstance(value, Buckets):
            before = told.counts if told else (0,) * len(value.counts)
            for middle, count, known in zip(_middles(value), value.counts, before, strict=True):
                for _ in range(count - known):
                    metric.observe(middle, tags)
        elif family.kind == "gauge":
            metric.set(float(value), tags)
        elif value > (told or 0):
            metric.inc(value - (told or 0), tags)

    def _metric(self, family: Family, value: float | Buckets) -> Any:
        if family.name not in self._metrics:
            options: dict[str, Any] = {"tag_keys": tuple(family.samples[0][0])}
            if isinstance(value, Buckets):
                options["boundaries"] = _bounds(value)
            kind = {"counter": metrics.Counter, "gauge": metrics.Gauge}.get(
                family.kind, metrics.Histogram
            )
            self._metrics[family.name] = kind(family.name, family.text, **options)
        return self._metrics[family.name]


def for_ray(families: Sequence[Family], mesh_name: str) -> Iterator[Family]:
    """``families`` under names that Ray takes, and what its boards ask for besides."""
    for family in families:
        if family.name.startswith("skippy:") or family.name in _STOCK:
            samples = [(_tags(labels), value) for labels, value in family.samples]
            yield replace(family, name=family.name.replace(":", "_"), samples=samples)
        if family.name == "skippy:requests_waiting":
            yield _swapped(family)
        if family.name == "skippy:requests_finished":
            yield _deployment(family, mesh_name)


def _swapped(waiting: Family) -> Family:
    samples = [
        ({"model_name": labels["model_name"]}, value)
        for labels, value in waiting.samples
        if labels["reason"] == "preempted"
    ]
    text = "Requests that gave up their memory and wait to resume"
    return Family("gauge", "vllm_num_requests_swapped", text, samples)


def _deployment(finished: Family, mesh_name: str) -> Family:
    """Without it Serve LLM shows nothing: it joins the others with it by process."""
    tags = {
        "deployment": "skippy_mesh",
        "replica": "gateway_0",
        "application": mesh_name,
        "route": "/v1",
        "model_name": finished.samples[0][0]["model_name"],
    }
    count = sum(value for _, value in finished.samples if not isinstance(value, Buckets))
    name = "serve_deployment_request_counter"
    return Family("counter", name, "Requests that ended", [(tags, count)])


def _tags(labels: Labels) -> dict[str, str]:
    return {name: value for name, value in labels.items() if name != "engine"}


def _bounds(buckets: Buckets) -> list[float]:
    """All above 0, which Ray does not take; what was 0 is in the first one."""
    return [float(end) for end in buckets.ends if end > 0]


def _middles(buckets: Buckets) -> Iterator[float]:
    """A value in each bucket; beyond the last end, twice that, as Ray counts it, too."""
    start = 0.0
    for end in buckets.ends:
        yield (start + end) / 2
        start = end
    yield 2 * start
