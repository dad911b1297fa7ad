"""``GET /status``: the mesh on one page, from what is known here. It asks nobody."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from skippy_mesh.client import Channel
from skippy_mesh.gateway.readiness import Problem
from skippy_mesh.health import Pulse
from skippy_mesh.mesh_facts import Bound
from skippy_mesh.messages import Snapshot
from skippy_mesh.step_totals import cells
from stages.worker import StageInfo


class CeilingLike(Protocol):
    @property
    def binding(self) -> Bound: ...
    @property
    def terms(self) -> Sequence[Bound]: ...


class LoadedLike(Protocol):
    """What the stages have, and what follows for requests."""

    @property
    def infos(self) -> Sequence[StageInfo]: ...
    @property
    def ceiling(self) -> CeilingLike: ...
    @property
    def context_bound(self) -> Bound: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def why_inexact(self) -> str | None: ...


class Served(LoadedLike, Protocol):
    """A running mesh, as a gateway needs to know it: what it was when it was started, and, asked,
    what it is ``current``ly. ``nodes`` names the machine of each stage."""

    @property
    def channel(self) -> Channel: ...
    @property
    def current(self) -> Callable[[], LoadedLike]: ...
    @property
    def nodes(self) -> Sequence[str]: ...
    @property
    def pulses(self) -> Callable[[], Mapping[int, Pulse | Exception]]: ...
    @property
    def reset_peaks(self) -> Callable[[], None]: ...


def status(
    mesh: LoadedLike,
    *,
    nodes: Sequence[str],
    model_name: str,
    config: Mapping[str, object],
    problem: Problem | None,
    state: Snapshot | None,
    epoch: int | None,
    last_reply_age_s: float | None,
    lease_ages_s: Mapping[int, float],
    oldest_waiting_s: float | None,
    is_open: bool,
) -> dict[str, object]:
    """What is not known is not there. ``state`` is the scheduler's after the last step, which all
    stages ran in ``epoch`` and answered ``last_reply_age_s`` ago; ``lease_ages_s`` are by stage."""
    page: dict[str, object] = {
        "state": _state(problem),
        "captured_at": time.time(),
        "model": model_name,
        "stages": [
            _stage(info, node, state)
            | _known(
                epoch=epoch,
                lease_age_s=lease_ages_s.get(info.index),
                last_reply_age_s=last_reply_age_s,
            )
            for info, node in zip(mesh.infos, nodes, strict=True)
        ],
        "exact": {"value": mesh.why_inexact is None, "reason": mesh.why_inexact},
        "ceiling": {
            "value": mesh.ceiling.binding.value,
            "stage": mesh.ceiling.binding.stage,
            "component": mesh.ceiling.binding.component,
            "term": mesh.ceiling.binding.term,
        },
        "insecure_bind": is_open,
        "config": dict(config),
    }
    if problem is not None:
        page["problem"] = problem.message
    if state is not None:
        queue: dict[str, object] = {
            "requests": sum(state.waiting.values()),
            "tokens": state.waiting_tokens,
        }
        if oldest_waiting_s is not None:
            queue["oldest_s"] = oldest_waiting_s
        page["queue"] = queue
        page["running"] = state.running
        page["preempted"] = state.waiting.get("preempted", 0)
    return page


def _state(problem: Problem | None) -> str:
    if problem is None:
        return "ready"
    if problem.code in ("loading", "draining"):
        return problem.code
    # A stage that is silent or slow may come back; an engine that is lost does not.
    return "failed" if problem.stage is None and problem.code != "stalled" else "degraded"


def _known(**facts: object) -> dict[str, object]:
    return {name: fact for name, fact in facts.items() if fact is not None}


def _stage(info: StageInfo, node: str, state: Snapshot | None) -> dict[str, object]:
    components: dict[str, dict[str, object]] = {
        name: {"cells": size} for name, size in info.capacity.by_component().items()
    }
    for name, cell_bytes in info.cell_bytes.items():
        if name in components:
            components[name]["bytes"] = info.capacity.by_component()[name] * cell_bytes
    if state is not None:
        for name, counts in cells(info.capacity, state):
            components[name].update(counts)
    return {
        "index": info.index,
        "layers": [info.first_layer, info.end_layer],
        "node": node,
        "components": components,
        "bytes": {"weights": info.weight_bytes, "context": info.context_bytes},
        "ubatch": info.rules.max_rows,
        "kv_types": {"k": info.kv_type, "v": info.kv_type},
    }
