"""Ours against the strongest peer of the same shape, in paired rounds, with targets.

Two pairs: one stage of two threads against llama-server, and two stages of one thread against
llama-server over two RPC workers of one thread. How a round is played: ``bench/pairs.py``.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from bench.machine import document_head
from bench.pairs import ONE, TWO, Settings, intervals, levels, play_round, weights_by_worker
from bench.points import write_json
from bench.programs import find_peers
from bench.servers import model_path
from bench.table import HEADER
from bench.verdict import Points, Target, judgements, summarise

PAIRS = {pair.name: pair for pair in (ONE, TWO)}

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
                rounds.append(play_round(settings, PAIRS[name], level, round_))
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
