"""Layers, context and lanes to nodes. The numeric cases are public design rules for such planners
(mesh-llm's among them), each worked out by hand; sessions count on 4,096 cells there."""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import replace

import pytest

from coordinator.costs import LayerCosts, ModelCosts, StageSizes
from coordinator.nodes import Link, Node, usable_of
from coordinator.planner import plan
from coordinator.request import PlanRequest
from skippy_mesh.errors import PlanError, UsageError
from tests.planning import (
    FORTY,
    GIB,
    KIB,
    MIB,
    RULES,
    costs_with,
    create_costs,
    create_nodes,
    layers_of,
    outline,
)

GB = 10**9
SIXTY_TWO = create_costs(62, 315_680_000_000, kv=128 * KIB, native=262_144)


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (create_nodes(23, 23), (65_536, 16, [20, 20])),
        (create_nodes(80, 80, 80, 80, 80, 80), (131_072, 32, [40])),
    ],
)
def test_forty_layers_of_40_gib(nodes, expected):
    """Public design rules, cases 1 and 2: the context goes before the number of nodes, and a
    single node that holds everything is enough."""
    assert outline(plan(FORTY, nodes, RULES)) == expected


def test_unlike_nodes_the_large_one_is_filled():
    """Public design rules, case 3: 50 GiB on 16 and 48 GiB."""
    costs = create_costs(40, 50 * GIB, kv=64 * KIB, native=65_536)
    found = plan(costs, create_nodes(16, 48), RULES)
    assert [(stage.node.name, stage.end_layer) for stage in found.stages] == [("b", 35), ("a", 40)]


@pytest.mark.parametrize(
    ("weights", "nodes", "cuts"),
    [
        ([GIB // 8, GIB // 8, 9 * GIB, 8 * GIB], (12, 9), (3,)),
        ([9 * GIB, GIB, GIB, GIB], (11, 3), (2,)),
    ],
)
def test_unlike_layers_are_cut_by_their_bytes(weights, nodes, cuts):
    """Public design rules, cases 4 and 5: not by their number."""
    found = plan(costs_with(weights, kv=1 * KIB), create_nodes(*nodes), RULES)
    assert found.cuts == cuts


@pytest.mark.parametrize(("num_layers", "fits"), [(10, True), (12, False)])
def test_cells_are_priced_as_if_they_filled_85_percent(num_layers, fits):
    """Public design rules, case 6: a node of 32 GiB, cap 24, headroom 8. Twelve layers of 1 GiB and
    4 GiB of cells would fill 16 GiB to the byte, and fail on the first token."""
    usable = usable_of(32 * GIB, cap_bytes=24 * GIB, headroom_bytes=8 * GIB)
    assert usable == 16 * GIB
    costs = create_costs(num_layers, num_layers * GIB, kv=64 * KIB, native=65_536)
    if fits:
        assert outline(plan(costs, [Node("a", usable)], RULES)) == (65_536, 16, [10])
    else:
        with pytest.raises(PlanError):
            plan(costs, [Node("a", usable)], RULES)


def test_the_planner_never_goes_below_its_floor_by_itself():
    """Public design rules, case 7: below 65,536 only if asked to, or if the model has no more."""
    nodes = create_nodes(8, 8)
    costs = create_costs(12, 12 * GIB, kv=64 * KIB, native=131_072)
    with pytest.raises(PlanError, match=r"would fit with --ctx-size 32768, or with one more node"):
        plan(costs, nodes, RULES)
    expected = (32_768, 8, [6, 6])
    assert outline(plan(costs, nodes, replace(RULES, context=32_768))) == expected
    assert outline(plan(replace(costs, native_context=32_768), nodes, RULES)) == expected


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"context": 131_073}, r"from 1 to 131072 tokens.* got 131073"),
        ({"context": 0}, r"from 1 to 131072 tokens"),
        ({"lanes": 0}, r"--parallel must be at least 1, got 0"),
        ({"lanes": 33}, r"--parallel 33 is more than 32, what 131072 cells / 4096 per session"),
        ({"num_cells": 65_536, "lanes": 17}, r"--parallel 17 is more than 16, what 65536 cells"),
        ({"lanes": 9, "reserved_ids": 248}, r"more than 8, what \(256 ids - 248 reserved\)"),
        ({"num_cells": 0}, r"--ctx-size takes from 1"),
        ({"num_stages": 7}, r"7 stages need as many nodes, and there are 6"),
        ({"cuts": (20, 20)}, r"cuts 20,20 are not legal .* rise and lie between 1 and 39"),
        ({"cuts": (40,)}, r"cuts 40 are not legal"),
        ({"cuts": (20,), "num_stages": 3}, r"the cuts make 2 stages, not 3"),
    ],
)
def test_what_is_out_of_range_is_an_error_and_not_clamped(asked, said):
    """Public design rules, case 8, and rule PL8."""
    nodes = create_nodes(80, 80, 80, 80, 80, 80)
    with pytest.raises(UsageError, match=said):
        plan(FORTY, nodes, replace(RULES, **asked))


