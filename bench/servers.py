"""Start a server as a child process, watch it, and end exactly what it started."""

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
from dataclasses import dataclass
from pathlib import Path

import httpx

from bench.processes import ProcessTree, Watch
from skippy_mesh.cli import demo_path
from skippy_mesh.errors import RuntimeUnavailableError, UsageError

READY_LINE = "skippy_mesh ready on "
SAMPLE_S = 0.2
STOP_S = 20.0


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
    def watched(self) -> Iterator[Watch]:
        """Memory peaks and CPU of this server while the block runs, looked at every 0.2 s."""
        watch, over = Watch(self.pid), threading.Event()

        def keep_looking() -> None:
            watch.look()
            while not over.wait(SAMPLE_S):
                watch.look()

        watcher = threading.Thread(target=keep_looking, name="watch", daemon=True)
        watcher.start()
        try:
            yield watch
        finally:
            over.set()
            watcher.join()
            watch.finish()


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
