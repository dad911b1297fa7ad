"""What the engine's step log says of one run: where the time of a pipeline went.

The only place that knows the log's keys is :func:`read_step`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BEHIND_S = 0.2  # a step is answered before its line is written
_COUNTS = ("prefill_tokens", "decode_tokens", "recompute_tokens", "running", "waiting")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    compute_s: tuple[float, ...]  # of each stage
    scheduler_s: float
    step_s: float
    answered_s: float  # on this machine's monotonic clock, if the engine is here
    prefill_tokens: int
    decode_tokens: int
    recompute_tokens: int
    running: int
    waiting: int
    active_cells: tuple[dict[str, int], ...]  # of each stage, by component; shared ones count once


def read_step(line: str) -> Step:
    entry: dict[str, Any] = json.loads(line)
    return Step(
        compute_s=tuple(ms / 1e3 for ms in entry["stage_ms"]),
        scheduler_s=entry["plan_ms"] / 1e3,
        step_s=entry["step_ms"] / 1e3,
        answered_s=entry["answered_s"],
        active_cells=tuple(
            {name: states["active"] for name, states in stage.items()} for stage in entry["kv"]
        ),
        **{key: entry[key] for key in _COUNTS},
    )


class StepLog:
    """A log that a server is still writing, read from where it was when this was made."""

    def __init__(self, path: Path):
        self._path = path
        self._offset = path.stat().st_size

    def steps(self) -> list[Step]:
        time.sleep(_BEHIND_S)
        with self._path.open() as file:
            file.seek(self._offset)
            # A line without its end is still being written.
            return [read_step(line) for line in file if line.endswith("\n")]


def profile(steps: Sequence[Step], duration_s: float) -> dict[str, object]:
    """Shares of ``duration_s``, in which the pipeline always had work: a closed loop's makespan.

    ``busy_share`` is each stage's time inside its steps, waiting for a core included.
    """
    if not steps:
        return {"steps": 0}
    stages = range(max(len(step.compute_s) for step in steps))
    busy = [sum(step.compute_s[k] for step in steps) / duration_s for k in stages]
    return {
        "steps": len(steps),
        "busy_share": [round(share, 4) for share in busy],
        "scheduler_share": round(sum(step.scheduler_s for step in steps) / duration_s, 4),
        "mean_step_ms": round(1e3 * sum(step.step_s for step in steps) / len(steps), 2),
        "mean_compute_ms": [round(1e3 * share * duration_s / len(steps), 2) for share in busy],
        "decode_rows_a_step": round(sum(step.decode_tokens for step in steps) / len(steps), 2),
        "prefill_tokens": sum(step.prefill_tokens for step in steps),
        "recompute_tokens": sum(step.recompute_tokens for step in steps),
        "max_running": max(step.running for step in steps),
        "mean_running": round(sum(step.running for step in steps) / len(steps), 2),
        "max_waiting": max(step.waiting for step in steps),
    }
