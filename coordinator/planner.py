"""Who runs which layers, with how large a pool, for how many sessions at once. Pure.

The order of wishes is fixed: the longest context, then the fewest nodes (every stage more is a hop
more), then the most lanes. The first that fits is the plan. Where every node's speed is known the
borders then move until the slowest stage is as fast as it can be; nothing else depends on speed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from coordinator.ceiling import Ceiling, Term, bound
from coordinator.costs import ModelCosts, StageBytes, StageSizes
from coordinator.layout import Run, balance, pack, seat, split
from coordinator.nodes import Node, by_size, token_time_us
from coordinator.request import PlanRequest
from coordinator.shortfall import plan_error
from skippy_mesh.config import MemoryNeed
from skippy_mesh.errors import UsageError
from skippy_mesh.sizes import format_size


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """``free_bytes`` of the node, beside this stage and others of the mesh on it."""

    index: int
    node: Node
    first_layer: int
    end_layer: int
    bytes: StageBytes
    need: MemoryNeed
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """``context`` for one request out of ``num_cells`` for all. ``unused`` says why, by node.
    ``token_time_us`` is None where the network between the stages is not known."""

    stages: tuple[StagePlan, ...]
    context: int
    num_cells: int
    ceiling: Ceiling
    unused: dict[str, str]
    token_time_us: int | None
    meets_target: bool | None

    @property
    def lanes(self) -> int:
        return self.ceiling.value

    @property
    def cuts(self) -> tuple[int, ...]:
        return tuple(stage.first_layer for stage in self.stages[1:])


def plan(costs: ModelCosts, nodes: Sequence[Node], request: PlanRequest | None = None) -> Plan:
    """The best plan for ``request``, whatever the order of ``nodes``.

    :class:`UsageError` if it asks for what no memory could give, :class:`PlanError` if these nodes
    lack memory for it.
    """
    request = request or PlanRequest()
    nodes = by_size(nodes)
    request.check(costs, len(nodes))
    _check_divisible(costs, nodes, request)
    found = _search(costs, nodes, request)
    if found is None:
        raise plan_error(
            costs, nodes, request, lambda other, others: bool(_search(costs, others, other))
        )
    return found


def _check_divisible(costs: ModelCosts, nodes: Sequence[Node], request: PlanRequest) -> None:
    """Before memory comes into it: can there be so many legal stages?"""
    sizes = StageSizes(costs, num_cells=1, num_ids=1)
    if request.num_stages and split(nodes[0], sizes, request.num_stages) is None:
        raise UsageError(
            f"cannot cut this model into {request.num_stages} stages: no cuts leave each of them a "
            f"layer of every kind ({', '.join(costs.components)}); choose fewer"
        )


def _search(costs: ModelCosts, nodes: Sequence[Node], request: PlanRequest) -> Plan | None:
    counts: Sequence[int] = range(1, min(len(nodes), len(costs.layers)) + 1)
    if request.num_stages is not None:
        counts = (request.num_stages,)
    if request.cuts is not None:
        counts = (len(request.cuts) + 1,)
    pools = request.pools(costs.native_context)
    for (context, num_cells), num_stages in itertools.product(pools, counts):
        most = request.most_lanes(num_cells)
        if request.lanes is not None and request.lanes > most:
            continue
        fit = _Fit(costs, nodes, request, num_cells, num_stages)
        lanes = fit.most_lanes(most if request.lanes is None else request.lanes)
        if lanes:
            return _plan_of(fit, fit.runs(lanes), context, lanes)
    return None


@dataclass(frozen=True, slots=True)
class _Fit:
    """One try: so many cells on so many nodes. Only recurrent memory depends on the lanes."""

    costs: ModelCosts
    nodes: Sequence[Node]
    request: PlanRequest
    num_cells: int
    num_stages: int

    def most_lanes(self, most: int) -> int:
        """The most lanes that fit, up to ``most``; 0 if none do, or not all that were asked for."""
        if self._packed(most):
            return most
        is_given = self.request.lanes is not None or "recurrent" not in self.costs.components
        if is_given or not self._packed(1):
            return 0
        low, high = 1, most  # low fits, high does not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._packed(middle) else (low, middle)
        return low

    def runs(self, lanes: int) -> list[Run]:
        runs = self._packed(lanes)
        assert runs, "lanes that were found to fit"
        if self.request.cuts is not None or self._is_shared:
            return runs
        rates = [run.node.bytes_per_s for run in runs]
        if self.request.num_stages is not None and not any(rates):
            rates = [1] * len(rates)  # who asks for a number of stages wants them alike
        known = [rate for rate in rates if rate is not None]
        return balance(runs, self.sizes(lanes), known) if len(known) == len(runs) else runs

    def sizes(self, lanes: int) -> StageSizes:
        num_ids = self.request.num_ids(lanes)
        return StageSizes(self.costs, num_cells=self.num_cells, num_ids=num_ids)

    @property
    def _is_shared(self) -> bool:
        """One machine is as many nodes as stages were asked for, out of the same memory."""
        return len(self.nodes) == 1 < self.num_stages

    def _packed(self, lanes: int) -> list[Run] | None:
        sizes = self.sizes(lanes)
        if self.request.cuts is not None:
            return seat((0, *self.request.cuts, len(self.costs.layers)), self.nodes, sizes)
        if self._is_shared:
            runs = split(self.nodes[0], sizes, self.num_stages) or []
            need = sum(sizes.total(lo, hi) for _, lo, hi in runs)
            return runs if need <= self.nodes[0].usable_bytes else None
        return pack(self.nodes, sizes, self.num_stages)


def _plan_of(fit: _Fit, runs: Sequence[Run], context: int, lanes: int) -> Plan:
    sizes, request = fit.sizes(lanes), fit.request
    taken: dict[str, int] = {}
    for node, lo, hi in runs:
        taken[node.name] = taken.get(node.name, 0) + sizes.total(lo, hi)
    stages = tuple(
        StagePlan(
            index=index,
            node=node,
            first_layer=lo,
            end_layer=hi,
            bytes=sizes.parts(lo, hi),
            need=sizes.need(lo, hi),
            free_bytes=node.usable_bytes - taken[node.name],
        )
        for index, (node, lo, hi) in enumerate(runs)
    )
    terms = tuple(term for stage in stages for term in _terms(stage, stages, fit, sizes))
    time_us = token_time_us([run.node for run in runs], request.links, frame_bytes=fit.costs.frame)
    is_known = request.target_us is not None and time_us is not None
    return Plan(
        stages=stages,
        context=context,
        num_cells=fit.num_cells,
        ceiling=bound(terms, parallel=request.lanes),
        unused=_unused(fit, taken, sizes),
        token_time_us=time_us,
        meets_target=(time_us or 0) <= (request.target_us or 0) if is_known else None,
    )


def _terms(
    stage: StagePlan, stages: Sequence[StagePlan], fit: _Fit, sizes: StageSizes
) -> Iterator[Term]:
    """What bounds the sessions of a stage, with the arithmetic."""
    request, num_cells, name = fit.request, fit.num_cells, str(stage.index)
    yield Term(request.lanes_of_ids, name, "lanes", request.ids_term)
    layers = fit.costs.layers[stage.first_layer : stage.end_layer]
    num_lanes = max(num_cells // request.floor_context, 1)
    has_window = any(layer.window_per_cell for layer in layers)
    if not has_window or any(layer.attention_per_cell for layer in layers):
        yield Term(num_lanes, name, "attention", request.cells_term(num_cells))
    if has_window:
        yield Term(num_lanes, name, "window", request.cells_term(num_cells))
    here = [other for other in stages if other.node.name == stage.node.name]
    per_id = sum(sizes.recurrent_per_id(s.first_layer, s.end_layer) for s in here)
    if per_id:
        room = stage.free_bytes + sum(other.bytes.recurrent for other in here)
        num_lanes = request.lanes_of_states(room // per_id)
        reserved = request.num_ids(max(num_lanes, 0)) - max(num_lanes, 0) * request.ids_per_lane
        text = f"({room} bytes / {per_id} per id - {reserved} reserved)"
        yield Term(num_lanes, name, "recurrent", text + request.per_lane)


def _unused(fit: _Fit, taken: dict[str, int], sizes: StageSizes) -> dict[str, str]:
    """Why the others have nothing to do."""
    num_stages, request = fit.num_stages, fit.request
    least = min(sizes.total(layer, layer + 1) for layer in range(sizes.num_layers))
    reasons = {}
    for node in fit.nodes:
        if node.name in taken:
            continue
        if node.usable_bytes < least:
            reason = f"too small for even one layer, which takes {format_size(least)}"
        elif request.cuts is not None or request.num_stages is not None:
            reason = f"{num_stages} stages were asked for, and nodes as large or larger hold them"
        else:
            on = f"{num_stages} nodes" if num_stages > 1 else "one node"
            reason = f"the model fits on {on} as large or larger, and a stage more is a hop more"
        reasons[node.name] = reason
    return reasons