@pytest.mark.parametrize(
    ("nodes", "asked", "expected"),
    [
        (create_nodes(70, 70, 70, 70), None, None),
        (create_nodes(80, 80, 80, 80), None, (65_536, 16, [16, 16, 16, 14])),
        (create_nodes(*[80] * 5), 262_144, (262_144, 64, [14, 14, 14, 14, 6])),
        (create_nodes(*[80] * 5), None, (131_072, 32, [15, 15, 15, 15, 2])),
        (create_nodes(*[80] * 10), None, (131_072, 32, [15, 15, 15, 15, 2])),
        (create_nodes(115.4, 239.1, unit=GB), None, (131_072, 32, [44, 18])),
        (create_nodes(115.4, 239.1, unit=GB), 262_144, None),
    ],
)
def test_sixty_two_layers_of_315_gb(nodes, asked, expected):
    """Public design rules, cases 9 to 13: an automatic context stops at 131,072; nodes that are not
    needed are left alone."""
    request = replace(RULES, context=asked)
    if expected is None:
        with pytest.raises(PlanError):
            plan(SIXTY_TWO, nodes, request)
    else:
        assert outline(plan(SIXTY_TWO, nodes, request)) == expected


def test_recurrent_memory_is_charged_per_id_to_the_byte():
    """Public design rules, case 14."""
    per_lane = 19_132_416
    layer = LayerCosts(weights=MIB, recurrent_per_id=per_lane)
    costs = ModelCosts(layers=(layer,) * 24, native_context=262_144)
    request = replace(RULES, context=262_144, lanes=64)
    need = 24 * MIB + 29_387_390_976
    found = plan(costs, [Node("a", need)], request)
    assert found.stages[0].bytes.recurrent == 24 * 64 * per_lane == 29_387_390_976
    assert (found.lanes, found.stages[0].free_bytes) == (64, 0)
    with pytest.raises(
        PlanError, match=r"lacks 1B .* recurrent; .* with --parallel 63, or .* one more"
    ):
        plan(costs, [Node("a", need - 1)], request)
    left = plan(costs, [Node("a", need - 1)], replace(request, lanes=None))
    assert (left.lanes, left.ceiling.binding.component) == (63, "recurrent")


@pytest.mark.parametrize(
    ("reserved", "per_lane", "expected"), [(0, 3, 85), (16, 3, 80), (64, 1, 192), (256, 3, None)]
)
@pytest.mark.parametrize("context", [None, 1_048_576])
def test_lanes_share_256_ids_with_all_else(reserved, per_lane, expected, context):
    """Public design rules, case 15."""
    costs = create_costs(4, 4 * GIB, kv=KIB, native=1_048_576)
    request = PlanRequest(
        context=context, floor_context=256, reserved_ids=reserved, ids_per_lane=per_lane
    )
    nodes = create_nodes(80)
    if expected is None:
        for lanes in (None, 1):
            with pytest.raises(UsageError, match=r"no sequence id is left .* 256 of 256"):
                plan(costs, nodes, replace(request, lanes=lanes))
    else:
        found = plan(costs, nodes, request)
        assert (found.lanes, found.ceiling.binding.component) == (expected, "lanes")


