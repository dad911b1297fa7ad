"""Ours against the strongest peer of the same shape, in paired rounds, with targets.

Two pairs: one stage of two threads against llama-server, and two stages of one thread against
llama-server over two RPC workers of one thread. N clients in a closed loop send a fixed number of
distinct prompts, so both arms do the same work. Each run has a fresh server, and the two runs of a
round follow one another, ours first in every other round. A run of ours has numbers only if every
request completed and a sample of them, sent again alone, says the same.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bench.load import run_requests
from bench.machine import document_head
from bench.peers import find_peers
from bench.points import COUNTS, OURS, check_warm, describe, published, write_json
from bench.processes import TICKS_PER_S, read_stat
from bench.records import Run, same_texts
from bench.servers import (
    Server,
    check_split,
    llama_server_command,
    mesh_command,
    model_path,
    rpc_flags,
    rpc_workers,
    running,
)
from bench.steplog import StepLog, profile
from bench.table import HEADER, table_row
from bench.verdict import Points, Target, interval, judgements, paired_ratios, summarise
from bench.workloads import Workload

NUM_SLOTS = 32
NUM_CELLS = 8192  # 256 for each slot, and as many lanes of ours
MIN_REQUESTS = 8  # of a run; below this a median says little
NUM_ALONE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    stages: int
    threads: int  # of each stage or worker
    peer: str
    workers: int = 0


PAIRS = {
    "one": Pair(stages=1, threads=2, peer="llama-server"),
    "two": Pair(stages=2, threads=1, peer="llama RPC", workers=2),
}

# What the project promises of `python -m bench serve`. Not worse is a ratio of 1.
TARGETS = (
    Target(pair="one", clients=1, metric="throughput", bound=1.0),
    Target(pair="one", clients=8, metric="throughput", bound=1.0),
    Target(pair="one", clients=32, metric="throughput", bound=1.2),
    Target(pair="one", clients=1, metric="p99_e2e", bound=1.0, is_floor=False),
    Target(pair="one", clients=8, metric="p99_e2e", bound=1.0, is_floor=False),
    Target(pair="one", clients=32, metric="p99_e2e", bound=1.0, is_floor=False),
    Target(pair="two", clients=8, metric="throughput", bound=1.45),
    Target(pair="two", clients=32, metric="throughput", bound=1.65),
    Target(pair="two", clients=32, metric="busy_share", bound=0.9),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    model: str
    pairs: list[str]
    levels: list[int]
    rounds: int
    prompt_tokens: int
    output_tokens: int
    requests_per_client: int
    limit_seconds: float  # of a run; one that is not done then has no number
    seed: int

    def num_requests(self, level: int) -> int:
        return max(MIN_REQUESTS, self.requests_per_client * level)

    def workload(self, name: str) -> Workload:
        return Workload(
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            seed=f"{self.seed}/{name}",
        )


@dataclass(frozen=True, slots=True)
class Arm:
    server: Server
    command: list[str]
    step_log: Path | None = None  # of ours


@contextlib.contextmanager
def our_arm(settings: Settings, pair: Pair) -> Iterator[Arm]:
    with tempfile.TemporaryDirectory(prefix="bench-") as home:
        log = Path(home) / "steps.jsonl"
        command = mesh_command(
            settings.model,
            stages=pair.stages,
            engine="mesh",
            num_cells=NUM_CELLS,
            num_threads=pair.threads,
        )
        command += ["--parallel", str(NUM_SLOTS), "--step-log", str(log)]
        with running(OURS, command) as server:
            yield Arm(server, command, log)


@contextlib.contextmanager
def peer_arm(settings: Settings, pair: Pair, *extra: str) -> Iterator[Arm]:
    programs = find_peers()
    command = llama_server_command(
        programs["llama-server"],
        model_path(settings.model),
        num_slots=NUM_SLOTS,
        num_cells=NUM_CELLS,
        num_threads=pair.threads,
    )
    with contextlib.ExitStack() as stack:
        pids: tuple[int, ...] = ()
        if pair.workers:
            ports, pids = stack.enter_context(
                rpc_workers(programs["ggml-rpc-server"], pair.workers, num_threads=pair.threads)
            )
            command += rpc_flags(ports)
        server = stack.enter_context(running(pair.peer, [*command, *extra]))
        yield Arm(replace(server, worker_pids=pids), command)


Start = Callable[[Settings, Pair], contextlib.AbstractContextManager[Arm]]


def weights_by_worker(settings: Settings, pair: Pair) -> dict[str, float]:
    """Looked at once and apart, because a server that talks so much might be slower."""
    with peer_arm(settings, pair, "-lv", "4") as arm:
        return check_split(arm.server.log_lines(), pair.workers)


def texts_alone(url: str, workload: Workload, settings: Settings, run: Run) -> dict[str, int]:
    """How many of a sample say the same alone. The sample is from where the first clients end and
    send again, so that it has both those that began together and those that joined."""
    num_sent = len(run.records)
    num_clients = max(1, num_sent // settings.requests_per_client)
    num_alone = min(NUM_ALONE, num_sent)
    first = max(0, min(num_clients - num_alone // 2, num_sent - num_alone))
    alone = run_requests(
        url, workload, clients=1, requests=num_alone, limit_s=settings.limit_seconds, first=first
    )
    return {**same_texts(run, alone), "asked": num_alone}


def judge(point: dict[str, object], alone: dict[str, int] | None) -> dict[str, object]:
    """The point, without numbers if it was not finished or one of its answers was wrong."""
    reason = point["void"] or point["cut_by_time"]
    if alone is not None and not alone["equal"] == alone["of"] == alone["asked"]:
        reason = reason or f"only {alone['equal']} of {alone['asked']} texts are the same alone"
    if reason is None:
        return point | {"alone": alone}
    return {"void": reason, "alone": alone, **{key: point[key] for key in COUNTS}}


def measure(
    arm: Arm, settings: Settings, level: int, workload: Workload
) -> tuple[Run, dict[str, object]]:
    server = arm.server
    check_warm(server, settings.workload("warm-up"))
    log = StepLog(arm.step_log) if arm.step_log else None
    requests = settings.num_requests(level)
    with server.watched() as watch:
        ticks = worker_ticks(server)
        run = run_requests(
            server.url, workload, clients=level, requests=requests, limit_s=settings.limit_seconds
        )
        spent = [after - before for before, after in zip(ticks, worker_ticks(server), strict=True)]
    point = describe(run, requests)
    alone, duration = None, point.get("duration")
    if log is not None and isinstance(duration, float):
        point["profile"] = profile(log.steps(), duration)
        alone = texts_alone(server.url, workload, settings, run)
    if isinstance(duration, float) and spent:
        point["worker_cpu_share"] = [round(n / TICKS_PER_S / duration, 3) for n in spent]
    return run, {
        **judge(point, alone),
        "peak_memory": {"engine": watch.engine.as_json(), "ray": watch.ray.as_json()},
        "command": published(arm.command),
        "ready_line": server.ready_line(),
        "others_cpu_share": watch.others_cpu_share,
    }


def worker_ticks(server: Server) -> list[int]:
    stats = [read_stat(pid) for pid in server.worker_pids]
    return [stat.cpu_ticks for stat in stats if stat]


def play_round(
    settings: Settings,
    name: str,
    level: int,
    round_: int,
    *,
    ours: Start = our_arm,
    theirs: Start = peer_arm,
) -> dict[str, object]:
    pair = PAIRS[name]
    arms = {OURS: ours, pair.peer: theirs}
    # Ours first in every other round: ABBA, so that drift favours neither.
    order = list(arms) if round_ % 2 == 0 else list(arms)[::-1]
    runs: dict[str, Run] = {}
    points: dict[str, dict[str, object]] = {}
    for label in order:
        with arms[label](settings, pair) as arm:
            workload = settings.workload(f"{name}/{round_}/{level}")
            runs[label], points[label] = measure(arm, settings, level, workload)
    ratio = paired_ratios([points[OURS]], [points[pair.peer]])["throughput"]
    for label in arms:
        times = ratio[0] if ratio and label == OURS else None
        print(table_row(level, label, points[label], times), flush=True)
    return {
        "pair": name,
        "clients": level,
        "round": round_,
        "first": order[0],
        "same_texts": same_texts(runs[OURS], runs[pair.peer]),
        "ours": points[OURS],
        "theirs": points[pair.peer],
    }


def busy_share(point: Mapping[str, object]) -> float | None:
    """Of the stage that is least busy."""
    found = point.get("profile")
    shares = found.get("busy_share") if isinstance(found, dict) else None
    return min(shares) if shares else None


def intervals(rounds: Sequence[dict[str, object]]) -> Points:
    """By pair and clients, each metric over the rounds that have a number."""
    found: Points = {}
    for name, level in dict.fromkeys((str(r["pair"]), int(str(r["clients"]))) for r in rounds):
        mine = [r for r in rounds if (r["pair"], r["clients"]) == (name, level)]
        ours, theirs = ([r[side] for r in mine] for side in ("ours", "theirs"))
        values = paired_ratios(ours, theirs)  # type: ignore[arg-type]
        shares = [busy_share(point) for point in ours]  # type: ignore[arg-type]
        values["busy_share"] = [share for share in shares if share is not None]
        found[name, level] = {key: i for key, v in values.items() if (i := interval(v))}
    return found


def serve(settings: Settings, out: Path | None) -> None:
    rounds: list[dict[str, object]] = []
    document: dict[str, object] = {
        **document_head("serve", model_path(settings.model)),
        "settings": asdict(settings),
        "weights_mib": {
            name: weights_by_worker(settings, PAIRS[name])
            for name in settings.pairs
            if PAIRS[name].workers
        },
        "rounds": rounds,
    }
    if document["weights_mib"]:
        print(f"RPC workers hold: {document['weights_mib']} MiB", flush=True)
    print(HEADER, flush=True)
    summary: dict[str, object] = {}
    for round_ in range(settings.rounds):
        for name in settings.pairs:
            for level in settings.levels:
                rounds.append(play_round(settings, name, level, round_))
                summary = summarise(TARGETS, intervals(rounds))
                if out:
                    write_json(out, document | summary)
    print_summary(intervals(rounds))
    if out:
        print(f"written to {out}")
    print(json.dumps({"bench": "serve", "rounds": settings.rounds, **summary}))


METRICS = ("throughput", "p99_e2e", "p50_e2e", "p50_ttft", "p50_tpot", "busy_share")


def print_summary(found: Points) -> None:
    print("\nours over theirs, median of the rounds (interval)")
    print(f"{'pair':>5} {'N':>3}" + "".join(f"{name:>18}" for name in METRICS))
    for (pair, clients), each in found.items():
        cells = "".join(f"{each.get(name) or '-'!s:>18}" for name in METRICS)
        print(f"{pair:>5} {clients:>3}{cells}")
    for entry in judgements(TARGETS, found):
        print(f"{entry['verdict']:>10}: {entry['target']}")


def names(text: str) -> list[str]:
    chosen = text.split(",")
    if not set(chosen) <= set(PAIRS):
        raise ValueError
    return chosen


def levels(text: str) -> list[int]:
    values = [int(word) for word in text.split(",")]
    if not all(1 <= value <= NUM_SLOTS for value in values):
        raise ValueError
    return values


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench serve", description=__doc__)
    parser.add_argument("--model", default="demo", help="a GGUF file, or demo")
    parser.add_argument("--pairs", type=names, default=list(PAIRS), help="one, two or one,two")
    parser.add_argument("--levels", type=levels, default=[1, 8, 32], help="N,N..: clients, <= 32")
    parser.add_argument("--rounds", type=int, default=6, help="below 4 decides nothing")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--requests-per-client", type=int, default=2)
    parser.add_argument("--limit-seconds", type=float, default=600, help="for one run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="does it run? one round of little")
    parser.add_argument("--out", type=Path, help="write a document, e.g. bench/results/NAME.json")
    options = vars(parser.parse_args(argv))
    out = options.pop("out")
    if options.pop("quick"):
        options |= {"rounds": 1, "prompt_tokens": 16, "output_tokens": 16, "requests_per_client": 1}
    find_peers()  # not built is better said now than after our first run
    serve(Settings(**options), out)
    return 0
