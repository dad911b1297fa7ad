"""Scripted reports, and a page of metrics as a scraper reads it."""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from coordinator.ceiling import ceiling
from skippy_mesh.messages import Snapshot, StageTime, StepRecord, StepReport, TokenEvent
from skippy_mesh.scheduler.memory import Capacity
from skippy_mesh.telemetry import Telemetry

STAGES = (Capacity(lanes=8, attention=4096), Capacity(lanes=6, attention=4352, window=4096))
LEDGER = {
    "attention": {"active": 100, "resident": 20, "reserved": 30, "free": 3946},
    "window": {"active": 100, "resident": 20, "reserved": 30, "free": 3946},
    "lanes": {"running": 2, "resident": 1, "free": 3},
}
WAITING = {"memory": 3, "lane": 0, "order": 1, "preempted": 2}


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def telemetry_of(described: bool = True, **options: Any) -> Telemetry:
    telemetry = Telemetry(**{"model_name": "tiny", "max_model_len": 4096, **options})
    if described:
        found = ceiling(STAGES)
        telemetry.describe(STAGES, terms=found.terms, binding=found.binding)
    return telemetry


def state(running: int = 2, waiting: dict[str, int] | None = None) -> Snapshot:
    return Snapshot(
        running=running,
        waiting=WAITING if waiting is None else waiting,
        waiting_tokens=77,
        components=LEDGER,
    )


def idle() -> Snapshot:
    return state(0, dict.fromkeys(WAITING, 0))


def record(**changes: Any) -> StepRecord:
    fields: dict[str, Any] = {
        "epoch": 1, "step_id": 5, "kind": "mixed", "state": state(),
        "admitted": 2, "resumed": 1, "preempted": 1,
        "prefill_tokens": 60, "decode_tokens": 3,
        "recompute_prompt_tokens": 10, "recompute_output_tokens": 4,
        "prefix_hits": 0, "prefix_misses": {}, "prefix_hit_tokens": 0,
        "prefix_queried_tokens": 0, "prefix_evictions": {},
        "batches_in_flight": 2, "step_s": 0.1, "scheduler_s": 0.0004, "answered_s": 7.25,
        "stages": (StageTime(0.04, 0.01, sent_bytes=512), StageTime(0.05, 0.02, 2)),
    }  # fmt: skip
    return StepRecord(**{**fields, **changes})


def step(*events: TokenEvent, **changes: Any) -> StepReport:
    return StepReport(events, record(**changes))


def token(request_id: str = "a", **fields: Any) -> TokenEvent:
    return TokenEvent(request_id=request_id, token_id=7, **fields)


class Seen:
    """A page as a scraper reads it. Names of our own go without their prefix."""

    def __init__(self, page: bytes):
        self.text = page.decode()
        self.types: dict[str, str] = {}
        self.samples: dict[str, list[tuple[dict[str, str], float]]] = {}
        for family in text_string_to_metric_families(self.text):
            assert family.name not in self.types, "a scraper refuses a family that comes twice"
            self.types[family.name] = family.type
            for sample in family.samples:
                labels = dict(sample.labels)
                is_ours = not family.name.startswith("llamacpp:")
                assert labels.pop("model_name", None) == ("tiny" if is_ours else None)
                self.samples.setdefault(sample.name, []).append((labels, sample.value))

    def __contains__(self, name: str) -> bool:
        return _full(name) in self.samples

    def __call__(self, name: str, **labels: str) -> float:
        """The sum of the samples that carry ``labels``."""
        values = [
            value for found, value in self.samples[_full(name)] if labels.items() <= found.items()
        ]
        assert values, f"no sample of {name} with {labels}"
        return sum(values)


def seen(telemetry: Telemetry) -> Seen:
    return Seen(telemetry.render())


def _full(name: str) -> str:
    return name if ":" in name else f"skippy:{name}"
