"""How much of a planned context fits what is free. Without this a stage that finds less memory than
planned takes all of it, or none."""

from __future__ import annotations

import itertools

import pytest

from skippy_mesh.config import ContextConfig, MemoryNeed

PLANNED = ContextConfig(num_cells=8192, num_lanes=20)
DENSE = MemoryNeed(weights=10**9, buffers=10**8, per_cell=1000, kv_per_cell=10_000, per_id=0)
HYBRID = MemoryNeed(weights=10**9, buffers=10**8, per_cell=9000, kv_per_cell=0, per_id=10**7)


@pytest.mark.parametrize("need", [DENSE, HYBRID])
def test_what_was_planned_is_taken_where_it_just_fits(need):
    whole = need.of(PLANNED.num_cells, PLANNED.num_lanes)
    assert need.fit(PLANNED, whole) is PLANNED
    less = need.fit(PLANNED, whole - 1)
    assert less != PLANNED
    assert need.of(less.num_cells, less.num_lanes) <= whole - 1


def test_states_give_way_before_cells_do():
    whole = HYBRID.of(PLANNED.num_cells, PLANNED.num_lanes)
    found = [HYBRID.fit(PLANNED, whole - short * 10**7) for short in (1, 2, 19, 20)]
    sizes = [(one.num_lanes, one.num_cells) for one in found]
    assert sizes[:3] == [(19, 8192), (18, 8192), (1, 8192)]
    assert sizes[3][0] == 1 and sizes[3][1] < 8192


def test_the_pool_is_the_largest_that_fits_and_less_memory_never_makes_it_larger():
    free = range(DENSE.of(256, 20), DENSE.of(8192, 20), 10**6)
    cells = [DENSE.fit(PLANNED, num_bytes).num_cells for num_bytes in free]
    assert cells == sorted(cells) and (cells[0], cells[-1]) == (256, 7936)
    for num_bytes, num_cells in zip(free, cells, strict=True):
        assert DENSE.of(num_cells + 256, 20) > num_bytes


def test_nothing_fits_where_not_even_one_session_does():
    for need, lanes in itertools.product([DENSE, HYBRID], [1, 20]):
        context = ContextConfig(num_cells=256, num_lanes=lanes)
        assert need.fit(context, need.of(256, 1) - 1) is None
        assert need.fit(context, need.of(256, 1)).num_cells == 256
