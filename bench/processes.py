"""What a tree of processes holds and uses, read from /proc."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# In the command lines of Ray's daemons, agents and waiting workers; a live actor shows its class.
RAYS_OWN = (b"packages/ray/", b"ray::IDLE", b"ray::DashboardAgent", b"ray::RuntimeEnvAgent")


@dataclass(frozen=True, slots=True)
class Process:
    """A pid and its start time (ticks after boot), so that a reused pid is not mistaken for it."""

    pid: int
    started: int


class Stat(NamedTuple):
    parent: int
    started: int
    cpu_ticks: int


def read_stat(pid: int) -> Stat | None:
    """None once it is gone, and a zombie is gone."""
    try:
        # The name may hold spaces and brackets: fields are counted from its last bracket.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    if fields[0] == "Z":
        return None
    return Stat(int(fields[1]), int(fields[19]), int(fields[11]) + int(fields[12]))


class ProcessTree:
    """Processes and all that came from them, orphans included as long as they were seen once."""

    def __init__(self, *root_pids: int):
        found = {pid: stat for pid in root_pids if (stat := read_stat(pid))}
        self._known = {Process(pid, stat.started) for pid, stat in found.items()}

    def living(self) -> set[Process]:
        pids = [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()]
        table = {pid: stat for pid in pids if (stat := read_stat(pid))}
        found = {p.pid for p in self._known if p.pid in table and table[p.pid].started == p.started}
        while more := {pid for pid, stat in table.items() if stat.parent in found} - found:
            found |= more
        self._known = {Process(pid, table[pid].started) for pid in found}
        return self._known

    def cpu_ticks(self) -> int:
        """Spent so far by those alive."""
        stats = [read_stat(process.pid) for process in self.living()]
        return sum(stat.cpu_ticks for stat in stats if stat)


def is_rays_own(pid: int) -> bool:
    """Ray's daemons and idle workers, as against the driver and the actors of the mesh."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return any(mark in command for mark in RAYS_OWN)


def rss_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
    except OSError:
        return 0  # it ended since it was listed


def pss_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(ln.split()[1]) * 1024 for ln in lines if ln.startswith("Pss:")), 0)


@dataclass(slots=True)
class Peak:
    """The most memory a group of processes held at once.

    RSS counts a shared page once per process, Pss once in all; but reading Pss costs milliseconds
    a process and would slow what is measured, so it is read only when RSS rose by over 1 %.
    """

    rss: int = 0
    pss: int = 0
    _rss_at_pss: float = 0.0

    def see(self, pids: list[int]) -> None:
        rss = sum(map(rss_bytes, pids))
        self.rss = max(self.rss, rss)
        if rss > self._rss_at_pss * 1.01:
            self._rss_at_pss = rss
            self.pss = max(self.pss, sum(map(pss_bytes, pids)))

    def as_json(self) -> dict[str, int | None]:
        return {"rss_bytes": self.rss or None, "pss_bytes": self.pss or None}


def machine_ticks() -> tuple[int, int]:
    """(busy, total) of all cores since boot; what a hypervisor took away counts as busy."""
    words = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    user, nice, system, idle, iowait, *rest = map(int, words)
    busy = user + nice + system + sum(rest)
    return busy, busy + idle + iowait


class Watch:
    """What a server's processes used while they were watched, and what others took from them."""

    def __init__(self, *root_pids: int):
        self.engine, self.ray = Peak(), Peak()
        self.others_cpu_share: float | None = None  # of all cores; not the server, not this client
        self._tree = ProcessTree(*root_pids)
        self._began = self._ticks()

    def look(self) -> None:
        pids = [process.pid for process in self._tree.living()]
        rays_own = {pid for pid in pids if is_rays_own(pid)}
        self.engine.see([pid for pid in pids if pid not in rays_own])
        self.ray.see(list(rays_own))

    def finish(self) -> None:
        known, busy, total = (
            now - then for now, then in zip(self._ticks(), self._began, strict=True)
        )
        self.others_cpu_share = max(0.0, (busy - known) / total) if total else None

    def _ticks(self) -> tuple[float, int, int]:
        client = time.process_time() * TICKS_PER_S
        return (self._tree.cpu_ticks() + client, *machine_ticks())
