"""From token to client: ``python -m bench lag``.

How long after the last stage's answer a token's chunk is with its client, over a real socket, as
a share of the step that sampled it. N clients stream at once; each chunk belongs to the last step
that was answered before it came, by the step log, whose clock is this machine's. A chunk has come
when the kernel has its bytes for the client's socket: how soon that client wakes up, and what it
does with them, is its own affair.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import struct
import tempfile
import time
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from bench.figures import percentile
from bench.load import Stream
from bench.machine import commit, machine_facts
from bench.servers import mesh_command, running
from bench.steplog import Step, StepLog
from bench.workloads import Workload

LEVELS = (1, 8, 32)
TARGET_SHARE = 0.05  # at N = 1
_SO_TIMESTAMPNS = 35  # asm-generic/socket.h; Python's socket module does not name it
_TIMESPEC = struct.Struct("ll")


class Arrivals:
    """An answer, each piece with the time at which this machine's kernel had it, until its end."""

    def __init__(self, sock: socket.socket):
        sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        self._sock = sock
        self._pieces: list[tuple[float, bytes]] = []
        self._loop = asyncio.get_running_loop()
        self.ended = self._loop.create_future()
        self._loop.add_reader(sock, self._read)

    def _read(self) -> None:
        data, ancillary, _, _ = self._sock.recvmsg(1 << 16, socket.CMSG_SPACE(_TIMESPEC.size))
        if not data:
            self._loop.remove_reader(self._sock)
            self.ended.set_result(None)
            return
        age_s = 0.0  # the first pieces may have come before the kernel began to stamp
        for _, kind, stamp in ancillary:
            if kind == _SO_TIMESTAMPNS:
                seconds, nanoseconds = _TIMESPEC.unpack(stamp)
                age_s = time.time() - (seconds + 1e-9 * nanoseconds)  # of another clock
        self._pieces.append((time.monotonic() - age_s, data))

    def stream(self) -> Stream:
        stream, left = Stream(), b""
        for now_s, data in self._pieces:
            *lines, left = (left + data).split(b"\n")
            for line in lines:
                stream.feed(line.decode(), now_s)
        return stream


async def times_of(url: str, workload: Workload, index: int) -> list[float]:
    """When each chunk of one answer came."""
    server, loop = urlsplit(url), asyncio.get_running_loop()
    body = json.dumps(workload.body(index)).encode()
    with socket.socket() as sock:
        sock.setblocking(False)
        await loop.sock_connect(sock, (server.hostname, server.port))
        # 1.0, so that the answer's body comes as it is, not in chunks with lengths.
        head = f"POST /v1/completions HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n"
        await loop.sock_sendall(sock, head.encode() + body)
        arrivals = Arrivals(sock)
        await arrivals.ended
    stream = arrivals.stream()
    if (problem := stream.verdict(workload.output_tokens)) is not None:
        raise RuntimeError(problem)
    return stream.chunk_times_s


async def stream_all(url: str, workload: Workload, num_clients: int) -> list[float]:
    """When each chunk of all answers came."""
    found = await asyncio.gather(*(times_of(url, workload, k) for k in range(num_clients)))
    return sorted(time_s for times in found for time_s in times)


def lags_of(arrivals_s: Sequence[float], answers_s: Sequence[float]) -> list[float]:
    """How long after an answer each chunk came; one that came before any has none."""
    found = [(at, bisect_right(answers_s, at)) for at in arrivals_s]
    return [at - answers_s[place - 1] for at, place in found if place]


def summary(arrivals_s: Sequence[float], steps: Sequence[Step]) -> dict[str, float]:
    lags = lags_of(arrivals_s, sorted(step.answered_s for step in steps))
    decodes = [step.step_s for step in steps if not step.prefill_tokens]
    step_s = statistics.median(decodes)
    lag_s = statistics.median(lags)
    return {
        "chunks": len(lags),
        "step_ms": round(1e3 * step_s, 3),
        "p50_lag_ms": round(1e3 * lag_s, 3),
        "p99_lag_ms": round(1e3 * (percentile(lags, 99) or 0.0), 3),
        "p50_share": round(lag_s / step_s, 4),
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench lag", description=__doc__)
    parser.add_argument("model", nargs="?", default="demo", help="a GGUF file (%(default)s)")
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2, help="per stage (%(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer (%(default)s)")
    args = parser.parse_args(argv)
    found: dict[int, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "steps"
        command = mesh_command(
            args.model, stages=args.stages, engine="mesh", num_cells=16384,
            num_threads=args.threads,
        )  # fmt: skip
        with running("skippy_mesh", [*command, "--step-log", str(log)]) as server:
            for level in LEVELS:
                steps = StepLog(log)
                workload = Workload(
                    prompt_tokens=32, output_tokens=args.tokens, seed=f"lag-{level}"
                )
                arrivals_s = asyncio.run(stream_all(server.url, workload, level))
                found[level] = summary(arrivals_s, steps.steps())
    for level, row in found.items():
        print(f"N={level:<3}", "  ".join(f"{name} {value}" for name, value in row.items()))
    share = found[1]["p50_share"]
    print(f"share at N=1: {share:.1%}, target under {TARGET_SHARE:.0%}")
    print(json.dumps({"machine": machine_facts(), "commit": commit(), "levels": found}))
    return 0 if share < TARGET_SHARE else 1
