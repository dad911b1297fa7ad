"""One point, as vLLM's bench would measure it: ``python -m bench run``.

A closed loop keeps ``--clients`` requests open; with ``--rate`` they are sent when due, and their
latency counts from there. Against a server that is up (``--url``, of this machine only), or
one that is started for it (``--model``).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from bench.arrivals import arrival_times
from bench.console import block
from bench.figures import PRESETS, Slo, details, summarise
from bench.load import check_loopback, closed_loop, open_loop
from bench.machine import commit, machine_facts, model_facts, versions
from bench.points import write_json
from bench.records import Run
from bench.server_side import Prices, costs_of_point, kv_per_session, observed, prices_of
from bench.servers import mesh_command, model_path, running
from bench.workloads import LENGTHS, SHAPES, WORDS, Workload, mixes, named
from skippy_mesh.errors import RuntimeUnavailableError, UsageError

_LIMITS = ("ttft", "tpot", "itl", "e2el")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server and what is known of it. ``status`` is empty for one that has no such page."""

    url: str
    model_id: str
    tokenizer_id: str
    status: dict[str, Any]
    words_per_token: float
    digest: str | None = None
    prices: Prices = ()


def _get(url: str) -> Any:
    """The page as JSON, empty if this server has none."""
    try:
        reply = httpx.get(url, timeout=10, trust_env=False)
    except httpx.HTTPError as error:
        raise RuntimeUnavailableError(f"no answer from {url}: {error}") from error
    return reply.json() if reply.status_code == 200 else {}


def target_of(url: str, model: Path | None = None) -> Target:
    check_loopback(url)
    cards = _get(f"{url}/v1/models").get("data") or [{"id": "unknown"}]
    status = _get(f"{url}/status")
    counted = httpx.post(
        f"{url}/tokenize", json={"content": " ".join(WORDS)}, timeout=30, trust_env=False
    )
    tokens = counted.json() if counted.status_code == 200 else {}
    count = tokens.get("count") or len(tokens.get("tokens") or WORDS)
    prices: Prices = ()
    if model is not None and status:
        from skippy_mesh.planning import costs_of_model
        from skippy_mesh.starting import open_model

        borders = [(stage["layers"][0], stage["layers"][1]) for stage in status["stages"]]
        prices = prices_of(costs_of_model(open_model(str(model)), "q8_0").layers, borders)
    return Target(
        url=url,
        model_id=cards[0]["id"],
        tokenizer_id=cards[0].get("root") or cards[0]["id"],
        status=status,
        words_per_token=len(WORDS) / count,
        digest=str(model_facts(model)["sha256"]) if model else None,
        prices=prices,
    )


@contextlib.contextmanager
def target(args: argparse.Namespace) -> Iterator[Target]:
    if args.url:
        yield target_of(args.url)
        return
    model = model_path(args.model)
    command = mesh_command(
        str(model), stages=args.stages, engine=args.engine, num_cells=args.ctx_size
    )
    with running(args.engine, command) as server:
        yield target_of(server.url, model)


def play(args: argparse.Namespace, workload: Workload, url: str) -> Run:
    if args.rate is None:
        return asyncio.run(
            closed_loop(
                url,
                workload,
                num_clients=args.clients,
                max_requests=args.num_prompts,
                send_s=args.seconds,
                drain_s=args.drain_seconds,
                probe_rate=args.probe_rate,
            )
        )
    times = arrival_times(
        args.num_prompts, rate=args.rate, burstiness=args.burstiness, seed=f"{args.seed}/arrivals"
    )
    return asyncio.run(
        open_loop(
            url,
            workload,
            times_s=times,
            drain_s=args.drain_seconds,
            max_concurrency=args.max_concurrency,
            probe_rate=args.probe_rate,
        )
    )


