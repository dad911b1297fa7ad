"""A real engine over a fake pipeline, on a thread of its own, and the gateway's client of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from skippy_mesh.client import EngineClient, ReportQueue
from skippy_mesh.config import StepRules
from skippy_mesh.engine import Engine, EnginePlan
from skippy_mesh.messages import Request, StepBatch, StepReport, StepResult
from skippy_mesh.scheduler.memory import Capacity
from stages.fake import FakePipeline


class Answer:
    def __init__(self, answer: StepResult | Exception):
        self._answer = answer

    def result(self) -> StepResult:
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


class Immediate:
    """``pipeline`` as the engine sees one: it answers a batch as soon as it is submitted."""

    def __init__(self, pipeline: FakePipeline):
        self._pipeline = pipeline

    def submit(self, batch: StepBatch) -> Answer:
        try:
            return Answer(self._pipeline.forward(batch))
        except Exception as error:
            return Answer(error)

    def lane_ends(self) -> list[dict[int, int]]:
        return [{lane: len(held) for lane, held in self._pipeline.histories.items()}]


class RunningEngine:
    """Remembers which requests it was told to end."""

    def __init__(
        self,
        pipeline: FakePipeline,
        *,
        max_model_len: int = 512,
        max_rows: int = 64,
        num_lanes: int = 16,
        max_open: int = 64,
    ):
        plan = EnginePlan(
            capacity=Capacity(lanes=num_lanes, attention=max_model_len * num_lanes),
            rules=StepRules(max_rows=max_rows),
            max_model_len=max_model_len,
            max_in_flight=1,
            ceiling=num_lanes,
        )
        self.aborted: list[str] = []
        self._reports = ReportQueue()
        self._engine = Engine(plan.scheduler(), Immediate(pipeline), self._reports.put)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self.client = EngineClient(self, max_model_len=max_model_len, max_open=max_open)

    def submit(self, request: Request) -> None:
        self._engine.submit(request)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self._engine.abort(request_id)

    def reports(self) -> Iterator[StepReport]:
        yield from self._reports

    def close(self) -> None:
        self._engine.close()

    def stop(self) -> None:
        self.client.close()
        self._thread.join()

    def _run(self) -> None:
        self._engine.run()
        self._reports.close()
