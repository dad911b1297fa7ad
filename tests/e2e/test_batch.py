"""Rows are taken if and only if every lane goes on where it stands, whatever the order of lanes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skippy_mesh.errors import InvalidBatchError
from stages.batch import Rows, check_rows

WIDTH, MAX_ROWS = 4, 12
quick = settings(deadline=None, database=None, max_examples=300)

standings = st.lists(st.integers(0, 50), min_size=1, max_size=5)


@st.composite
def good_steps(draw):
    """Where lanes stand, and a step that continues some of them in any interleaving."""
    standing = draw(standings)
    lanes = draw(st.lists(st.integers(0, len(standing) - 1), min_size=1, max_size=MAX_ROWS))
    ends = list(standing)
    positions = []
    for lane in lanes:
        positions.append(ends[lane])
        ends[lane] += 1
    return standing, lanes, positions


def check(standing, lanes, positions):
    inputs = np.zeros((len(lanes), WIDTH), np.float32)
    flags = [True] * len(lanes)
    rows = Rows(lanes, positions, flags, inputs)
    return checked(rows, standing)


def checked(rows, standing):
    return check_rows(
        rows, standing.__getitem__, num_lanes=len(standing), max_rows=MAX_ROWS, num_embd=WIDTH
    )


@quick
@given(good_steps())
def test_a_step_that_continues_every_lane_is_taken(step):
    standing, lanes, positions = step
    before = list(standing)
    reached = check(standing, lanes, positions)
    assert reached == {lane: standing[lane] + lanes.count(lane) for lane in lanes}
    assert standing == before


@quick
@given(good_steps(), st.data())
def test_one_wrong_position_is_refused(step, data):
    standing, lanes, positions = step
    row = data.draw(st.integers(0, len(lanes) - 1))
    shift = data.draw(st.integers(-(2**40), 2**40).filter(bool))
    positions[row] += shift
    with pytest.raises(InvalidBatchError):
        check(standing, lanes, positions)


@quick
@given(good_steps(), st.data())
def test_a_foreign_lane_is_refused(step, data):
    standing, lanes, positions = step
    row = data.draw(st.integers(0, len(lanes) - 1))
    lanes[row] = data.draw(st.integers(-(2**40), -1) | st.integers(len(standing), 2**40))
    with pytest.raises(InvalidBatchError):
        check(standing, lanes, positions)


@quick
@given(good_steps(), st.data())
def test_two_rows_that_changed_places_pass_only_between_lanes(step, data):
    standing, lanes, positions = step
    first = data.draw(st.integers(0, len(lanes) - 1))
    second = data.draw(st.integers(0, len(lanes) - 1))
    order = list(range(len(lanes)))
    order[first], order[second] = second, first
    moved = [lanes[row] for row in order]
    at = [positions[row] for row in order]
    in_order = all(
        [position for lane, position in zip(moved, at, strict=True) if lane == each]
        == sorted(position for lane, position in zip(moved, at, strict=True) if lane == each)
        for each in set(lanes)
    )
    if in_order:
        assert check(standing, moved, at) == check(standing, lanes, positions)
    else:
        with pytest.raises(InvalidBatchError):
            check(standing, moved, at)


@quick
@given(standings, st.integers(0, 3 * MAX_ROWS))
def test_the_number_of_rows_is_bounded(standing, count):
    positions = range(standing[0], standing[0] + count)
    if 1 <= count <= MAX_ROWS:
        assert check(standing, [0] * count, positions) == {0: standing[0] + count}
    else:
        with pytest.raises(InvalidBatchError, match=f"1 to {MAX_ROWS} rows, got {count}"):
            check(standing, [0] * count, positions)


@quick
@given(
    st.integers(0, 4), st.integers(0, 4), st.integers(0, 4), st.integers(0, 4), st.integers(0, 6)
)
def test_columns_of_other_lengths_are_refused(lanes, positions, flags, inputs, width):
    rows = Rows(
        [0] * lanes, range(positions), [True] * flags, np.zeros((inputs, width), np.float32)
    )
    if lanes == positions == flags == inputs > 0 and width == WIDTH:
        assert checked(rows, [0]) == {0: lanes}
    else:
        with pytest.raises(InvalidBatchError):
            checked(rows, [0])


@quick
@given(good_steps(), st.data(), st.sampled_from([np.nan, np.inf, -np.inf]))
def test_one_value_that_is_no_number_is_refused(step, data, value):
    standing, lanes, positions = step
    inputs = np.zeros((len(lanes), WIDTH), np.float32)
    row, column = data.draw(st.integers(0, len(lanes) - 1)), data.draw(st.integers(0, WIDTH - 1))
    inputs[row, column] = value
    rows = Rows(lanes, positions, [True] * len(lanes), inputs)
    with pytest.raises(InvalidBatchError, match="not finite"):
        checked(rows, standing)
