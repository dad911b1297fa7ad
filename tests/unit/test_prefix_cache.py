"""Prefixes computed once. The fake model's next token depends on the whole history of its lane, so
whoever starts from a wrong prefix says something else than alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from skippy_mesh.errors import StageError
from skippy_mesh.messages import Copy, Remove, Request
from skippy_mesh.scheduler import sequence
from skippy_mesh.scheduler.prefix_cache import MIN_AWAITED, MIN_SHARED
from stages.fake import FakePipeline
from tests.scheduling import Run, request

BOUNDARY: dict[str, Any] = {"prefix_rule": "boundary", "is_homogeneous": True}


def talk(
    name: str, num_common: int, num_own: int = 5, max_tokens: int = 4, **fields: Any
) -> Request:
    """A prompt that begins like all others for ``num_common`` tokens."""
    own = request(name, num_own, max_tokens, **fields)
    return replace(own, token_ids=(*range(1000, 1000 + num_common), *own.token_ids))


def run_of(**knobs: Any) -> Run:
    return Run(**{"cells": 512, "residents": 8, "max_rows": 64, **knobs})


def recurrent(**knobs: Any) -> Run:
    rules = {**BOUNDARY, **knobs.pop("rules", {})}
    return run_of(
        recurrent=knobs.get("lanes", 32) + knobs.get("residents", 8), rules=rules, **knobs
    )


def num_computed(run: Run, name: str) -> int:
    """Rows that were computed for one request."""
    parts = [part for plan in run.plans for part in plan.parts]
    return sum(part.num_rows for part in parts if part.sequence.request.request_id == name)


def ask_and_finish(run: Run, *asked: Request) -> None:
    run.ask(*asked)
    run.finish()
    run.assert_answers()


def misses(run: Run) -> dict[str, int]:
    return dict(run.scheduler.take_prefix_counts().misses)


# -- any common prefix -----------------------------------------------------------------------------


def test_a_prefix_is_computed_once_and_outlives_its_owner():
    run = run_of()
    ask_and_finish(run, talk("a", 77))
    ask_and_finish(run, talk("b", 77))
    assert num_computed(run, "a") == 77 + 5 + 3
    assert num_computed(run, "b") == 5 + 3
    assert (run.ends["a"].num_cached, run.ends["b"].num_cached) == (0, 77)
    assert [op for batch in run.batches for op in batch.operations] == [Copy(0, 1, 0, 77)]
    counts = run.scheduler.take_prefix_counts()
    assert (counts.num_hits, counts.num_hit_tokens) == (1, 77)
    assert (counts.num_queried_tokens, counts.misses) == (2 * 82, {"cold": 1})


@pytest.mark.parametrize("num_prompt", [MIN_SHARED + 1, 40])
def test_the_last_token_is_always_computed(num_prompt):
    """Or there would be no logits to draw from."""
    run = run_of()
    ask_and_finish(run, talk("a", num_prompt, 1, max_tokens=1))
    again = replace(run.asked["a"], request_id="b")
    ask_and_finish(run, again)
    assert num_computed(run, "b") == 1
    assert run.ends["b"].num_cached == num_prompt


def test_a_conversation_goes_on_from_its_last_turn():
    run = run_of()
    prompt = talk("t0", 20).token_ids
    for turn in range(20):
        name = f"t{turn}"
        ask_and_finish(run, Request(request_id=name, token_ids=prompt, max_tokens=6))
        if turn:
            assert num_computed(run, name) == 4 + 1 + 5, "its last token was never computed"
        prompt = (*prompt, *run.tokens[name], *range(4 * turn, 4 * turn + 4))
    assert len(run.scheduler._prefixes._residents) == 1, "a turn's memory is the next one's"


def test_what_a_running_sequence_has_computed_can_be_shared():
    run = run_of()
    run.ask(talk("a", 60, max_tokens=50))
    run.step()
    run.step()
    run.ask(talk("b", 60))
    run.step()
    assert run.sequence("b").num_cached == 60
    run.finish()
    run.assert_answers()


def test_only_what_every_stage_has_answered_is_shared():
    """Three batches are on their way; nobody knows yet whether they arrive."""
    run = run_of(in_flight=3, num_stages=3, max_rows=32)
    run.ask(talk("a", 90))
    run.send()
    run.send()
    run.ask(talk("b", 20))
    run.send()
    assert run.sequence("b").num_cached == 0
    run.finish()
    run.assert_answers()


def test_a_prefix_that_is_being_computed_is_waited_for():
    run = run_of(cells=2048)
    run.ask(*(talk(name, 200) for name in "abcdefgh"))
    run.step()
    assert run.names() == {"a"}
    run.finish()
    run.assert_answers()
    assert sum(num_computed(run, name) for name in "abcdefgh") < 200 + 8 * 8 + 7 * MIN_AWAITED


def test_a_little_more_is_not_waited_for():
    run = run_of(cells=2048)
    run.ask(talk("a", MIN_AWAITED - 1), talk("b", MIN_AWAITED - 1))
    run.step()
    assert run.names() == {"a", "b"}


def test_who_waits_for_a_prefix_is_overtaken_32_times_at_most():
    run = run_of(cells=4096, lanes=80, max_rows=8)
    run.ask(talk("slow", 900), talk("next", 900))
    for number in range(60):
        run.ask(request(f"small{number}", 2, 1))
        run.step()
        if "next" in run.ends or not run.sequence("next").num_bypassed < 32:
            break
    assert run.sequence("next").num_bypassed == 32
    run.ask(request("late", 2, 1))
    run.step()
    assert "late" not in run.names()
    run.finish()
    run.assert_answers()


def test_a_donor_that_goes_takes_nobody_along():
    run = run_of(cells=2048)
    run.ask(talk("a", 200), talk("b", 200))
    run.step()
    run.abort("a")
    run.step()
    assert "b" in run.names() or "b" in run.ends
    run.finish()
    run.assert_answers()


# -- namespaces ------------------------------------------------------------------------------------


def test_namespaces_never_share():
    run = run_of()
    ask_and_finish(run, talk("a", 60, namespace="x"))
    ask_and_finish(run, talk("b", 60, namespace="y"), talk("c", 60, namespace="x"))
    assert (run.ends["b"].num_cached, run.ends["c"].num_cached) == (0, 60)


def test_who_does_not_share_neither_looks_up_nor_leaves_anything():
    run = run_of()
    ask_and_finish(run, talk("a", 60, shares_prefix=False))
    ask_and_finish(run, talk("b", 60))
    ask_and_finish(run, talk("c", 60, shares_prefix=False))
    assert [run.ends[name].num_cached for name in "abc"] == [0, 0, 0]
    assert misses(run) == {"off": 2, "cold": 1}


# -- room ------------------------------------------------------------------------------------------


def test_the_cache_gives_way_before_anybody_is_preempted():
    run = run_of(cells=128, lanes=2, max_rows=128)
    ask_and_finish(run, request("a", 60, 4))
    run.ask(request("b", 60, 60))
    run.finish()
    run.assert_answers()
    assert not sum(plan.num_preempted for plan in run.plans)
    assert run.scheduler.take_prefix_counts().evictions["deficit"] == 1


def test_growth_beyond_a_promise_takes_from_the_cache_first(monkeypatch):
    monkeypatch.setattr(sequence, "MAX_RESERVED_OUTPUT", 4)
    run = run_of(cells=128, lanes=2, max_rows=128)
    ask_and_finish(run, request("a", 60, 4))
    ask_and_finish(run, request("b", 30, 60), request("c", 20, 12))
    assert not sum(plan.num_preempted for plan in run.plans)


def test_only_the_deficit_is_evicted_and_the_least_recently_used_first():
    run = run_of(cells=400, lanes=4)
    for name in "abc":
        ask_and_finish(run, request(name, 47, 4))  # 50 cells each stay
    ask_and_finish(run, replace(run.asked["a"], request_id="again"))
    run.scheduler.take_prefix_counts()
    ask_and_finish(run, request("large", 238, 60, shares_prefix=False))
    assert run.scheduler.take_prefix_counts().evictions["deficit"] == 1
    for name in "ac":
        ask_and_finish(run, replace(run.asked[name], request_id=f"{name}2", max_tokens=1))
        assert run.ends[f"{name}2"].num_cached == 46, name


def test_looking_does_not_make_a_resident_recent():
    run = run_of(cells=256, residents=2)
    ask_and_finish(run, request("a", 30, 1))
    ask_and_finish(run, request("b", 30, 1))
    run.scheduler.add(replace(run.asked["a"], request_id="peek"))
    waiting = next(iter(run.scheduler.waiting))
    for _ in range(1000):
        assert run.scheduler._prefixes.find(waiting).num_shared == 29
    run.scheduler.abort("peek")
    run.scheduler.take_events()
    ask_and_finish(run, request("c", 30, 1))
    ask_and_finish(run, replace(run.asked["b"], request_id="b2"))
    assert run.ends["b2"].num_cached == 29, "a was looked at, b was the younger one"


def test_residents_have_half_the_pool_at_most():
    run = run_of(cells=200, residents=8)
    for number in range(6):
        ask_and_finish(run, request(f"r{number}", 40, 1))
        assert run.scheduler.snapshot().components["attention"]["resident"] <= 100
    assert len(run.scheduler._prefixes._residents) == 2
    assert run.scheduler.take_prefix_counts().evictions == {"cap": 4}


def test_only_as_much_is_cut_from_a_resident_as_is_in_the_way():
    run = run_of(cells=400)
    ask_and_finish(run, request("a", 180, 4))
    ask_and_finish(run, request("b", 220, 20, shares_prefix=False))
    ask_and_finish(run, replace(run.asked["a"], request_id="a2"))
    assert run.ends["a2"].num_cached == 183 - 64


def test_of_what_is_too_long_to_keep_the_beginning_is_kept():
    run = run_of(cells=200)
    ask_and_finish(run, request("a", 150, 4))
    ask_and_finish(run, replace(run.asked["a"], request_id="b"))
    assert run.ends["b"].num_cached == 153 - 64


def test_residents_have_only_their_ids():
    run = run_of(cells=4096, residents=3)
    for number in range(6):
        ask_and_finish(run, request(f"r{number}", 40, 1))
    assert len(run.scheduler._prefixes._residents) == 3


def test_what_fits_the_pool_is_let_in_whatever_is_cached():
    """Even if what it would share is part of what is in the way."""
    run = run_of(cells=128, residents=4, max_rows=128)
    for name in ("a", "b", "c"):
        ask_and_finish(run, talk(name, 20, 20, 1))
    ask_and_finish(run, talk("whole", 20, 107, 1))
    assert run.ends["whole"].num_cached == 20


def test_a_donor_evicted_in_the_step_that_shares_from_it_is_copied_first():
    run = run_of(cells=128, residents=1, max_rows=128)
    ask_and_finish(run, talk("a", 30, 20, 1))
    ask_and_finish(run, talk("b", 30, 90, 1))
    operations = [op for batch in run.batches for op in batch.operations]
    assert operations[:2] == [Copy(0, 1, 0, 30), Remove(0, 0, -1)]
    assert run.ends["b"].num_cached == 30


def test_sharers_of_one_prefix_are_preempted_by_what_they_hold_alone():
    run = run_of(cells=100, lanes=8, residents=0, max_rows=64)
    ask_and_finish(run, *(talk(name, 60, 2, 30) for name in "abcdefgh"))
    assert set(run.reasons().values()) == {"length"}


def test_after_a_failure_nothing_is_taken_for_cached():
    faults = [StageError("stumbled")]

    def on_step(batch):
        if batch.step_id == 3 and faults:
            raise faults.pop()

    run = run_of(pipeline=FakePipeline(on_step=on_step))
    run.ask(talk("a", 60, max_tokens=20))
    run.finish()
    ask_and_finish(run, talk("b", 60))
    assert run.ends["b"].num_cached == 60, "what was computed again is there again"
    assert not faults


def test_twenty_turns_of_a_tool_loop_beside_a_full_cache():
    run = run_of(cells=600, lanes=4, residents=16, max_rows=128)
    for number in range(10):
        ask_and_finish(run, request(f"old{number}", 60, 4))
    prompt = talk("tool", 30).token_ids
    for turn in range(20):
        name = f"turn{turn}"
        run.ask(request(f"side{turn}", 50, 4))
        ask_and_finish(run, Request(request_id=name, token_ids=prompt, max_tokens=8))
        assert turn == 0 or run.ends[name].num_cached >= min(len(prompt) - 13, 230)
        prompt = (*prompt, *run.tokens[name], *range(12))
    assert set(run.reasons().values()) == {"length"}
    assert run.scheduler.epoch == 0


# -- snapshots -------------------------------------------------------------------------------------


@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("off", [-1, 0, 1])
def test_a_snapshot_is_lent_at_its_boundary_and_nowhere_else(multiple, off):
    run = recurrent(rules={"chunk_multiple": multiple})
    ask_and_finish(run, talk("a", 60, 1))
    end = 60  # of 61 tokens, the last is left to compute
    ask_and_finish(run, talk("b", end + off, 30))
    assert run.ends["b"].num_cached == (end if off >= 0 else 0)
    assert misses(run) == ({"cold": 1} if off >= 0 else {"cold": 1, "boundary": 1})


def test_the_next_turn_of_a_chat_starts_from_its_history():
    run = recurrent(rules={"chunk_multiple": 4})
    ask_and_finish(run, talk("a", 50, 3, history_end=50))
    ask_and_finish(run, talk("b", 50, 40, history_end=85))
    ask_and_finish(run, replace(talk("b", 50, 40), request_id="c"))
    assert [run.ends[name].num_cached for name in "abc"] == [0, 48, 84]


def test_the_end_of_the_prompt_is_kept_too_where_it_is_far_from_the_history():
    run = recurrent()
    ask_and_finish(run, talk("a", 30, 40, history_end=30))
    again = replace(run.asked["a"], request_id="b")
    ask_and_finish(run, again)
    ask_and_finish(run, talk("c", 30, 41))
    assert (run.ends["b"].num_cached, run.ends["c"].num_cached) == (69, 30)


def test_snapshots_take_turns_on_the_ids_there_are():
    run = recurrent(residents=3)
    for number in range(6):
        ask_and_finish(run, request(f"r{number}", 40, 2))
        assert len(run.scheduler._prefixes._residents) <= 3
    ask_and_finish(run, replace(run.asked["r5"], request_id="again"))
    assert run.ends["again"].num_cached == 39


def test_a_snapshot_that_was_never_reached_leaves_its_id():
    run = recurrent(residents=2)
    run.ask(request("a", 200, 2))
    run.step()
    run.abort("a")
    run.finish()
    assert not run.scheduler._prefixes._residents


def test_a_snapshot_that_is_being_computed_is_waited_for():
    run = recurrent(cells=2048)
    run.ask(talk("a", 200, 1), talk("b", 200, 3))
    run.step()
    assert run.names() == {"a"}
    run.finish()
    run.assert_answers()
    assert run.ends["b"].num_cached == 200
