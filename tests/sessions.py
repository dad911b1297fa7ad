"""Sessions under an engine that is stepped by hand, every sampled row compared with the session
alone.

The reference is an undivided context of llama.cpp by itself that knows no scheduler: each session's
prompt in one step, then its own tokens one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from coordinator.launch import engine_plan
from skippy_mesh.config import ContextConfig, EngineSettings, specs_of
from skippy_mesh.engine import Engine, Pending
from skippy_mesh.messages import Request, StepBatch, StepRecord, StepReport
from stages.batch import Floats
from stages.pipeline import LocalPipeline
from stages.sampling import LaneSampler
from stages.worker import StageWorker
from tests.crowd import Made, Story


class Recording(LocalPipeline):
    """Keeps the logits of every sampled row, by request and position."""

    engine: Engine

    def __init__(self, workers: list[StageWorker]):
        super().__init__(workers)
        self.rows: dict[tuple[str, int], Floats] = {}
        self._owners: dict[int, str] = {}
        last = workers[-1]
        sample = last.sample

        def sample_and_keep(batch: StepBatch, logits: Floats | None):  # type: ignore[no-untyped-def]
            flagged = [row for row in range(batch.num_rows) if batch.samples[row]]
            for index, row in enumerate(flagged):
                assert logits is not None
                key = (self._owners[batch.lanes[row]], batch.positions[row])
                assert key not in self.rows, f"{key} sampled twice"
                self.rows[key] = logits[index].copy()
            return sample(batch, logits)

        last.sample = sample_and_keep  # type: ignore[method-assign]

    def submit(self, batch: StepBatch) -> Pending:
        running = self.engine.scheduler.running
        self._owners = {s.lane: s.request.request_id for s in running}
        return super().submit(batch)


@dataclass
class Sessions:
    """What an engine said of each request, and the records of its steps."""

    engine: Engine
    pipeline: Recording
    asked: dict[str, Request] = field(default_factory=dict)
    outputs: dict[str, list[int]] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)
    num_cached: dict[str, int] = field(default_factory=dict)
    records: list[StepRecord] = field(default_factory=list)

    def take(self, report: StepReport) -> None:
        for event in report.events:
            assert event.request_id not in self.ended
            self.num_cached[event.request_id] = event.num_cached
            if event.token_id is not None:
                self.outputs.setdefault(event.request_id, []).append(event.token_id)
            if event.finish_reason is not None:
                self.ended[event.request_id] = event.finish_reason
        if report.record is not None:
            self.records.append(report.record)

    def submit(self, request: Request) -> None:
        self.asked[request.request_id] = request
        self.engine.submit(request)

    def run(
        self, *requests: Request, between: Callable[[], None] = lambda: None, max_turns: int = 5000
    ) -> list[StepRecord]:
        """Submit ``requests`` and step until all have ended, ``between`` any two steps; the records
        of these steps."""
        num_before = len(self.records)
        for request in requests:
            self.submit(request)
        for _ in range(max_turns):
            between()
            self.engine.turn()
            if len(self.ended) == len(self.asked) and not self.engine.scheduler.has_work:
                return self.records[num_before:]
        raise AssertionError(f"only {self.ended} have ended")

    def differences(self, model: Made) -> list[str]:
        """What differs between the sessions in this company and each of them alone."""
        return [text for name in self.asked for text in self._compare(model, name)]

    def _compare(self, model: Made, name: str) -> Iterator[str]:
        prompt, outputs = self.asked[name].token_ids, self.outputs[name]
        # The last token is sampled and never computed.
        alone = model.alone(Story((*prompt, *outputs[:-1]), len(prompt)))
        sampler = LaneSampler(self.asked[name].sampling)
        for index, token in enumerate(outputs):
            position = len(prompt) - 1 + index
            row = self.pipeline.rows[name, position]
            if not np.array_equal(row.view(np.uint32), alone[position].view(np.uint32)):
                off = float(np.abs(row - alone[position]).max())
                yield f"session {name}, output {index}: by {off:.2g}"
            if sampler(alone[position], position + 1) != token:
                yield f"session {name}, output {index}: another token"
        sampler.close()


@contextmanager
def sessions_on(
    made: Made,
    cuts: Sequence[int],
    context: ContextConfig,
    settings: EngineSettings,
    *,
    ceiling: int,
) -> Iterator[Sessions]:
    """``ceiling`` instead of what 256 cells a session would allow."""
    specs = specs_of(made.path, made.model.num_layers, cuts, context)
    pipeline = Recording([StageWorker(spec) for spec in specs])
    plan, _ = engine_plan(pipeline.infos, settings)
    sessions: Sessions
    engine = Engine(
        replace(plan, ceiling=ceiling).scheduler(),
        pipeline,
        lambda report: sessions.take(report),
        checks_integrity=True,
    )
    pipeline.engine = engine
    sessions = Sessions(engine, pipeline)
    try:
        yield sessions
    finally:
        pipeline.close()
