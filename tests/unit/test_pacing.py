"""The two controllers. Without these one long prompt stalls every live stream, or a machine runs
at a crowd that is slower than a smaller one."""

from __future__ import annotations

import itertools

import pytest

from skippy_mesh.scheduler.pacing import COOLDOWN_S, MIN_PREFILL_ROWS, PrefillPacer, RunLimit


def paced(*steps, target_s=0.03, **options):
    pacer = PrefillPacer(target_s, **options)
    for step_s, num_prefill, num_decode in steps:
        pacer.observe(step_s=step_s, num_prefill=num_prefill, num_decode=num_decode)
    return pacer


def test_a_chunk_that_costs_too_much_shrinks_at_once():
    assert paced().num_rows == 64
    assert paced((0.010, 0, 4), (0.170, 64, 4)).num_rows == 8


def test_a_cheap_chunk_lets_the_next_grow_by_a_quarter_of_the_gap():
    # 20.2 ms left at 0.2 ms a row is 101 rows.
    pacer = paced((0.010, 0, 4), (0.010 + 64 * 0.0002, 64, 4), target_s=0.0302)
    assert pacer.num_rows == 64 + (101 - 64) // 4
    for _ in range(100):
        pacer.observe(step_s=0.03, num_prefill=100, num_decode=4)
    assert 95 <= pacer.num_rows <= 100


def test_prompts_get_on_even_where_decodes_alone_miss_the_target():
    assert paced((0.5, 0, 4), (0.9, 64, 4)).num_rows == MIN_PREFILL_ROWS


def test_where_the_target_is_out_of_reach_a_step_may_double():
    pacer = paced((0.5, 0, 30), (0.9, 64, 30))
    assert [pacer.limit(num_decoding) for num_decoding in (1, 30)] == [MIN_PREFILL_ROWS, 30]
    assert paced((0.5, 0, 30), (0.9, 64, 30), pinned=40).limit(64) == 40


def test_steps_that_say_nothing_of_a_mixed_step_teach_nothing():
    assert paced((9.0, 64, 0), (9.0, 64, 3)).num_rows == 64
    assert paced((0.01, 0, 3), (0.01, 64, 3), (0.009, 64, 3)).num_rows == 64


def test_a_pinned_pace_stays():
    assert paced((0.01, 0, 4), (9.0, 64, 4), pinned=40).num_rows == 40


class Machine:
    """Steps of 0.1 s in which ``rows_per_s(limit)`` rows are computed."""

    def __init__(self, rows_per_s, ceiling=64, **options):
        self.limit = RunLimit(ceiling, **options)
        self.now_s = 0.0
        self.seen = [self.limit.limit]
        self._rows_per_s = rows_per_s

    def run(self, seconds, num_waiting=9):
        for _ in range(round(10 * seconds)):
            self.now_s += 0.1
            rows = self._rows_per_s(self.limit.limit) // 10
            self.limit.observe(now_s=self.now_s, num_rows=rows, num_waiting=num_waiting)
            if self.limit.limit != self.seen[-1]:
                self.seen.append(self.limit.limit)
        return self


def test_a_larger_crowd_that_pays_is_kept_up_to_the_ceiling():
    assert Machine(lambda n: 100 * n, ceiling=30).run(60).seen == [8, 16, 30]


def test_a_larger_crowd_that_does_not_pay_is_sent_back_and_tried_ever_less_often():
    tries = []
    machine = Machine(lambda n: 1000 if n <= 8 else 1020)
    for _ in range(4000):
        before = machine.limit.limit
        machine.run(0.1)
        if machine.limit.limit > before:
            tries.append(machine.now_s)
    assert set(machine.seen) == {8, 16}
    gaps = [b - a for a, b in itertools.pairwise(tries)]
    assert gaps[0] >= COOLDOWN_S
    assert all(b > 1.5 * a for a, b in itertools.pairwise(gaps))


def test_nothing_is_tried_while_nobody_waits():
    assert Machine(lambda n: 100 * n).run(60, num_waiting=0).seen == [8]


@pytest.mark.parametrize(
    ("ceiling", "pinned", "expected"), [(64, 20, 20), (4, 20, 4), (4, None, 4)]
)
def test_the_limit_is_never_above_the_ceiling_and_a_pinned_one_stays(ceiling, pinned, expected):
    machine = Machine(lambda n: 100 * n, ceiling=ceiling, pinned=pinned).run(60)
    assert machine.seen == [expected]


def test_a_few_steps_or_a_short_time_prove_nothing():
    limit = RunLimit(64)
    for step in range(15):
        limit.observe(now_s=10.0 * step, num_rows=9, num_waiting=1)
    assert limit.limit == 8
    limit = RunLimit(64)
    for step in range(1000):
        limit.observe(now_s=0.001 * step, num_rows=9, num_waiting=1)
    assert limit.limit == 8
