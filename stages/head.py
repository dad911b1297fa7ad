"""Stage 0: the worker and the engine in one place, because every step begins and ends here.

A plain class. It runs as a thread beside the gateway where the model is not cut, else as the first
of the stage actors. :meth:`StageHead.load` and :meth:`StageHead.serve` belong to one thread, which
owns the context; everything else may be called from any.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from skippy_mesh.client import ReportQueue
from skippy_mesh.config import StageSpec
from skippy_mesh.engine import Engine, EnginePlan
from skippy_mesh.errors import StageError
from skippy_mesh.health import Pulse, RestartLimit
from skippy_mesh.messages import Request, StepReport
from stages.pipeline import HeadPipeline
from stages.worker import Progress, StageInfo, StageWorker


class StageHead:
    def __init__(self, spec: StageSpec):
        self._worker = StageWorker(spec)
        self._reports = ReportQueue()
        self._has_reader = False
        self._engine: Engine | None = None

    def __repr__(self) -> str:
        return repr(self._worker)

    def load(self, progress: Progress | None = None) -> StageInfo:
        return self._worker.load(progress)

    def prepare(self, plan: EnginePlan, actors: Sequence[Any] = ()) -> None:
        """Build the engine over this stage and the ``actors`` of those behind it."""
        pipeline = HeadPipeline(self._worker, actors, plan.capacity)
        restarts = RestartLimit(plan.max_restarts)
        self._engine = Engine(plan.scheduler(), pipeline, self._report, restarts=restarts)

    def serve(self) -> None:
        """Run until :meth:`close`."""
        try:
            self._prepared().run()
        finally:
            self._reports.close()
            self._worker.close()

    def submit(self, request: Request) -> None:
        self._prepared().submit(request)

    def abort(self, request_id: str) -> None:
        self._prepared().abort(request_id)

    def close(self) -> None:
        self._prepared().close()

    def reports(self) -> Iterator[StepReport]:
        """Every step's report, until the engine has ended or another reads. Who comes second finds
        the requests of the first one ended: nobody is left to hear of them."""
        if self._has_reader:
            before, self._reports = self._reports, ReportQueue()
            before.close()
            self._prepared().abort_all()
        self._has_reader = True
        yield from self._reports

    def info(self) -> StageInfo | None:
        return self._worker.info()

    def pulse(self) -> Pulse:
        return self._worker.pulse()

    def check(self) -> None:
        """A stage behind this one may be gone: look, if nothing runs that would find out."""
        self._prepared().check()

    def node(self) -> str:
        return self._worker.node()

    def problem(self) -> str | None:
        """Why no step can succeed any more, None while all is well."""
        return self._prepared().problem

    def _report(self, report: StepReport) -> None:
        self._reports.put(report)

    def _prepared(self) -> Engine:
        if self._engine is None:
            raise StageError(f"{self!r} has no engine yet")
        return self._engine
