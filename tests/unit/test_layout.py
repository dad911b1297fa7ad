"""Layers onto nodes, against trying everything. A packing that is missed is a cluster that is told
to buy memory it does not need."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import pytest

from coordinator.costs import LayerCosts, ModelCosts, StageSizes
from coordinator.layout import Run, balance, pack, seat, split
from coordinator.nodes import Node, by_size


def random_model(rng: random.Random) -> StageSizes:
    """Up to seven layers, of one kind or of two that each stage needs, with ends of their own."""
    num_layers = rng.randint(1, 7)
    layers = tuple(LayerCosts(weights=rng.randint(1, 9)) for _ in range(num_layers))
    kinds = [rng.random() < 0.4 for _ in layers]
    is_hybrid = rng.random() < 0.5 and len(set(kinds)) == 2

    def why_illegal(lo: int, hi: int) -> str | None:
        is_legal = not is_hybrid or hi - lo == num_layers or len(set(kinds[lo:hi])) == 2
        return None if is_legal else "one kind only"

    runs = [len(list(run)) for _, run in itertools.groupby(kinds)]
    costs = ModelCosts(
        layers=layers,
        native_context=1,
        embedding=rng.randint(0, 5),
        head=rng.randint(0, 5),
        common=rng.randint(0, 1),
        why_illegal=why_illegal,
        min_legal_layers=max(runs) + 1 if is_hybrid else 1,
    )
    return StageSizes(costs, num_cells=1, num_ids=1)


def random_nodes(rng: random.Random, sizes: StageSizes) -> list[Node]:
    count = rng.randint(1, 4)
    share = sizes.total(0, sizes.num_layers) / count
    return by_size(Node(f"n{i}", int(share * rng.uniform(0.6, 1.5))) for i in range(count))


def all_cuts(sizes: StageSizes, num_stages: int) -> Iterator[list[tuple[int, int]]]:
    for cuts in itertools.combinations(range(1, sizes.num_layers), num_stages - 1):
        stages = list(itertools.pairwise((0, *cuts, sizes.num_layers)))
        if all(sizes.costs.why_illegal(lo, hi) is None for lo, hi in stages):
            yield stages


def fits(stages: Sequence[tuple[int, int]], nodes: Sequence[Node], sizes: StageSizes) -> bool:
    return all(
        sizes.total(*stage) <= node.usable_bytes for stage, node in zip(stages, nodes, strict=True)
    )


@pytest.mark.parametrize("seed", range(300))
def test_a_packing_is_found_whenever_there_is_one(seed):
    rng = random.Random(seed)
    sizes = random_model(rng)
    nodes = random_nodes(rng, sizes)
    for num_stages in range(1, len(nodes) + 1):
        found = pack(nodes, sizes, num_stages)
        exists = any(
            fits(stages, order, sizes)
            for order in itertools.permutations(nodes, num_stages)
            for stages in all_cuts(sizes, num_stages)
        )
        assert (found is not None) == exists
        if found:
            stages = [(run.lo, run.hi) for run in found]
            assert stages in list(all_cuts(sizes, num_stages))
            assert fits(stages, [run.node for run in found], sizes)
            assert len({run.node.name for run in found}) == num_stages


@pytest.mark.parametrize("seed", range(100))
def test_no_cut_that_fits_has_a_faster_slowest_stage(seed):
    rng = random.Random(seed)
    sizes = random_model(rng)
    nodes = random_nodes(rng, sizes)
    rates = [rng.randint(1, 4) for _ in nodes]
    for num_stages in range(1, len(nodes) + 1):
        packed = pack(nodes, sizes, num_stages)
        if packed is None:
            continue
        order = [run.node for run in packed]

        def slowest(stages: Sequence[tuple[int, int]]) -> float:
            works = [sizes.work(*stage) for stage in stages]
            return max(work / rate for work, rate in zip(works, rates, strict=False))

        found = balance(packed, sizes, rates[:num_stages])
        assert [run.node for run in found] == order
        assert fits([(run.lo, run.hi) for run in found], order, sizes)
        least = min(slowest(s) for s in all_cuts(sizes, num_stages) if fits(s, order, sizes))
        assert slowest([(run.lo, run.hi) for run in found]) == pytest.approx(least)


@pytest.mark.parametrize("seed", range(100))
def test_given_cuts_find_nodes_whenever_one_for_each_would_do(seed):
    rng = random.Random(seed)
    sizes = random_model(rng)
    nodes = random_nodes(rng, sizes)
    for num_stages in range(1, len(nodes) + 1):
        for stages in all_cuts(sizes, num_stages):
            orders = itertools.permutations(nodes, num_stages)
            found = seat([0, *(hi for _, hi in stages)], nodes, sizes)
            if any(fits(stages, order, sizes) for order in orders):
                assert found and len({run.node.name for run in found}) == num_stages
            if found:
                taken = dict.fromkeys((node.name for node in nodes), 0)
                for node, lo, hi in found:
                    taken[node.name] += sizes.total(lo, hi)
                assert all(taken[node.name] <= node.usable_bytes for node in nodes)
                assert found == [Run(run.node, *s) for run, s in zip(found, stages, strict=True)]


@pytest.mark.parametrize("seed", range(200))
def test_one_machine_is_cut_as_evenly_as_can_be(seed):
    rng = random.Random(seed)
    sizes = random_model(rng)
    for num_stages in range(1, sizes.num_layers + 1):
        found = split(Node("a", 1), sizes, num_stages)
        works = [[sizes.crowd_work(*stage) for stage in cut] for cut in all_cuts(sizes, num_stages)]
        if not works:
            assert found is None
            continue
        assert [run.lo for run in found] == [0, *(run.hi for run in found[:-1])]
        assert max(sizes.crowd_work(lo, hi) for _, lo, hi in found) == min(map(max, works))
        assert {run.node for run in found} == {Node("a", 1)}
