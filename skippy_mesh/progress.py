"""Bars on stderr for what takes long, where stderr is a terminal. Elsewhere nothing is written."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skippy_mesh.config import StageSpec
from skippy_mesh.health import Loading, LoadPhase, OnLoad
from skippy_mesh.sizes import format_size

if TYPE_CHECKING:
    from rich.progress import Progress

_PHASES = {
    "starting": "starting",
    "fetching": "fetching",
    "slicing": "reading the model",
    "loading": "loading",
    "testing": "self-test",
    "loaded": "ready",
}


@dataclass(frozen=True, slots=True)
class Bar:
    """``done`` of ``total``, which is None where nobody knows."""

    text: str
    done: int = 0
    total: int | None = None


def bar_of(state: Loading) -> Bar:
    """What is shown of one stage."""
    if state.phase in ("fetching", "slicing") and state.total_bytes:
        done, total = state.done_bytes, state.total_bytes
        return Bar(f"{state.phase} {format_size(done)} of {format_size(total)}", done, total)
    if state.phase == "loaded":
        return Bar(_PHASES["loaded"], 1, 1)
    return Bar(_PHASES[state.phase])


def total_of(states: Sequence[Loading]) -> Bar:
    """What is shown of all stages together."""
    done = sum(state.phase == "loaded" for state in states)
    return Bar(f"{done} of {len(states)} stages", done, len(states))


@contextmanager
def load_bars(specs: Sequence[StageSpec]) -> Iterator[OnLoad | None]:
    """A bar for each stage until the block ends, and one for all; None for who sees none."""
    if not sys.stderr.isatty():
        yield None
        return
    with _bars() as bars:
        for spec in specs:
            title = f"stage {spec.index}, layers {spec.first_layer}:{spec.end_layer}"
            bars.add_task(title, total=None, text="")
        if len(specs) > 1:
            bars.add_task("all", text="")

        def show(states: Sequence[Loading]) -> None:
            shown = [*map(bar_of, states), total_of(states)]
            for task, bar in zip(bars.tasks, shown, strict=False):  # one stage has no sum
                task.total = bar.total  # update() would not take a None
                bars.update(task.id, completed=bar.done, text=bar.text)

        show([Loading()] * len(specs))
        yield show


@contextmanager
def byte_bar(
    title: str, phase: LoadPhase = "slicing"
) -> Iterator[Callable[[int, int], None] | None]:
    """A bar for bytes done of all, which whoever writes them is to call."""
    if not sys.stderr.isatty():
        yield None
        return
    with _bars() as bars:
        task = bars.add_task(title, total=None, text="")

        def show(done: int, total: int) -> None:
            bar = bar_of(Loading(phase, done, total))
            bars.update(task, completed=bar.done, total=bar.total, text=bar.text)

        yield show


def _bars() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[text]}", markup=False),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,  # stdout is the user's text
    )
