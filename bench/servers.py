"""Start a server as a child process, watch its memory, and end exactly what it started."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from skippy_mesh.cli import demo_path
from skippy_mesh.errors import RuntimeUnavailableError, UsageError

READY_LINE = "skippy_mesh ready on "
SAMPLE_S = 0.2
STOP_S = 20.0
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# In the command lines of Ray's daemons, agents and waiting workers; a live actor shows its class.
RAYS_OWN = (b"packages/ray/", b"ray::IDLE", b"ray::DashboardAgent", b"ray::RuntimeEnvAgent")


def model_path(model: str) -> Path:
    """The file behind a model's name; ``demo`` is the one bundled with its package."""
    path = demo_path() if model == "demo" else Path(model)
    if not path.is_file():
        raise UsageError(f"no model file at {path}")
    return path


def mesh_command(model: str, *, stages: int, engine: str, num_cells: int) -> list[str]:
    return [sys.executable, "-m", "skippy_mesh", "serve", model, "--stages", str(stages),
            "--engine", engine, "--ctx-size", str(num_cells)]  # fmt: skip


def llama_server_command(
    program: Path, model: Path, *, num_slots: int, num_cells: int
) -> list[str]:
    """The strongest fair peer: same file, KV type and cells, one pool shared by all its slots.
    Its prompt caches are off because no prompt comes twice."""
    return [str(program), "-m", str(model), "-fa", "on", "-ctk", "q8_0", "-ctv", "q8_0",
            "-t", str(os.cpu_count() or 1), "-np", str(num_slots), "--kv-unified",
            "-c", str(num_cells), "--no-cache-prompt", "--cache-ram", "0", "--offline",
            "--no-ui", "--host", "127.0.0.1"]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Process:
    """A pid and its start time (ticks after boot), so that a reused pid is not mistaken for it."""

    pid: int
    started: int


def read_stat(pid: int) -> tuple[int, int] | None:
    """(parent pid, start time); None once it is gone, and a zombie is gone."""
    try:
        # The name may hold spaces and brackets: fields are counted from its last bracket.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else (int(fields[1]), int(fields[19]))


class ProcessTree:
    """A process and all that came from it, orphans included as long as they were seen once."""

    def __init__(self, root_pid: int):
        stat = read_stat(root_pid)
        self._known = {Process(root_pid, stat[1])} if stat else set()

    def living(self) -> set[Process]:
        pids = [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()]
        table = {pid: stat for pid in pids if (stat := read_stat(pid))}
        found = {p.pid for p in self._known if table.get(p.pid, (0, -1))[1] == p.started}
        while more := {pid for pid, (parent, _) in table.items() if parent in found} - found:
            found |= more
        self._known = {Process(pid, table[pid][1]) for pid in found}
        return self._known


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


@dataclass(slots=True)
class Memory:
    engine: Peak = field(default_factory=Peak)
    ray: Peak = field(default_factory=Peak)

    def see(self, tree: ProcessTree) -> None:
        pids = [p.pid for p in tree.living()]
        rays_own = {pid for pid in pids if is_rays_own(pid)}
        self.engine.see([pid for pid in pids if pid not in rays_own])
        self.ray.see(list(rays_own))


@dataclass(frozen=True, slots=True)
class Server:
    name: str
    url: str
    pid: int
    log_path: Path

    def log_lines(self) -> list[str]:
        return self.log_path.read_text(errors="replace").splitlines()

    def ready_line(self) -> str | None:
        """What the mesh says about itself once it is up; other servers say nothing of the kind."""
        return next((ln for ln in self.log_lines() if ln.startswith(READY_LINE)), None)

    @contextlib.contextmanager
    def memory_watched(self) -> Iterator[Memory]:
        """Peaks of this server's processes while the block runs, looked at every 0.2 s."""
        memory, tree, over = Memory(), ProcessTree(self.pid), threading.Event()

        def look() -> None:
            while True:
                memory.see(tree)
                if over.wait(SAMPLE_S):
                    return

        watcher = threading.Thread(target=look, name="memory-watch", daemon=True)
        watcher.start()
        try:
            yield memory
        finally:
            over.set()
            watcher.join()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until_healthy(server: Server, child: subprocess.Popen[bytes], limit_s: float) -> None:
    give_up_s = time.monotonic() + limit_s
    problem = f"not healthy after {limit_s:.0f} s"
    while time.monotonic() < give_up_s:
        if child.poll() is not None:
            problem = f"ended with status {child.returncode} before it was healthy"
            break
        # Loading servers refuse the connection or answer 503.
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{server.url}/health", timeout=2, trust_env=False).status_code == 200:
                return
        time.sleep(0.1)
    tail = "\n".join(server.log_lines()[-20:])
    raise RuntimeUnavailableError(f"{server.name}: {problem}; its last words:\n{tail}")


def end(child: subprocess.Popen[bytes], tree: ProcessTree) -> None:
    """Ask the server to stop, then kill what is left of its own processes, and no other."""
    tree.living()
    child.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(STOP_S)
    give_up_s = time.monotonic() + 2
    while tree.living() and child.poll() is not None and time.monotonic() < give_up_s:
        time.sleep(0.1)
    for process in tree.living():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    child.wait()


@contextlib.contextmanager
def running(name: str, command: list[str], *, ready_s: float = 180) -> Iterator[Server]:
    """The server ``command`` on a free loopback port: healthy inside the block, gone after it."""
    port = free_port()
    # The peer's settings left in the environment would change what is measured unseen, and on a
    # cluster that was there before the stages would not be ours to watch.
    env = {k: v for k, v in os.environ.items() if not k.startswith(("LLAMA_ARG_", "RAY_ADDRESS"))}
    with tempfile.TemporaryDirectory(prefix="bench-") as home:
        log_path = Path(home) / "server.log"
        with log_path.open("wb") as log:
            child = subprocess.Popen(
                [*command, "--port", str(port)], stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True, env=env,
            )  # fmt: skip
        tree = ProcessTree(child.pid)
        try:
            server = Server(name, f"http://127.0.0.1:{port}", child.pid, log_path)
            wait_until_healthy(server, child, ready_s)
            yield server
        finally:
            end(child, tree)
