"""Blocks as pictures: the one place that knows matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # before pyplot: there is no screen

from matplotlib import pyplot

from bench.blocks import Block, Series

_MAX_COLUMNS = 3
_PANEL_INCHES = (4.2, 3.0)


def draw(block: Block, path: Path) -> None:
    """A PNG with a panel for each model."""
    num_columns = min(_MAX_COLUMNS, len(block.panels))
    num_rows = -(-len(block.panels) // num_columns)
    width, height = _PANEL_INCHES
    figure, axes = pyplot.subplots(
        num_rows, num_columns, figsize=(width * num_columns, height * num_rows), squeeze=False
    )
    for axis in list(axes.flat)[len(block.panels) :]:
        axis.set_visible(False)
    for axis, (case, series) in zip(axes.flat, block.panels.items(), strict=False):
        axis.set_title(case)
        axis.set_ylabel(block.unit)
        if block.kind == "curve":
            _draw_curves(axis, series)
        else:
            _draw_bars(axis, series)
    figure.suptitle(block.title)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw_curves(axis: Any, series: tuple[Series, ...]) -> None:
    for one in series:
        spread = [
            [y - low for y, low in zip(one.ys, one.lows, strict=True)],
            [high - y for y, high in zip(one.ys, one.highs, strict=True)],
        ]
        axis.errorbar(one.xs, one.ys, yerr=spread, marker="o", capsize=3, label=one.label)
    levels = sorted({x for one in series for x in one.xs})
    axis.set_xscale("log", base=2)
    axis.set_xticks(levels, [f"{level:.0f}" for level in levels])
    axis.set_xlabel("clients")
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=8)


def _draw_bars(axis: Any, series: tuple[Series, ...]) -> None:
    values = [one.ys[0] for one in series]
    bars = axis.bar([one.label for one in series], values)
    axis.bar_label(bars, [f"{value:.3g}" for value in values])
    axis.margins(y=0.15)
