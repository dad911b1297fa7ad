"""The table a sweep prints as it goes; the JSON document holds the same numbers and more."""

from __future__ import annotations

MAX_OTHERS = 0.05  # of all cores, while a point ran; above it the row says so
COLUMNS = {
    "N": 3, "arm": 12, "tok/s": 7, "ratio": 6, "TTFT p50/p99 ms": 15, "TPOT p50/p99 ms": 15,
    "E2E p50/p99 s": 13, "done/sent": 9, "open": 4, "client CPU": 10, "engine MB": 9,
}  # fmt: skip


def align(cells: list[str]) -> str:
    return " ".join(f"{cell:>{width}}" for cell, width in zip(cells, COLUMNS.values(), strict=True))


HEADER = align(list(COLUMNS))


def number(value: object, digits: int = 0, *, scale: float = 1) -> str:
    return f"{value * scale:.{digits}f}" if isinstance(value, int | float) else "-"


def table_row(level: int, arm: str, point: dict[str, object], times: float | None) -> str:
    """A line of the table as it goes: N=4, done/sent 8/8, engine MB in Pss, and so on."""
    if point["void"]:
        return f"{level:>3} {arm:>12} no number: {point['void']}"

    def pair(name: str, digits: int, scale: float = 1) -> str:
        return "/".join(number(point[f"p{p}_{name}_ms"], digits, scale=scale) for p in (50, 99))

    memory = point["peak_memory"]
    cells = [
        str(level), arm, number(point["output_throughput"], 1), number(times, 2),
        pair("ttft", 0), pair("tpot", 1), pair("e2el", 1, 1e-3),
        f"{point['completed']}/{point['sent']}", number(point["max_concurrent_requests"]),
        f"{number(point['client_cpu_share'], scale=100)} %",
        number(memory["engine"]["pss_bytes"] if isinstance(memory, dict) else None, scale=1e-6),
    ]  # fmt: skip
    others = point["others_cpu_share"]
    notes = [" cut by time"] if point["cut_by_time"] else []
    if isinstance(others, float) and others > MAX_OTHERS:
        notes.append(f" others used {others:.0%} of the machine")
    return align(cells) + ",".join(notes)
