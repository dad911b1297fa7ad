"""The mesh beside every server of its kind, and below the machine's roofline.

llama-server, llama-server over two llama.cpp RPC workers, and llama-cpp-python's own server, from
`make peers`; and whatever runs already (``--url NAME=URL``). Same file, KV type, cells, threads and
flash attention, in paired rounds: ``bench/pairs.py`` says how one is played. The roofline is the
same work in a bare loop, without server, scheduler or client: ``bench/roofline.py``. Rows are kept
as they come, and a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from bench.ledger import Ledger, Row, set_aside
from bench.load import check_loopback
from bench.machine import document_head
from bench.pairs import (
    LLAMA_CPP_PYTHON,
    NUM_CELLS,
    ONE,
    TWO,
    Pair,
    Settings,
    intervals,
    levels,
    play_round,
    weights_by_worker,
)
from bench.points import RESULTS, write_json
from bench.programs import find_peers
from bench.roofline import BATCHED_BENCH, RUNTIME, Work, of_batched_bench, of_our_runtime
from bench.servers import model_path
from bench.table import HEADER
from bench.verdict import Interval, interval

PYTHON = Pair(name="python", stages=1, threads=2, peer=LLAMA_CPP_PYTHON)
PAIRS = {pair.name: pair for pair in (ONE, TWO, PYTHON)}
ROOFLINE = "roofline"
METRICS = ("throughput", "p50_ttft", "p50_tpot", "p50_e2e", "p99_e2e")


def roofline_row(settings: Settings, level: int, round_: int) -> Row:
    """Both bare loops on the work of ``level`` sessions, each first in every other round."""
    model = model_path(settings.model)
    work = Work(
        num_sessions=level,
        prompt_tokens=settings.prompt_tokens,
        output_tokens=settings.output_tokens,
        num_cells=NUM_CELLS,
        num_threads=ONE.threads,
    )
    arms = {
        RUNTIME: partial(of_our_runtime, model, work),
        BATCHED_BENCH: partial(of_batched_bench, find_peers()["llama-batched-bench"], model, work),
    }
    order = list(arms) if round_ % 2 == 0 else list(arms)[::-1]
    points = {label: arms[label]() for label in order}
    for label in arms:
        print(f"{level:>3} {label:>20} {points[label]['output_throughput']:7.1f} tok/s", flush=True)
    return {"pair": ROOFLINE, "clients": level, "round": round_, "points": points}


def roofline_ratios(rows: Sequence[Row]) -> dict[str, dict[str, Interval]]:
    """By number of clients: our server over each bare loop in the same round, and the two loops."""
    found: dict[str, dict[str, Interval]] = {}
    for level in dict.fromkeys(row["clients"] for row in rows if row["pair"] == ROOFLINE):
        values: dict[str, list[float]] = {}
        for row in rows:
            if (row["pair"], row["clients"]) != (ROOFLINE, level):
                continue
            bare = {name: point["output_throughput"] for name, point in row["points"].items()}
            served = _throughput_of(rows, level, row["round"])
            for name, rate in bare.items():
                if served:
                    values.setdefault(f"our server / {name}", []).append(served / rate)
            values.setdefault(f"{RUNTIME} / {BATCHED_BENCH}", []).append(
                bare[RUNTIME] / bare[BATCHED_BENCH]
            )
        found[f"{ROOFLINE} N={level}"] = {
            name: i for name, each in values.items() if (i := interval(each))
        }
    return found


def _throughput_of(rows: Sequence[Row], level: int, round_: int) -> float | None:
    """Of our server with one stage, which is what the bare loops are."""
    for row in rows:
        if (row["pair"], row["clients"], row["round"]) == (ONE.name, level, round_):
            rate: float | None = row["ours"].get("output_throughput")
            return rate
    return None


def ratios_of(rows: Sequence[Row]) -> dict[str, dict[str, Interval]]:
    """Ours over theirs by pair and clients, then the roofline's."""
    pairs = intervals([row for row in rows if row["pair"] != ROOFLINE])
    return {
        **{f"{pair} N={clients}": dict(each) for (pair, clients), each in pairs.items()},
        **roofline_ratios(rows),
    }


