"""A Ray cluster of one node as an operator starts it, with a token, and not by the mesh."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.processes import Process, environment, still_alive, tree

RAY = (sys.executable, "-m", "ray.scripts.scripts")
STARTS_WITHIN_S = 120
ENDS_WITHIN_S = 60


@dataclass(frozen=True)
class Head:
    """``address`` is for drivers, ``dashboard`` for jobs; ``env`` has the token for both."""

    pid: int
    folder: Path
    address: str
    dashboard: str
    env: Mapping[str, str]

    def ray(self, *arguments: str) -> str:
        """What a command of Ray's own says; it must succeed."""
        done = subprocess.run(
            [*RAY, *arguments],
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    def get(self, path: str) -> Any:
        headers = {"Authorization": f"Bearer {self.env['RAY_AUTH_TOKEN']}"}
        reply = httpx.get(f"{self.dashboard}{path}", headers=headers, timeout=30)
        reply.raise_for_status()
        return reply.json()

    def rows(self, kind: str) -> list[dict[str, Any]]:
        """``actors`` or ``placement_groups``, as the cluster's control store knows them."""
        found: list[dict[str, Any]] = self.get(f"/api/v0/{kind}")["data"]["result"]["result"]
        return found

    def left_of(self, mesh_name: str) -> list[str]:
        """What the control store still has of a mesh."""
        actors = [
            row["name"] for row in self.rows("actors")
            if row["state"] != "DEAD" and row["name"].startswith(f"{mesh_name}_")
        ]  # fmt: skip
        groups = [
            row["name"] for row in self.rows("placement_groups")
            if row["state"] != "REMOVED" and row["name"] == f"{mesh_name}_pg"
        ]  # fmt: skip
        return actors + groups

    def mesh_processes(self) -> list[Process]:
        """Of every mesh: its actors, and drivers that are none."""
        titles = ("ray::Stage", "ray::Coordinator", "ray::Gateway", "ray::Driver")
        return [
            process for process in tree(self.pid, self.folder)
            if process.command.startswith(titles) or "-m skippy_mesh serve" in process.command
        ]  # fmt: skip


@contextlib.contextmanager
def head_node(cache: Path, folder: Path, *, num_cpus: int) -> Iterator[Head]:
    """On free ports, with its session in ``folder``."""
    token = secrets.token_hex(32)
    env = environment(cache, folder) | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        "RAY_USAGE_STATS_ENABLED": "0",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    gcs, dashboard, agent, client = free_ports(4)
    command = [
        *RAY, "start", "--head", "--block", "--port", str(gcs), "--num-cpus", str(num_cpus),
        "--include-dashboard", "true", "--dashboard-port", str(dashboard),
        "--dashboard-agent-listen-port", str(agent), "--ray-client-server-port", str(client),
        "--min-worker-port", "0", "--max-worker-port", "0",
        "--object-store-memory", str(100 * 2**20), "--node-ip-address", "127.0.0.1",
    ]  # fmt: skip
    log = folder / "head.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=env, stdout=output, stderr=output)
    url = f"http://127.0.0.1:{dashboard}"
    head = Head(process.pid, folder, f"127.0.0.1:{gcs}", url, env)
    try:
        _await(head, process, log)
        yield head
    finally:
        started = tree(process.pid, folder)
        process.send_signal(signal.SIGTERM)
        process.wait(ENDS_WITHIN_S)
        for left in still_alive(started, within_s=10):  # agents that wait for a store that is gone
            with contextlib.suppress(ProcessLookupError):
                os.kill(left.pid, signal.SIGKILL)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in socks:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in socks]


def _await(head: Head, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until jobs are taken, which is the last thing to come up."""
    deadline = time.monotonic() + STARTS_WITHIN_S
    while True:
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        try:
            head.get("/api/jobs/")
            return
        except httpx.HTTPError:
            time.sleep(0.2)
