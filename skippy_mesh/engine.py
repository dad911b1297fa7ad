"""The loop that turns requests into tokens: :meth:`Engine.step` is the whole of it.

Schedule, forward, commit: as many batches as keep all stages busy are scheduled and sent, then the
oldest answer is taken and committed. There is no sleep and no timer; while a step runs, requests
gather for the next. The engine runs on the thread of stage 0, whose context it calls directly; any
other thread may submit and abort, and gets one report per step.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from skippy_mesh.config import EngineSettings, StepRules
from skippy_mesh.errors import RequestError, StageChangedError, StageError, StageLostError
from skippy_mesh.health import MAX_RESTARTS, RestartLimit
from skippy_mesh.messages import (
    Request,
    StageLoss,
    StepBatch,
    StepRecord,
    StepReport,
    StepResult,
    TokenEvent,
)
from skippy_mesh.scheduler.memory import Capacity
from skippy_mesh.scheduler.pacing import PrefillPacer, RunLimit
from skippy_mesh.scheduler.plan import Plan, RowCounts
from skippy_mesh.scheduler.policies import Policies
from skippy_mesh.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

MAX_COMMANDS_A_STEP = 64
"""Submissions and aborts taken between two steps: a flood of them must not hold up tokens."""
_RESTORE_S = 0.2
"""While a stage is being restored, how long requests and aborts may wait to be looked at."""


class Pending(Protocol):
    """A batch on its way through the stages."""

    def result(self) -> StepResult:
        """Wait for the last stage's answer; raises what went wrong on any stage."""
        ...