@pytest.mark.parametrize(
    ("num_stages", "time_us", "is_met"), [(None, 20_000, True), (4, 40_000, False)]
)
def test_every_stage_is_a_round_trip(num_stages, time_us, is_met):
    """Public design rules, case 16: 10 ms between any two nodes, 33 ms wanted."""
    nodes = [replace(node, rtt_us=10_000) for node in create_nodes(23, 23, 23, 23)]
    costs = create_costs(40, 40 * GIB, kv=64 * KIB, native=65_536)
    found = plan(costs, nodes, replace(RULES, num_stages=num_stages, target_us=33_000))
    assert len(found.stages) == (num_stages or 2)
    assert (found.token_time_us, found.meets_target) == (time_us, is_met)


@pytest.mark.parametrize(
    ("links", "rtt_us", "expected"),
    [
        # Asymmetric: each hop in its own direction, the one back from the last stage too.
        ([("a", "b", 1_000, None), ("b", "a", 50_000, None)], None, 51_000),
        # A frame of 2 MiB at 1 MiB/s.
        ([("a", "b", 1_000, MIB), ("b", "a", 1_000, None)], None, 2_002_000),
        # Only the reverse is known; then only the nodes; then nothing.
        ([("b", "a", 7_000, None)], 3_000, 14_000),
        ([], 3_000, 6_000),
        ([], None, None),
    ],
)
def test_links_count_in_their_own_direction(links, rtt_us, expected):
    """Public design rules, case 17."""
    nodes = [replace(node, rtt_us=rtt_us) for node in create_nodes(23, 23)]
    known = tuple(
        Link(source=source, target=target, rtt_us=rtt, bytes_per_s=speed)
        for source, target, rtt, speed in links
    )
    found = plan(replace(FORTY, frame=2 * MIB), nodes, replace(RULES, links=known))
    assert found.token_time_us == expected


THIRTY_SIX = create_costs(36, 36 * GIB)


@pytest.mark.parametrize(
    ("rates", "expected"), [((2, 1), [24, 12]), ((120 * GB, 68 * GB), [23, 13])]
)
def test_layers_follow_speed_where_every_speed_is_known(rates, expected):
    """Public design rules, case 18: 18/18 would leave the fast node idle 43 % of the time."""
    nodes = [
        replace(node, bytes_per_s=rate)
        for node, rate in zip(create_nodes(33, 32), rates, strict=True)
    ]
    assert layers_of(plan(THIRTY_SIX, nodes, RULES)) == expected
    partial = [nodes[0], replace(nodes[1], bytes_per_s=None)]
    assert layers_of(plan(THIRTY_SIX, partial, RULES)) == [33, 3]


def test_memory_binds_before_speed():
    """Public design rules, case 19."""
    nodes = [Node("fast", 20 * GIB + 1, 2), Node("slow", 30 * GIB, 1)]
    found = plan(THIRTY_SIX, nodes, RULES)
    layers = {stage.node.name: stage.end_layer - stage.first_layer for stage in found.stages}
    assert layers == {"fast": 20, "slow": 16}


def test_the_head_counts_as_work_of_the_last_stage():
    """Public design rules, case 20. The table of embeddings is memory, and no work."""
    costs = create_costs(4, 4 * GIB, head=2 * GIB)
    nodes = [replace(node, bytes_per_s=1) for node in create_nodes(5, 5)]
    assert layers_of(plan(costs, nodes, RULES)) == [3, 1]
    tied = replace(costs, embedding=2 * GIB)
    found = plan(tied, nodes, RULES)
    assert layers_of(found) == [3, 1]
    assert [stage.bytes.embedding + stage.bytes.head for stage in found.stages] == [2 * GIB] * 2


