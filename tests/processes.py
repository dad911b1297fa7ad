"""Child processes as a user starts them, and who is still alive once they ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SKIPPY = (sys.executable, "-m", "skippy_mesh")


def environment(cache: Path, ray_dir: Path) -> dict[str, str]:
    """This process's environment with a cache and a folder for Ray's sessions of its own."""
    env = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    return {**env, "SKIPPY_CACHE_DIR": str(cache), "RAY_TMPDIR": str(ray_dir)}


@dataclass(frozen=True)
class Process:
    """One process for good: the start time tells it from a later one with the same number."""

    pid: int
    started: int
    command: str

    def is_alive(self) -> bool:
        stat = _stat(self.pid)
        return stat is not None and stat[0] != "Z" and int(stat[19]) == self.started


def tree(root: int, ray_dir: Path) -> list[Process]:
    """``root``, its descendants, and everything that names ``ray_dir`` wherever it hangs now."""
    stats = {pid: stat for pid in _pids() if (stat := _stat(pid))}
    found = {pid for pid in stats if _names(pid, str(ray_dir))} | {root}
    size = 0
    while size != len(found):
        size = len(found)
        found |= {pid for pid, stat in stats.items() if int(stat[1]) in found}
    return [Process(pid, int(stats[pid][19]), _command(pid)) for pid in sorted(found & set(stats))]


def still_alive(processes: list[Process], *, within_s: float) -> list[Process]:
    """Those that have not ended after ``within_s``; returns as soon as none is left."""
    deadline = time.monotonic() + within_s
    while (alive := [each for each in processes if each.is_alive()]) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.2)
    return alive


class Server:
    """``skippy-mesh serve`` as a child process, up to its ready line."""

    def __init__(self, *arguments: str, env: dict[str, str], log: Path):
        self.log = log
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [*SKIPPY, "serve", *arguments],
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=env,
                text=True,
            )
        assert self.process.stdout is not None
        self.lines: list[str] = []
        for line in self.process.stdout:
            self.lines.append(line)
            if line.startswith("skippy_mesh ready on "):
                break
        assert self.lines and " ready on " in self.lines[-1], (self.lines, log.read_text())
        self.url = self.lines[-1].split()[3]
        # Somebody has to read on, or a full pipe would stop the server.
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(self.process.stdout)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def end(self, number: int, *, within_s: float) -> int:
        """Send a signal and wait for the exit code."""
        self.process.send_signal(number)
        try:
            return self.process.wait(within_s)
        finally:
            self.close()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextlib.contextmanager
def serving(*arguments: str, env: dict[str, str], log: Path) -> Iterator[Server]:
    server = Server(*arguments, env=env, log=log)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.end(signal.SIGTERM, within_s=60)
        server.close()


def _pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def _stat(pid: int) -> list[str] | None:
    """/proc/PID/stat from the state on: 0 is the state, 1 the parent, 19 the start time."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return text.rpartition(")")[2].split()


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:200]
    return ""


def _names(pid: int, text: str) -> bool:
    """Whether the command line or the environment holds ``text``; another user's cannot be read."""
    if pid == os.getpid():
        return False
    for file in ("cmdline", "environ"):
        with contextlib.suppress(OSError):
            if text.encode() in Path(f"/proc/{pid}/{file}").read_bytes():
                return True
    return False
