"""The choices, one by one. Without these the wrong sequence waits, starves or gives way."""

from __future__ import annotations

import pytest

from skippy_mesh.errors import UsageError
from skippy_mesh.scheduler.policies import (
    MAX_BYPASSES,
    ORDERING,
    Policies,
    choose_victim,
    first_that_fits,
)
from skippy_mesh.scheduler.queues import WaitingQueue
from skippy_mesh.scheduler.sequence import Sequence, Status
from tests.scheduling import Run, request


def sequence(turn, *, scheduled=10, priority=0, preemptions=0, bypassed=0):
    return Sequence(
        request=request(f"r{turn}", priority=priority),
        turn=turn,
        max_tokens=8,
        num_scheduled=scheduled,
        num_preemptions=preemptions,
        num_bypassed=bypassed,
    )


@pytest.mark.parametrize(("policy", "expected"), [("newest", 2), ("cheapest-recompute", 1)])
def test_who_gives_way(policy, expected):
    crowd = [sequence(0, scheduled=30), sequence(1, scheduled=5), sequence(2, scheduled=20)]
    assert choose_victim(crowd, policy).turn == expected


@pytest.mark.parametrize("policy", ["newest", "cheapest-recompute"])
def test_the_least_important_gives_way_first(policy):
    crowd = [sequence(0, priority=5, scheduled=90), sequence(1), sequence(2, scheduled=5)]
    assert choose_victim(crowd, policy).turn == 0


@pytest.mark.parametrize("policy", ["newest", "cheapest-recompute"])
def test_one_preempted_four_times_gives_way_only_if_nobody_else_can(policy):
    tired = sequence(9, scheduled=1, priority=9, preemptions=4)
    assert choose_victim([sequence(0), tired], policy).turn == 0
    assert choose_victim([tired], policy) is tired
    assert choose_victim([], policy) is None


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"preemption": "swap"}, "swap needs a disk tier"),
        ({"preemption": "oldest"}, "'oldest' is not one of newest, cheapest-recompute"),
        ({"ordering": "lifo"}, "ordering policy 'lifo' is not one of fcfs, priority"),
        ({"admission": "all"}, "admission policy 'all' is not one of fcfs"),
    ],
)
def test_an_unknown_policy_is_refused_by_name(names, message):
    with pytest.raises(UsageError, match=message):
        Policies(**names)


def test_whoever_is_overtaken_too_often_blocks_those_behind():
    big, small = sequence(0), sequence(1)
    for _ in range(MAX_BYPASSES):
        assert first_that_fits([big, small], lambda s: s is small) is small
    assert big.num_bypassed == MAX_BYPASSES == 32
    assert first_that_fits([big, small], lambda s: s is small) is None
    assert first_that_fits([big, small], lambda _: True) is big


def test_a_full_house_overtakes_nobody():
    crowd = [sequence(turn) for turn in range(3)]
    assert first_that_fits(crowd, lambda _: False) is None
    assert not any(one.num_bypassed for one in crowd)


def test_the_preempted_come_first_and_then_the_order_of_arrival():
    waiting = WaitingQueue(ORDERING["fcfs"])
    crowd = [sequence(turn) for turn in range(5)]
    crowd[4].status = crowd[2].status = Status.PREEMPTED
    for one in (crowd[3], crowd[4], crowd[0], crowd[2], crowd[1]):
        waiting.add(one)
    assert [one.turn for one in waiting] == [2, 4, 0, 1, 3]


def test_priority_goes_before_arrival_where_asked_for():
    for policy, expected in (("fcfs", ["a", "b", "c"]), ("priority", ["c", "a", "b"])):
        run = Run(lanes=1, ordering=policy)
        run.ask(*(request(name, priority=n) for n, name in [(1, "a"), (1, "b"), (0, "c")]))
        run.finish()
        assert run.admitted == expected


def test_the_choice_of_a_victim_reaches_the_scheduler():
    """The older sequence has less to lose."""
    for policy, victim in (("newest", "b"), ("cheapest-recompute", "a")):
        run = Run(cells=1400, max_rows=256, preemption=policy)
        run.ask(request("a", 10, 1300), request("b", 200, 1100))
        sequences = {name: run.sequence(name) for name in "ab"}
        run.finish()
        run.assert_answers()
        assert sequences[victim].num_preemptions > 0
