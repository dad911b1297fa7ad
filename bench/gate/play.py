"""One row of the gate each: what is sent to the arms, and what is kept of it.

Arms get the same requests, ours first in every other round. A row of ours has numbers only if each
of its answers is the one the old engine gave to the same request.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from bench.figures import relative_slo, summarise
from bench.gate.arms import OURS, THEIRS, Arm, Arms
from bench.gate.settings import Settings
from bench.load import closed_loop, run_requests
from bench.points import describe
from bench.records import Run, same_texts
from bench.server_side import Prices, costs_of_point, kv_per_session, observed, read, rise
from bench.workloads import Workload

Row = dict[str, Any]

_MAX_REQUESTS = 10**6
_PRIMER = 10**6  # the index of a prompt that no measured request has
_REFUSED_PAUSE_S = 1.0  # what Retry-After says at least
_EMPTY_S = 15.0  # to give back all cells once nothing is asked any more


def measure(
    arm: Arm,
    workload: Workload,
    settings: Settings,
    *,
    clients: int,
    requests: int,
    alone: Mapping[str, object] | None = None,
) -> tuple[Run, Row]:
    """A closed loop on one arm: its records, and its point. ``alone`` are the numbers of the same
    server with one client, by which goodput is also judged."""
    with arm.server.watched() as watch, observed(arm.url) as seen:
        run = asyncio.run(
            closed_loop(
                arm.url,
                workload,
                num_clients=clients,
                max_requests=requests,
                send_s=settings.point_seconds,
                drain_s=settings.drain_seconds,
            )
        )
    point = describe(run, len(run.records))
    duration = point.get("duration")
    costs = costs_of_point(seen, duration if isinstance(duration, float) else None)
    held = kv_per_session(seen.during, arm.prices)
    if costs["steps"] is None:  # an engine that keeps no step records has one session
        held = {"kv_bytes_per_session": lone_session_bytes(run, arm.prices), "max_running": 1}
    slo = relative_slo(alone or {})
    relative = summarise(run, slo) if slo else {}
    return run, {
        **point,
        **costs,
        **held,
        "attainment_relative": relative.get("attainment"),
        "goodput_relative": relative.get("request_goodput"),
        "engine_memory": watch.engine.as_json(),
        "others_cpu_share": watch.others_cpu_share,
    }


def lone_session_bytes(run: Run, prices: Prices) -> int | None:
    """What the longest request holds at its end: all its tokens but the last, and a state. The
    fullest moment, as for an engine that tells what it holds."""
    lengths = [
        r.prompt_tokens + r.completion_tokens - 1
        for r in run.records
        if r.is_complete and r.prompt_tokens is not None and r.completion_tokens is not None
    ]
    if not lengths:
        return None
    return sum(
        price * (1 if component == "recurrent" else max(lengths))
        for stage in prices
        for component, price in stage.items()
    )


def exact_row(arms: Arms, settings: Settings) -> Row:
    """Some requests alone, then the same among others, then from the old engine. Half of them are
    there when the crowd begins, half join it."""
    workload = settings.workload(settings.mixes[0], "exact", arms.words_per_token)
    asked, limit_s = settings.num_alone, settings.drain_seconds
    clients = settings.exact_clients
    first = max(0, clients - asked // 2)
    alone, old = (
        run_requests(arm.url, workload, clients=1, requests=asked, limit_s=limit_s, first=first)
        for arm in (arms.ours, arms.theirs)
    )
    crowd = run_requests(
        arms.ours.url,
        workload,
        clients=clients,
        requests=first + asked + clients,
        limit_s=limit_s,
    )
    return {
        "kind": "exact",
        "crowd": {**same_texts(alone, crowd), "asked": asked},
        "baseline": {**same_texts(alone, old), "asked": asked},
    }


def point_row(
    arms: Arms,
    settings: Settings,
    *,
    mix: str,
    clients: int,
    round_: int,
    alone: Mapping[str, Mapping[str, object]],
) -> Row:
    """N clients, both arms. ``alone`` is the point of each with one client, once there is one."""
    workload = settings.workload(mix, f"{clients}/{round_}", arms.words_per_token)
    requests = settings.num_requests(clients)
    row = both(arms, workload, settings, clients, requests, round_, alone)
    return {"kind": "point", "mix": mix, "clients": clients, "round": round_, **row}


def long_row(arms: Arms, settings: Settings, *, round_: int) -> Row:
    workload = settings.long_prompt(str(round_), arms.words_per_token)
    return {"kind": "long", "round": round_, **both(arms, workload, settings, 1, 1, round_, {})}


def both(
    arms: Arms,
    workload: Workload,
    settings: Settings,
    clients: int,
    requests: int,
    round_: int,
    alone: Mapping[str, Mapping[str, object]],
) -> Row:
    by_label = arms.by_label()
    runs, points = {}, {}
    # ABBA, so that drift favours neither.
    for label in list(by_label)[:: 1 if round_ % 2 == 0 else -1]:
        runs[label], points[label] = measure(
            by_label[label], workload, settings,
            clients=clients, requests=requests, alone=alone.get(label),
        )  # fmt: skip
    same = same_texts(runs[OURS], runs[THEIRS])
    points[OURS], wrong = unless_wrong(points[OURS], same)
    return {OURS: points[OURS], THEIRS: points[THEIRS], "same_texts": same, "wrong": wrong}


def unless_wrong(point: Row, same: Mapping[str, int]) -> tuple[Row, str | None]:
    """The point, or without its numbers what is wrong with its answers."""
    if same["equal"] == same["of"]:
        return point, None
    problem = f"{same['of'] - same['equal']} of {same['of']} answers are not the old engine's"
    return {"void": problem, "sent": point["sent"], "completed": point["completed"]}, problem


def prefix_row(arms: Arms, settings: Settings, *, round_: int) -> Row:
    """The mesh against itself: prompts that begin alike, with their beginning computed before and
    with no cache asked for."""
    runs, points = {}, {}
    clients, order = settings.prefix_clients, ["cold", "warm"]
    for label in order if round_ % 2 == 0 else order[::-1]:
        workload = settings.shared_prompt(
            str(round_), arms.words_per_token, uses_cache=label == "warm"
        )
        if label == "warm":
            run_requests(
                arms.ours.url, workload, clients=1, requests=1,
                limit_s=settings.drain_seconds, first=_PRIMER,
            )  # fmt: skip
        patient = replace(settings, point_seconds=settings.drain_seconds)
        runs[label], points[label] = measure(
            arms.ours, workload, patient, clients=clients, requests=clients
        )
    same = same_texts(runs["warm"], runs["cold"])
    wrong = None
    if same["equal"] < same["of"]:
        wrong = f"{same['of'] - same['equal']} of {same['of']} warm answers are not the cold ones"
    return {"kind": "prefix", "round": round_, **points, "same_texts": same, "wrong": wrong}


def overload_row(arms: Arms, settings: Settings) -> Row:
    """Four times as many clients as may run, and more than may wait, twice half the time."""
    arm = arms.ours
    clients = max(4 * arm.ceiling, 2 * arm.ceiling + settings.max_queue)
    before = read(arm.url)
    runs, peaks = [], []
    for half in range(2):
        workload = settings.workload(settings.mixes[0], f"over/{half}", arms.words_per_token)
        with arm.server.watched() as watch:
            runs.append(
                asyncio.run(
                    closed_loop(
                        arm.url,
                        workload,
                        num_clients=clients,
                        max_requests=_MAX_REQUESTS,
                        send_s=settings.overload_seconds / 2,
                        drain_s=settings.drain_seconds,
                        refused_pause_s=_REFUSED_PAUSE_S,
                    )
                )
            )
        peaks.append(watch.engine.rss)
    left = cells_left(arm)
    records = [record for run in runs for record in run.records]
    refused = [r for r in records if r.status == 429]
    others = [r for r in records if not r.is_complete and r.status != 429]
    return {
        "kind": "overload",
        "clients": clients,
        "ceiling": arm.ceiling,
        "sent": len(records),
        "completed": sum(r.is_complete for r in records),
        "rejected": len(refused),
        "others": dict(Counter(r.code or r.error or "time was up" for r in others)),
        "without_retry_after": sum(r.retry_after is None for r in refused),
        "failed_decodes": rise(before, read(arm.url), "requests_finished_total", reason="error"),
        "peak_bytes": peaks,
        "left_cells": left,
        "p99_e2el_ms": summarise(Run(records=records, client_cpu_share=0.0))["p99_e2el_ms"],
    }


def cells_left(arm: Arm) -> float | None:
    """Cells still active once nothing is asked; prefixes kept for others do not count."""
    give_up_s = time.monotonic() + _EMPTY_S
    while True:
        left = read(arm.url).total("kv_cells", state="active")
        if not left or time.monotonic() > give_up_s:
            return left
        time.sleep(0.25)


def alone_of(rows: Sequence[Row], mix: str) -> dict[str, Mapping[str, object]]:
    """Each arm's first point with one client."""
    found = [
        row
        for row in rows
        if (row["kind"], row.get("mix"), row.get("clients")) == ("point", mix, 1)
    ]
    return {label: found[0][label] for label in (OURS, THEIRS)} if found else {}
