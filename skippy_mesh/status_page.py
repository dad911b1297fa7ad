"""A server's ``/status`` as a page for a terminal. What the server does not know is not shown."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

_BAR_WIDTH = 16
# Who has the cells, from the left: how it is drawn, and without Unicode, in which colour.
_STATES = {
    "active": ("█", "#", "green"),
    "resident": ("▓", "=", "blue"),
    "reserved": ("▒", "-", "yellow"),
    "free": ("░", ".", "bright_black"),
}
_COLORS = {"ready": "green", "degraded": "yellow", "draining": "yellow", "loading": "yellow"}


@dataclass(frozen=True, slots=True)
class Counts:
    """What has added up on ``/metrics`` by ``at_s``: rows by phase, and prompt tokens that the
    prefix cache had, of those that were looked up."""

    at_s: float
    tokens: Mapping[str, float]
    prefix_hit: float
    prefix_queried: float


def page(
    document: Mapping[str, Any],
    url: str,
    *,
    counts: Counts | None = None,
    before: Counts | None = None,
    is_ascii: bool = False,
) -> RenderableType:
    """``before`` are earlier ``counts`` of the same server: with them there are rates."""
    state = str(document["state"])
    title = Text.assemble(
        (str(document.get("model", "")), "bold"), " is ", (state, _COLORS.get(state, "red")),
        f" at {url}",
    )  # fmt: skip
    lines = [title, *map(Text, _facts(document)), *map(Text, _counted(counts, before))]
    stages = document.get("stages", [])
    tables = (_stages(stages), _memory(stages, is_ascii=is_ascii))
    return Group(*lines, "", tables[0], "", tables[1], _legend(is_ascii))


def _facts(document: Mapping[str, Any]) -> Iterator[str]:
    if problem := document.get("problem"):
        yield f"not serving: {problem}"
    if document.get("insecure_bind"):
        yield "open: whoever reaches it may ask, no key is needed"
    if ceiling := document.get("ceiling"):
        stage = ceiling["stage"]
        where = "all stages" if stage == "all" else f"stage {stage}"
        yield (
            f"ceiling {ceiling['value']}, bound by {ceiling['component']} of {where}: "
            f"{ceiling['term']}"
        )
    if (queue := document.get("queue")) is not None:
        waits = f"waiting {queue['requests']} ({queue['tokens']:,} prompt tokens"
        if "oldest_s" in queue:
            waits += f", the first for {queue['oldest_s']:.1f} s"
        yield f"running {document['running']}, {waits}), preempted {document['preempted']}"
    if (exact := document.get("exact")) is not None:
        yield "exact yes" if exact["value"] else f"exact no: {exact['reason']}"


def _counted(counts: Counts | None, before: Counts | None) -> Iterator[str]:
    if counts is None:
        return
    if before is not None and counts.at_s > before.at_s:
        seconds = counts.at_s - before.at_s
        rates = (
            f"{phase} {(total - before.tokens.get(phase, 0)) / seconds:.1f}"
            for phase, total in counts.tokens.items()
        )
        yield f"tokens a second: {', '.join(rates)}"
    elif counts.tokens:
        totals = (f"{phase} {total:,.0f}" for phase, total in counts.tokens.items())
        yield f"tokens so far: {', '.join(totals)}"
    if counts.prefix_queried:
        share = counts.prefix_hit / counts.prefix_queried
        yield f"prompt tokens from the prefix cache: {counts.prefix_hit:,.0f} ({share:.0%})"


def _stages(stages: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("stage", "layers", "node", "epoch", "lanes", "well", "answered")
    for stage in stages:
        lo, hi = stage["layers"]
        table.add_row(
            str(stage["index"]),
            f"{lo}:{hi}",
            Text(str(stage["node"])),
            str(stage.get("epoch", "-")),
            str(stage["components"].get("lanes", {}).get("cells", "-")),
            _age(stage.get("lease_age_s")),
            _age(stage.get("last_reply_age_s")),
        )
    return table


def _age(age_s: float | None) -> str:
    return "-" if age_s is None else f"{age_s:.1f} s ago"


def _memory(stages: Sequence[Mapping[str, Any]], *, is_ascii: bool) -> Table:
    table = _table("stage", "memory", "", "taken")
    for stage in stages:
        for name, counts in stage["components"].items():
            size = counts["cells"]
            if "free" in counts:
                taken = f"{size - counts['free']:,} of {size:,}"
                shown = bar(counts, size, is_ascii=is_ascii)
                table.add_row(str(stage["index"]), name, shown, taken)
            elif name != "lanes":  # that are ids, and no memory
                table.add_row(str(stage["index"]), name, "", f"- of {size:,}")
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, no_wrap=True)
    return table


def bar(counts: Mapping[str, int], size: int, *, is_ascii: bool = False) -> Text:
    """Who has the ``size`` cells. Whatever is taken shows, if only as one mark."""
    text, taken, shown = Text(), 0, 0
    for name, (block, plain, color) in _STATES.items():
        taken += counts.get(name, 0)
        end = _BAR_WIDTH if name == "free" else math.ceil(_BAR_WIDTH * taken / max(size, 1))
        text.append((plain if is_ascii else block) * (end - shown), color)
        shown = end
    return text


def _legend(is_ascii: bool) -> Text:
    text = Text()
    for name, (block, plain, color) in _STATES.items():
        text.append(plain if is_ascii else block, color).append(f" {name}  ")
    return text
