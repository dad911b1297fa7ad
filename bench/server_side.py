"""What a server says of itself while a point runs: ``/metrics`` before, during and after.

Counters give what the point cost, the fullest moment what a session holds. Not every server knows
everything, and what it does not tell is None.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

SAMPLE_S = 0.5
"""Between two looks, on average: at even distances all of them fell between the requests of a lone
client that happened to take as long."""
_OURS = "skippy:"

Prices = Sequence[Mapping[str, int]]
"""Bytes of a cell, or of a row of state, by component: one mapping for each stage."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One page of metrics: our own families, names without their prefix."""

    samples: tuple[tuple[str, Mapping[str, str], float], ...]

    @classmethod
    def parse(cls, text: str) -> Reading:
        return cls(
            tuple(
                (sample.name.removeprefix(_OURS), dict(sample.labels), float(sample.value))
                for family in text_string_to_metric_families(text)
                for sample in family.samples
                if sample.name.startswith(_OURS)
            )
        )

    def total(self, name: str, **labels: str) -> float | None:
        """The sum over all series with these labels; None without any."""
        found = [
            value
            for other, its, value in self.samples
            if other == name and labels.items() <= its.items()
        ]
        return sum(found) if found else None

    def by(self, label: str, name: str, **labels: str) -> dict[str, float]:
        """The sum for each value of ``label``."""
        values = {its[label] for other, its, _ in self.samples if other == name and label in its}
        return {
            value: self.total(name, **{**labels, label: value}) or 0.0 for value in sorted(values)
        }


@dataclass(slots=True)
class Observed:
    """Filled while the point runs."""

    before: Reading
    after: Reading
    during: list[Reading] = field(default_factory=list)


def rise(before: Reading, after: Reading, name: str, **labels: str) -> float | None:
    """Of a counter."""
    first, last = before.total(name, **labels), after.total(name, **labels)
    return None if first is None or last is None else last - first


def _share(part: float | None, whole: float | None) -> float | None:
    return round(part / whole, 4) if part is not None and whole else None


def costs_of_point(seen: Observed, duration_s: float | None) -> dict[str, object]:
    """What the server computed in ``duration_s``, under the names of the result document."""
    before, after = seen.before, seen.after

    def rose(name: str, **labels: str) -> float | None:
        return rise(before, after, name, **labels)

    recomputed, hit = rose("recomputed_tokens_total"), rose("prefix_tokens_total", result="hit")
    computed, steps = rose("step_tokens_total"), rose("steps_total")
    prefill = rose("step_tokens_total", phase="prefill")
    known = None if hit is None or prefill is None else hit + prefill
    in_flight = [n for r in seen.during if (n := r.total("batches_in_flight"))]
    return {
        "steps": steps,
        "rows_a_step": _share(computed, steps),
        "prefill_tokens": prefill,
        "recomputed_tokens": recomputed,
        "recompute_tax": _share(recomputed, computed),
        "preemptions": rose("preemptions_total"),
        "prefix_hit_tokens": hit,
        "prefix_hit_rate": _share(hit, rose("prefix_tokens_total", result="queried")),
        "prompt_share_not_computed": _share(hit, known),
        "batches_in_flight": max(in_flight, default=None),
        "stage_busy_share": _by_stage(seen, "stage_compute_seconds_sum", duration_s),
        "stage_bubble_share": _by_stage(seen, "stage_wait_seconds_total", duration_s),
        "peak_memory_bytes": list(after.by("stage", "memory_peak_bytes").values()) or None,
    }


def _by_stage(seen: Observed, name: str, duration_s: float | None) -> list[float] | None:
    stages = seen.after.by("stage", name)
    if not stages or not duration_s:
        return None
    rises = [rise(seen.before, seen.after, name, stage=stage) or 0.0 for stage in stages]
    return [round(value / duration_s, 4) for value in rises]


def kv_per_session(during: Sequence[Reading], prices: Prices) -> dict[str, object]:
    """At the moment when most requests ran: bytes of all components in use on all stages, over how
    many ran; of several such moments the fullest."""
    held = [
        (running, _held_bytes(reading, prices))
        for reading in during
        if (running := reading.total("requests_running"))
    ]
    if not held:
        return {"kv_bytes_per_session": None, "max_running": None}
    running, num_bytes = max(held)
    return {"kv_bytes_per_session": round(num_bytes / running), "max_running": int(running)}


def _held_bytes(reading: Reading, prices: Prices) -> float:
    return sum(
        (reading.total("kv_cells", stage=str(index), component=name, state="active") or 0) * price
        for index, stage in enumerate(prices)
        for name, price in stage.items()
    )


def prices_of(layers: Sequence[Any], borders: Sequence[tuple[int, int]]) -> Prices:
    """Of stages over layers [lo, hi), from what each layer costs (``coordinator.costs``)."""
    names = {
        "attention": "attention_per_cell",
        "window": "window_per_cell",
        "recurrent": "recurrent_per_id",
    }
    return [
        {
            component: sum(getattr(layer, name) for layer in layers[lo:hi])
            for component, name in names.items()
        }
        for lo, hi in borders
    ]


def read(url: str) -> Reading:
    with _client(url) as client:
        return _read(client)


def status_of(url: str) -> Any:
    with _client(url) as client:
        reply = client.get("/status")
    reply.raise_for_status()
    return reply.json()


@contextlib.contextmanager
def observed(url: str) -> Iterator[Observed]:
    """The server at ``url`` while the block runs, looked at about twice a second."""
    with _client(url) as client:
        # A server that keeps peaks of memory starts them anew; another one has no such route.
        with contextlib.suppress(httpx.HTTPError):
            client.post("/v1/peak_reset")
        seen = Observed(before=(first := _read(client)), after=first)
        over = threading.Event()

        def keep_looking() -> None:
            while not over.wait(SAMPLE_S * random.uniform(0.6, 1.4)):
                seen.during.append(_read(client))

        watcher = threading.Thread(target=keep_looking, name="observe", daemon=True)
        watcher.start()
        try:
            yield seen
        finally:
            over.set()
            watcher.join()
            seen.after = _read(client)


def _client(url: str) -> httpx.Client:
    """One for many readings: making one costs more than a page. This machine needs no proof of who
    it is."""
    return httpx.Client(base_url=url, timeout=10, trust_env=False, verify=False)


def _read(client: httpx.Client) -> Reading:
    """A page that does not come, from a server that is late or gone, says nothing: its requests
    will."""
    try:
        reply = client.get("/metrics")
    except httpx.HTTPError:
        return Reading(())
    return Reading.parse(reply.text if reply.status_code == 200 else "")
