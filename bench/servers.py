"""Start a server as a child process, watch it, and end exactly what it started."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from bench.processes import ProcessTree, Watch
from skippy_mesh.errors import RuntimeUnavailableError, UsageError
from skippy_mesh.starting import demo_path

READY_LINE = "skippy_mesh ready on "
SAMPLE_S = 0.2
STOP_S = 20.0
WORKER_READY_S = 20.0
_Q8_0 = 8  # in enum ggml_type


def model_path(model: str) -> Path:
    """The file behind a model's name; ``demo`` is the one bundled with its package."""
    path = demo_path() if model == "demo" else Path(model)
    if not path.is_file():
        raise UsageError(f"no model file at {path}")
    return path


def mesh_command(
    model: str, *, stages: int, engine: str, num_cells: int, num_threads: int | None = None
) -> list[str]:
    threads = [] if num_threads is None else ["--threads", str(num_threads)]
    return [sys.executable, "-m", "skippy_mesh", "serve", model, "--stages", str(stages),
            "--engine", engine, "--ctx-size", str(num_cells), *threads]  # fmt: skip


def llama_server_command(
    program: Path,
    model: Path,
    *,
    num_slots: int,
    num_cells: int,
    num_threads: int | None = None,
    uses_cache: bool = False,
) -> list[str]:
    """The strongest fair peer: same file, KV type and cells, one pool shared by all its slots.
    Its prompt caches are off where no prompt comes twice."""
    caches = [] if uses_cache else ["--no-cache-prompt", "--cache-ram", "0"]
    threads = num_threads or os.cpu_count() or 1
    return [str(program), *llama_flags(model, num_cells=num_cells, num_threads=threads),
            "-np", str(num_slots), "--kv-unified", *caches, "--offline", "--no-ui",
            "--host", "127.0.0.1"]  # fmt: skip


def llama_flags(model: Path, *, num_cells: int, num_threads: int) -> list[str]:
    """What llama.cpp's programs are told alike: file, KV type, flash attention, threads, cells."""
    return ["-m", str(model), "-fa", "on", "-ctk", "q8_0", "-ctv", "q8_0",
            "-t", str(num_threads), "-c", str(num_cells)]  # fmt: skip


def llama_cpp_python_command(
    site: Path, model: Path, *, num_cells: int, num_threads: int
) -> list[str]:
    """llama-cpp-python's own server, of the very package the mesh runs on; what else it needs is
    in ``site``. One request at a time, and a new one must not cut off the one that runs."""
    return ["env", f"PYTHONPATH={site}", sys.executable, "-m", "llama_cpp.server",
            "--model", str(model), "--n_ctx", str(num_cells), "--n_threads", str(num_threads),
            "--type_k", str(_Q8_0), "--type_v", str(_Q8_0), "--flash_attn", "true",
            "--interrupt_requests", "false", "--verbose", "false",
            "--host", "127.0.0.1"]  # fmt: skip


def rpc_flags(ports: Sequence[int]) -> list[str]:
    """Every layer on the RPC workers, as many on each; what is then left to llama-server is the
    lookup of embeddings and the sampling."""
    servers = ",".join(f"127.0.0.1:{port}" for port in ports)
    return ["--rpc", servers, "-ngl", "99", "-ts", ",".join("1" * len(ports))]


def check_split(log_lines: Sequence[str], num_workers: int) -> dict[str, float]:
    """MiB of weights on each RPC worker, as llama-server tells at ``-lv 4``; an error if one got
    none or a layer stayed behind: that would be a peer other than the one it is called."""
    text = "\n".join(log_lines)
    sizes = dict(re.findall(r"load_tensors: (RPC\S+) model buffer size = +([\d.]+) MiB", text))
    layers = re.search(r"offloaded (\d+)/(\d+) layers", text)
    if len(sizes) != num_workers or layers is None or layers[1] != layers[2]:
        where = layers[0] if layers else "no layer offloaded"
        raise RuntimeUnavailableError(
            f"llama-server put weights on {len(sizes)} of {num_workers} RPC workers ({where})"
        )
    return {name: float(size) for name, size in sizes.items()}


@dataclass(frozen=True, slots=True)
class Server:
    name: str
    url: str
    pid: int
    log_path: Path
    worker_pids: tuple[int, ...] = ()  # started beside it; they count as this server's

    def log_lines(self) -> list[str]:
        return self.log_path.read_text(errors="replace").splitlines()

    def ready_line(self) -> str | None:
        """What the mesh says about itself once it is up; other servers say nothing of the kind."""
        return next((ln for ln in self.log_lines() if ln.startswith(READY_LINE)), None)

    @contextlib.contextmanager
    def watched(self) -> Iterator[Watch]:
        """Memory peaks and CPU of this server while the block runs, looked at every 0.2 s."""
        watch, over = Watch(self.pid, *self.worker_pids), threading.Event()

        watch.look()  # the first look costs most, and is not to fall on the first request

        def keep_looking() -> None:
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


def wait_until_healthy(
    server: Server, child: subprocess.Popen[bytes], limit_s: float, alive: str
) -> None:
    give_up_s = time.monotonic() + limit_s
    problem = f"not healthy after {limit_s:.0f} s"
    while time.monotonic() < give_up_s:
        if child.poll() is not None:
            problem = f"ended with status {child.returncode} before it was healthy"
            break
        # Loading servers refuse the connection or answer 503.
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(server.url + alive, timeout=2, trust_env=False).status_code == 200:
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
def child(command: list[str], log_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """``command`` as a process with its words in ``log_path``; it and all of its own end here."""
    # The peer's settings left in the environment would change what is measured unseen, and on a
    # cluster that was there before the stages would not be ours to watch.
    env = {k: v for k, v in os.environ.items() if not k.startswith(("LLAMA_ARG_", "RAY_ADDRESS"))}
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            start_new_session=True, env=env,
        )  # fmt: skip
    tree = ProcessTree(process.pid)
    try:
        yield process
    finally:
        end(process, tree)


@contextlib.contextmanager
def running(
    name: str, command: list[str], *, ready_s: float = 180, alive: str = "/health"
) -> Iterator[Server]:
    """The server ``command`` on a free loopback port: inside the block ``alive`` answers 200, and
    after it the server is gone."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="bench-") as home:
        log_path = Path(home) / "server.log"
        with child([*command, "--port", str(port)], log_path) as process:
            server = Server(name, f"http://127.0.0.1:{port}", process.pid, log_path)
            wait_until_healthy(server, process, ready_s, alive)
            yield server


@contextlib.contextmanager
def rpc_workers(
    program: Path, count: int, *, num_threads: int
) -> Iterator[tuple[list[int], tuple[int, ...]]]:
    """``count`` llama.cpp RPC servers on this machine: their ports and their pids."""
    ports = [free_port() for _ in range(count)]
    with contextlib.ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        pids = []
        for port in ports:
            command = [str(program), "--threads", str(num_threads), "--host", "127.0.0.1",
                       "--port", str(port)]  # fmt: skip
            log_path = home / f"{port}.log"
            process = stack.enter_context(child(command, log_path))
            wait_until_open(port, process, log_path)
            pids.append(process.pid)
        yield ports, tuple(pids)


def wait_until_open(port: int, process: subprocess.Popen[bytes], log_path: Path) -> None:
    give_up_s = time.monotonic() + WORKER_READY_S
    while time.monotonic() < give_up_s and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    tail = log_path.read_text(errors="replace")[-2000:]
    raise RuntimeUnavailableError(f"the RPC worker does not listen; its last words:\n{tail}")