def test_the_order_of_nodes_does_not_matter():
    """Rule PL7."""
    nodes = create_nodes(30, 23, 23, 9)
    found = {str(plan(FORTY, order, RULES)) for order in itertools.permutations(nodes)}
    assert len(found) == 1
    with pytest.raises(UsageError, match="node a is named twice"):
        plan(FORTY, [nodes[0], nodes[0]], RULES)
    with pytest.raises(UsageError, match="there is no node"):
        plan(FORTY, [], RULES)


@pytest.mark.parametrize("scale", [0.9, 1.0, 1.04, 1.2])
def test_sixteen_unlike_nodes_take_less_than_a_second(scale):
    """Rule PL7: at the edge between fitting and not, where the search is longest."""
    rng = random.Random(7)
    weights = [rng.randint(GIB, 5 * GIB) for _ in range(80)]
    costs = costs_with(weights, kv=160 * KIB, native=131_072)
    parts = [rng.uniform(0.5, 1.5) for _ in range(16)]
    total = scale * (sum(weights) + 65_536 * 160 * KIB / 0.85)
    nodes = [
        Node(f"n{i:02}", int(total * part / sum(parts)), 1 + i) for i, part in enumerate(parts)
    ]
    started = time.process_time()
    try:
        plan(costs, nodes, RULES)
    except PlanError as error:
        assert len(error.shortfalls) == 16
    assert time.process_time() - started < 1


