"""What the stages of a loaded mesh have, and what of it is in use: the gauges of memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from skippy_mesh.exposition import Page, Sample, by, by_stage, only
from skippy_mesh.messages import Snapshot
from skippy_mesh.scheduler.memory import Capacity
from skippy_mesh.step_totals import STORES, cells


class Bound(Protocol):
    """``value`` sequences at most, because of ``component`` on ``stage``; ``term`` says how."""

    @property
    def value(self) -> int: ...
    @property
    def stage(self) -> str: ...
    @property
    def component(self) -> str: ...
    @property
    def term(self) -> str: ...


@dataclass(frozen=True, slots=True)
class StageSight:
    """A stage as it was last asked: whether it answered, how long ago it last did, and the memory
    its process has and at most had. None is not known."""

    is_up: bool
    silent_s: float | None = None
    rss_bytes: int | None = None
    peak_rss_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class MeshFacts:
    """``cell_bytes`` is what a cell of each of a stage's stores takes, empty if that is not known;
    ``terms`` are what bounds admission, and ``binding`` is the least of them."""

    stages: tuple[Capacity, ...] = ()
    cell_bytes: tuple[Mapping[str, int], ...] = ()
    terms: tuple[Bound, ...] = ()
    binding: Bound | None = None

    @property
    def is_recurrent(self) -> bool:
        return any(stage.recurrent for stage in self.stages)

    def add_to(self, page: Page) -> None:
        page.gauge(
            "kv_cells_capacity", "Cells, or rows of recurrent state, a stage has",
            [
                ({"stage": str(index), "component": component}, size)
                for index, stage in enumerate(self.stages)
                for component, size in stage.by_component().items()
                if component in STORES
            ],
        )  # fmt: skip
        page.gauge(
            "admission_ceiling", "Sequences each component of each stage allows at once",
            [({"stage": t.stage, "component": t.component}, t.value) for t in self.terms],
        )  # fmt: skip
        if (bound := self.binding) is not None:
            labels = {"stage": bound.stage, "component": bound.component, "term": bound.term}
            page.gauge("admission_ceiling_effective", "The least of them", only(bound.value))
            page.gauge("binding_stage", "What binds the ceiling", [(labels, 1)])

    def add_state(self, page: Page, state: Snapshot) -> None:
        """What is in use where the scheduler stands at ``state``."""
        counts = list(self._cells(state))
        page.gauge(
            "kv_cells", "Cells, or rows of recurrent state, by state; they add up to the capacity",
            counts,
        )  # fmt: skip
        page.gauge("kv_bytes", "What those take in the stage's layers", self._bytes(counts))
        page.gauge(
            "lanes", "Sequence ids for requests, by state",
            by("state", state.components.get("lanes", {})),
        )  # fmt: skip

    def _cells(self, state: Snapshot) -> Iterator[Sample]:
        for index, stage in enumerate(self.stages):
            for component, counts in cells(stage, state):
                for name, count in counts.items():
                    yield {"stage": str(index), "component": component, "state": name}, count

    def _bytes(self, counts: Sequence[Sample]) -> Iterator[Sample]:
        sizes = {str(index): each for index, each in enumerate(self.cell_bytes)}
        for labels, count in counts:
            num_bytes = sizes.get(labels["stage"], {}).get(labels["component"])
            if num_bytes is not None:
                yield labels, count * num_bytes


def add_sights(page: Page, sights: Sequence[StageSight]) -> None:
    page.gauge("stage_up", "Whether the stage answers", by_stage(each.is_up for each in sights))
    page.gauge(
        "stage_last_reply_age_seconds", "Since the stage last answered when it was asked",
        _known(each.silent_s for each in sights),
    )  # fmt: skip
    page.gauge(
        "memory_bytes", "Memory of the stage's process",
        _known((each.rss_bytes for each in sights), kind="rss"),
    )  # fmt: skip
    page.gauge(
        "memory_peak_bytes", "The most it had since it started, or since POST /v1/peak_reset",
        _known((each.peak_rss_bytes for each in sights), kind="rss"),
    )  # fmt: skip


def _known(values: Iterable[float | None], **labels: str) -> list[Sample]:
    """A sample for each stage of which there is a value."""
    return [
        ({"stage": str(index), **labels}, value)
        for index, value in enumerate(values)
        if value is not None
    ]
