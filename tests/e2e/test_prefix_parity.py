"""A prefix that was computed for another, against the same prompt computed alone: bit for bit.

Company, compaction of the pool and departed owners included. What may be shared depends on the
family's memory: any common prefix, or the state at a snapshot's boundary.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from skippy_mesh.config import ContextConfig, EngineSettings
from skippy_mesh.messages import Request, SamplingParams
from tests.crowd import Made
from tests.models import FAMILIES
from tests.sessions import Sessions, sessions_on

CONTEXT = ContextConfig(num_cells=1024, num_lanes=8, num_residents=8, max_rows=128, num_threads=1)
SETTINGS = EngineSettings(running=8, prefill_rows=48)
LAYERS_AND_CUTS = {
    "dense": (4, (1,)),
    "mla": (4, (2,)),
    "window": (6, (2,)),
    "ssm": (4, (1,)),
    "linear": (12, (4,)),
}
CASES = [(family, "q8_0") for family in FAMILIES]
CASES += [("dense", "q4_K_M"), ("linear", "q4_K_M"), ("linear", "f32")]
NUM_COMMON = 300


def tokens(seed: int, count: int) -> tuple[int, ...]:
    return tuple(map(int, np.random.default_rng(seed).integers(3, 512, count)))


COMMON = tokens(0, NUM_COMMON)


def ask(name: str, prompt: tuple[int, ...], *, num_output: int = 6, history: int = 0) -> Request:
    """Every second one is drawn with a seed."""
    seed = sum(name.encode())
    drawn = SamplingParams(temperature=1.0, top_k=40, seed=seed)
    return Request(
        request_id=name,
        token_ids=prompt,
        max_tokens=num_output,
        history_end=history,
        sampling=drawn if seed % 2 else SamplingParams(),
    )


def num_prefill(records) -> int:
    return sum(record.prefill_tokens for record in records)


def compact(sessions: Sessions) -> None:
    for worker in sessions.pipeline._workers:
        worker._context._lanes._compact()


def settled(model: Made, sessions: Sessions) -> None:
    """All that was said is what each says alone, and every stage holds what the ledger says."""
    different = sessions.differences(model)
    assert not different, different[:9]
    scheduler = sessions.engine.scheduler
    assert scheduler.epoch == 0, "the ledger and llama.cpp differed"
    held = sessions.pipeline.lane_ends()
    assert held == scheduler.lane_ends(held)
    num_used = {worker._context._lanes._holdings.num_used for worker in sessions.pipeline._workers}
    assert num_used == {pool.num_used for pool in scheduler._ledger._pools.values()}


@pytest.fixture(params=CASES, ids="-".join)
def case(request, made, shared_cache: Path):
    family, dtype = request.param
    num_layers, cuts = LAYERS_AND_CUTS[family]
    model: Made = made(family, dtype, num_layers=num_layers)
    with sessions_on(model, cuts, CONTEXT, SETTINGS, ceiling=8) as sessions:
        yield model, sessions


def test_prefix_parity(case):
    """One prompt, then six that begin like it, all at once, then its own next turn."""
    model, sessions = case
    first = ask("first", (*COMMON, *tokens(1, 13)), history=NUM_COMMON)
    assert num_prefill(sessions.run(first)) == NUM_COMMON + 13
    border = NUM_COMMON - NUM_COMMON % model.chunk_multiple
    shared = border if model.is_recurrent else NUM_COMMON

    others = [ask(f"o{n}", (*COMMON, *tokens(10 + n, 3 + 5 * n)), num_output=12) for n in range(6)]
    num_turns = 0

    def compact_midway() -> None:
        nonlocal num_turns
        num_turns += 1
        if num_turns in (4, 9):
            compact(sessions)  # duplicated, 6 x 300 cells would not fit

    records = sessions.run(*others, between=compact_midway)
    assert {sessions.num_cached[request.request_id] for request in others} == {shared}
    assert num_prefill(records) == sum(len(o.token_ids) - shared for o in others)
    assert max(record.state.running for record in records) == 6
    settled(model, sessions)

    said = tuple(sessions.outputs["first"])
    turn = ask("turn", (*first.token_ids, *said, *tokens(30, 20)), num_output=8)
    sessions.run(turn, between=compact_midway)
    known = len(first.token_ids) + len(said) - 1  # the last one was drawn and never computed
    assert sessions.num_cached["turn"] == (border if model.is_recurrent else known)
    settled(model, sessions)


def test_a_prefix_outlives_its_first_owner(case):
    """Who shared goes on, the owner's resident is evicted, the pool is compacted, others share."""
    model, sessions = case
    sessions.run(ask("owner", (*COMMON, *tokens(1, 5)), num_output=2, history=NUM_COMMON))
    sessions.run(ask("heir", (*COMMON, *tokens(2, 9)), num_output=2, history=NUM_COMMON))
    scheduler = sessions.engine.scheduler
    oldest = next(iter(scheduler._prefixes._residents.values()))
    scheduler._prefixes._drop(oldest, scheduler._next)
    compact(sessions)
    sessions.run(ask("third", (*COMMON, *tokens(3, 7)), history=NUM_COMMON))
    if not model.is_recurrent:
        assert sessions.num_cached["third"] == NUM_COMMON
    settled(model, sessions)


HYBRIDS = [case for case in CASES if case[0] in ("ssm", "linear")]


@pytest.mark.parametrize("case", HYBRIDS, ids="-".join, indirect=True)
@pytest.mark.parametrize("off", [-1, 0, 1])
def test_prefix_parity_at_a_snapshot_and_beside_it(case, off):
    model, sessions = case
    prompt = tokens(4, 201)
    sessions.run(ask("a", prompt, num_output=2))
    end = 200  # a multiple of every padding; one token is left to compute
    records = sessions.run(ask("b", (*prompt[: end + off], *tokens(5, 40))))
    expected = end if off >= 0 else 0
    assert sessions.num_cached["b"] == expected
    assert num_prefill(records) == end + off + 40 - expected
    settled(model, sessions)


def test_the_same_prompt_again_computes_its_last_token(case):
    model, sessions = case
    prompt = tokens(6, 97)
    sessions.run(ask("a", prompt))
    records = sessions.run(ask("c", prompt))
    assert (num_prefill(records), sessions.num_cached["c"]) == (1, 96)
    settled(model, sessions)
