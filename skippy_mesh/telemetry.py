"""What every step and request was, as metrics and as a log: ``/metrics`` and ``--step-log``.

Two rules. What is unknown is absent, never 0; and what can be counted starts at 0. A step costs a
few additions here and a token two; the page is put together when it is read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import get_args

from skippy_mesh.aliases import Known, llamacpp, vllm
from skippy_mesh.exposition import Family, Labels, Page, by, exposition, only
from skippy_mesh.mesh_facts import Bound, MeshFacts, StageSight, add_sights
from skippy_mesh.messages import FinishReason, Snapshot, StageLoss, StepReport
from skippy_mesh.request_totals import RequestTotals
from skippy_mesh.scheduler.memory import Capacity, Ledger
from skippy_mesh.step_log import StepLog, step_line
from skippy_mesh.step_totals import StepTotals, counted_waits, has_work
from skippy_mesh.times import RequestNews

WAIT_REASONS = ("memory", "lane", "order", "preempted")
REFUSALS = (
    "invalid_json", "invalid_value", "unsupported_parameter", "template_error",
    "context_length_exceeded", "invalid_api_key", "request_too_large", "queue_full",
    "queue_tokens_full", "queue_timeout", "loading", "draining", "stage_unavailable",
    "coordinator_lost",
)  # fmt: skip
"""Codes known to the gateway; another one is counted all the same."""
_FAMILIES = {"vllm": vllm, "llamacpp": llamacpp}


class Telemetry:
    """Fed with reports on one thread, read on any.

    No request has more than ``max_model_len`` tokens; ``aliases`` name the sets of other servers'
    names to show. ``build`` are the labels of ``build_info``. ``counts_steps`` is false for an
    engine that keeps no step records: what only they could tell stays off the page.
    ``oldest_waiting_s`` is how long the first request in the queue has been there, ``is_ready``
    what ``/ready`` would say, ``sights`` all stages, none before the first answer.
    """

    def __init__(
        self,
        *,
        model_name: str,
        max_model_len: int,
        aliases: Sequence[str] = (),
        build: Labels | None = None,
        step_log: StepLog | None = None,
        counts_steps: bool = True,
        oldest_waiting_s: Callable[[], float | None] = lambda: None,
        is_ready: Callable[[], bool | None] = lambda: None,
        sights: Callable[[], Sequence[StageSight]] = tuple,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._model_name = model_name
        self._aliases = aliases
        self._build = build
        self._log = step_log
        self._clock = clock
        self._oldest_waiting_s = oldest_waiting_s
        self._is_ready = is_ready
        self._sights = sights
        self._lock = threading.Lock()
        self._steps = StepTotals() if counts_steps else None
        self._requests = RequestTotals(max_model_len)
        self._finished: dict[str, float] = dict.fromkeys(get_args(FinishReason), 0)
        self._rejected: dict[str, float] = dict.fromkeys(REFUSALS, 0)
        self._num_stalls = 0
        self._num_ended = self._num_cancelled = 0  # since the last line of the log
        self._mesh = MeshFacts()
        self._state: Snapshot | None = None
        self._num_in_flight = 0
        self._last_token_s: float | None = None
        self._last_step_s: float | None = None

    def describe(
        self,
        stages: Sequence[Capacity],
        *,
        terms: Sequence[Bound],
        binding: Bound,
        cell_bytes: Sequence[Mapping[str, int]] = (),
    ) -> None:
        """A loaded mesh, still idle: what each stage has, what a cell of each of its stores takes
        if that is known, and what bounds admission."""
        with self._lock:
            self._mesh = MeshFacts(tuple(stages), tuple(cell_bytes), tuple(terms), binding)
            if self._steps is not None:
                self._steps.add_stages(len(stages))
                self._state = _idle(stages)

    def observe(self, report: StepReport) -> None:
        with self._lock:
            num_last, has_tokens = self._count_events(report)
            record = report.record
            before, self._state = self._state, record.state if record else report.state
            if report.loss is not None:
                self._count_loss(report.loss)
            if has_tokens or not has_work(before):
                self._last_token_s = self._clock()
            if record is None or self._steps is None:
                return
            self._last_step_s = self._clock()
            waits_s = counted_waits(record, before)
            self._steps.add(record, waits_s, num_last=num_last)
            self._num_in_flight = record.batches_in_flight
            finished, self._num_ended = self._num_ended, 0
            cancelled, self._num_cancelled = self._num_cancelled, 0
        if self._log is None:
            return
        stages = self._mesh.stages
        self._log.write(
            lambda: step_line(record, waits_s, stages, finished=finished, cancelled=cancelled)
        )

    def observe_requests(self, news: RequestNews) -> None:
        """What the same report meant to the requests it names."""
        with self._lock:
            self._requests.add(news)

    def reject(self, code: str) -> None:
        """A request that never entered the queue; ``code`` is that of the error reply."""
        with self._lock:
            self._rejected[code] = self._rejected.get(code, 0) + 1

    def stall(self) -> None:
        """A stream was ended because nobody read it."""
        with self._lock:
            self._num_stalls += 1

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
        return exposition(self.families(self._aliases))

    def families(self, aliases: Sequence[str]) -> list[Family]:
        """What is known now, under our names and those of ``aliases``."""
        page = Page({"model_name": self._model_name})
        sights, is_ready = self._sights(), self._is_ready()  # they may take locks of their own
        with self._lock:
            if self._build is not None:
                page.gauge("build_info", "What is serving", [(self._build, 1)])
            if is_ready is not None:
                page.gauge("ready", "Whether /ready answers 200", only(is_ready))
            self._mesh.add_to(page)
            add_sights(page, sights)
            self._add_requests(page)
            if self._steps is not None:
                self._steps.add_to(page, is_recurrent=self._mesh.is_recurrent)
            if (age_s := self._oldest_waiting_s()) is not None:
                page.gauge("queue_oldest_seconds", "Age of the first in the queue", only(age_s))
            if self._state is not None:
                self._add_state(page, self._state)
            known = self._known()
            return page.families + [family for name in aliases for family in _FAMILIES[name](known)]

    def close(self) -> None:
        if self._log is not None:
            self._log.close()

    def _known(self) -> Known:
        return Known(
            model_name=self._model_name,
            requests=self._requests,
            steps=self._steps,
            state=self._state,
            stages=self._mesh.stages,
            finished=self._finished,
            rejected=self._rejected,
        )

    def _count_events(self, report: StepReport) -> tuple[int, bool]:
        """How many requests had their last token, and whether any had one."""
        num_last, has_tokens = 0, False
        for event in report.events:
            is_token = event.token_id is not None
            has_tokens = has_tokens or is_token
            if event.finish_reason is not None:
                self._finished[event.finish_reason] += 1
                self._num_ended += 1
                self._num_cancelled += event.finish_reason == "abort"
                num_last += is_token
        return num_last, has_tokens

    def _count_loss(self, loss: StageLoss) -> None:
        if self._state is None:  # a new engine, which has said nothing yet
            self._state = _idle(self._mesh.stages)
        if self._steps is not None:
            self._steps.add_loss(loss)

    def _add_requests(self, page: Page) -> None:
        page.counter(
            "requests_finished", "Requests that ended, by reason", by("reason", self._finished)
        )
        page.counter(
            "requests_rejected", "Requests that never entered the queue, by code of the reply",
            by("reason", self._rejected),
        )  # fmt: skip
        page.counter(
            "stream_stalls", "Streams ended because nobody read them", only(self._num_stalls)
        )
        self._requests.add_to(page)

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
        self._mesh.add_state(page, state)
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