def show(ratios: Mapping[str, Mapping[str, Interval]], peers: Mapping[str, str]) -> None:
    print("\nours over theirs, median of the rounds (interval)")
    print(f"{'pair':>10} {'peer':>16}" + "".join(f"{name:>18}" for name in METRICS))
    for point, each in ratios.items():
        name = point.partition(" ")[0]
        if name == ROOFLINE:
            told = ", ".join(f"{label} {value}" for label, value in each.items())
            print(f"{point:>14}: {told}")
        else:
            cells = "".join(f"{each.get(key) or '-'!s:>18}" for key in METRICS)
            print(f"{point:>10} {peers[name]:>16}{cells}")


def compare(pairs: Sequence[Pair], settings: Settings, out: Path) -> None:
    head = document_head("peers", model_path(settings.model))
    identity = {"commit": head["commit"], "settings": asdict(settings)}
    ledger = Ledger(out.with_suffix(".jsonl"), identity, head)
    weights = {pair.name: weights_by_worker(settings, pair) for pair in pairs if pair.workers}
    print(HEADER, flush=True)
    for round_ in range(settings.rounds):
        for level in settings.levels:
            for pair in pairs:
                key = f"{pair.name} N={level} round {round_}"
                ledger.row(key, partial(play_round, settings, pair, level, round_))
            if ROOFLINE in settings.pairs:
                key = f"{ROOFLINE} N={level} round {round_}"
                ledger.row(key, partial(roofline_row, settings, level, round_))
    ratios = ratios_of(ledger.rows)
    show(ratios, {pair.name: pair.peer for pair in pairs})
    write_json(out, {
        **ledger.head,
        "settings": asdict(settings),
        "weights_mib": weights,
        "ratios": {
            point: {name: value.as_json() for name, value in each.items()}
            for point, each in ratios.items()
        },
        "rounds": ledger.rows,
    })  # fmt: skip
    print(f"written to {out}")


def _pairs(text: str) -> list[str]:
    chosen = text.split(",")
    if not set(chosen) <= {*PAIRS, ROOFLINE}:
        raise ValueError
    return chosen


def _url(text: str) -> Pair:
    name, _, url = text.partition("=")
    if not name or not url:
        raise ValueError
    return Pair(name=name, stages=1, threads=2, peer=name, url=url.rstrip("/"))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench peers", description=__doc__)
    add: Any = parser.add_argument
    known = [*PAIRS, ROOFLINE]
    add("--model", default="demo", help="a GGUF file, or demo")
    add("--pairs", type=_pairs, default=known, help=f"of {', '.join(known)} (all)")
    add("--url", type=_url, action="append", default=[], metavar="NAME=URL",
        help="a server of this machine that runs already, with the same file")  # fmt: skip
    add("--levels", type=levels, default=[1, 8, 32], help="N,N..: clients, <= 32")
    add("--rounds", type=int, default=5, help="below 4 decides nothing")
    add("--prompt-tokens", type=int, default=128)
    add("--output-tokens", type=int, default=64)
    add("--requests-per-client", type=int, default=1)
    add("--limit-seconds", type=float, default=600, help="for one run")
    add("--seed", type=int, default=1)
    add("--fresh", action="store_true", help="forget the rows that are there")
    add("--out", type=Path, default=RESULTS / f"{datetime.date.today()}-peers.json",
        help="rows are kept beside it (%(default)s)")  # fmt: skip
    options = vars(parser.parse_args(argv))
    out, urls, fresh = (options.pop(name) for name in ("out", "url", "fresh"))
    for pair in urls:
        check_loopback(pair.url)
    if fresh:
        set_aside(out.with_suffix(".jsonl"))
    find_peers()  # not built is better said now than after our first run
    chosen = [PAIRS[name] for name in options["pairs"] if name in PAIRS]
    compare([*chosen, *urls], Settings(**options), out)
    return 0
