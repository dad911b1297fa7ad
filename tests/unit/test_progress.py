"""Bars where somebody sees them. Without these a pipe fills with escape codes, or a bar shows what
is not so."""

from __future__ import annotations

import io
import sys

from skippy_mesh.config import ContextConfig, specs_of
from skippy_mesh.health import Loading
from skippy_mesh.progress import Bar, bar_of, byte_bar, load_bars, total_of

SPECS = specs_of("model.gguf", 30, (15,), ContextConfig())


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_bytes_are_shown_where_they_are_known():
    assert bar_of(Loading("slicing", 3 << 20, 4 << 20)) == Bar(
        "slicing 3.00MiB of 4.00MiB", 3 << 20, 4 << 20
    )
    for phase in ("starting", "slicing", "loading", "testing"):
        assert bar_of(Loading(phase)).total is None
    assert bar_of(Loading("loaded")).done == 1


def test_stages_are_counted():
    states = [Loading("loaded"), Loading("testing"), Loading("loaded")]
    assert total_of(states) == Bar("2 of 3 stages", 2, 3)


def test_no_terminal_gets_nothing(capfd):
    with load_bars(SPECS) as on_load, byte_bar("layers") as on_bytes:
        assert on_load is None and on_bytes is None
    assert capfd.readouterr() == ("", "")


def test_a_terminal_sees_each_stage_and_all(monkeypatch, capsys):
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with load_bars(SPECS) as on_load:
        on_load([Loading("slicing", 1 << 20, 2 << 20), Loading("loaded")])
        on_load([Loading("loading"), Loading("loaded")])
    shown = terminal.getvalue()
    for text in ("stage 0, layers 0:15", "stage 1, layers 15:30", "1 of 2 stages", "loading"):
        assert text in shown
    assert capsys.readouterr().out == ""
