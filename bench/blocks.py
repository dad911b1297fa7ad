"""What a report shows, made of a gate's rows. Pure: rows in, series out.

A block is one figure with a panel for each model. What a row does not know gives no point, and a
class whose panel is missing is named: a report with holes is no report.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Row = Mapping[str, Any]
Pick = Callable[[Row], float | None]


@dataclass(frozen=True, slots=True)
class Series:
    """Medians over the rounds at each x, with the least and the greatest."""

    label: str
    xs: tuple[float, ...]
    ys: tuple[float, ...]
    lows: tuple[float, ...]
    highs: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """``panels`` by model. Curves run over the number of clients, bars stand for themselves."""

    name: str
    title: str
    note: str
    unit: str
    kind: Literal["curve", "bars"]
    panels: Mapping[str, tuple[Series, ...]]


def blocks_of(rows: Sequence[Row]) -> list[Block]:
    return [
        _curves(rows, "scaling", "Output tokens a second against clients",
                "New engine beside the single-lane one on the same requests; the bars reach from "
                "the worst to the best round.", "tok/s", _both("output_throughput")),
        _curves(rows, "slowest", "End to end, 99th percentile, against clients",
                "The slowest answers.", "s", _both("p99_e2el_ms", 1e-3)),
        _curves(rows, "goodput", "Goodput against clients",
                "Requests a second that met every limit; what failed or was refused met none.",
                "req/s", _both("request_goodput")),
        _curves(rows, "memory", "Peak memory against clients",
                "Of all processes of the engine, without Ray's own.", "MB",
                _both("engine_memory.rss_bytes", 1e-6)),
        _curves(rows, "bubbles", "A stage's time against clients",
                "Share of the makespan a stage computed, and idled though there was work.",
                "share", _stage_picks(rows)),
        _prefix(rows),
        _overload(rows),
    ]  # fmt: skip


def missing(blocks: Iterable[Block], classes: Iterable[str]) -> list[str]:
    """``block of class`` for each panel that is not there."""
    wanted = list(classes)
    return [
        f"{block.name} of {family}"
        for block in blocks
        for family in wanted
        if not any(class_of(case) == family for case in block.panels)
    ]


def class_of(case: str) -> str:
    return case.partition("/")[0]


def cases_of(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["case"] for row in rows))


def points_of(rows: Sequence[Row], case: str) -> list[Row]:
    """The first mix only: one curve a panel."""
    mine = [row for row in rows if row["case"] == case and row["kind"] == "point"]
    return [row for row in mine if row["mix"] == mine[0]["mix"]]


def pick(path: str, scale: float = 1.0) -> Pick:
    """A number somewhere in a row, or None."""

    def found(row: Row) -> float | None:
        value: Any = row
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value * scale if isinstance(value, int | float) else None

    return found


def median_of(rows: Iterable[Row], path: str) -> float | None:
    values = [value for row in rows if (value := pick(path)(row)) is not None]
    return statistics.median(values) if values else None


def _both(key: str, scale: float = 1.0) -> dict[str, Pick]:
    return {
        "new engine": pick(f"ours.{key}", scale),
        "single lane": pick(f"theirs.{key}", scale),
    }


def _stage_picks(rows: Sequence[Row]) -> dict[str, Pick]:
    shares = [row["ours"].get("stage_busy_share") or () for row in rows if row["kind"] == "point"]

    def of_stage(key: str, stage: int) -> Pick:
        def found(row: Row) -> float | None:
            values = row["ours"].get(key)
            return values[stage] if values and stage < len(values) else None

        return found

    picks: dict[str, Pick] = {}
    for stage in range(max(map(len, shares), default=0)):
        picks[f"stage {stage} busy"] = of_stage("stage_busy_share", stage)
        picks[f"stage {stage} bubble"] = of_stage("stage_bubble_share", stage)
    return picks


def _curves(
    rows: Sequence[Row], name: str, title: str, note: str, unit: str, picks: Mapping[str, Pick]
) -> Block:
    panels = {}
    for case in cases_of(rows):
        points = points_of(rows, case)
        found = [s for label, get in picks.items() if (s := _curve(label, points, get)).xs]
        if found:
            panels[case] = tuple(found)
    return Block(name=name, title=title, note=note, unit=unit, kind="curve", panels=panels)


def _curve(label: str, points: Sequence[Row], get: Pick) -> Series:
    by_level: dict[int, list[float]] = {}
    for row in points:
        if (value := get(row)) is not None:
            by_level.setdefault(row["clients"], []).append(value)
    levels = sorted(by_level)
    return Series(
        label,
        tuple(map(float, levels)),
        tuple(statistics.median(by_level[n]) for n in levels),
        tuple(min(by_level[n]) for n in levels),
        tuple(max(by_level[n]) for n in levels),
    )


def _bar(label: str, values: Sequence[float]) -> tuple[Series, ...]:
    if not values:
        return ()
    middle = statistics.median(values)
    return (Series(label, (0.0,), (middle,), (min(values),), (max(values),)),)


def _prefix(rows: Sequence[Row]) -> Block:
    panels = {}
    for case in cases_of(rows):
        mine = [row for row in rows if row["case"] == case and row["kind"] == "prefix"]
        bars: list[Series] = []
        for arm in ("cold", "warm"):
            times = [pick(f"{arm}.p50_ttft_ms", 1e-3)(row) for row in mine]
            bars += _bar(arm, [time for time in times if time is not None])
        if bars:
            panels[case] = tuple(bars)
    note = "The same prompts with a beginning that was computed before, and with no cache."
    return Block(name="prefix", title="First token behind a shared prefix", note=note, unit="s",
                 kind="bars", panels=panels)  # fmt: skip


def _overload(rows: Sequence[Row]) -> Block:
    panels = {}
    for case in cases_of(rows):
        for row in rows:
            if row["case"] == case and row["kind"] == "overload":
                counts = {
                    "200": row["completed"],
                    "429": row["rejected"],
                    "else": sum(row["others"].values()),
                }
                panels[case] = tuple(b for key, n in counts.items() for b in _bar(key, [float(n)]))
    note = "Four times as many clients as may run: answered, told to come back, and neither."
    return Block(name="overload", title="Overload", note=note, unit="requests", kind="bars",
                 panels=panels)  # fmt: skip
