"""Which cells of one pool the lanes hold, each cell counted once however many lanes share it.

A lane holds runs of cells, from position 0 on. Lanes that share a prefix hold the same runs, and a
run knows how many lanes hold it. What two lanes share is always the beginning of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class _Run:
    """Cells that belong together. ``num_residents`` of its holders are cached prefixes."""

    size: int
    num_holders: int = 1
    num_residents: int = 0

    @property
    def num_idle(self) -> int:
        """Its cells if nobody but cached prefixes holds them."""
        return self.size if self.num_holders == self.num_residents else 0


@dataclass(frozen=True, slots=True)
class Piece:
    """Cells at positions [start, end) of all ``lanes``."""

    lanes: tuple[int, ...]
    start: int
    end: int

    def parts(self, max_size: int) -> list[Piece]:
        """The same cells in order, in pieces of ``max_size`` at most."""
        starts = range(self.start, self.end, max_size)
        return [Piece(self.lanes, at, min(at + max_size, self.end)) for at in starts]


class Holdings:
    """What each of a pool's lanes holds.

    ``num_used`` cells are held by anybody, ``num_idle`` of them by residents only.
    """

    def __init__(self) -> None:
        self.num_used = 0
        self.num_idle = 0
        self._runs: dict[int, list[_Run]] = {}
        self._ends: dict[int, int] = {}
        self._residents: set[int] = set()

    def held(self, lane: int) -> int:
        """Cells of ``lane``, which is one past its last position."""
        return self._ends.get(lane, 0)

    def exclusive(self, lane: int) -> int:
        """Cells that are free once ``lane`` gives its own back."""
        return sum(run.size for run in self._runs.get(lane, ()) if run.num_holders == 1)

    def idle(self, lane: int, end: int) -> int:
        """Cells of ``lane`` at positions [0, end) that only residents hold."""
        num_idle = at = 0
        for run in self._runs.get(lane, ()):
            if at >= end:
                break
            num_idle += min(run.num_idle, end - at)
            at += run.size
        return num_idle

    def grow(self, lane: int, num_cells: int) -> None:
        runs = self._runs.setdefault(lane, [])
        if runs and runs[-1].num_holders == 1:
            runs[-1].size += num_cells
        else:
            runs.append(_Run(num_cells))
        self.num_used += num_cells
        self._ends[lane] = self.held(lane) + num_cells

    def share(self, donor: int, lane: int, num_cells: int) -> None:
        """Let ``lane``, still empty, hold the first ``num_cells`` of ``donor``."""
        assert not self.held(lane) and num_cells <= self.held(donor)
        shared = self._split(donor, num_cells)
        self._runs[lane] = list(shared)
        self._ends[lane] = num_cells
        for run in shared:
            self._count(run, holders=1, residents=lane in self._residents)

    def cut(self, lane: int, end: int) -> None:
        """Give back the cells of ``lane`` from position ``end`` on; all of them at 0."""
        kept = self._split(lane, end)
        for run in self._runs.pop(lane, [])[len(kept) :]:
            self._count(run, holders=-1, residents=-(lane in self._residents))
        self._ends.pop(lane, None)
        if end:
            self._runs[lane], self._ends[lane] = kept, end
        else:
            self._residents.discard(lane)

    def keep(self, lane: int) -> None:
        """From now on ``lane`` is a cached prefix: what nobody else holds is idle."""
        self._residents.add(lane)
        for run in self._runs.get(lane, ()):
            self._count(run, residents=1)

    def pieces(self) -> list[Piece]:
        """Every cell once, and each lane's in the order of its positions."""
        found: dict[int, tuple[int, int, list[int]]] = {}
        for lane, runs in self._runs.items():
            start = 0
            for run in runs:
                _, _, lanes = found.setdefault(id(run), (start, start + run.size, []))
                lanes.append(lane)
                start += run.size
        return [Piece(tuple(lanes), start, end) for start, end, lanes in found.values()]

    def _count(self, run: _Run, *, holders: int = 0, residents: int = 0) -> None:
        self.num_idle -= run.num_idle
        run.num_holders += holders
        run.num_residents += residents
        if run.num_holders:
            self.num_idle += run.num_idle
        else:
            self.num_used -= run.size

    def _split(self, lane: int, end: int) -> list[_Run]:
        """The runs of ``lane`` that make up [0, end), for all that hold them."""
        index = at = 0
        runs: Sequence[_Run] = self._runs.get(lane, ())
        while at < end:
            run = runs[index]
            if run.size > end - at:
                self._halve(run, end - at)
                runs = self._runs[lane]
                run = runs[index]
            at += run.size
            index += 1
        return list(runs[:index])

    def _halve(self, run: _Run, size: int) -> None:
        """Make two of ``run``, the first of ``size`` cells, for every lane that holds it."""
        tail = _Run(run.size - size, run.num_holders, run.num_residents)
        run.size = size
        for runs in self._runs.values():
            if run in runs:
                runs.insert(runs.index(run) + 1, tail)
