"""A real engine over a fake pipeline, on a thread of its own, and the gateway's client of it."""

from __future__ import annotations

import queue
import threading

from coordinator.ceiling import Term
from coordinator.coordinator import Coordinator, DirectDoorkeeper
from skippy_mesh.client import Deliver, EngineClient, ReportQueue
from skippy_mesh.config import EngineSettings, StepRules
from skippy_mesh.engine import Engine, EnginePlan
from skippy_mesh.gateway.places import Places
from skippy_mesh.gateway.refusals import Bounds
from skippy_mesh.messages import Request, TokenEvent
from skippy_mesh.places import AdmissionLimits
from skippy_mesh.scheduler.memory import Capacity
from stages.fake import FakePipeline

BOUNDS = Bounds(Term(16, "0", "lanes", "ids"), Term(512, "1", "attention", "512 cells"))


def places_of(*, ceiling: int = 16, max_queue: int = 48, **limits: float) -> Places:
    settings = {"max_queue_tokens": 10**6, **limits}
    admission = AdmissionLimits(ceiling=ceiling, max_queue=max_queue, **settings)  # type: ignore[arg-type]
    return Places(DirectDoorkeeper(Coordinator(admission)))


class RunningEngine:
    """Remembers which requests it was given, and which it was told to end."""

    def __init__(
        self,
        pipeline: FakePipeline,
        *,
        max_model_len: int = 512,
        max_rows: int = 64,
        num_lanes: int = 16,
        num_cells: int | None = None,
        num_residents: int = 0,
        rules: StepRules | None = None,
        running: int | None = None,
    ):
        cells = max_model_len * num_lanes if num_cells is None else num_cells
        plan = EnginePlan(
            capacity=Capacity(lanes=num_lanes, residents=num_residents, attention=cells),
            rules=rules or StepRules(max_rows=max_rows),
            max_model_len=max_model_len,
            max_in_flight=1,
            ceiling=num_lanes,
            settings=EngineSettings(running=running),
        )
        self.submitted: list[str] = []
        self.aborted: list[str] = []
        self._reports = ReportQueue()
        self._engine = Engine(plan.scheduler(), pipeline, self._reports.put)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self.client = EngineClient(self, max_model_len=max_model_len)

    def submit(self, request: Request) -> None:
        self.submitted.append(request.request_id)
        self._engine.submit(request)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self._engine.abort(request_id)

    def connect(self) -> None: ...

    def follow(self, deliver: Deliver) -> None:
        self._reports.follow(deliver)

    def close(self) -> None:
        self._engine.close()

    def stop(self) -> None:
        self.client.close()
        self._thread.join()

    def _run(self) -> None:
        self._engine.run()
        self._reports.close()


def submit(client: EngineClient, asked: Request) -> queue.SimpleQueue[TokenEvent]:
    events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
    client.submit(asked, events.put)
    return events


def until_end(
    events: queue.SimpleQueue[TokenEvent], *, within_s: float
) -> tuple[list[int], TokenEvent]:
    """Tokens, and the last event, behind which nothing comes."""
    tokens = []
    while True:
        event = events.get(timeout=within_s)
        if event.token_id is not None:
            tokens.append(event.token_id)
        if event.finish_reason is not None:
            assert events.empty()
            return tokens, event
