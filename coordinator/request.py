"""What an operator asks a plan for, and which of it no memory could give."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from coordinator.ceiling import FLOOR_CONTEXT
from coordinator.costs import ModelCosts
from coordinator.nodes import Link
from skippy_mesh.config import MAX_CELLS, MAX_RESIDENTS, num_residents
from skippy_mesh.errors import UsageError
from skippy_mesh.messages import MAX_LANES

MAX_AUTO_CONTEXT = 131_072
MIN_AUTO_CONTEXT = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What is fixed; None leaves it to the planner.

    ``context`` is what one request may fill, at most what the model was trained for. ``num_cells``
    is the pool all requests share, which may be larger; without it the pool is one context.
    ``num_stages`` share the machine where there is only one. ``lanes`` lower the ceiling.
    ``reserved_ids`` (residents, padding) and ``ids_per_lane`` come out of the 256 there are, and
    recurrent memory is paid for each id. Each lane can count on ``floor_context`` cells.
    With ``keeps_prefixes`` more ids go to cached prefixes. ``target_us`` is for what the network
    adds to a token.
    """

    context: int | None = None
    num_cells: int | None = None
    lanes: int | None = None
    cuts: tuple[int, ...] | None = None
    num_stages: int | None = None
    floor_context: int = FLOOR_CONTEXT
    reserved_ids: int = 0
    ids_per_lane: int = 1
    keeps_prefixes: bool = False
    links: tuple[Link, ...] = ()
    target_us: int | None = None

    def num_ids(self, lanes: int) -> int:
        """Those that bring recurrent states, where there are any."""
        return lanes * self.ids_per_lane + self.reserved_ids + self._num_snapshots(lanes)

    def lanes_of_states(self, num_states: int) -> int:
        """As many as have ids where memory holds ``num_states``; below 1 if not even one has."""
        lanes = (num_states - self.reserved_ids) // self.ids_per_lane
        while lanes > 0 and self.num_ids(lanes) > num_states:
            lanes -= 1
        return lanes

    def _num_snapshots(self, lanes: int) -> int:
        return num_residents(lanes, is_recurrent=True) if self.keeps_prefixes else 0

    @property
    def lanes_of_ids(self) -> int:
        return (MAX_LANES - self._num_taken) // self.ids_per_lane

    @property
    def ids_term(self) -> str:
        return f"({MAX_LANES} ids - {self._num_taken} reserved){self.per_lane}"

    @property
    def _num_taken(self) -> int:
        return self.reserved_ids + (MAX_RESIDENTS if self.keeps_prefixes else 0)

    @property
    def per_lane(self) -> str:
        return "" if self.ids_per_lane == 1 else f" / {self.ids_per_lane} per lane"

    def cells_term(self, num_cells: int) -> str:
        return f"{num_cells} cells / {min(self.floor_context, num_cells)} per session"

    def most_lanes(self, num_cells: int) -> int:
        """What cells and ids permit; memory for them is another matter."""
        return min(max(num_cells // self.floor_context, 1), self.lanes_of_ids)

    def pools(self, native_context: int) -> Iterator[tuple[int, int]]:
        """(context of one request, cells of the pool) that may be tried, the largest first."""
        if self.num_cells is not None:
            yield min(self.context or native_context, self.num_cells), self.num_cells
            return
        if self.context is not None:
            yield self.context, self.context
            return
        most = min(native_context, MAX_AUTO_CONTEXT)
        least = min(native_context, MIN_AUTO_CONTEXT)
        powers = (2**power for power in range(native_context.bit_length()))
        for context in sorted({most, *powers}, reverse=True):
            if least <= context <= most:
                yield context, context

    def least_pool(self, native_context: int) -> int:
        """The smallest pool to be tried that still permits the lanes asked for."""
        pools = [cells for _, cells in self.pools(native_context)]
        return min(cells for cells in pools if self.most_lanes(cells) >= (self.lanes or 1))

    def with_cells(self, num_cells: int) -> PlanRequest:
        """The same with so small a pool, and no more context or lanes than that permits."""
        context = None if self.context is None else min(self.context, num_cells)
        lanes = None if self.lanes is None else min(self.lanes, self.most_lanes(num_cells))
        return replace(self, num_cells=num_cells, context=context, lanes=lanes)

    def check(self, costs: ModelCosts, num_nodes: int) -> None:
        """:class:`UsageError`, never a silent clamp, for what is out of range anyway."""
        native, num_layers = costs.native_context, len(costs.layers)
        if self.context is not None and not 1 <= self.context <= native:
            raise UsageError(
                f"one request may have from 1 to {native} tokens, what the model was trained for, "
                f"got {self.context} (--ctx-size may be more: it is for all requests)"
            )
        if self.num_cells is not None and not 1 <= self.num_cells <= MAX_CELLS:
            raise UsageError(f"--ctx-size takes from 1 to {MAX_CELLS} cells, got {self.num_cells}")
        num_stages = self.num_stages
        if num_stages is not None and not 1 <= num_stages <= num_layers:
            raise UsageError(
                f"cannot cut {num_layers} layers into {num_stages} stages: "
                f"choose from 1 to {num_layers}"
            )
        if num_stages is not None and 1 < num_nodes < num_stages:
            raise UsageError(
                f"{num_stages} stages need as many nodes, and there are {num_nodes} "
                f"(--cuts may put several stages on one)"
            )
        if self.cuts is not None:
            self._check_cuts(costs, self.cuts)
        self._check_lanes(native)

    def _check_cuts(self, costs: ModelCosts, cuts: tuple[int, ...]) -> None:
        num_layers = len(costs.layers)
        borders = list(itertools.pairwise((0, *cuts, num_layers)))
        if any(lo >= hi for lo, hi in borders):
            raise UsageError(
                f"cuts {','.join(map(str, cuts))} are not legal for a model of {num_layers} "
                f"layers: they must rise and lie between 1 and {num_layers - 1}"
            )
        if self.num_stages is not None and self.num_stages != len(borders):
            raise UsageError(f"the cuts make {len(borders)} stages, not {self.num_stages}")
        reasons = [costs.why_illegal(lo, hi) for lo, hi in borders]
        problems = [f"stage {index}: {reason}" for index, reason in enumerate(reasons) if reason]
        if problems:
            raise UsageError("; ".join(problems))

    def _check_lanes(self, native_context: int) -> None:
        if self.lanes_of_ids < 1:
            raise UsageError(
                f"no sequence id is left for a lane: {self._num_taken} of {MAX_LANES} are "
                f"reserved, and a lane needs {self.ids_per_lane}"
            )
        if self.lanes is None:
            return
        if self.lanes < 1:
            raise UsageError(f"--parallel must be at least 1, got {self.lanes}")
        _, num_cells = next(self.pools(native_context))
        most = self.most_lanes(num_cells)
        if self.lanes > most:
            is_by_ids = most == self.lanes_of_ids
            term = self.ids_term if is_by_ids else self.cells_term(num_cells)
            raise UsageError(f"--parallel {self.lanes} is more than {most}, what {term} allow")
