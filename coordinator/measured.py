"""From what loaded stages say of themselves to what the engine over them may do."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from coordinator.ceiling import Ceiling, Term, after_load, ceiling, context_bound
from skippy_mesh.config import EngineSettings
from skippy_mesh.engine import EnginePlan
from skippy_mesh.health import MAX_RESTARTS
from skippy_mesh.scheduler.memory import Capacity
from skippy_mesh.sizes import format_size
from stages.worker import StageInfo

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """What the stages of a mesh have, and what follows for requests. It changes when a stage comes
    back from its death with other memory than before."""

    infos: Sequence[StageInfo]
    ceiling: Ceiling
    max_model_len: int

    @property
    def num_cells(self) -> int:
        """Of the smallest pool."""
        return min(info.capacity.num_cells for info in self.infos)

    @property
    def context_bound(self) -> Term:
        return context_bound([info.capacity for info in self.infos], self.max_model_len)

    @property
    def why_inexact(self) -> str | None:
        """None if every stage's self-test passed, else the first stage's reason."""
        return next((i.why_inexact for i in self.infos if i.why_inexact is not None), None)


def engine_plan(
    infos: Sequence[StageInfo],
    settings: EngineSettings,
    parallel: int | None = None,
    planned: Ceiling | None = None,
    max_restarts: int = MAX_RESTARTS,
) -> tuple[EnginePlan, Loaded]:
    """What the engine over these stages may do: the least of what each can."""
    if planned is None:
        limit = ceiling([info.capacity for info in infos], parallel=parallel)
    else:
        limit = after_load(planned, [(info.planned, info.capacity) for info in infos])
    for info in infos:
        _warn_of_difference(info)
    capacity = Capacity.least([info.capacity for info in infos])
    rules = replace(infos[0].rules, max_rows=min(info.rules.max_rows for info in infos))
    if not settings.prefix_cache:
        rules = replace(rules, prefix_rule="none")
    plan = EnginePlan(
        capacity=capacity,
        rules=rules,
        max_model_len=min(
            infos[0].max_trained_tokens,
            capacity.num_cells,
            settings.max_model_len or capacity.num_cells,
        ),
        max_in_flight=len(infos),
        ceiling=limit.value,
        max_restarts=max_restarts,
        settings=settings,
    )
    return plan, Loaded(infos, limit, plan.max_model_len)


def _warn_of_difference(info: StageInfo) -> None:
    """Between what was planned and what was measured: where there is less, fewer are served; where
    more was taken, the next step may lack it."""
    asked, has = info.planned.by_component(), info.capacity.by_component()
    less = [f"{has[name]} {name} of {asked[name]}" for name in asked if has[name] < asked[name]]
    if less:
        logger.warning("stage %d found too little memory free: %s", info.index, ", ".join(less))
    if info.planned_context_bytes is not None and info.context_bytes > info.planned_context_bytes:
        logger.warning(
            "the context of stage %d takes %s, and %s were planned: lower --memory-fraction",
            info.index,
            format_size(info.context_bytes),
            format_size(info.planned_context_bytes),
        )