def document_of(
    args: argparse.Namespace, found: Target, workload: Workload, run: Run, seen: dict[str, object]
) -> dict[str, object]:
    """vLLM's keys, then ours; what is not known is null."""
    status = found.status
    config = json.dumps(status.get("config"), sort_keys=True) if status else None
    is_open = args.rate is not None
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S"),
        "backend": "openai",
        "label": args.label,
        "model_id": found.model_id,
        "tokenizer_id": found.tokenizer_id,
        "num_prompts": args.num_prompts,
        "request_rate": args.rate if is_open else "inf",
        "burstiness": _finite(args.burstiness) if is_open else None,
        "max_concurrency": args.max_concurrency if is_open else args.clients,
        **summarise(run, args.slo),
        "config_hash": hashlib.sha256(config.encode()).hexdigest()[:16] if config else None,
        "model_digest": found.digest,
        "exact": (status.get("exact") or {}).get("value"),
        "workload": {
            "lengths": args.workload,
            "shape": args.shape,
            "scale": args.scale,
            "prompt_tokens": workload.prompt_tokens,
            "output_tokens": workload.output_tokens,
            "seed": workload.seed,
        },
        "arrival": "open" if is_open else "closed",
        "engine": {key: status.get(key) for key in ("ceiling", "config")} if status else None,
        "hardware": machine_facts(),
        "versions": versions(),
        "parity": None,  # a lone point compares with nothing: the gate does
        **commit(),
        **seen,
        **(details(run) if args.detailed else {}),
    }


def _finite(value: float) -> float | str:
    return "inf" if math.isinf(value) else value


def measure(args: argparse.Namespace, found: Target) -> dict[str, object]:
    workload = replace(
        named(args.workload, args.shape, scale=args.scale, seed=str(args.seed)),
        words_per_token=found.words_per_token,
    )
    # The first request pays for what is done once, so no point counts it.
    warm = replace(workload, seed=f"{args.seed}/warm-up")
    asyncio.run(
        closed_loop(
            found.url, warm, num_clients=1, max_requests=args.num_warmups,
            send_s=args.drain_seconds, drain_s=0,
        )
    )  # fmt: skip
    with observed(found.url) as seen:
        run = play(args, workload, found.url)
    duration = summarise(run)["duration"]
    costs = costs_of_point(seen, duration if isinstance(duration, float) else None)
    # What the server counts as found in its cache; the clients' sum covers whole answers only.
    held = kv_per_session(seen.during, found.prices) if found.prices else {}
    return document_of(args, found, workload, run, {"kv_bytes_per_session": None, **costs, **held})


def _slo(text: str) -> Slo:
    """A preset's name, or limits like ``ttft:2000,tpot:200`` in milliseconds."""
    if text in PRESETS:
        return PRESETS[text]
    limits = {name: float(value) for name, value in (part.split(":") for part in text.split(","))}
    if not set(limits) <= set(_LIMITS):
        raise ValueError
    return Slo(limits)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench run", description=__doc__)
    add = parser.add_argument
    add("--url", help="a server that is up, e.g. http://127.0.0.1:8000")
    add("--model", default="demo", help="else a file to serve, or demo (%(default)s)")
    add("--engine", choices=["auto", "mesh", "baseline"], default="mesh")
    add("--stages", type=int, default=2)
    add("--ctx-size", type=int, default=16384, metavar="N")
    add("--workload", default="chat", metavar="NAME", help=", ".join((*LENGTHS, *mixes())))
    add("--shape", choices=list(SHAPES), default="unique", help="what prompts share")
    add("--scale", type=float, default=1.0, help="shrinks all lengths (%(default)s)")
    add("--num-prompts", type=int, default=64, metavar="N")
    add("--clients", type=int, default=8, metavar="N", help="closed loop: requests open")
    add("--rate", type=float, metavar="R", help="open loop: requests a second")
    add("--burstiness", type=float, default=1.0, metavar="B",
        help="of an open loop: 1 Poisson, less is bursty, inf constant")  # fmt: skip
    add("--max-concurrency", type=int, metavar="N", help="of an open loop; who waits is counted")
    add("--probe-rate", type=float, default=0.0, metavar="R", help="one-token requests beside it")
    add("--seconds", type=float, default=math.inf, help="closed loop: send no longer")
    add("--drain-seconds", type=float, default=300.0, help="for what is open then")
    add("--num-warmups", type=int, default=1, metavar="N")
    add("--slo", type=_slo, default="default",
        help=f"{', '.join(PRESETS)}, or ttft:MS,tpot:MS,itl:MS,e2el:MS")  # fmt: skip
    add("--label", help="kept in the document")
    add("--seed", type=int, default=1)
    add("--detailed", action="store_true", help="a list for every request's figures, too")
    add("--out", type=Path, help="write the document")
    return parser


def main(argv: list[str]) -> int:
    args = _parser().parse_args(argv)
    if args.max_concurrency is not None and args.rate is None:
        raise UsageError("--max-concurrency is of an open loop: give --rate, or use --clients")
    with target(args) as found:
        document = measure(args, found)
    print(block(document))
    if args.out:
        write_json(args.out, document)
    return 0 if document["completed"] else 1
