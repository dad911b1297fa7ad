"""What the prefix cache must not take: room, exactness, or time that grows with a crowd."""

from __future__ import annotations

from dataclasses import replace

import pytest

from skippy_mesh.messages import Request
from tests.scheduling import request
from tests.unit.test_prefix_cache import ask_and_finish, recurrent, run_of, talk


def test_the_only_snapshot_serves_whoever_comes_until_another_is_wanted():
    run = recurrent(residents=1)
    ask_and_finish(run, talk("a", 60, 1))
    for name in ("b", "c", "d"):
        ask_and_finish(run, replace(run.asked["a"], request_id=name))
        assert run.ends[name].num_cached == 60
    ask_and_finish(run, request("other", 60))
    ask_and_finish(run, request("another", 60))
    ask_and_finish(run, replace(run.asked["another"], request_id="again"))
    assert run.ends["again"].num_cached == 59


def test_snapshots_have_half_the_pool_at_most():
    run = recurrent(cells=256, lanes=2)
    for number in range(6):
        ask_and_finish(run, request(f"r{number}", 60, 1))
        assert run.scheduler.snapshot().components["attention"]["resident"] <= 128
    assert len(run.scheduler._prefixes._residents) == 2


@pytest.mark.parametrize("replays_in_chunks", [True, False])
def test_outputs_are_not_replaced_by_what_a_chunk_made_of_the_same_tokens(replays_in_chunks):
    """Somebody's prompt goes on with what another has generated, who is preempted then."""
    run = recurrent(rules={"replays_in_chunks": replays_in_chunks})
    run.ask(request("a", 30, 60))
    while len(run.tokens["a"]) < 40:
        run.step()
    known = (*run.asked["a"].token_ids, *run.tokens["a"][:38])
    run.ask(Request(request_id="b", token_ids=(*known, 9), max_tokens=1))
    while "b" not in run.ends:
        run.step()
    run.step()
    owner = run.sequence("a")
    run.scheduler._preempt(owner)
    (part,) = (part for plan in run.step() for part in plan.parts if part.sequence is owner)
    assert part.start == (68 if replays_in_chunks else 29)
    run.finish()
    run.assert_answers()


def test_nothing_is_remembered_of_who_has_left_the_queue():
    """Even if the index never changes, as where there is no id for a snapshot."""
    run = recurrent(residents=0, lanes=1)
    for number in range(3):
        run.ask(request(f"r{number}", 40, 2))
    run.step()
    run.abort("r2")
    run.finish()
    assert not run.scheduler._prefixes._walks


def test_who_cannot_fit_is_not_compared_with_every_donor(monkeypatch):
    """A full pool is asked at each step for all who wait."""
    run = run_of(cells=700, max_rows=512)
    run.ask(*(talk(name, 60, 5, 20) for name in "abc"))
    run.step()
    run.step()
    run.ask(*(talk(f"w{number}", 60, 500, 60) for number in range(5)))
    looked_at: list[str] = []
    find = run.scheduler._prefixes.find
    monkeypatch.setattr(
        run.scheduler._prefixes,
        "find",
        lambda sequence: looked_at.append(sequence.request.request_id) or find(sequence),
    )
    for _ in range(3):
        run.step()
    assert not looked_at
    run.finish()
    run.assert_answers()
