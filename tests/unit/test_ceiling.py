"""What memory permits. Without these more sessions are let in than a stage can hold, or lanes
divide the pool."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.ceiling import Ceiling, Term, after_load, ceiling
from skippy_mesh.config import StepRules
from skippy_mesh.engine import Engine, EnginePlan
from skippy_mesh.errors import UsageError
from skippy_mesh.scheduler.memory import Capacity
from stages.fake import FakePipeline
from tests.scheduling import answer_alone, request


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
    assert Capacity.least(stages) == Capacity(lanes=7, attention=512, window=256, recurrent=8)


PLANNED = ceiling([Capacity(lanes=20, attention=5120, recurrent=40)] * 3)
ASKED = Capacity(lanes=20, attention=5120, recurrent=20)


def test_a_plan_holds_where_every_stage_has_what_was_asked_of_it():
    """40 states would have fitted, 20 were asked for: they are not what binds."""
    assert after_load(PLANNED, [(ASKED, ASKED)] * 3) == PLANNED
    more = replace(ASKED, attention=5376)
    assert after_load(PLANNED, [(ASKED, more)] * 3) == PLANNED


@pytest.mark.parametrize(
    ("less", "said"),
    [
        ({"attention": 1024}, "4, bound by stage 2 attention"),
        ({"recurrent": 3, "lanes": 3}, "3, bound by stage 2 recurrent"),
        ({"lanes": 19}, "19, bound by stage 2 lanes"),
    ],
)
def test_a_stage_that_measures_less_lowers_the_ceiling_and_is_named(less, said):
    stages = [(ASKED, ASKED), (ASKED, ASKED), (ASKED, replace(ASKED, **less))]
    assert str(after_load(PLANNED, stages)) == said


def test_what_an_operator_asked_for_is_lowered_only_below_it():
    asked = Ceiling(Term(4, "all", "lanes", "operator"), PLANNED.terms)
    for cells, said in [(1024, "4, bound by stage all lanes"), (768, "3, bound by stage 0 att")]:
        found = after_load(asked, [(ASKED, replace(ASKED, attention=cells))] * 3)
        assert str(found).startswith(said)


WIDE = Capacity(lanes=40, attention=20 * 256, window=20 * 256, recurrent=20)
SHRUNK = {"lanes": 5, "attention": 5 * 256 + 255, "window": 5 * 256, "recurrent": 5}


@pytest.mark.parametrize("component", SHRUNK)
@pytest.mark.parametrize("stage", range(3))
def test_whatever_a_stage_lacks_no_stage_ever_refuses_a_step(stage, component):
    """Three fake stages with memory of their own; one has less of one thing than the others."""
    capacities = [WIDE] * 3
    capacities[stage] = replace(WIDE, **{component: SHRUNK[component]})
    limit = ceiling(capacities)
    assert str(limit) == f"5, bound by stage {stage} {component}"
    reports = []
    pipeline = FakePipeline(capacities=capacities)
    plan = EnginePlan(
        capacity=Capacity.least(capacities),
        rules=StepRules(max_rows=64),
        max_model_len=1024,
        max_in_flight=3,
        ceiling=limit.value,
    )
    engine = Engine(plan.scheduler(), pipeline, reports.append, clock=pipeline.clock)
    # More cells than the ceiling counts on: some are preempted, too.
    asked = [request(f"r{number}", 200, 150) for number in range(8)]
    for one in asked:
        engine.submit(one)
    engine._take_commands(wait=False)
    while engine.scheduler.has_work:
        engine.step()
    records = [report.record for report in reports if report.record]
    most = max(record.state.running for record in records)
    assert most == 5 if component in ("lanes", "recurrent") else 3 <= most <= 5
    assert records[-1].epoch == 0, "a stage refused a step"
    tokens = {one.request_id: [] for one in asked}
    for report in reports:
        for event in report.events:
            assert event.error is None
            tokens[event.request_id] += [] if event.token_id is None else [event.token_id]
    assert tokens == {one.request_id: answer_alone(one, 150) for one in asked}
