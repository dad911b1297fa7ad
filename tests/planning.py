"""Models and nodes of round numbers, for tests of the planner."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from coordinator.costs import LayerCosts, ModelCosts
from coordinator.nodes import Node
from coordinator.planner import Plan
from coordinator.request import PlanRequest

KIB, MIB, GIB = 2**10, 2**20, 2**30


def spread(total: int, num_layers: int) -> list[int]:
    """``total`` over the layers in integers that differ by at most one and lose nothing."""
    ends = [total * layer // num_layers for layer in range(num_layers + 1)]
    return [hi - lo for lo, hi in itertools.pairwise(ends)]


def create_costs(
    num_layers: int, total: int, *, kv: int = 0, native: int = 65_536, **knobs: object
) -> ModelCosts:
    """``total`` bytes of weights and ``kv`` bytes per token, over all layers."""
    return costs_with(spread(total, num_layers), kv=kv, native=native, **knobs)


def costs_with(
    weights: Sequence[int], *, kv: int = 0, native: int = 65_536, **knobs: object
) -> ModelCosts:
    per_cell = spread(kv, len(weights))
    layers = tuple(
        LayerCosts(weights=size, attention_per_cell=cell)
        for size, cell in zip(weights, per_cell, strict=True)
    )
    return ModelCosts(layers=layers, native_context=native, **knobs)  # type: ignore[arg-type]


def create_nodes(*sizes: float, unit: int = GIB) -> list[Node]:
    """Nodes a, b, c and so on, of so many units."""
    return [Node(chr(97 + index), int(size * unit)) for index, size in enumerate(sizes)]


def layers_of(plan: Plan) -> list[int]:
    """How many layers each stage has."""
    return [stage.end_layer - stage.first_layer for stage in plan.stages]


def outline(plan: Plan) -> tuple[int, int, list[int]]:
    """(context, lanes, layers of each stage)."""
    return plan.context, plan.lanes, layers_of(plan)


RULES = PlanRequest(floor_context=4096)
"""As in the numeric cases: each session counts on 4,096 cells."""

FORTY = create_costs(40, 40 * GIB, kv=64 * KIB, native=131_072)
