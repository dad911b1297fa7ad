"""What the driver does for a running mesh: stage 0 when it dies, and any stage that hangs.

The engine loads the stages behind it again by itself. What it cannot do is come back from its own
death, end a step that never returns, or go on over a stage that came back with other memory than it
was planned for. One thread looks once a second.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray

from coordinator.measured import Loaded
from skippy_mesh.engine import EnginePlan
from skippy_mesh.errors import SkippyError, StageLostError
from skippy_mesh.health import Pulse, RestartLimit, Watchdog
from stages.pipeline import Revival, first_line, read_infos, read_pulses
from stages.worker import StageInfo

logger = logging.getLogger(__name__)

_WATCH_S = 1.0
_POLL_S = 0.2
_END_S = 10.0

PlanOf = Callable[[Sequence[StageInfo]], tuple[EnginePlan, Loaded]]


class Supervisor:
    """Serves what ``plan_of`` plans over ``actors``, which are loaded and say ``infos``, until
    :meth:`close`. The first of them has the engine."""

    def __init__(
        self,
        actors: Sequence[Any],
        infos: Sequence[StageInfo],
        plan_of: PlanOf,
        watchdog: Watchdog,
    ):
        self._actors = dict(enumerate(actors))
        self._head, self._later = actors[0], list(actors[1:])
        self._plan_of = plan_of
        self._plan, self.loaded = plan_of(infos)
        self._restarts = RestartLimit(self._plan.max_restarts)
        self._watchdog = watchdog
        self._highest_epoch = self._plan.first_epoch
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
        self._start_engine()
        self._thread.start()

    def close(self) -> None:
        """End the engine. Returns when it has, or after a few seconds."""
        self._is_closing.set()
        self._head.close.remote()
        self._thread.join(_END_S)

    def _start_engine(self) -> None:
        capacities = [info.capacity for info in self.loaded.infos[1:]]
        ray.get(self._head.prepare.remote(self._plan, self._later, capacities, self.loaded))
        self._serving = self._head.serve.remote()

    def _run(self) -> None:
        try:
            self._watch()
        except Exception:  # a bug of ours must not leave a mesh that nobody looks after
            logger.exception("the supervisor failed, and ends the mesh")
            ray.kill(self._head)

    def _watch(self) -> None:
        while True:
            ended, _ = ray.wait([self._serving], timeout=_WATCH_S)
            if not ended:
                self._look()
            elif not (self._needs_engine() and self._revive()):
                return

    def _needs_engine(self) -> bool:
        """Whether there must be a new one; False when the last has ended as it was told."""
        try:
            needs_engine: bool = ray.get(self._serving)
            return needs_engine
        except ray.exceptions.RayError as error:
            if self._is_closing.is_set():
                return False
            logger.warning("stage 0 is lost: %s", first_line(error))
            return True

    def _revive(self) -> bool:
        """An engine on stage 0 over what the stages have now, unless that was done too often.
        Whoever asks an actor that was ended for good hears that at once."""
        while not self._is_closing.is_set():
            if not self._restarts.allows(0, time.monotonic()):
                logger.error("the engine had %s, and no more are made", self._restarts)
                break
            try:
                if not self._load_all():
                    break
                plan, self.loaded = self._plan_of(read_infos(self._actors))
                self._plan = replace(plan, first_epoch=self._next_epoch())
                self._start_engine()
                return True
            except (StageLostError, ray.exceptions.RayActorError) as error:
                logger.warning("a stage was lost again: %s", first_line(error))
            except SkippyError as error:
                logger.error("the engine cannot be had back: %s", error)
                break
        ray.kill(self._head)
        return False

    def _load_all(self) -> bool:
        """Whether every stage is loaded; False if there is no need any more. One may be loading for
        an engine that is gone, and only then it knows what it has."""
        revival = Revival(list(self._actors.values()))
        while not self._is_closing.is_set():
            if revival.poll(_POLL_S):
                return True
        return False

    def _next_epoch(self) -> int:
        """Above what any stage has seen, so that each starts empty; one that is silent just now is
        remembered."""
        self._read()
        return 1 + self._highest_epoch

    def _read(self) -> dict[int, Pulse | Exception]:
        pulses = read_pulses(self._actors)
        seen = [pulse.epoch for pulse in pulses.values() if isinstance(pulse, Pulse)]
        self._highest_epoch = max([self._highest_epoch, *seen])
        return pulses

    def _look(self) -> None:
        pulses = self._read()
        asked: Mapping[int, Pulse | None] = {
            stage: pulse if isinstance(pulse, Pulse) else None
            for stage, pulse in pulses.items()
            if isinstance(pulse, (Pulse, TimeoutError))
        }
        for stage, reason in self._watchdog.stuck(asked, time.monotonic()).items():
            logger.warning("stage %d %s: it is started again", stage, reason)
            ray.kill(self._actors[stage], no_restart=False)
        if any(not isinstance(p, Pulse) or not p.is_loaded for s, p in pulses.items() if s):
            self._head.check.remote()
