"""Why nothing fits: what each node lacks, and the smallest change that would help."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from coordinator.costs import ModelCosts, StageSizes
from coordinator.layout import match_by_size, split
from coordinator.nodes import Node, by_size
from coordinator.request import PlanRequest
from skippy_mesh.errors import PlanError
from skippy_mesh.sizes import format_size

Fits = Callable[[PlanRequest, Sequence[Node]], bool]

_MIN_CELLS = 256
_MAX_MORE_NODES = 64


@dataclass(frozen=True, slots=True)
class Shortfall:
    """``num_bytes`` more on ``node`` and it holds ``runs`` of layers: with given cuts its own, else
    all that the other nodes leave, so that nothing else need change. ``component`` is what no
    longer fits there, counted in the order of :class:`StageBytes`."""

    node: Node
    num_bytes: int
    component: str
    runs: tuple[tuple[int, int], ...]

    def told_of(self, names: Sequence[str]) -> str:
        """The same sentence for all nodes that lack the same."""
        layers = ", ".join(f"{lo}:{hi}" for lo, hi in self.runs)
        size = format_size(self.node.usable_bytes)
        who = f"each of {', '.join(names)}" if len(names) > 1 else names[0]
        return (
            f"{who} ({size}) lacks {format_size(self.num_bytes, round_up=True)} for layers "
            f"{layers}, by its {self.component}"
        )


def plan_error(
    costs: ModelCosts, nodes: Sequence[Node], request: PlanRequest, fits: Fits
) -> PlanError:
    """The error for a ``request`` that does not fit ``nodes``, largest first. ``fits`` tells
    whether another request would, or others."""
    num_cells = request.least_pool(costs.native_context)
    num_ids = request.num_ids(request.lanes or 1)
    sizes = StageSizes(costs, num_cells=num_cells, num_ids=num_ids)
    cuts = _cuts_asked_for(nodes, request, sizes)
    if cuts is not None:
        shortfalls = _of_cuts((0, *cuts, sizes.num_layers), nodes, sizes)
    else:
        shortfalls = [_of_node(node, nodes, sizes) for node in nodes]
    changes = list(_changes(request, num_cells, lambda other: fits(other, nodes)))
    if request.cuts is None and request.num_stages is None:
        changes.extend(_more_nodes(nodes, lambda more: fits(request, more)))
    if request.cuts is None or len(shortfalls) == 1:
        least = min(shortfalls, key=lambda shortfall: shortfall.num_bytes)
        more = format_size(least.num_bytes, round_up=True)
        changes.append(f"{more} more on {least.node.name}")
    usable = sum(node.usable_bytes for node in nodes)
    lanes = f"{request.lanes} lanes" if (request.lanes or 1) > 1 else "1 lane"
    message = (
        f"the model does not fit: {num_cells} cells and {lanes} take at least "
        f"{format_size(sizes.total(0, sizes.num_layers))}, and {_nodes(len(nodes))} "
        f"{format_size(usable)}; {_sentences(shortfalls)}"
    )
    if changes:
        message += f"; it would fit with {', or with '.join(changes)}"
    return PlanError(message, {s.node.name: s.num_bytes for s in shortfalls})


def _cuts_asked_for(
    nodes: Sequence[Node], request: PlanRequest, sizes: StageSizes
) -> tuple[int, ...] | None:
    """None where they are for the planner to find."""
    if request.num_stages is None or len(nodes) > 1:
        return request.cuts
    runs = split(nodes[0], sizes, request.num_stages) or []
    return request.cuts or tuple(run.lo for run in runs[1:])


def _sentences(shortfalls: Sequence[Shortfall]) -> str:
    alike: dict[str, list[Shortfall]] = {}
    for shortfall in shortfalls:
        alike.setdefault(shortfall.told_of([""]), []).append(shortfall)
    return "; ".join(same[0].told_of([s.node.name for s in same]) for same in alike.values())


def _nodes(count: int) -> str:
    return f"{count} nodes have" if count > 1 else "the node has"


def _of_node(node: Node, nodes: Sequence[Node], sizes: StageSizes) -> Shortfall:
    """What ``node`` lacks for the layers that the others leave, at the end of the model or, where
    that is less, at its beginning."""
    others = [other for other in nodes if other is not node]
    lo = 0
    for other in others:
        lo = _legal_end(sizes, lo, sizes.reach(other.usable_bytes, lo))
    hi = sizes.num_layers
    for other in others:
        hi = _legal_start(sizes, hi, other.usable_bytes)
    tail, head = (lo, sizes.num_layers), (0, hi)
    runs = [run for run in (tail, head) if sizes.costs.why_illegal(*run) is None]
    run = min(runs or [(0, sizes.num_layers)], key=lambda run: sizes.total(*run))
    return _shortfall(node, (run,), sizes)


def _legal_end(sizes: StageSizes, lo: int, far: int) -> int:
    """The furthest end up to ``far`` that leaves layers and makes a stage; ``lo`` if none does."""
    ends = range(min(far, sizes.num_layers - 1), lo, -1)
    why = sizes.costs.why_illegal
    legal = (hi for hi in ends if not why(lo, hi) and not why(hi, sizes.num_layers))
    return next(legal, lo)


def _legal_start(sizes: StageSizes, hi: int, usable_bytes: int) -> int:
    """The same from the other side."""
    why = sizes.costs.why_illegal
    found = hi
    for lo in range(hi - 1, 0, -1):
        if sizes.total(lo, hi) > usable_bytes:
            break
        if not why(lo, hi) and not why(0, lo):
            found = lo
    return found


def _of_cuts(borders: Sequence[int], nodes: Sequence[Node], sizes: StageSizes) -> list[Shortfall]:
    """What the node of each stage lacks, the largest stage on the largest node."""
    runs: dict[Node, list[tuple[int, int]]] = {}
    for node, run in match_by_size(borders, nodes, sizes):
        runs.setdefault(node, []).append(run)
    found = [_shortfall(node, tuple(sorted(of_node)), sizes) for node, of_node in runs.items()]
    return [shortfall for shortfall in found if shortfall.num_bytes > 0]


def _shortfall(node: Node, runs: tuple[tuple[int, int], ...], sizes: StageSizes) -> Shortfall:
    parts = [sizes.parts(*run).by_term() for run in runs]
    left = node.usable_bytes
    binding = ""
    for term in parts[0]:
        left -= sum(part[term] for part in parts)
        binding = binding or (term if left < 0 else "")
    return Shortfall(node, -left, binding, runs)


def _more_nodes(nodes: Sequence[Node], fits: Callable[[Sequence[Node]], bool]) -> Iterator[str]:
    """How many more nodes like the largest."""
    like = nodes[0]
    more = [replace(like, name=f"{like.name}+{index}") for index in range(_MAX_MORE_NODES)]
    counts = range(1, _MAX_MORE_NODES + 1)
    at = bisect_left(counts, True, key=lambda count: fits(by_size([*nodes, *more[:count]])))
    if at < len(counts):
        text = f"{counts[at]} more nodes" if at else "one more node"
        yield f"{text} of {format_size(like.usable_bytes)}"


def _changes(
    request: PlanRequest, num_cells: int, fits: Callable[[PlanRequest], bool]
) -> Iterator[str]:
    """For each flag the least change of it alone that fits."""
    if request.cuts is not None and fits(replace(request, cuts=None)):
        yield "other cuts"
    if request.lanes is not None:
        lanes = request.lanes
        less = range(1, lanes)
        at = bisect_left(less, True, key=lambda fewer: fits(replace(request, lanes=lanes - fewer)))
        if at < len(less):
            yield f"--parallel {lanes - less[at]}"
    powers = [2**power for power in reversed(range(num_cells.bit_length()))]
    smaller = [power for power in powers if _MIN_CELLS <= power < num_cells]
    at = bisect_left(smaller, True, key=lambda cells: fits(request.with_cells(cells)))
    if at < len(smaller):
        with_less = request.with_cells(smaller[at])
        is_fewer = request.lanes is not None and with_less.lanes != request.lanes
        parallel = f" --parallel {with_less.lanes}" if is_fewer else ""
        yield f"--ctx-size {smaller[at]}{parallel}"
