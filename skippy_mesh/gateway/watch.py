"""How the stages are, asked every second, so that nobody else has to wait for one."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from skippy_mesh.gateway.readiness import Problem
from skippy_mesh.health import Pulse, why_silent
from skippy_mesh.mesh_facts import StageSight

logger = logging.getLogger(__name__)

_WATCH_S = 1.0
Pulses = Mapping[int, Pulse | Exception]


class Watch:
    """Asks ``pulses`` on a thread of its own. What it heard last is what everybody is told:
    nothing before the first answer."""

    def __init__(self, pulses: Callable[[], Pulses], *, num_stages: int):
        self._stages = range(num_stages)
        self._ask = pulses
        self._pulses: Pulses | None = None
        self._silent: Mapping[int, str] = {}
        self._heard_s: dict[int, float] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    @property
    def problem(self) -> Problem | None:
        for stage, reason in self._silent.items():
            return Problem("stage_unavailable", reason, stage)
        return None

    def lease_ages_s(self) -> dict[int, float]:
        """How long ago each stage said that it is well; one that never did is not there."""
        now_s = time.monotonic()
        return {stage: now_s - heard_s for stage, heard_s in list(self._heard_s.items())}

    def sights(self) -> list[StageSight]:
        """All stages; none before the first answer. Of one that is silent the memory is not
        known."""
        pulses, silent, ages_s = self._pulses, self._silent, self.lease_ages_s()
        if pulses is None:
            return []
        sights = []
        for stage in self._stages:
            pulse = pulses.get(stage)
            memory: tuple[int | None, int | None] = (None, None)
            if isinstance(pulse, Pulse):
                memory = (pulse.rss_bytes, pulse.peak_rss_bytes)
            sights.append(StageSight(stage not in silent, ages_s.get(stage), *memory))
        return sights

    def look(self) -> None:
        """Ask now."""
        asked_s = time.monotonic()
        pulses = self._ask()
        silent = why_silent(pulses)
        self._heard_s |= {stage: asked_s for stage in self._stages if stage not in silent}
        if silent and not self._silent and not self._stopped.is_set():
            logger.warning("not serving: %s", next(iter(silent.values())))
        self._pulses, self._silent = pulses, silent

    def stop(self) -> None:
        """The stages are about to end: that they do is nothing to tell."""
        self._stopped.set()

    def close(self) -> None:
        self.stop()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.is_set():
            self.look()
            self._stopped.wait(_WATCH_S)
