"""How many sequences may be served at once: the least over all stages and memory components.

Pure arithmetic on what the stages report. The ceiling is what memory permits; how many of them are
worth running at a time is for pacing to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skippy_mesh.errors import UsageError
from skippy_mesh.scheduler.memory import CELL_COMPONENTS, Capacity

FLOOR_CONTEXT = 256
"""Cells a session can count on when all sessions run."""


@dataclass(frozen=True, slots=True)
class Term:
    """One bound: ``value`` sequences, because of ``component`` on ``stage``."""

    value: int
    stage: str
    component: str
    term: str


@dataclass(frozen=True, slots=True)
class Ceiling:
    """``binding`` is the least of ``terms``; its value is the ceiling."""

    binding: Term
    terms: tuple[Term, ...]

    @property
    def value(self) -> int:
        return self.binding.value

    def __str__(self) -> str:
        binding = self.binding
        return f"{binding.value}, bound by stage {binding.stage} {binding.component}"


def ceiling(
    stages: Sequence[Capacity], *, floor_context: int = FLOOR_CONTEXT, parallel: int | None = None
) -> Ceiling:
    """The ceiling of a mesh of ``stages``, which ``parallel`` may lower and never raise.

    A pool bounds it by cells over ``floor_context``, recurrent memory by the state rows there are,
    and ids by the lanes that residents and padding leave of 256.
    """
    terms = tuple(
        _term(index, component, size, floor_context)
        for index, stage in enumerate(stages)
        for component, size in stage.for_sessions().items()
    )
    return bound(terms, parallel=parallel)


def bound(terms: tuple[Term, ...], *, parallel: int | None = None) -> Ceiling:
    """The least of ``terms``, or ``parallel`` where that is less. Of equals the first, and lanes
    last: they are made to match what the pool permits."""
    binding = min(terms, key=lambda term: (term.value, term.component == "lanes"))
    if binding.value < 1:
        raise UsageError(
            f"no session fits: stage {binding.stage} allows 0 by its {binding.component} "
            f"({binding.term}); raise --ctx-size"
        )
    if parallel is None:
        return Ceiling(binding, terms)
    if not 1 <= parallel <= binding.value:
        raise UsageError(
            f"--parallel {parallel} is not from 1 to {binding.value}, what stage {binding.stage} "
            f"allows by its {binding.component} ({binding.term})"
        )
    return Ceiling(Term(parallel, "all", "lanes", "operator"), terms)


def after_load(planned: Ceiling, stages: Sequence[tuple[Capacity, Capacity]]) -> Ceiling:
    """``planned``, lowered by every stage that has less of something than was asked of it.

    ``stages`` are (asked, has). A plan's terms tell what would be possible, and the context that
    was asked for is the least of them: only what came out smaller says more than they do.
    """
    terms = {(term.stage, term.component): term for term in planned.terms}
    for index, (asked, has) in enumerate(stages):
        sizes = has.for_sessions()
        for component, size in asked.for_sessions().items():
            if sizes[component] < size:
                measured = _term(index, component, sizes[component], FLOOR_CONTEXT)
                terms[measured.stage, component] = measured
    measured_terms = tuple(terms.values())
    limit = bound(measured_terms)
    return limit if limit.value < planned.value else Ceiling(planned.binding, measured_terms)


def _term(stage: int, component: str, size: int, floor_context: int) -> Term:
    if component in CELL_COMPONENTS:
        text = f"{size} cells / {floor_context} per session"
        return Term(size // floor_context, str(stage), component, text)
    return Term(size, str(stage), component, f"{size} rows" if component == "recurrent" else "ids")


def context_bound(stages: Sequence[Capacity], max_model_len: int) -> Term:
    """What keeps a request to ``max_model_len`` tokens: the smallest pool, or the model itself."""
    pools = [
        _term(index, component, size, 1)
        for index, stage in enumerate(stages)
        for component, size in stage.by_component().items()
        if component in CELL_COMPONENTS
    ]
    least = min(pools, key=lambda pool: pool.value, default=None)
    if least is None or least.value > max_model_len:
        return Term(max_model_len, "all", "model", f"{max_model_len} tokens a request")
    return Term(max_model_len, least.stage, least.component, f"{least.value} cells")
