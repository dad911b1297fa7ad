"""What every step was, as metrics and as a log: native ``skippy:*`` names at ``/metrics``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import IO

from prometheus_client import CollectorRegistry, Counter, generate_latest

from skippy_mesh.messages import StepReport
from skippy_mesh.scheduler.memory import Capacity


class Telemetry:
    """Fed with reports on one thread, read on any."""

    def __init__(self, *, model_name: str, step_log: str | None = None):
        self._registry = CollectorRegistry()
        self._log: IO[str] | None = open(step_log, "w") if step_log else None  # noqa: SIM115
        self._steps = Counter(
            "skippy:steps", "steps", ["model_name", "kind"], registry=self._registry
        )
        self._model_name = model_name

    def describe(self, stages: Sequence[Capacity], ceiling: int) -> None:
        pass

    def observe(self, report: StepReport) -> None:
        record = report.record
        if record is None:
            return
        self._steps.labels(self._model_name, record.kind).inc()
        if self._log:
            self._log.write(json.dumps(dataclasses.asdict(record)) + "\n")
            self._log.flush()

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def close(self) -> None:
        if self._log:
            self._log.close()
