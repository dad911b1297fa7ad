"""Why nothing fits, and what would: advice that does not do when followed is worse than none."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from coordinator.nodes import Node
from coordinator.planner import plan
from skippy_mesh.errors import PlanError
from tests.planning import FORTY, GIB, KIB, RULES, costs_with, create_costs, create_nodes


@pytest.mark.parametrize("seed", range(30))
def test_what_an_error_asks_for_is_enough(seed):
    """Rule PL6. Memory that a message names and that then does not do is worse than no advice."""
    rng = random.Random(seed)
    weights = [rng.randint(1, 9) * GIB for _ in range(rng.randint(2, 20))]
    costs = costs_with(weights, kv=64 * KIB, head=rng.randint(0, 4) * GIB)
    share = sum(weights) / rng.randint(1, 4)
    nodes = [Node(f"n{i}", int(rng.uniform(0.2, 0.8) * share)) for i in range(rng.randint(1, 4))]
    try:
        plan(costs, nodes, RULES)
    except PlanError as error:
        for name, num_bytes in error.shortfalls.items():
            assert num_bytes > 0
            grown = [
                replace(node, usable_bytes=node.usable_bytes + num_bytes * (node.name == name))
                for node in nodes
            ]
            plan(costs, grown, RULES)


@pytest.mark.parametrize("num_more", [1, 3, 9])
def test_the_number_of_nodes_that_an_error_asks_for_is_enough_and_not_too_many(num_more):
    costs = create_costs(40, 40 * GIB, kv=64 * KIB, native=65_536)
    num_needed = -(-40 // 4)  # 4.5 GiB hold four layers with their cells
    nodes = [Node(f"n{index}", 4 * GIB + GIB // 2) for index in range(num_needed - num_more)]
    said = f"{num_more} more nodes" if num_more > 1 else "one more node"
    with pytest.raises(PlanError, match=rf"would fit with {said} of 4\.50GiB"):
        plan(costs, nodes, RULES)


def test_a_model_that_does_not_fit_names_each_nodes_blocker():
    """Rule PL6: what is short, where, and by which component."""
    with pytest.raises(PlanError) as caught:
        plan(create_costs(10, 20 * GIB, kv=64 * KIB), create_nodes(11, 11), RULES)
    text = str(caught.value)
    assert "\n" not in text
    assert "65536 cells and 1 lane take at least 24.71GiB, and 2 nodes have 22.00GiB" in text
    assert "each of a, b (11.00GiB) lacks 3.83GiB for layers 0:6, by its weights" in text
    assert text.endswith(
        "it would fit with --ctx-size 16384, or with one more node of 11.00GiB, or with 3.83GiB "
        "more on a"
    )
    assert caught.value.shortfalls.keys() == {"a", "b"}


def test_given_cuts_that_do_not_fit_are_refused_with_the_reason_per_stage():
    with pytest.raises(PlanError) as caught:
        plan(FORTY, create_nodes(23, 23), replace(RULES, cuts=(10,)))
    assert "lacks 10.53GiB for layers 10:40" in str(caught.value)
    assert "it would fit with other cuts" in str(caught.value)
    assert list(caught.value.shortfalls) == ["a"]