def test_an_unused_node_says_why():
    """Rule PL6."""
    nodes = [*create_nodes(23, 23, 23), Node("tiny", GIB // 2)]
    found = plan(replace(FORTY, native_context=65_536), nodes, RULES)
    assert found.unused["c"].startswith("the model fits on 2 nodes as large or larger")
    assert found.unused["tiny"].startswith("too small for even one layer, which takes 1.1")


def test_given_cuts_are_kept_and_each_stage_finds_a_node():
    found = plan(FORTY, create_nodes(30, 12, 23), replace(RULES, cuts=(8, 28)))
    assert found.cuts == (8, 28)
    assert [stage.node.name for stage in found.stages] == ["b", "a", "c"]


def test_given_cuts_take_equal_nodes_in_order():
    found = plan(FORTY, create_nodes(40, 40, 40), replace(RULES, cuts=(8, 28)))
    assert [stage.node.name for stage in found.stages] == ["a", "b", "c"]


def test_given_cuts_may_share_a_node_if_they_must():
    found = plan(FORTY, create_nodes(60), replace(RULES, cuts=(8, 28)))
    assert [stage.node.name for stage in found.stages] == ["a", "a", "a"]
    assert {stage.free_bytes for stage in found.stages} == {
        60 * GIB - sum(stage.bytes.total for stage in found.stages)
    }
    apart = plan(FORTY, create_nodes(60, 1), replace(RULES, cuts=(20,)))
    assert [stage.node.name for stage in apart.stages] == ["a", "a"]


def alternating(num_layers: int) -> ModelCosts:
    """Every fourth layer has cells, the others have states; a stage needs both."""
    layers = tuple(
        LayerCosts(weights=GIB, attention_per_cell=KIB)
        if (layer + 1) % 4 == 0
        else LayerCosts(weights=GIB, recurrent_per_id=MIB)
        for layer in range(num_layers)
    )

    def why_illegal(lo: int, hi: int) -> str | None:
        kinds = {(layer + 1) % 4 == 0 for layer in range(lo, hi)}
        return None if len(kinds) == 2 else f"layers {lo}:{hi} lack a kind"

    return ModelCosts(
        layers=layers, native_context=65_536, why_illegal=why_illegal, min_legal_layers=4
    )


def test_only_legal_cuts_are_made():
    """Rule SC4: an illegal stage ends llama.cpp's process. Seven layers fit the first node, which
    would leave the last one an attention layer only."""
    found = plan(alternating(8), create_nodes(7.5, 7.5), RULES)
    assert found.cuts == (6,)
    with pytest.raises(UsageError, match=r"^stage 1: layers 7:8 lack a kind$"):
        plan(alternating(8), create_nodes(7.5, 7.5), replace(RULES, cuts=(7,)))
    with pytest.raises(PlanError):
        plan(alternating(8), create_nodes(7.5, 1.5), RULES)


def test_lanes_give_way_before_the_context_does():
    """8 GiB of weights, 150.6 MiB of cells, and 6 MiB of states for each of 5 ids."""
    found = plan(alternating(8), create_nodes(8 * 1024 + 151 + 30, unit=MIB), RULES)
    assert (found.context, found.lanes) == (65_536, 5)
    assert str(found.ceiling) == "5, bound by stage 0 recurrent"
    reserved = replace(RULES, reserved_ids=4)
    nodes = create_nodes(8 * 1024 + 181, unit=MIB)
    assert plan(alternating(8), nodes, reserved).lanes == 1
    # Six ids' states, and there is room for five.
    with pytest.raises(PlanError, match="--parallel 1"):
        plan(alternating(8), nodes, replace(reserved, lanes=2))


def test_the_ceiling_is_the_least_term_and_lowering_it_is_the_operators():
    found = plan(FORTY, create_nodes(23, 23), RULES)
    assert str(found.ceiling) == "16, bound by stage 0 attention"
    assert found.ceiling.binding.term == "65536 cells / 4096 per session"
    lowered = plan(FORTY, create_nodes(23, 23), replace(RULES, lanes=3))
    assert str(lowered.ceiling) == "3, bound by stage all lanes"


def test_the_pool_may_be_larger_than_what_one_request_may_fill():
    costs = create_costs(4, 4 * GIB, kv=KIB, native=8192)
    assert outline(plan(costs, create_nodes(8), RULES)) == (8192, 2, [4])
    found = plan(costs, create_nodes(8), replace(RULES, num_cells=65_536))
    assert (found.context, found.num_cells, found.lanes) == (8192, 65_536, 16)


def test_an_automatic_context_need_not_be_a_power_of_two():
    costs = create_costs(4, 4 * GIB, kv=KIB, native=100_000)
    assert plan(costs, create_nodes(8), RULES).context == 100_000
    assert plan(replace(costs, native_context=40_960), create_nodes(8), RULES).context == 40_960


def test_one_machine_holds_as_many_stages_as_are_asked_for_out_of_one_memory():
    costs = create_costs(8, 8 * MIB, kv=8 * KIB, native=1024, common=7, head=MIB)
    request = PlanRequest(num_stages=3)
    sizes = StageSizes(costs, num_cells=1024, num_ids=4)
    total = sum(sizes.total(lo, hi) for lo, hi in ((0, 3), (3, 6), (6, 8)))
    found = plan(costs, [Node("a", total)], request)
    assert layers_of(found) == [3, 3, 2]
    assert {stage.free_bytes for stage in found.stages} == {0}
    with pytest.raises(PlanError, match=r"a \(.*\) lacks 1B for layers 0:3, 3:6, 6:8") as caught:
        plan(costs, [Node("a", total - 1)], request)
    assert "would fit with --ctx-size 512" in str(caught.value)


def test_stages_that_no_cuts_can_make_are_refused_before_memory_comes_into_it():
    def only_in_pairs(lo: int, hi: int) -> str | None:
        return None if (hi - lo) % 2 == 0 else "half a pair"

    costs = replace(create_costs(8, 8, native=1024), why_illegal=only_in_pairs)
    assert layers_of(plan(costs, create_nodes(1), PlanRequest(num_stages=4))) == [2, 2, 2, 2]
    for nodes in (create_nodes(1), create_nodes(*[1] * 5)):
        with pytest.raises(UsageError, match="cannot cut this model into 5 stages: no cuts"):
            plan(costs, nodes, PlanRequest(num_stages=5))