class Pipeline(Protocol):
    """All stages of one mesh, seen from the engine."""

    def submit(self, batch: StepBatch) -> Pending:
        """Run ``batch`` on stage 0 and send it on. Never raises: :meth:`Pending.result` does."""
        ...

    def lane_ends(self) -> list[Mapping[int, int]]:
        """Per stage, how many positions each lane holds that is not empty. Waits for all steps."""
        ...

    def restore(self, timeout_s: float) -> bool:
        """Load again the stages that were lost and leave the others alone, waiting for about
        ``timeout_s``; whether all are there. :class:`StageLostError` for one that died once more,
        :class:`StageChangedError` for one that has other memory than before, any other error if one
        cannot be had back."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """What the engine of one mesh needs to know: the least of all stages, and the settings.

    ``max_restarts`` of a stage within the window of :class:`RestartLimit` are tolerated.
    ``first_epoch`` is above any that these stages have seen.
    """

    capacity: Capacity
    rules: StepRules
    max_model_len: int
    max_in_flight: int
    ceiling: int
    max_restarts: int = MAX_RESTARTS
    first_epoch: int = 0
    settings: EngineSettings = field(default_factory=EngineSettings)

    def scheduler(self) -> Scheduler:
        settings = self.settings
        return Scheduler(
            capacity=self.capacity,
            rules=self.rules,
            max_model_len=self.max_model_len,
            max_in_flight=self.max_in_flight,
            policies=Policies(
                ordering=settings.scheduling_policy, preemption=settings.preemption_policy
            ),
            pacer=PrefillPacer(settings.inter_token_s, pinned=settings.prefill_rows),
            run_limit=RunLimit(self.ceiling, pinned=settings.running),
            first_epoch=self.first_epoch,
        )


class Engine:
    """Runs a :class:`Scheduler`'s steps on ``pipeline`` and hands ``report`` one message a step.

    Only the thread that calls :meth:`run` (or :meth:`turn`) touches scheduler and pipeline;
    ``report`` is called there and must not block. Idle, the ledger is compared with what llama.cpp
    holds on every stage; with ``checks_integrity`` also whenever nothing is in flight.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        pipeline: Pipeline,
        report: Callable[[StepReport], None],
        *,
        clock: Callable[[], float] = time.perf_counter,
        checks_integrity: bool = False,
        restarts: RestartLimit | None = None,
    ):
        self.scheduler = scheduler
        self._pipeline = pipeline
        self._report = report
        self._clock = clock
        self._pending: deque[tuple[Pending, float]] = deque()
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._scheduler_s = 0.0
        self._is_closing = False
        self._checks_integrity = checks_integrity
        self._restarts = restarts or RestartLimit()
        self._is_restoring = False
        self.problem: str | None = None

    def submit(self, request: Request) -> None:
        """Queue ``request``. Any thread; refusals come back as its only event."""
        self._commands.put(lambda: self._add(request))

    def abort(self, request_id: str) -> None:
        """End a request within one step. Any thread; unknown ids are no error."""
        self._commands.put(lambda: self._abort(request_id))

    def report_to(self, report: Callable[[StepReport], None]) -> None:
        """``report`` to somebody who knows of no request: what is open is dropped, and not a word
        of it is said. Any thread."""
        self._commands.put(lambda: self._report_to(report))

    def check(self) -> None:
        """A stage may be gone. With work open a step finds out; else it is looked for here. Any
        thread."""
        self._commands.put(self._check_if_idle)

    def close(self) -> None:
        """Abort everything open, free it on all stages and let :meth:`run` return. Any thread."""
        self._commands.put(None)

    def run(self) -> None:
        """Steps while there is work, waits while there is none, until :meth:`close`. At a
        :class:`StageChangedError` what is open is left to the engine that is to follow."""
        while not (self._is_closing and not self.scheduler.has_work):
            try:
                self.turn()
            except StageChangedError:
                raise
            except Exception as error:  # a bug of ours must not leave clients waiting
                logger.exception("the engine failed")
                self._fail(f"internal engine error: {type(error).__name__}")

    def turn(self) -> None:
        """Take what has been asked, waiting for it where there is nothing to do, and step."""
        self._take_commands(wait=not (self.scheduler.has_work or self._is_restoring))
        self.step()

    def step(self) -> None:
        """Fill the pipeline, take the oldest answer, tell the gateway."""
        if self._is_restoring:
            self._restore()
            return
        while (batch := self._schedule()) is not None:
            started_s = self._clock()  # submit returns when stage 0 is done
            self._pending.append((self._pipeline.submit(batch), started_s))
        if self._pending:
            self._commit(*self._pending.popleft())
        self._say(None)

    def _schedule(self) -> StepBatch | None:
        started_s = self._clock()
        batch = self.scheduler.schedule()
        self._scheduler_s += self._clock() - started_s
        return batch

    def _commit(self, pending: Pending, started_s: float) -> None:
        try:
            result = pending.result()
            answered_s = self._clock()
            plan = self.scheduler.commit(result)
        except Exception as error:  # whatever a stage met, no request may vanish
            self._recover(error)
            return
        if plan.parts:
            self._scheduler_s += self._clock() - answered_s
            step_s, counts = answered_s - started_s, plan.count()
            record = self._record(plan, counts, result, step_s, answered_s)
            self._say(record, admitted=plan.admitted)
            self._scheduler_s = 0.0
            self.scheduler.observe(plan, counts, step_s=step_s, now_s=answered_s)
        else:  # ids have come back
            self._report(StepReport((), state=self.scheduler.snapshot()))
        if not self.scheduler.has_work or (self._checks_integrity and not self._pending):
            self._check_integrity()

    def _recover(self, error: Exception) -> None:
        logger.warning("a step failed, what ran is computed again: %s", error)
        self._pending.clear()
        num_sequences = len(self.scheduler.running)
        self.scheduler.recover(str(error))
        if isinstance(error, StageLostError):
            self._lose(error, num_sequences)

    def _lose(self, error: StageLostError, num_sequences: int) -> None:
        """Who ran waits until the stage is there again, unless it was lost too often."""
        if not self._restarts.allows(error.stage, self._clock()):
            self._give_up(f"{error}; it had {self._restarts}, and no more are made")
            return
        self._is_restoring = True
        loss = StageLoss(error.stage, num_sequences)
        self._report(StepReport((), state=self.scheduler.snapshot(), loss=loss))
        self._say(None)

    def _restore(self) -> None:
        try:
            self._is_restoring = not self._pipeline.restore(_RESTORE_S)
        except StageChangedError:
            raise
        except StageLostError as error:
            logger.warning("%s", error)
            self._lose(error, 0)
        except Exception as error:
            logger.exception("a lost stage cannot be had back")
            self._give_up(str(error))
        self._say(None)  # who was aborted in the meantime

    def _give_up(self, problem: str) -> None:
        """No step can succeed any more: everything open ends, and nothing is let in."""
        self.problem = problem
        self._is_restoring = False
        self._say(None)
        self.scheduler.fail_all(problem)
        events = [replace(event, is_unavailable=True) for event in self.scheduler.take_events()]
        self._report(StepReport(tuple(events), state=self.scheduler.snapshot()))

    def _fail(self, problem: str) -> None:
        """A bug of ours: everything open ends, and nothing is let in."""
        self.problem = problem
        self._is_restoring = False
        self._pending.clear()
        self.scheduler.fail_all(problem)
        self._say(None)

    def _check_if_idle(self) -> None:
        if not (self.scheduler.has_work or self._is_restoring or self.problem):
            self._check_integrity()

    def _check_integrity(self) -> None:
        """Every stage must hold what the ledger says, no more and no less; nothing is in flight."""
        try:
            found = self._pipeline.lane_ends()
        except StageError as error:
            self._recover(error)
            return
        expected = self.scheduler.lane_ends(found)
        if found != expected:
            logger.error("stages hold %s, the ledger says %s: starting over", found, expected)
            self.scheduler.recover("a stage's memory is not what it should be")

    def _say(self, record: StepRecord | None, *, admitted: Sequence[str] = ()) -> None:
        events = self.scheduler.take_events()
        if record is not None:
            self._report(StepReport(tuple(events), record, admitted=tuple(admitted)))
        elif events:
            self._report(StepReport(tuple(events), state=self.scheduler.snapshot()))

    def _record(
        self, plan: Plan, counts: RowCounts, result: StepResult, step_s: float, answered_s: float
    ) -> StepRecord:
        prefixes = self.scheduler.take_prefix_counts()
        return StepRecord(
            epoch=result.epoch,
            step_id=plan.step_id,
            kind=counts.kind,
            state=self.scheduler.snapshot(),
            admitted=plan.num_admitted,
            resumed=plan.num_resumed,
            preempted=plan.num_preempted,
            prefill_tokens=counts.prefill,
            decode_tokens=counts.decode,
            recompute_prompt_tokens=counts.recompute - counts.recompute_output,
            recompute_output_tokens=counts.recompute_output,
            prefix_hits=prefixes.num_hits,
            prefix_misses=prefixes.misses,
            prefix_hit_tokens=prefixes.num_hit_tokens,
            prefix_queried_tokens=prefixes.num_queried_tokens,
            prefix_evictions=prefixes.evictions,
            batches_in_flight=len(self._pending) + 1,
            step_s=step_s,
            scheduler_s=self._scheduler_s,
            answered_s=answered_s,
            stages=result.stages,
        )

    def _take_commands(self, *, wait: bool) -> None:
        for _ in range(MAX_COMMANDS_A_STEP):
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return
            wait = False
            if command is None:
                self._is_closing = True
                self.scheduler.abort_all()
                return
            command()

    def _report_to(self, report: Callable[[StepReport], None]) -> None:
        if self.scheduler.has_work:
            self._pending.clear()
            self.scheduler.fail_all("nobody is left to hear of it")
            self.scheduler.take_events()
        self._report = report

    def _add(self, request: Request) -> None:
        reason = self.problem or ("the engine is shutting down" if self._is_closing else None)
        if reason is None:
            try:
                self.scheduler.add(request)
            except RequestError as error:
                reason = str(error)
        if reason is not None:
            refusal = TokenEvent(
                request_id=request.request_id,
                finish_reason="error",
                error=reason,
                is_unavailable=True,  # the gateway let it in: this engine can do less than the last
            )
            self._report(StepReport((refusal,), state=self.scheduler.snapshot()))

    def _abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id)
