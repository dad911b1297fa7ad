"""Stage 0: the worker and the engine in one place, because every step begins and ends here.

A plain class. It runs as a thread beside the gateway where the model is not cut, else as the first
of the stage actors. :meth:`StageHead.load` and :meth:`StageHead.serve` belong to one thread, which
owns the context; everything else may be called from any.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from skippy_mesh.client import Deliver, ReportQueue
from skippy_mesh.config import StageSpec
from skippy_mesh.engine import Engine, EnginePlan
from skippy_mesh.errors import StageChangedError, StageError
from skippy_mesh.health import Loading, Pulse, RestartLimit
from skippy_mesh.messages import Request, StepReport
from skippy_mesh.scheduler.memory import Capacity
from stages.pipeline import HeadPipeline
from stages.worker import StageInfo, StageWorker

logger = logging.getLogger(__name__)


class StageHead:
    def __init__(self, spec: StageSpec):
        self._worker = StageWorker(spec)
        self._reports: ReportQueue | None = None
        self._engine: Engine | None = None
        self._told: object = None
        self._lock = threading.Lock()  # between an engine's end and who connects to it

    def __repr__(self) -> str:
        return repr(self._worker)

    def load(self) -> StageInfo:
        return self._worker.load()

    def loading(self) -> Loading:
        return self._worker.loading()

    def prepare(
        self,
        plan: EnginePlan,
        actors: Sequence[Any] = (),
        capacities: Sequence[Capacity] = (),
        loaded: object = None,
    ) -> None:
        """Build the engine over this stage and the ``actors`` of those behind it, which have
        ``capacities``. ``loaded`` is what :meth:`loaded` is to tell of it."""
        pipeline = HeadPipeline(self._worker, actors, capacities)
        restarts = RestartLimit(plan.max_restarts)
        self._told = loaded
        self._engine = Engine(plan.scheduler(), pipeline, _drop, restarts=restarts)

    def loaded(self) -> object:
        """What its maker says of the engine, to whoever has connected to it."""
        return self._told

    def serve(self) -> bool:
        """Run until :meth:`close`. True if a stage behind has changed, for which an engine with
        other plans must be prepared; the stages stay as they are."""
        try:
            self._prepared().run()
        except StageChangedError as error:
            logger.warning("%s: requests go on with an engine planned for that", error)
            with self._lock:
                self._engine = None
                if self._reports is not None:
                    self._reports.fail(error)
            return True
        finally:
            if self._engine is not None:
                self._end()
        return False

    def connect(self) -> None:
        """Report to the caller from now on. Who did so before is done, and what it asked for is
        dropped: nobody is left to hear of it."""
        with self._lock:
            engine, before = self._prepared(), self._reports
            self._reports = ReportQueue()
            engine.report_to(self._reports.put)
        if before is not None:
            before.close()

    def submit(self, request: Request) -> None:
        """Queue ``request``. Without a reader it was meant for the engine before this one, and
        comes again when its sender has connected."""
        if self._reports is not None:
            self._prepared().submit(request)

    def abort(self, request_id: str) -> None:
        self._prepared().abort(request_id)

    def close(self) -> None:
        self._prepared().close()

    def reports(self) -> Iterator[StepReport]:
        """Every step's report since :meth:`connect`, until the engine has ended or another
        connects."""
        yield from self._connected()

    def follow(self, deliver: Deliver) -> None:
        """The same for who is in this process: ``deliver`` is called on the engine's thread."""
        self._connected().follow(deliver)

    def _connected(self) -> ReportQueue:
        assert self._reports is not None, "nobody has connected"
        return self._reports

    def info(self) -> StageInfo | None:
        return self._worker.info()

    def pulse(self) -> Pulse:
        problem = "stage 0 has no engine yet" if self._engine is None else self._engine.problem
        return replace(self._worker.pulse(), problem=problem)

    def reset_peak(self) -> None:
        self._worker.reset_peak()

    def check(self) -> None:
        """A stage behind this one may be gone: look, if nothing runs that would find out."""
        self._prepared().check()

    def node(self) -> str:
        return self._worker.node()

    def _end(self) -> None:
        if self._reports is not None:
            self._reports.close()
        self._worker.close()

    def _prepared(self) -> Engine:
        if self._engine is None:
            raise StageError(f"{self!r} has no engine yet")
        return self._engine


def _drop(_report: StepReport) -> None:
    """Nobody has connected."""
