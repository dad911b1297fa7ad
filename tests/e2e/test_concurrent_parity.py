"""Eight sessions under one scheduler, every sampled row compared with the session alone.

The reference is an undivided context of llama.cpp by itself that knows no scheduler: each session's
prompt in one step, then its own tokens one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from coordinator.ceiling import mesh_capacity
from coordinator.launch import engine_plan
from skippy_mesh.config import ContextConfig, EngineSettings, specs_of
from skippy_mesh.engine import Engine, Pending
from skippy_mesh.messages import Request, SamplingParams, StepBatch, StepReport
from skippy_mesh.scheduler import sequence
from stages.batch import Floats
from stages.pipeline import LocalPipeline
from stages.sampling import LaneSampler
from stages.worker import StageWorker
from tests.crowd import Made, Story
from tests.models import FAMILIES

NUM_OUTPUT = 40
PROMPTS = (233, 150, 97, 5, 40, 180, 12, 64)
CONTEXT = ContextConfig(num_cells=512, num_lanes=8, max_rows=128, num_threads=1)
# Promises this small leave the pool overbooked: growth beyond them must preempt.
RESERVED_OUTPUT = 2
CUTS = {
    "dense": (4, (), (1,), (1, 3)),
    "mla": (4, (), (2,), (1, 3)),
    "window": (6, (), (2,), (2, 4)),
    "ssm": (4, (), (1,), (1, 3)),
    "linear": (12, (), (4,), (4, 8)),
}
CASES = [(family, "q8_0", stages) for family in FAMILIES for stages in (1, 2, 3)]
CASES += [("dense", "q4_K_M", 2), ("linear", "q4_K_M", 2), ("linear", "f32", 1)]


def request(number: int) -> Request:
    """Odd ones sample with a seed, even ones are greedy."""
    tokens = np.random.default_rng(number).integers(3, 512, PROMPTS[number])
    sampling = SamplingParams()
    if number % 2:
        sampling = SamplingParams(temperature=1.0, top_k=40, top_p=0.95, seed=number)
    return Request(
        request_id=str(number),
        token_ids=tuple(map(int, tokens)),
        max_tokens=NUM_OUTPUT,
        sampling=sampling,
    )


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
class Crowd:
    """Sessions under an engine that is stepped by hand."""

    engine: Engine
    pipeline: Recording
    outputs: dict[str, list[int]] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)
    num_preempted: int = 0
    num_recomputed: int = 0
    most_running: int = 0

    def take(self, report: StepReport) -> None:
        for event in report.events:
            assert event.request_id not in self.ended
            if event.token_id is not None:
                self.outputs.setdefault(event.request_id, []).append(event.token_id)
            if event.finish_reason is not None:
                self.ended[event.request_id] = event.finish_reason
        if (record := report.record) is not None:
            self.num_preempted += record.preempted
            self.num_recomputed += record.recompute_prompt_tokens + record.recompute_output_tokens
            self.most_running = max(self.most_running, record.state.running)

    def run(self) -> None:
        """Four sessions at once, the others while these decode."""
        coming = list(map(request, range(len(PROMPTS))))
        for _ in range(4):
            self.engine.submit(coming.pop(0))
        for _ in range(5000):
            if coming and len(self.outputs) >= 2:
                self.engine.submit(coming.pop(0))
            self.engine.turn()
            if len(self.ended) == len(PROMPTS) and not self.engine.scheduler.has_work:
                return
        raise AssertionError(f"only {self.ended} have ended")


@contextmanager
def crowd_on(made: Made, cuts: tuple[int, ...]) -> Iterator[Crowd]:
    specs = specs_of(made.path, made.model.num_layers, cuts, CONTEXT)
    pipeline = Recording([StageWorker(spec) for spec in specs])
    plan, _ = engine_plan(pipeline.infos, EngineSettings(running=len(PROMPTS), prefill_rows=48))
    crowd: Crowd
    plan = replace(plan, ceiling=len(PROMPTS))  # at 256 cells a session it would be two
    engine = Engine(
        plan.scheduler(), pipeline, lambda report: crowd.take(report), checks_integrity=True
    )
    pipeline.engine = engine
    crowd = Crowd(engine, pipeline)
    try:
        yield crowd
    finally:
        pipeline.close()


@pytest.mark.parametrize(("family", "dtype", "num_stages"), CASES)
def test_concurrent_parity(
    made, shared_cache: Path, monkeypatch: pytest.MonkeyPatch, family: str, dtype: str,
    num_stages: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(sequence, "MAX_RESERVED_OUTPUT", RESERVED_OUTPUT)
    num_layers, *cuts = CUTS[family]
    model: Made = made(family, dtype, num_layers=num_layers)
    with crowd_on(model, cuts[num_stages - 1]) as crowd:
        crowd.run()
        assert set(crowd.ended.values()) == {"length"}
        # What hides faults if it did not happen.
        assert crowd.num_preempted >= 2, "the pool was never short"
        assert crowd.num_recomputed > 0
        assert crowd.most_running >= 4
        assert crowd.engine.scheduler.epoch == 0, "the ledger and llama.cpp differed"
        assert crowd.pipeline.lane_ends() == [{}] * num_stages
        different = [
            text for number in range(len(PROMPTS)) for text in compare(model, crowd, number)
        ]
        assert not different, different[:9]


def compare(model: Made, crowd: Crowd, number: int) -> Iterator[str]:
    """What differs between one session in the crowd and the same session alone."""
    asked = request(number)
    outputs = crowd.outputs[asked.request_id]
    assert len(outputs) == NUM_OUTPUT
    # The last token is sampled and never computed.
    alone = model.alone(Story((*asked.token_ids, *outputs[:-1]), len(asked.token_ids)))
    sampler = LaneSampler(asked.sampling)
    for index, token in enumerate(outputs):
        position = len(asked.token_ids) - 1 + index
        row = crowd.pipeline.rows[asked.request_id, position]
        if not np.array_equal(row.view(np.uint32), alone[position].view(np.uint32)):
            yield f"session {number}, output {index}: by {np.abs(row - alone[position]).max():.2g}"
        if sampler(alone[position], position + 1) != token:
            yield f"session {number}, output {index}: another token"
    sampler.close()


def test_the_pool_of_a_mesh_is_that_of_its_smallest_stage(made, shared_cache: Path) -> None:
    model: Made = made("window", "q8_0", num_layers=6)
    with crowd_on(model, (2,)) as crowd:
        infos = crowd.pipeline.infos
        capacity = mesh_capacity([info.capacity for info in infos])
        assert capacity.attention == capacity.window == 512
        assert capacity.recurrent is None
