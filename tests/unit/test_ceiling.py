"""What memory permits. Without these more sessions are let in than a stage can hold, or lanes
divide the pool."""

from __future__ import annotations

import pytest

from coordinator.ceiling import ceiling, mesh_capacity
from skippy_mesh.errors import UsageError
from skippy_mesh.scheduler.memory import Capacity


@pytest.mark.parametrize(
    ("stages", "value", "said"),
    [
        ([Capacity(lanes=100, attention=8192)], 32, "32, bound by stage 0 attention"),
        ([Capacity(lanes=10, attention=8192)], 10, "10, bound by stage 0 lanes"),
        ([Capacity(lanes=99, attention=8192, window=1024)], 4, "4, bound by stage 0 window"),
        ([Capacity(lanes=99, recurrent=3)], 3, "3, bound by stage 0 recurrent"),
        (
            [Capacity(lanes=99, attention=8192), Capacity(lanes=99, recurrent=8),
             Capacity(lanes=99, attention=1000)],
            3, "3, bound by stage 2 attention",
        ),
    ],
)  # fmt: skip
def test_the_least_of_all_stages_and_components_binds_and_is_named(stages, value, said):
    found = ceiling(stages)
    assert (found.value, str(found)) == (value, said)
    assert found.binding in found.terms
    assert len(found.terms) == sum(len(stage.by_component()) for stage in stages)


def test_an_operator_may_lower_it_and_never_raise_it():
    stages = [Capacity(lanes=99, attention=2048)]
    assert ceiling(stages, parallel=8).value == 8
    assert str(ceiling(stages, parallel=3)) == "3, bound by stage all lanes"
    for parallel in (9, 0, -1):
        with pytest.raises(UsageError, match=rf"{parallel} is not from 1 to 8, .* stage 0 .*2048"):
            ceiling(stages, parallel=parallel)


def test_no_room_for_a_single_session_is_an_error_that_says_where():
    with pytest.raises(UsageError, match=r"stage 1 allows 0 by its window \(255 cells / 256"):
        ceiling([Capacity(lanes=9, attention=999), Capacity(lanes=9, window=255)])


def test_a_mesh_has_what_its_poorest_stage_has():
    stages = [Capacity(lanes=9, attention=512), Capacity(lanes=7, recurrent=8, window=256)]
    assert mesh_capacity(stages) == Capacity(lanes=7, attention=512, window=256, recurrent=8)
