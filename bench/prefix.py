"""What a shared system prompt saves: ours with it cached, ours without, and llama-server with it.

All prompts begin with the same tokens and end with their own. A *warm* arm has seen the beginning
once before the clock starts; the *cold* one asks for no cache. The arms of a round answer the same
prompts one after another, each on a fresh server. A round has numbers only if our warm answers are
our cold ones, byte for byte.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bench.load import run_requests
from bench.machine import document_head
from bench.pairs import NUM_SLOTS, levels
from bench.points import check_warm, describe, published, write_json
from bench.programs import find_peers
from bench.records import Run, same_texts
from bench.servers import Server, llama_server_command, mesh_command, model_path, running
from bench.steplog import Step, StepLog
from bench.table import HEADER, table_row
from bench.verdict import Points, Target, interval, paired_ratios, summarise
from bench.workloads import Workload

COLD, WARM, PEER = "cold", "warm", "llama-server"
PRIMER = 10**6  # the index of a prompt that no measured request has

TARGETS = (
    Target(pair="warm/cold", clients=1, metric="p50_ttft", bound=0.1, is_floor=False),
    Target(pair="warm/llama-server", clients=8, metric="throughput", bound=1.4),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    model: str
    levels: list[int]
    rounds: int
    shared_tokens: int
    own_tokens: int
    output_tokens: int
    threads: int
    limit_seconds: float
    seed: int

    @property
    def num_cells(self) -> int:
        """Enough for all slots without any sharing, so that nobody runs short of memory."""
        each = self.shared_tokens + self.own_tokens + self.output_tokens + 64
        return -(-NUM_SLOTS * each // 256) * 256

    def num_requests(self, level: int) -> int:
        return max(8, level)

    def workload(self, name: str, arm: str) -> Workload:
        return Workload(
            prompt_tokens=self.shared_tokens + self.own_tokens,
            shared_tokens=self.shared_tokens,
            output_tokens=self.output_tokens,
            uses_cache=arm != COLD,
            seed=f"{self.seed}/{name}",
        )


@contextlib.contextmanager
def started(settings: Settings, arm: str) -> Iterator[tuple[Server, list[str], Path]]:
    with tempfile.TemporaryDirectory(prefix="bench-") as home:
        log = Path(home) / "steps.jsonl"
        if arm == PEER:
            command = llama_server_command(
                find_peers()["llama-server"],
                model_path(settings.model),
                num_slots=NUM_SLOTS,
                num_cells=settings.num_cells,
                num_threads=settings.threads,
                uses_cache=True,
            )
        else:
            command = mesh_command(
                settings.model,
                stages=1,
                engine="mesh",
                num_cells=settings.num_cells,
                num_threads=settings.threads,
            )
            command += ["--step-log", str(log)]
        with running(arm, command) as server:
            yield server, command, log


Start = Callable[[Settings, str], AbstractContextManager[tuple[Server, list[str], Path]]]


def measure(
    settings: Settings, arm: str, level: int, round_: int, start: Start
) -> tuple[Run, dict[str, object]]:
    workload, limit_s = settings.workload(f"{round_}/{level}", arm), settings.limit_seconds
    with start(settings, arm) as (server, command, log):
        check_warm(server, replace(workload, seed="warm-up", shared_tokens=0))
        if arm != COLD:
            run_requests(server.url, workload, clients=1, requests=1, limit_s=limit_s, first=PRIMER)
        steps = StepLog(log) if log.exists() else None
        with server.watched() as watch:
            requests = settings.num_requests(level)
            run = run_requests(
                server.url, workload, clients=level, requests=requests, limit_s=limit_s
            )
        point = describe(run, requests)
        if steps is not None:
            point |= cells_per_session(steps.steps())
    return run, {
        **point,
        "peak_memory": {"engine": watch.engine.as_json(), "ray": watch.ray.as_json()},
        "command": published(command),
        "others_cpu_share": watch.others_cpu_share,
    }


def cells_per_session(steps: Sequence[Step]) -> dict[str, object]:
    """While the most sequences run: the most attention cells in use, over how many run."""
    busiest = max(steps, key=lambda step: (step.running, _cells(step)), default=None)
    if busiest is None or not busiest.running:
        return {}
    return {
        "cells_per_session": round(_cells(busiest) / busiest.running, 1),
        "max_running": busiest.running,
        "prefill_tokens": sum(step.prefill_tokens for step in steps),
    }


def _cells(step: Step) -> int:
    return max(stage.get("attention", 0) for stage in step.active_cells)


def play_round(
    settings: Settings, level: int, round_: int, *, start: Start = started
) -> dict[str, object]:
    order = [COLD, WARM, PEER] if round_ % 2 == 0 else [PEER, WARM, COLD]
    runs, points = {}, {}
    for arm in order:
        runs[arm], points[arm] = measure(settings, arm, level, round_, start)
        print(table_row(level, arm, points[arm], None), flush=True)
    same = same_texts(runs[WARM], runs[COLD])
    if same["equal"] != settings.num_requests(level):
        points[WARM] |= {"void": f"only {same['equal']} warm answers are the cold ones"}
        points[WARM].pop("output_throughput", None)
        print(f"    no number: {points[WARM]['void']}", flush=True)
    return {"clients": level, "round": round_, "same_texts": same, **points}


def intervals(rounds: Sequence[dict[str, object]]) -> Points:
    """Warm over each of the others, by clients and metric."""
    found = {}
    for level in dict.fromkeys(int(str(r["clients"])) for r in rounds):
        mine = [r for r in rounds if r["clients"] == level and not r[WARM]["void"]]  # type: ignore[index]
        for other in (COLD, PEER):
            values = paired_ratios([r[WARM] for r in mine], [r[other] for r in mine])  # type: ignore[misc]
            ratios = {key: i for key, v in values.items() if (i := interval(v))}
            found[f"{WARM}/{other}", level] = ratios
    return found


def summary_of(rounds: Sequence[dict[str, object]]) -> dict[str, object]:
    return summarise(TARGETS, intervals(rounds))


def prefix(settings: Settings, out: Path | None) -> None:
    rounds: list[dict[str, object]] = []
    document: dict[str, object] = {
        **document_head("prefix", model_path(settings.model)),
        "settings": asdict(settings) | {"num_cells": settings.num_cells},
        "rounds": rounds,
    }
    print(HEADER, flush=True)
    for round_ in range(settings.rounds):
        for level in settings.levels:
            rounds.append(play_round(settings, level, round_))
            if out:
                write_json(out, document | summary_of(rounds))
    for (pair, clients), each in intervals(rounds).items():
        shown = ", ".join(f"{name} {value}" for name, value in each.items())
        print(f"{pair} N={clients}: {shown}")
    print(json.dumps({"bench": "prefix", "rounds": settings.rounds, **summary_of(rounds)}))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench prefix", description=__doc__)
    parser.add_argument("--model", default="demo", help="a GGUF file, or demo")
    parser.add_argument("--levels", type=levels, default=[1, 8, 32], help="N,N..: clients, <= 32")
    parser.add_argument("--rounds", type=int, default=4, help="below 4 decides nothing")
    parser.add_argument("--shared-tokens", type=int, default=1000)
    parser.add_argument("--own-tokens", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit-seconds", type=float, default=600, help="for one run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write a document, e.g. bench/results/NAME.json")
    options = vars(parser.parse_args(argv))
    out = options.pop("out")
    find_peers()  # not built is better said now than after our first run
    prefix(Settings(**options), out)
    return 0
