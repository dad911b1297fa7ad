"""What every step was, as metrics and as a log: native ``skippy:*`` names at ``/metrics``.

Two rules. What is unknown is absent, never 0; and what can be counted starts at 0. A step costs a
few additions here, whatever its number of tokens; the page is put together when it is read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Container, Sequence
from typing import Protocol, get_args

from skippy_mesh.exposition import Labels, Page, by, only
from skippy_mesh.messages import FinishReason, Snapshot, StageLoss, StepReport
from skippy_mesh.scheduler.memory import Capacity, Ledger
from skippy_mesh.step_log import StepLog, step_line
from skippy_mesh.step_totals import STORES, StepTotals, cells, counted_waits, has_work

WAIT_REASONS = ("memory", "lane", "order", "preempted")
REFUSALS = (
    "invalid_json", "invalid_value", "unsupported_parameter", "template_error",
    "context_length_exceeded", "invalid_api_key", "request_too_large", "queue_full",
    "queue_tokens_full", "queue_timeout", "loading", "draining", "stage_unavailable",
    "coordinator_lost",
)  # fmt: skip
"""Codes known to the gateway; another one is counted all the same."""


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


class Telemetry:
    """Fed with reports on one thread, read on any.

    ``build`` are the labels of ``build_info``. ``counts_steps`` is false for an engine that keeps
    no step records: what only they could tell stays off the page. ``oldest_waiting_s`` is how long
    the first request in the queue has been there, ``silent_stages`` are those that do not answer.
    """

    def __init__(
        self,
        *,
        model_name: str,
        build: Labels | None = None,
        step_log: StepLog | None = None,
        counts_steps: bool = True,
        oldest_waiting_s: Callable[[], float | None] = lambda: None,
        silent_stages: Callable[[], Container[int] | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._model_name = model_name
        self._build = build
        self._log = step_log
        self._clock = clock
        self._oldest_waiting_s = oldest_waiting_s
        self._silent_stages = silent_stages
        self._lock = threading.Lock()
        self._steps = StepTotals() if counts_steps else None
        self._finished: dict[str, float] = dict.fromkeys(get_args(FinishReason), 0)
        self._rejected: dict[str, float] = dict.fromkeys(REFUSALS, 0)
        self._num_ended = self._num_cancelled = 0  # since the last line of the log
        self._stages: tuple[Capacity, ...] = ()
        self._terms: tuple[Bound, ...] = ()
        self._binding: Bound | None = None
        self._state: Snapshot | None = None
        self._num_in_flight = 0
        self._last_token_s: float | None = None
        self._last_step_s: float | None = None

    def describe(
        self, stages: Sequence[Capacity], *, terms: Sequence[Bound], binding: Bound
    ) -> None:
        """A loaded mesh, still idle: what each stage has, and what bounds admission."""
        with self._lock:
            self._stages = tuple(stages)
            self._terms, self._binding = tuple(terms), binding
            if self._steps is not None:
                self._steps.add_stages(len(stages))
                self._state = _idle(stages)

    def observe(self, report: StepReport) -> None:
        with self._lock:
            ended, cancelled, has_tokens = self._count_events(report)
            record = report.record
            before, self._state = self._state, record.state if record else report.state
            if report.loss is not None:
                self._count_loss(report.loss)
            if has_tokens or not has_work(before):
                self._last_token_s = self._clock()
            self._num_ended += ended
            self._num_cancelled += cancelled
            if record is None or self._steps is None:
                return
            self._last_step_s = self._clock()
            waits_s = counted_waits(record, before)
            self._steps.add(record, waits_s)
            self._num_in_flight = record.batches_in_flight
            finished, self._num_ended = self._num_ended, 0
            cancelled, self._num_cancelled = self._num_cancelled, 0
        if self._log is None:
            return
        line = step_line(record, waits_s, self._stages, finished=finished, cancelled=cancelled)
        self._log.write(line)  # outside: a slow disk must not hold up who reads the page

    def reject(self, code: str) -> None:
        """A request that never entered the queue; ``code`` is that of the error reply."""
        with self._lock:
            self._rejected[code] = self._rejected.get(code, 0) + 1

    @property
    def epoch(self) -> int | None:
        """That of the last step, on every stage; None before the first."""
        return None if self._steps is None else self._steps.epoch

    @property
    def last_step_age_s(self) -> float | None:
        """Since all stages answered a step; None before the first."""
        return None if self._last_step_s is None else self._clock() - self._last_step_s

    @property
    def state(self) -> Snapshot | None:
        """Where the scheduler stood after the last step; None if that is not known."""
        return self._state

    def render(self) -> bytes:
        """The page, as of now."""
        page = Page({"model_name": self._model_name})
        with self._lock:
            self._add_mesh(page)
            self._add_requests(page)
            if self._steps is not None:
                self._steps.add_to(page, is_recurrent=any(s.recurrent for s in self._stages))
            self._add_queue(page)
            if self._state is not None:
                self._add_state(page, self._state)
        return page.text()

    def close(self) -> None:
        if self._log is not None:
            self._log.close()

    def _count_events(self, report: StepReport) -> tuple[int, int, bool]:
        ended = cancelled = 0
        has_tokens = False
        for event in report.events:
            has_tokens = has_tokens or event.token_id is not None
            if event.finish_reason is not None:
                self._finished[event.finish_reason] += 1
                ended += 1
                cancelled += event.finish_reason == "abort"
        return ended, cancelled, has_tokens

    def _count_loss(self, loss: StageLoss) -> None:
        if self._state is None:  # a new engine, which has said nothing yet
            self._state = _idle(self._stages)
        if self._steps is not None:
            self._steps.add_loss(loss)

    def _add_mesh(self, page: Page) -> None:
        if self._build is not None:
            page.gauge("build_info", "What is serving", [(self._build, 1)])
        page.gauge(
            "kv_cells_capacity", "Cells, or rows of recurrent state, a stage has",
            [
                ({"stage": str(index), "component": component}, size)
                for index, stage in enumerate(self._stages)
                for component, size in stage.by_component().items()
                if component in STORES
            ],
        )  # fmt: skip
        page.gauge(
            "admission_ceiling", "Sequences each component of each stage allows at once",
            [({"stage": t.stage, "component": t.component}, t.value) for t in self._terms],
        )  # fmt: skip
        if (bound := self._binding) is not None:
            labels = {"stage": bound.stage, "component": bound.component, "term": bound.term}
            page.gauge("admission_ceiling_effective", "The least of them", only(bound.value))
            page.gauge("binding_stage", "What binds the ceiling", [(labels, 1)])

    def _add_requests(self, page: Page) -> None:
        page.counter(
            "requests_finished", "Requests that ended, by reason", by("reason", self._finished)
        )
        page.counter(
            "requests_rejected", "Requests that never entered the queue, by code of the reply",
            by("reason", self._rejected),
        )  # fmt: skip

    def _add_queue(self, page: Page) -> None:
        if (age_s := self._oldest_waiting_s()) is not None:
            page.gauge("queue_oldest_seconds", "Age of the first in the queue", only(age_s))
        if (silent := self._silent_stages()) is not None:
            page.gauge(
                "stage_up", "Whether the stage answers",
                [({"stage": str(i)}, i not in silent) for i in range(len(self._stages))],
            )  # fmt: skip

    def _add_state(self, page: Page, state: Snapshot) -> None:
        page.gauge("requests_running", "Requests in the running set", only(state.running))
        page.gauge(
            "requests_waiting", "Requests that wait, by what they wait for",
            by("reason", state.waiting),
        )  # fmt: skip
        page.gauge("queue_tokens", "Prompt tokens waiting", only(state.waiting_tokens))
        page.gauge(
            "batches_in_flight", "Batches under way when the last step was answered, with it",
            only(self._num_in_flight if has_work(state) else 0),
        )  # fmt: skip
        page.gauge(
            "kv_cells", "Cells, or rows of recurrent state, by state; they add up to the capacity",
            [
                ({"stage": str(index), "component": component, "state": name}, count)
                for index, stage in enumerate(self._stages)
                for component, counts in cells(stage, state)
                for name, count in counts.items()
            ],
        )  # fmt: skip
        page.gauge(
            "lanes", "Sequence ids for requests, by state",
            by("state", state.components.get("lanes", {})),
        )  # fmt: skip
        if state.running and self._last_token_s is not None:
            page.gauge(
                "seconds_since_last_token", "Since the last token, or since requests run again",
                only(self._clock() - self._last_token_s),
            )  # fmt: skip


def _idle(stages: Sequence[Capacity]) -> Snapshot:
    return Snapshot(
        running=0,
        waiting=dict.fromkeys(WAIT_REASONS, 0),
        waiting_tokens=0,
        components=Ledger(Capacity.least(stages)).snapshot(),
    )
