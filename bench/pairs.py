"""Two servers with the same work, one after the other, in rounds: what `bench serve` and
`bench peers` share.

N clients in a closed loop send a fixed number of distinct prompts, so both arms do the same work.
Each run has a fresh server, and the two runs of a round follow one another, ours first in every
other round. A run of ours has numbers only if every request completed and a sample of them, sent
again alone, says the same.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.load import run_requests
from bench.points import COUNTS, OURS, check_warm, describe, published
from bench.processes import TICKS_PER_S, read_stat
from bench.programs import find_peers
from bench.records import Run, same_texts
from bench.servers import (
    Server,
    check_split,
    llama_cpp_python_command,
    llama_server_command,
    mesh_command,
    model_path,
    rpc_flags,
    rpc_workers,
    running,
)
from bench.steplog import StepLog, profile
from bench.table import table_row
from bench.verdict import Points, interval, paired_ratios
from bench.workloads import Workload
from stages.tokenizer import Tokenizer

NUM_SLOTS = 32
NUM_CELLS = 8192  # 256 for each slot, and as many lanes of ours
MIN_REQUESTS = 8  # of a run; below this a median says little
NUM_ALONE = 4
LLAMA_SERVER, LLAMA_RPC, LLAMA_CPP_PYTHON = "llama-server", "llama RPC", "llama-cpp-python"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Ours of ``stages`` with ``threads`` each, and ``peer``: over RPC with ``workers``, of ``url``
    if it runs already, else started here."""

    name: str
    stages: int
    threads: int  # of each stage or worker
    peer: str = LLAMA_SERVER
    workers: int = 0
    url: str = ""


ONE = Pair(name="one", stages=1, threads=2)
TWO = Pair(name="two", stages=2, threads=1, peer=LLAMA_RPC, workers=2)


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
    """``wants`` is what its requests need beside those of the others."""

    server: Server
    command: list[str]
    step_log: Path | None = None  # of ours
    wants: Mapping[str, Any] = field(default_factory=dict)


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
    with contextlib.ExitStack() as stack:
        pids: tuple[int, ...] = ()
        if pair.url:
            yield Arm(Server(pair.peer, pair.url, pid=0, log_path=Path(os.devnull)), [pair.url])
            return
        if pair.peer == LLAMA_CPP_PYTHON:
            command = llama_cpp_python_command(
                find_peers()[LLAMA_CPP_PYTHON],
                model_path(settings.model),
                num_cells=NUM_CELLS,
                num_threads=pair.threads,
            )
            server = stack.enter_context(running(pair.peer, command, alive="/v1/models"))
            yield Arm(server, command, wants=wants_of_llama_cpp_python(model_path(settings.model)))
            return
        command = llama_server_command(
            find_peers()["llama-server"],
            model_path(settings.model),
            num_slots=NUM_SLOTS,
            num_cells=NUM_CELLS,
            num_threads=pair.threads,
        )
        if pair.workers:
            program = find_peers()["ggml-rpc-server"]
            ports, pids = stack.enter_context(
                rpc_workers(program, pair.workers, num_threads=pair.threads)
            )
            command += rpc_flags(ports)
        server = stack.enter_context(running(pair.peer, [*command, *extra]))
        yield Arm(replace(server, worker_pids=pids), command)


def wants_of_llama_cpp_python(model: Path) -> dict[str, Any]:
    """It has no ``ignore_eos``, so every token that ends a text is biased away, and it tells no
    usage of a stream."""
    ends = Tokenizer(str(model)).eog_ids
    return {"extra": {"logit_bias": {str(token): -100 for token in ends}}, "has_usage": False}


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
    workload = replace(workload, **arm.wants)
    check_warm(server, replace(settings.workload("warm-up"), **arm.wants))
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
    pair: Pair,
    level: int,
    round_: int,
    *,
    ours: Start = our_arm,
    theirs: Start = peer_arm,
) -> dict[str, object]:
    arms = {OURS: ours, pair.peer: theirs}
    # Ours first in every other round: ABBA, so that drift favours neither.
    order = list(arms) if round_ % 2 == 0 else list(arms)[::-1]
    runs: dict[str, Run] = {}
    points: dict[str, dict[str, object]] = {}
    for label in order:
        with arms[label](settings, pair) as arm:
            workload = settings.workload(f"{pair.name}/{round_}/{level}")
            runs[label], points[label] = measure(arm, settings, level, workload)
    ratio = paired_ratios([points[OURS]], [points[pair.peer]])["throughput"]
    for label in arms:
        times = ratio[0] if ratio and label == OURS else None
        print(table_row(level, label, points[label], times), flush=True)
    return {
        "pair": pair.name,
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


def levels(text: str) -> list[int]:
    values = [int(word) for word in text.split(",")]
    if not all(1 <= value <= NUM_SLOTS for value in values):
        raise ValueError
    return values
