"""From token to client, on hand-made times. Without these a lag is taken to the wrong step."""

from __future__ import annotations

import pytest

from bench.lag import lags_of, summary
from bench.steplog import Step


def step(answered_s: float, *, step_s: float = 0.02, prefill: int = 0) -> Step:
    return Step(
        compute_s=(step_s,), scheduler_s=0.0, step_s=step_s, answered_s=answered_s,
        prefill_tokens=prefill, decode_tokens=1, recompute_tokens=0, running=1, waiting=0,
        active_cells=(),
    )  # fmt: skip


def test_a_chunk_belongs_to_the_last_answer_before_it():
    assert lags_of([0.5, 1.001, 1.9, 2.0], [1.0, 2.0]) == pytest.approx([0.001, 0.9, 0.0])


def test_the_share_is_of_a_step_without_prompts():
    steps = [step(1.0, step_s=5.0, prefill=100), step(2.0), step(3.0)]
    found = summary([1.001, 2.001, 3.001], steps)
    assert (found["chunks"], found["step_ms"], found["p50_lag_ms"]) == (3, 20.0, 1.0)
    assert found["p50_share"] == pytest.approx(0.05)
