"""A point: one run of one arm as numbers, or why there are none; and the document it goes into."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

from bench.figures import DEFAULT_SLO, Slo, summarise
from bench.load import closed_loop
from bench.records import Run
from bench.servers import Server
from bench.workloads import Workload
from skippy_mesh.errors import RuntimeUnavailableError

OURS = "ours"
RESULTS = Path(__file__).parent / "results"
COUNTS = ("sent", "completed", "failed", "timeouts", "failures")


def why_void(summary: dict[str, object]) -> str | None:
    if summary["failed"]:
        return f"{summary['failed']} of {summary['sent']} requests failed: {summary['failures']}"
    return None if summary["completed"] else "no request finished in time"


def describe(run: Run, num_requests: int, slo: Slo = DEFAULT_SLO) -> dict[str, object]:
    """A point of one arm: its numbers, or why there are none; the counts in any case."""
    summary = summarise(run, slo)
    reason = why_void(summary)
    if reason is not None:
        return {"void": reason, **{key: summary[key] for key in COUNTS}}
    missing = num_requests - len(run.records)
    note = None
    if summary["timeouts"] or missing:
        note = (
            f"cut by time: {summary['timeouts']} requests were still open, {missing} were never "
            "sent; latencies are of the finished ones, so they flatter"
        )
    return {"void": None, "cut_by_time": note, **summary}


def published(command: list[str]) -> list[str]:
    """File names only: a result is published, the folders of a machine are not."""
    return [Path(word).name if "/" in word else word for word in command]


def check_warm(server: Server, one: Workload) -> None:
    """The first request pays for what is done once, so no point counts it."""
    run = asyncio.run(
        closed_loop(server.url, one, num_clients=1, max_requests=1, send_s=60, drain_s=60)
    )
    if not run.records[0].is_complete:
        problem = run.records[0].error or "took too long"
        tail = "\n".join(server.log_lines()[-20:])
        raise RuntimeUnavailableError(f"{server.name}: the first request: {problem}\n{tail}")


def write_json(path: Path, document: dict[str, object]) -> None:
    """All or nothing, after every point: an interrupted run keeps what it measured."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(document, indent=1) + "\n")
    os.replace(part, path)
