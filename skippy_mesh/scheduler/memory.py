"""The ledger of what sequences hold: ids, cells and state rows, the same on every stage.

Every stage applies every StepBatch in the same order, so one ledger is true for all of them; a
capacity is the least of all stages. A cell that several lanes share is counted once (holdings.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from skippy_mesh.errors import IdsExhaustedError
from skippy_mesh.scheduler.holdings import Holdings

CELL_COMPONENTS = ("attention", "window")
"""A window pool keeps every cell (stages/context.py), so it fills like the attention pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What a mesh has of each component; None where the model has no such memory.

    ``lanes`` are ids for requests, ``residents`` those for cached prefixes, of the 256 that padding
    rows also draw from. ``recurrent`` counts state rows, of which each resident takes one, too.
    """

    lanes: int
    residents: int = 0
    attention: int | None = None
    window: int | None = None
    recurrent: int | None = None

    @classmethod
    def least(cls, stages: Sequence[Capacity]) -> Capacity:
        """What every one of ``stages`` has."""
        return cls(
            lanes=min(stage.lanes for stage in stages),
            residents=min(stage.residents for stage in stages),
            attention=_least(stage.attention for stage in stages),
            window=_least(stage.window for stage in stages),
            recurrent=_least(stage.recurrent for stage in stages),
        )

    @property
    def num_cells(self) -> int:
        """Cells one sequence after another may fill: the smaller pool bounds them."""
        return min(size for size in (self.attention, self.window) if size is not None)

    def by_component(self) -> dict[str, int]:
        sizes = {"attention": self.attention, "window": self.window, "recurrent": self.recurrent}
        return {"lanes": self.lanes, **{n: size for n, size in sizes.items() if size is not None}}

    def for_sessions(self) -> dict[str, int]:
        """The same without what is kept for cached prefixes."""
        sizes = self.by_component()
        if "recurrent" in sizes:
            sizes["recurrent"] -= self.residents
        return sizes


def _least(sizes: Iterable[int | None]) -> int | None:
    return min((size for size in sizes if size is not None), default=None)


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


class Cells:
    """One pool of ``size`` cells: what each lane holds, and what it was promised.

    ``num_promised`` cells are neither used nor free to be promised to another. Cells that only
    cached prefixes hold are used, but can be had: whoever takes them evicts first.
    """

    def __init__(self, size: int):
        self.size = size
        self.holdings = Holdings()
        self.num_promised = 0
        self._promises: dict[int, int] = {}

    @property
    def num_used(self) -> int:
        return self.holdings.num_used

    @property
    def num_free(self) -> int:
        return self.size - self.holdings.num_used

    def has_room(self, num_cells: int, donor: int | None = None, num_shared: int = 0) -> bool:
        """Whether a lane could be promised ``num_cells``, the first ``num_shared`` of ``donor``
        among them, once enough of the cache is evicted."""
        num_idle = self.holdings.num_idle
        if donor is not None:
            num_idle -= self.holdings.idle(donor, num_shared)
        return num_cells - num_shared <= self.num_free + num_idle - self.num_promised

    def promise(self, lane: int, num_cells: int) -> None:
        """Keep ``num_cells`` for ``lane``. What it comes to hold counts against the promise."""
        assert lane not in self._promises, f"lane {lane} has a promise"
        self._promises[lane] = num_cells
        self.num_promised += num_cells

    def grow(self, lane: int, num_cells: int) -> None:
        assert 0 < num_cells <= self.num_free, f"{num_cells} cells wanted, {self.num_free} free"
        left = self._left(lane)
        self.holdings.grow(lane, num_cells)
        self.num_promised -= left - self._left(lane)

    def share(self, donor: int, lane: int, num_cells: int) -> None:
        """Let ``lane``, still empty, hold the first ``num_cells`` of ``donor``."""
        left = self._left(lane)
        self.holdings.share(donor, lane, num_cells)
        self.num_promised -= left - self._left(lane)

    def release(self, lane: int) -> None:
        self._forget_promise(lane)
        self.holdings.cut(lane, 0)

    def keep(self, lane: int) -> None:
        """Make a cached prefix of what ``lane`` holds; it is promised nothing more."""
        self._forget_promise(lane)
        self.holdings.keep(lane)

    def _left(self, lane: int) -> int:
        """What ``lane`` is promised and does not hold yet."""
        return max(self._promises.get(lane, 0) - self.holdings.held(lane), 0)

    def _forget_promise(self, lane: int) -> None:
        self.num_promised -= self._left(lane)
        self._promises.pop(lane, None)


class Ledger:
    """All components of a mesh. A grant holds on every stage, whole or not at all.

    A lane is running from :meth:`admit` on, resident from :meth:`keep` or
    :meth:`reserve_resident` on, until :meth:`release`.
    """

    def __init__(self, capacity: Capacity):
        self.capacity = capacity
        self._ids = IdPool(capacity.lanes + capacity.residents)
        self._pools = {
            name: Cells(size)
            for name, size in capacity.by_component().items()
            if name in CELL_COMPONENTS
        }
        self._num_running = 0
        self.num_residents = 0

    @property
    def num_free_cells(self) -> int:
        """Rows that can be computed now."""
        return min(pool.num_free for pool in self._pools.values())

    @property
    def lacks_states(self) -> bool:
        """Whether running lanes and residents have more state rows than there are."""
        rows = self.capacity.recurrent
        return rows is not None and self._num_running + self.num_residents > rows

    @property
    def has_too_many_residents(self) -> bool:
        return self.num_residents > self.capacity.residents

    def shortage(self, num_rows: int) -> int:
        """Cells missing for ``num_rows`` or for what was promised; the cache must give them up."""
        pools = self._pools.values()
        return max(0, *(max(pool.num_promised, num_rows) - pool.num_free for pool in pools))

    @property
    def num_excess(self) -> int:
        """Cells by which the cache has more than half a pool."""
        pools = self._pools.values()
        return max(0, *(pool.holdings.num_idle - pool.size // 2 for pool in pools))

    def lacks(self, num_cells: int, *, donor: int | None = None, num_shared: int = 0) -> str | None:
        """The component without room for one more lane with ``num_cells``, the first ``num_shared``
        of them those of ``donor``; None if all have, be it by evicting."""
        for name, pool in self._pools.items():
            if not pool.has_room(num_cells, donor, num_shared):
                return name
        if self.capacity.recurrent is not None and self._num_running >= self.capacity.recurrent:
            return "recurrent"
        has_lane = self._num_running < self.capacity.lanes and self._ids.num_free
        return None if has_lane else "lanes"

    def admit(self, num_cells: int) -> int:
        """A lane with a promise of ``num_cells``. Ask :meth:`lacks` first."""
        lane = self._ids.take()
        for pool in self._pools.values():
            pool.promise(lane, num_cells)
        self._num_running += 1
        return lane

    def grow(self, lane: int, num_rows: int) -> None:
        for pool in self._pools.values():
            pool.grow(lane, num_rows)

    def share(self, donor: int, lane: int, num_cells: int) -> None:
        for pool in self._pools.values():
            pool.share(donor, lane, num_cells)

    def cut(self, lane: int, end: int) -> None:
        """Give back what the resident on ``lane`` holds from position ``end`` on."""
        for pool in self._pools.values():
            pool.holdings.cut(lane, end)

    def keep(self, lane: int) -> None:
        """A running lane becomes a cached prefix."""
        for pool in self._pools.values():
            pool.keep(lane)
        self._num_running -= 1
        self.num_residents += 1

    def reserve_resident(self) -> int | None:
        """An id for a cached prefix still to come, None if none is free."""
        if self.num_residents >= self.capacity.residents or not self._ids.num_free:
            return None
        self.num_residents += 1
        lane = self._ids.take()
        for pool in self._pools.values():
            pool.keep(lane)
        return lane

    def release(self, lane: int, *, is_resident: bool = False) -> None:
        """Give back everything but the id, which :meth:`confirm` frees when no stage holds it."""
        for pool in self._pools.values():
            pool.release(lane)
        if is_resident:
            self.num_residents -= 1
        else:
            self._num_running -= 1
        self._ids.retire(lane)

    def confirm(self, lane: int) -> None:
        self._ids.confirm(lane)

    def exclusive(self, lane: int) -> int:
        """Rows for which there is room once ``lane`` is released."""
        return min(pool.holdings.exclusive(lane) for pool in self._pools.values())

    def held(self, lane: int) -> int:
        return max(pool.holdings.held(lane) for pool in self._pools.values())

    def snapshot(self) -> dict[str, dict[str, int]]:
        """Each component by state; the states add up to its capacity."""
        components: dict[str, dict[str, int]] = {}
        for name, pool in self._pools.items():
            reserved = min(pool.num_promised, pool.num_free)
            components[name] = {
                "active": pool.num_used - pool.holdings.num_idle,
                "resident": pool.holdings.num_idle,
                "reserved": reserved,
                "free": pool.num_free - reserved,
            }
        if self.capacity.recurrent is not None:
            components["recurrent"] = {
                "active": self._num_running,
                "resident": self.num_residents,
                "reserved": 0,
                "free": self.capacity.recurrent - self._num_running - self.num_residents,
            }
        free = self.capacity.lanes + self.capacity.residents
        free -= self._num_running + self.num_residents
        components["lanes"] = {
            "running": self._num_running, "resident": self.num_residents, "free": free
        }  # fmt: skip
        return components
