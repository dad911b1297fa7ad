"""The ledger of what sequences hold: ids, cells and state rows, the same on every stage.

Every stage applies every StepBatch in the same order, so one ledger is true for all of them; a
capacity is the least of all stages. A cell that several lanes share is counted once: a lane holds
runs of cells, and a run knows how many lanes hold it.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from skippy_mesh.errors import IdsExhaustedError

CELL_COMPONENTS = ("attention", "window")
"""A window pool keeps every cell (stages/context.py), so it fills like the attention pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What a mesh has of each component; None where the model has no such memory.

    ``lanes`` are ids for requests, of the 256 that residents and padding rows also draw from.
    """

    lanes: int
    attention: int | None = None
    window: int | None = None
    recurrent: int | None = None

    @property
    def num_cells(self) -> int:
        """Cells one sequence after another may fill: the smaller pool bounds them."""
        return min(size for size in (self.attention, self.window) if size is not None)

    def by_component(self) -> dict[str, int]:
        sizes = {"attention": self.attention, "window": self.window, "recurrent": self.recurrent}
        return {"lanes": self.lanes, **{n: size for n, size in sizes.items() if size is not None}}


class IdPool:
    """Sequence ids below ``size``, lowest first. One that is given back is free again only when
    all stages have confirmed that its cells are gone: until then a row on it could meet them."""

    def __init__(self, size: int):
        self._free = list(range(size))
        self._retired: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        if not self._free:
            raise IdsExhaustedError(
                f"all sequence ids are taken, {len(self._retired)} not yet back"
            )
        return heapq.heappop(self._free)

    def retire(self, lane: int) -> None:
        assert lane not in self._retired and lane not in self._free, f"id {lane} was not taken"
        self._retired.add(lane)

    def confirm(self, lane: int) -> None:
        self._retired.remove(lane)
        heapq.heappush(self._free, lane)


@dataclass(slots=True, eq=False)
class _Run:
    """Cells that belong together, and how many lanes hold them."""

    size: int
    num_holders: int = 1


class Cells:
    """One pool of ``size`` cells: what each lane holds, and what it was promised.

    ``num_promised`` cells are neither used nor free to be promised to another.
    """

    def __init__(self, size: int):
        self.size = size
        self.num_used = 0
        self.num_promised = 0
        self._runs: dict[int, list[_Run]] = {}
        self._held: dict[int, int] = {}
        self._promises: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        return self.size - self.num_used

    def held(self, lane: int) -> int:
        return self._held.get(lane, 0)

    def exclusive(self, lane: int) -> int:
        """Cells that are free once ``lane`` gives its own back."""
        return sum(run.size for run in self._runs.get(lane, ()) if run.num_holders == 1)

    def promise(self, lane: int, num_cells: int) -> None:
        """Keep ``num_cells`` for ``lane``. What it comes to hold counts against the promise."""
        assert lane not in self._promises, f"lane {lane} has a promise"
        self._promises[lane] = num_cells
        self._runs[lane] = []
        self._held[lane] = 0
        self.num_promised += num_cells

    def grow(self, lane: int, num_cells: int) -> None:
        assert 0 < num_cells <= self.num_free, f"{num_cells} cells wanted, {self.num_free} free"
        runs = self._runs[lane]
        if runs and runs[-1].num_holders == 1:
            runs[-1].size += num_cells
        else:
            runs.append(_Run(num_cells))
        self.num_used += num_cells
        self._hold(lane, num_cells)

    def share(self, donor: int, lane: int, num_cells: int) -> None:
        """Let ``lane``, still empty, hold the first ``num_cells`` of ``donor``."""
        assert not self._runs[lane] and num_cells <= self.held(donor)
        self._hold(lane, num_cells)
        index = 0
        while num_cells:
            run = self._runs[donor][index]
            if run.size > num_cells:
                self._split(run, num_cells)
                run = self._runs[donor][index]
            run.num_holders += 1
            self._runs[lane].append(run)
            num_cells -= run.size
            index += 1

    def release(self, lane: int) -> None:
        for run in self._runs.pop(lane):
            run.num_holders -= 1
            if run.num_holders == 0:
                self.num_used -= run.size
        self.num_promised -= max(self._promises.pop(lane) - self._held.pop(lane), 0)

    def _hold(self, lane: int, num_cells: int) -> None:
        left = max(self._promises[lane] - self._held[lane], 0)
        self._held[lane] += num_cells
        self.num_promised -= left - max(self._promises[lane] - self._held[lane], 0)

    def _split(self, run: _Run, size: int) -> None:
        """Make two of ``run``, the first of ``size`` cells, with every lane that holds it."""
        parts = [_Run(size, run.num_holders), _Run(run.size - size, run.num_holders)]
        for lane, runs in self._runs.items():
            if run in runs:
                at = runs.index(run)
                self._runs[lane] = [*runs[:at], *parts, *runs[at + 1 :]]


class Ledger:
    """All components of a mesh. A grant holds on every stage, whole or not at all."""

    def __init__(self, capacity: Capacity):
        self.capacity = capacity
        self._ids = IdPool(capacity.lanes)
        self._pools = {
            name: Cells(size)
            for name, size in capacity.by_component().items()
            if name in CELL_COMPONENTS
        }
        self._num_states = 0

    @property
    def num_free_cells(self) -> int:
        """Rows that can be computed now."""
        return min(pool.num_free for pool in self._pools.values())

    def lacks(self, num_cells: int) -> str | None:
        """The component that has no room for one more lane with ``num_cells``, None if all do."""
        for name, pool in self._pools.items():
            if num_cells > pool.num_free - pool.num_promised:
                return name
        if self.capacity.recurrent is not None and self._num_states >= self.capacity.recurrent:
            return "recurrent"
        return None if self._ids.num_free else "lanes"

    def admit(self, num_cells: int) -> int:
        """A lane with a promise of ``num_cells``. Ask :meth:`lacks` first."""
        lane = self._ids.take()
        for pool in self._pools.values():
            pool.promise(lane, num_cells)
        self._num_states += self.capacity.recurrent is not None
        return lane

    def grow(self, lane: int, num_rows: int) -> None:
        for pool in self._pools.values():
            pool.grow(lane, num_rows)

    def share(self, donor: int, lane: int, num_cells: int) -> None:
        for pool in self._pools.values():
            pool.share(donor, lane, num_cells)

    def release(self, lane: int) -> None:
        """Give back everything but the id, which :meth:`confirm` frees when no stage holds it."""
        for pool in self._pools.values():
            pool.release(lane)
        self._num_states -= self.capacity.recurrent is not None
        self._ids.retire(lane)

    def confirm(self, lane: int) -> None:
        self._ids.confirm(lane)

    def exclusive(self, lane: int) -> int:
        """Rows for which there is room once ``lane`` is released."""
        return min(pool.exclusive(lane) for pool in self._pools.values())

    def held(self, lane: int) -> int:
        return max(pool.held(lane) for pool in self._pools.values())

    def snapshot(self) -> dict[str, dict[str, int]]:
        """Each component by state; the states add up to its capacity."""
        components: dict[str, dict[str, int]] = {}
        for name, pool in self._pools.items():
            reserved = min(pool.num_promised, pool.num_free)
            components[name] = {
                "active": pool.num_used,
                "resident": 0,
                "reserved": reserved,
                "free": pool.num_free - reserved,
            }
        if self.capacity.recurrent is not None:
            components["recurrent"] = {
                "active": self._num_states,
                "resident": 0,
                "reserved": 0,
                "free": self.capacity.recurrent - self._num_states,
            }
        free = self._ids.num_free
        components["lanes"] = {
            "running": self.capacity.lanes - free, "resident": 0, "free": free
        }  # fmt: skip
        return components
