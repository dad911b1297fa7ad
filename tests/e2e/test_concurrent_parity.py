"""Eight sessions under one scheduler in a pool too small for them: bit for bit as alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from skippy_mesh.config import ContextConfig, EngineSettings
from skippy_mesh.messages import Request, SamplingParams
from skippy_mesh.scheduler import sequence
from skippy_mesh.scheduler.memory import Capacity
from tests.crowd import Made
from tests.models import FAMILIES
from tests.sessions import Sessions, sessions_on

NUM_OUTPUT = 40
PROMPTS = (233, 150, 97, 5, 40, 180, 12, 64)
CONTEXT = ContextConfig(num_cells=512, num_lanes=8, max_rows=128, num_threads=1)
SETTINGS = EngineSettings(running=len(PROMPTS), prefill_rows=48)
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


def run(sessions: Sessions) -> None:
    """Four sessions at once, the others while these decode."""
    coming = list(map(request, range(len(PROMPTS))))

    def arrive() -> None:
        if coming and len(sessions.outputs) >= 2:
            sessions.submit(coming.pop(0))

    sessions.run(*(coming.pop(0) for _ in range(4)), between=arrive)
    assert len(sessions.ended) == len(PROMPTS)


@pytest.mark.parametrize(("family", "dtype", "num_stages"), CASES)
def test_concurrent_parity(
    made, shared_cache: Path, monkeypatch: pytest.MonkeyPatch, family: str, dtype: str,
    num_stages: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(sequence, "MAX_RESERVED_OUTPUT", RESERVED_OUTPUT)
    num_layers, *cuts = CUTS[family]
    model: Made = made(family, dtype, num_layers=num_layers)
    with sessions_on(
        model, cuts[num_stages - 1], CONTEXT, SETTINGS, ceiling=len(PROMPTS)
    ) as sessions:
        run(sessions)
        assert set(sessions.ended.values()) == {"length"}
        # What hides faults if it did not happen.
        records = sessions.records
        assert sum(record.preempted for record in records) >= 2, "the pool was never short"
        assert sum(r.recompute_prompt_tokens + r.recompute_output_tokens for r in records) > 0
        assert max(record.state.running for record in records) >= 4
        assert sessions.engine.scheduler.epoch == 0, "the ledger and llama.cpp differed"
        assert sessions.pipeline.lane_ends() == [{}] * num_stages
        different = sessions.differences(model)
        assert not different, different[:9]


def test_the_pool_of_a_mesh_is_that_of_its_smallest_stage(made, shared_cache: Path) -> None:
    model: Made = made("window", "q8_0", num_layers=6)
    with sessions_on(model, (2,), CONTEXT, SETTINGS, ceiling=8) as sessions:
        capacity = Capacity.least([info.capacity for info in sessions.pipeline.infos])
        assert capacity.attention == capacity.window == 512
        assert capacity.recurrent is None
