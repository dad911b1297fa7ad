"""What is said while there is no room. Without these an operator waits and learns nothing."""

from __future__ import annotations

import pytest

from coordinator.placement import why_unplaced

ONE = [("head", {"CPU": 4.0, "memory": 1e9})]
TWO = [("a", {"CPU": 2.0}), ("b", {"CPU": 6.0})]


@pytest.mark.parametrize(
    ("cpus", "nodes", "spread", "said"),
    [
        ([2, 2, 2], ONE, False, "stage 2 (2 CPU): head has 4 CPU free"),
        ([8], TWO, False, "stage 0 (8 CPU): a has 2 CPU free; b has 6 CPU free"),
        ([2, 6], TWO, True, "all stages at once, each on a node of its own: a has"),
        ([1, 1], ONE, True, "stage 1 (1 CPU), each on a node of its own: head has 4 CPU free"),
        ([4, 4], TWO, False, "stage 1 (4 CPU): a has"),
        ([1], [], False, "stage 0 (1 CPU): there is no node"),
        ([1], [("full", {})], False, "stage 0 (1 CPU): full has 0 CPU free"),
    ],
)
def test_each_unmet_bundle_and_what_the_nodes_have(cpus, nodes, spread, said):
    bundles = [{"CPU": float(cpu)} for cpu in cpus]
    assert why_unplaced(bundles, nodes, spread=spread).startswith(f"no room for {said}")


def test_a_graphics_card_is_told_of():
    why = why_unplaced([{"CPU": 1.0, "GPU": 1.0}], ONE, spread=False)
    assert why == "no room for stage 0 (1 CPU, 1 GPU): head has 4 CPU free"
