"""The sequences' memory inside one llama.cpp context, kept in an order that keeps bits.

Attention sums a lane's cells in the order in which they lie in the pool, and float sums depend on
order. A lone sequence lies in order of its positions. llama.cpp hands out the lowest free cells, so
in a crowd a lane that goes on after another one has left would get cells *below* its own, and its
bits would change. Three rules keep every lane in order of its positions:

* a freed cell stays taken: it goes to one spare lane, the grave, so new cells only come on top;
* when the top is reached, or more cells are dead than alive, the pool is compacted: the living are
  saved, the pool is cleared, and they are written back, a prefix that lanes share once and below
  what each of them goes on with;
* padding rows come last in their step and are wiped at once, so they are the topmost cells.

All of it is a matter of one pool: stages need not agree on when they compact.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import llama_cpp

from skippy_mesh.errors import DecodeError, InvalidBatchError, NoRoomError
from skippy_mesh.messages import Copy, Remove
from skippy_mesh.scheduler.holdings import Holdings

_FEW_CELLS = 512
"""So many dead cells are never worth a compaction."""


class LaneMemory:
    """Lanes ``[0, num_lanes)`` of ``context``; lane ``num_lanes`` is the grave. The living may hold
    ``num_cells`` of the ``pool_size``: the rest is for padding and for the dead.

    ``is_recurrent`` memory keeps one state per lane: it can be copied only whole and cut nowhere.
    ``window`` is how far back a windowed layer looks, 0 if there is none.
    """

    def __init__(
        self,
        context: int,
        *,
        num_lanes: int,
        num_cells: int,
        pool_size: int,
        is_recurrent: bool,
        window: int = 0,
    ):
        self._context = context
        self._memory = llama_cpp.llama_get_memory(context)
        self._grave = num_lanes
        self._num_cells = num_cells
        self._pool_size = pool_size
        self._is_recurrent = is_recurrent
        self._max_piece = window - 1 if window else pool_size
        self._num_lanes = num_lanes
        self._holdings = Holdings()
        self.num_compactions = 0
        self._top = 0  # cells below this one have been handed out since the last compaction

    def next_position(self, lane: int) -> int:
        """One past the last position of ``lane``."""
        return self._holdings.held(lane)

    def check_room(self, num_rows: int, operations: Sequence[Copy | Remove] = ()) -> None:
        """:class:`NoRoomError` unless ``num_rows`` fit once ``operations`` are done."""
        num_live = self._holdings.num_used
        if num_live + num_rows > self._num_cells and operations:
            num_live = self._num_live_after(operations)
        if num_live + num_rows > self._num_cells:
            raise NoRoomError(
                f"no room for {num_rows} rows: {num_live} of {self._num_cells} cells are in use"
            )

    def _num_live_after(self, operations: Sequence[Copy | Remove]) -> int:
        """Cells in use behind ``operations``; those that cannot be done are refused later."""
        holdings = copy.deepcopy(self._holdings)
        for operation in operations:
            if isinstance(operation, Remove):
                end = min(max(operation.p0, 0), holdings.held(operation.lane))
                holdings.cut(operation.lane, end)
            elif not holdings.held(operation.dst):
                end = min(operation.p1, holdings.held(operation.src))
                holdings.share(operation.src, operation.dst, end)
        return holdings.num_used

    def reserve(self, num_rows: int, num_padding: int) -> None:
        """Make sure the rows and their padding fit on top; :class:`NoRoomError`, and nothing
        changed, if not."""
        self.check_room(num_rows)
        # Attention walks over every cell below the top, the dead ones too.
        num_live = self._holdings.num_used
        if (
            self._top + num_rows + num_padding > self._pool_size
            or self._top - num_live > num_live + _FEW_CELLS
        ):
            self._compact()

    def advance(self, reached: Mapping[int, int], num_rows: int) -> None:
        """Note that a step of ``num_rows`` rows has brought lanes to their next positions."""
        for lane, position in reached.items():
            self._holdings.grow(lane, position - self._holdings.held(lane))
        self._top += num_rows

    def wipe(self, lanes: Sequence[int]) -> None:
        """Free padding rows: the topmost cells, so really freed."""
        for lane in lanes:
            self._drop(lane)

    def apply(self, operation: Copy | Remove) -> None:
        """Run one operation; :class:`InvalidBatchError`, and nothing changed, if it cannot be."""
        if isinstance(operation, Remove):
            self._remove(operation)
        else:
            self._copy(operation)

    def forget(self, lane: int) -> None:
        """Free all that ``lane`` holds, whatever state it is in."""
        llama_cpp.llama_memory_seq_cp(self._memory, lane, self._grave, -1, -1)
        self._drop(lane)
        self._holdings.cut(lane, 0)
        if not self._holdings.num_used:
            self.clear()

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(self._memory, False)
        self._holdings = Holdings()
        self._top = 0

    def positions(self, lane: int) -> tuple[int, int]:
        """First and last position ``lane`` holds, as llama.cpp says; (-1, -1) when empty."""
        self._check_lane(lane)
        return (
            llama_cpp.llama_memory_seq_pos_min(self._memory, lane),
            llama_cpp.llama_memory_seq_pos_max(self._memory, lane),
        )

    def _remove(self, operation: Remove) -> None:
        lane, p0, p1 = operation.lane, operation.p0, operation.p1
        self._check_lane(lane)
        end = self._holdings.held(lane)
        if p0 <= 0 and (p1 < 0 or p1 >= end):
            self.forget(lane)
            return
        if not 0 <= p0 < end or 0 <= p1 < end or self._is_recurrent:
            kind = "a recurrent lane goes whole" if self._is_recurrent else "only a tail can go"
            raise InvalidBatchError(
                f"cannot remove positions [{p0}, {p1}) of lane {lane}, which holds [0, {end}): "
                f"{kind}"
            )
        llama_cpp.llama_memory_seq_cp(self._memory, lane, self._grave, p0, -1)
        if not llama_cpp.llama_memory_seq_rm(self._memory, lane, p0, -1):
            raise InvalidBatchError(f"llama.cpp cannot remove positions from {p0} of lane {lane}")
        self._holdings.cut(lane, p0)

    def _copy(self, operation: Copy) -> None:
        src, dst, p0, p1 = operation.src, operation.dst, operation.p0, operation.p1
        self._check_lane(src)
        self._check_lane(dst)
        end, start = self._holdings.held(src), self._holdings.held(dst)
        if src == dst or not 0 <= p0 < p1 <= end or start != p0:
            raise InvalidBatchError(
                f"cannot copy positions [{p0}, {p1}) of lane {src}, which holds [0, {end}), "
                f"to lane {dst}, which ends at {start}"
            )
        if self._is_recurrent and (p0, p1) != (0, end):
            raise InvalidBatchError(
                f"cannot copy positions [{p0}, {p1}) of lane {src}: its recurrent state is that "
                f"of position {end - 1} and no other"
            )
        llama_cpp.llama_memory_seq_cp(self._memory, src, dst, p0, p1)
        # llama.cpp decodes after an invalid copy without a word, so ask where the lane stands.
        expected = (p1 - 1, p1 - 1) if self._is_recurrent else (0, p1 - 1)
        if self.positions(dst) != expected:
            found = self.positions(dst)
            self.forget(dst)
            raise InvalidBatchError(
                f"copying [{p0}, {p1}) of lane {src} left lane {dst} with positions {found}"
            )
        self._holdings.share(src, dst, p1)

    def _compact(self) -> None:
        """Write every living cell back, lowest cells first, each lane's in order.

        A piece goes through the grave, which is empty meanwhile, because llama.cpp saves and
        restores whole lanes. It leaves out what a lane's window has passed, so no piece is longer
        than that. A recurrent lane's state comes along with each of its pieces and is right with
        the last one, which is why a piece is saved from a lane that ends there, if any does.
        """
        holdings = self._holdings
        pieces = [part for piece in holdings.pieces() for part in piece.parts(self._max_piece)]
        self._drop(self._grave)
        saved = []
        for piece in pieces:
            ending = (lane for lane in piece.lanes if holdings.held(lane) == piece.end)
            owner = next(ending, piece.lanes[0])
            llama_cpp.llama_memory_seq_cp(self._memory, owner, self._grave, piece.start, piece.end)
            saved.append(self._save(self._grave))
            self._drop(self._grave)
        self.clear()
        lost: set[int] = set()
        for piece, data in zip(pieces, saved, strict=True):
            if not self._restore(self._grave, data):
                lost.update(piece.lanes)
                continue
            for lane in piece.lanes:
                llama_cpp.llama_memory_seq_cp(
                    self._memory, self._grave, lane, piece.start, piece.end
                )
            self._drop(self._grave)
            self._top += piece.end - piece.start
        self._holdings = holdings
        self.num_compactions += 1
        for lane in lost:
            self.forget(lane)
        if lost:
            raise DecodeError(f"compacting lost lanes {sorted(lost)}", tuple(sorted(lost)))

    def _save(self, lane: int) -> Any:
        size = llama_cpp.llama_state_seq_get_size(self._context, lane)
        data = (ctypes.c_uint8 * size)()
        llama_cpp.llama_state_seq_get_data(self._context, data, size, lane)
        return data

    def _restore(self, lane: int, data: Any) -> bool:
        size = len(data)
        return bool(llama_cpp.llama_state_seq_set_data(self._context, data, size, lane) == size)

    def _drop(self, lane: int) -> None:
        llama_cpp.llama_memory_seq_rm(self._memory, lane, -1, -1)

    def _check_lane(self, lane: int) -> None:
        if not 0 <= lane < self._num_lanes:
            raise InvalidBatchError(f"lane {lane} is not in [0, {self._num_lanes})")
