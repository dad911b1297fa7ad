"""Layers onto nodes: contiguous runs that fit, that llama.cpp accepts, one run for each node.

Four ways. :func:`pack` fills the largest node first and takes other orders only where that one
fails. :func:`balance` moves the borders of a packing until the slowest stage is as fast as it can
be. :func:`split` cuts a model for one machine. :func:`seat` finds nodes for borders that are given.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import NamedTuple

from coordinator.costs import StageSizes
from coordinator.nodes import Node

_MAX_STATES = 500
"""Dead ends a packing may meet before it gives up: orders of unlike nodes are without number."""


class Run(NamedTuple):
    """Layers [lo, hi) on a node."""

    node: Node
    lo: int
    hi: int


def pack(nodes: Sequence[Node], sizes: StageSizes, num_stages: int) -> list[Run] | None:
    """The model on the ``num_stages`` largest of ``nodes`` (given largest first), None if it does
    not fit. Any packing on other nodes fits on these, too, so no subsets need be tried."""
    if num_stages > min(len(nodes), sizes.num_layers):
        return None
    return _Packing(nodes[:num_stages], sizes).runs()


class _Packing:
    """A search over who comes next, remembering dead ends. ``left`` are the nodes not yet used,
    largest first, so equal ones make equal states."""

    def __init__(self, nodes: Sequence[Node], sizes: StageSizes):
        self._nodes, self._sizes = tuple(nodes), sizes
        self._dead: set[tuple[tuple[int, ...], int]] = set()
        self._most_layers: dict[int, int] = {}
        self._latest = _latest_borders(sizes, len(self._nodes))

    def runs(self) -> list[Run] | None:
        return self._place(self._nodes, 0)

    def _place(self, left: tuple[Node, ...], lo: int) -> list[Run] | None:
        if not left:
            return [] if lo == self._sizes.num_layers else None
        state = (tuple(node.usable_bytes for node in left), lo)
        if state in self._dead or len(self._dead) >= _MAX_STATES:
            return None
        if self._may_fit(left, lo):
            tried = set()
            for index, node in enumerate(left):
                if node.usable_bytes in tried:
                    continue
                tried.add(node.usable_bytes)
                rest = left[:index] + left[index + 1 :]
                for hi in self._borders(node, lo, len(rest)):
                    if (found := self._place(rest, hi)) is not None:
                        return [Run(node, lo, hi), *found]
        self._dead.add(state)
        return None

    def _may_fit(self, left: tuple[Node, ...], lo: int) -> bool:
        sizes = self._sizes
        if sum(node.usable_bytes for node in left) < sizes.total(lo, sizes.num_layers):
            return False
        return sum(self._most(node.usable_bytes) for node in left) >= sizes.num_layers - lo

    def _most(self, usable_bytes: int) -> int:
        """The most layers that fit so many bytes, wherever they begin."""
        if usable_bytes not in self._most_layers:
            reach = self._sizes.reach
            starts = range(self._sizes.num_layers)
            self._most_layers[usable_bytes] = max(reach(usable_bytes, lo) - lo for lo in starts)
        return self._most_layers[usable_bytes]

    def _borders(self, node: Node, lo: int, num_rest: int) -> list[int]:
        """Where a stage of ``node`` may end, furthest first. Ending earlier never helps memory; it
        may leave the next stage a kind of layer that it lacks, hence as many as that can take."""
        costs, num_layers = self._sizes.costs, self._sizes.num_layers
        far = min(self._sizes.reach(node.usable_bytes, lo), self._latest[num_rest])
        if not num_rest and far < num_layers:
            return []
        legal = (hi for hi in range(far, lo, -1) if costs.why_illegal(lo, hi) is None)
        found: list[int] = []
        for hi in legal:
            if len(found) == (costs.min_legal_layers if num_rest else 1):
                break
            found.append(hi)
        return found if num_rest or found == [num_layers] else []


def _latest_borders(sizes: StageSizes, num_stages: int) -> list[int]:
    """``[n]`` is the last border behind which ``n`` legal stages still find layers; 0 if none."""
    latest = [sizes.num_layers]
    for _ in range(num_stages):
        starts = range(latest[-1] - 1, 0, -1)
        legal = (lo for lo in starts if sizes.costs.why_illegal(lo, latest[-1]) is None)
        latest.append(next(legal, 0))
    return latest


def balance(runs: Sequence[Run], sizes: StageSizes, rates: Sequence[int]) -> list[Run]:
    """The same nodes in the same order, cut so that the slowest stage takes the least time for its
    weights at ``rates`` (bytes a second), and the others are as even as that permits."""
    return _evenest([run.node for run in runs], sizes, sizes.work, rates) or list(runs)


def split(node: Node, sizes: StageSizes, num_stages: int) -> list[Run] | None:
    """The model in ``num_stages`` of the same work, all on ``node``, None if no cuts are legal.

    There the stages compute for a crowd, and rows cost more than reading the weights. Whether they
    fit is another question, and hardly one of where the cuts are.
    """
    roomy = replace(node, usable_bytes=sizes.total(0, sizes.num_layers))
    found = _evenest([roomy] * num_stages, sizes, sizes.crowd_work, [1] * num_stages)
    return found and [Run(node, lo, hi) for _, lo, hi in found]


def _evenest(
    nodes: Sequence[Node],
    sizes: StageSizes,
    work: Callable[[int, int], int],
    rates: Sequence[int],
) -> list[Run] | None:
    scale = lcm(*rates)  # times in integers: work / rate, times scale

    def time_of(stage: int, lo: int, hi: int) -> int:
        return work(lo, hi) * (scale // rates[stage])

    slowest = _Cut(nodes, sizes, time_of, add=max).best()
    if slowest is None:
        return None

    def squared(stage: int, lo: int, hi: int) -> int | None:
        time = time_of(stage, lo, hi)
        return time * time if time <= slowest.cost else None

    even = _Cut(nodes, sizes, squared, add=int.__add__).best()
    return list((even or slowest).runs)


class _Found(NamedTuple):
    cost: int
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class _Cut:
    """The cheapest borders for ``nodes`` in their order. ``cost_of`` a stage is None where it may
    not be; ``add`` makes one cost of a stage's and the rest's."""

    nodes: Sequence[Node]
    sizes: StageSizes
    cost_of: Callable[[int, int, int], int | None]
    add: Callable[[int, int], int]

    def best(self) -> _Found | None:
        num_layers = self.sizes.num_layers
        # behind[lo]: the best of the stages after this one, for layers [lo, end).
        behind: dict[int, _Found] = {num_layers: _Found(0, ())}
        for stage in reversed(range(len(self.nodes))):
            starts = range(num_layers) if stage else (0,)
            options = {lo: self._best_from(stage, lo, behind) for lo in starts}
            behind = {lo: found for lo, found in options.items() if found}
        return behind.get(0)

    def _best_from(self, stage: int, lo: int, behind: dict[int, _Found]) -> _Found | None:
        node, sizes = self.nodes[stage], self.sizes
        best: _Found | None = None
        for hi in range(sizes.reach(node.usable_bytes, lo), lo, -1):
            rest = behind.get(hi)
            if rest is None or sizes.costs.why_illegal(lo, hi) is not None:
                continue
            own = self.cost_of(stage, lo, hi)
            if own is None:
                continue
            cost = self.add(own, rest.cost)
            if best is None or cost < best.cost:
                best = _Found(cost, (Run(node, lo, hi), *rest.runs))
        return best


def match_by_size(
    borders: Sequence[int], nodes: Sequence[Node], sizes: StageSizes
) -> list[tuple[Node, tuple[int, int]]]:
    """The stages between ``borders``, the largest with the largest node and so on. If one does not
    fit, no other one-to-one matching does. More stages than nodes: each goes where most is left."""
    stages = sorted(itertools.pairwise(borders), key=lambda stage: -sizes.total(*stage))
    if len(stages) <= len(nodes):
        return list(zip(nodes, stages, strict=False))
    return _share(stages, nodes, sizes)


def _share(
    stages: Sequence[tuple[int, int]], nodes: Sequence[Node], sizes: StageSizes
) -> list[tuple[Node, tuple[int, int]]]:
    left = {node.name: node.usable_bytes for node in nodes}
    shared = []
    for stage in stages:
        node = max(nodes, key=lambda node: left[node.name])
        left[node.name] -= sizes.total(*stage)
        shared.append((node, stage))
    return shared


def seat(borders: Sequence[int], nodes: Sequence[Node], sizes: StageSizes) -> list[Run] | None:
    """A node for each stage between ``borders``: in the order of the nodes if they fit so, else its
    own if it can have one, else shared. None if the stages do not fit."""
    stages = list(itertools.pairwise(borders))
    by_need = sorted(stages, key=lambda stage: -sizes.total(*stage))
    ways = [match_by_size(borders, nodes, sizes), _share(by_need, nodes, sizes)]
    if len(stages) <= len(nodes):
        ways.insert(0, list(zip(nodes, stages, strict=False)))
    for pairs in ways:
        taken: dict[str, int] = {}
        for node, stage in pairs:
            taken[node.name] = taken.get(node.name, 0) + sizes.total(*stage)
        if all(taken.get(node.name, 0) <= node.usable_bytes for node in nodes):
            return sorted((Run(node, *stage) for node, stage in pairs), key=lambda run: run.lo)
    return None
