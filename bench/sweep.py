"""Throughput, latency and peak memory against the number of clients, ours beside a peer.

A closed loop: N clients, each with one request open. Every point starts its server afresh, warms
it with one request, and gives both arms the same prompts. A point has numbers only if none of its
requests failed; one whose time ran out says so and counts what had finished.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.load import closed_loop
from bench.machine import document_head
from bench.points import OURS, RESULTS, check_warm, describe, published, write_json
from bench.programs import find_peers
from bench.records import Run, same_texts
from bench.servers import llama_server_command, mesh_command, model_path, running
from bench.table import HEADER, table_row
from bench.workloads import Workload

PEERS = ("llama-server",)
MIN_REQUESTS = 8  # below this a median says little


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    model: str
    stages: int
    engine: str
    levels: list[int]
    peer: str | None
    rounds: int
    send_seconds: float  # of a point; then nothing new is sent,
    drain_seconds: float  # and what is open has so long to finish before it is cut
    prompt_tokens: int
    output_tokens: int
    seed: int

    def num_cells(self, level: int) -> int:
        """Room for every client at once, the same for all arms; 32 more because the prompt's
        length is only wished for."""
        return max(1024, level * (self.prompt_tokens + self.output_tokens + 32))

    def num_requests(self, level: int) -> int:
        return max(MIN_REQUESTS, 2 * level)

    def workload(self, name: str) -> Workload:
        return Workload(
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            seed=f"{self.seed}/{name}",
        )

    def command(self, arm: str, level: int) -> list[str]:
        cells = self.num_cells(level)
        if arm == OURS:
            return mesh_command(self.model, stages=self.stages, engine=self.engine, num_cells=cells)
        return llama_server_command(
            find_peers()[arm], model_path(self.model), num_slots=level, num_cells=cells
        )


def measure(settings: Settings, arm: str, level: int, round_: int) -> tuple[Run, dict[str, object]]:
    command = settings.command(arm, level)
    with running(arm, command) as server:
        check_warm(server, settings.workload("warm-up"))
        with server.watched() as watch:
            run = asyncio.run(
                closed_loop(
                    server.url,
                    settings.workload(f"{round_}/{level}"),
                    num_clients=level,
                    max_requests=settings.num_requests(level),
                    send_s=settings.send_seconds,
                    drain_s=settings.drain_seconds,
                )
            )
        ready_line = server.ready_line()
    return run, {
        **describe(run, settings.num_requests(level)),
        "peak_memory": {"engine": watch.engine.as_json(), "ray": watch.ray.as_json()},
        "command": published(command),
        "ready_line": ready_line,
        "others_cpu_share": watch.others_cpu_share,
    }


def ratio(arms: dict[str, dict[str, object]], peer: str | None) -> float | None:
    """Our throughput over the peer's; None unless both are known."""
    ours = arms[OURS].get("output_throughput")
    theirs = arms[peer].get("output_throughput") if peer else None
    return ours / theirs if isinstance(ours, float) and isinstance(theirs, float) else None


def sweep(settings: Settings, out: Path) -> None:
    arms = [OURS, *([settings.peer] if settings.peer else [])]
    points: list[dict[str, object]] = []
    document: dict[str, object] = {
        **document_head("sweep", model_path(settings.model)),
        "settings": asdict(settings),
        "points": points,
    }
    print(HEADER, flush=True)
    for round_ in range(settings.rounds):
        for level in settings.levels:
            runs, point = {}, {}
            # Every other round begins with the other arm, so that drift favours neither.
            for arm in arms if round_ % 2 == 0 else arms[::-1]:
                runs[arm], point[arm] = measure(settings, arm, level, round_)
            times = ratio(point, settings.peer)
            for arm in arms:
                print(table_row(level, arm, point[arm], times if arm == OURS else None), flush=True)
            points.append({
                "clients": level,
                "round": round_,
                "ratio": times,
                "same_texts": same_texts(*runs.values()) if settings.peer else None,
                "arms": point,
            })  # fmt: skip
            write_json(out, document | {"ratios": median_ratios(points)})
    print(f"written to {out}")


def median_ratios(points: list[dict[str, object]]) -> dict[str, dict[str, object]]:
    """Over the rounds of each number of clients: our throughput over the peer's, and its spread."""
    found: dict[str, list[float]] = {}
    for point in points:
        if isinstance(value := point["ratio"], float):
            found.setdefault(str(point["clients"]), []).append(value)
    return {
        clients: {"median": statistics.median(v), "min": min(v), "max": max(v), "rounds": len(v)}
        for clients, v in found.items()
    }


def levels(text: str) -> list[int]:
    values = [int(word) for word in text.split(",")]
    if not all(1 <= value <= 256 for value in values):
        raise ValueError
    return values


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench sweep", description=__doc__)
    parser.add_argument("--model", default="demo", help="a GGUF file, or demo")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--engine", choices=["auto", "mesh", "baseline"], default="baseline")
    parser.add_argument("--levels", type=levels, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--peer", choices=PEERS, help="measure it beside ours (needs `make peers`)")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=30, dest="send_seconds", help="per point")
    parser.add_argument("--drain-seconds", type=float, default=90, help="for what is open then")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="default: bench/results/DATE-sweep.json")
    options = vars(parser.parse_args(argv))
    out = options.pop("out") or RESULTS / f"{datetime.date.today()}-sweep.json"
    if options["peer"]:
        find_peers()  # not built is better said now than after our first point
    sweep(Settings(**options), out)
    return 0
