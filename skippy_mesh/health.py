"""How far a stage is loaded, when one is stuck, and how often one may be started again. Pure: the
time is an argument.

Three clocks. Silent for 3 s, a stage is not ready and named (``why_silent``); without progress
for 120 s, it is started again; nothing in between ends it, for a step may be long.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

MAX_RESTARTS = 5
"""Of one stage within the window. A request that kills a stage costs two: one in company, which
could have been anybody's fault, and one alone."""
WINDOW_S = 600.0
STUCK_S = 120.0


class RestartLimit:
    """How often each stage may be started again: ``max_restarts`` times within ``window_s``.

    Ray's own count is for a lifetime: it would end a mesh that loses a stage once a week.
    """

    def __init__(self, max_restarts: int = MAX_RESTARTS, window_s: float = WINDOW_S):
        self._max_restarts = max_restarts
        self._window_s = window_s
        self._restarts_s: defaultdict[int, deque[float]] = defaultdict(deque)

    def allows(self, stage: int, now_s: float) -> bool:
        """Whether ``stage``, which was lost, may be started again; if so it counts."""
        restarts_s = self._restarts_s[stage]
        while restarts_s and now_s - restarts_s[0] >= self._window_s:
            restarts_s.popleft()
        if len(restarts_s) >= self._max_restarts:
            return False
        restarts_s.append(now_s)
        return True

    def __str__(self) -> str:
        return f"{self._max_restarts} restarts in {self._window_s:.0f} s"


@dataclass(frozen=True, slots=True)
class Pulse:
    """What a stage says of itself at any time. ``epoch`` is the last it ran a step of, ``step_s``
    how long the step that it runs has taken, 0 if none; ``problem`` is why it can run none. Its
    process has ``rss_bytes`` of memory and had ``peak_rss_bytes``, None if it cannot tell."""

    is_loaded: bool
    epoch: int
    step_s: float
    problem: str | None = None
    rss_bytes: int | None = None
    peak_rss_bytes: int | None = None


LoadPhase = Literal["starting", "fetching", "slicing", "loading", "testing", "loaded"]


@dataclass(frozen=True, slots=True)
class Loading:
    """How far a stage is in being loaded. The bytes are those of the file it fetches, then of the
    slice it writes; 0 of 0 while it reads the file for the first time."""

    phase: LoadPhase = "starting"
    done_bytes: int = 0
    total_bytes: int = 0


OnLoad = Callable[[Sequence[Loading]], None]
"""Told now and then how far each stage is, by stage."""


class Watchdog:
    """Tells a stage that hangs from one that works: the same step for ``limit_s``, or no word."""

    def __init__(self, limit_s: float):
        self._limit_s = limit_s
        self._silent_since_s: dict[int, float] = {}

    def stuck(self, pulses: Mapping[int, Pulse | None], now_s: float) -> dict[int, str]:
        """The stages to start again and why, of those that were asked just now: None did not
        answer. One whose process is gone is not asked: Ray starts it again."""
        found = {}
        silent = {stage for stage, pulse in pulses.items() if pulse is None}
        self._silent_since_s = {s: self._silent_since_s.get(s, now_s) for s in silent}
        for stage, pulse in pulses.items():
            if pulse is None:
                silent_s = now_s - self._silent_since_s[stage]
                if silent_s > self._limit_s:
                    found[stage] = f"has not answered for {silent_s:.0f} s"
                    del self._silent_since_s[stage]
            elif pulse.step_s > self._limit_s:
                found[stage] = f"has been in one step for {pulse.step_s:.0f} s"
        return found


def why_silent(pulses: Mapping[int, Pulse | Exception]) -> dict[int, str]:
    """The stages that cannot run a step, and what is wrong with each; an exception is why one did
    not answer."""
    silent = {}
    for index, pulse in pulses.items():
        if not isinstance(pulse, Pulse):
            silent[index] = f"stage {index} does not answer ({type(pulse).__name__})"
        elif not pulse.is_loaded:
            silent[index] = f"stage {index} was started again and is not loaded yet"
        elif pulse.problem is not None:
            silent[index] = pulse.problem
    return silent
