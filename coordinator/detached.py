"""A mesh that outlives the command that started it, because its driver is an actor.

The driver alone is detached. It owns stages, coordinator, gateway and placement group as a driver
in a terminal does, so whatever ends it takes them along, and nothing can be left behind.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray

from coordinator.launch import driver_actor
from coordinator.loading import LOOK_S
from coordinator.reservation import Say
from skippy_mesh.errors import RuntimeUnavailableError, SkippyError
from skippy_mesh.health import Loading, OnLoad
from stages.pipeline import first_line

logger = logging.getLogger(__name__)

_LAST_WORDS_S = 60.0  # for who waits to hear why there will be no mesh
_ENDING_S = 5.0  # what ended just now may be on the cluster's list still
_GONE_S = 60.0  # from the last answer to the last process
_ANSWER_S = 10.0
_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a driver is: each stage's loading and what was to be said so far, then either
    ``ready``, which is what a user is to read of a mesh that serves, or why there will be none."""

    states: tuple[Loading, ...] = ()
    notices: tuple[str, ...] = ()
    ready: str | None = None
    error: SkippyError | None = None


class Driver:
    """``serve`` has the mesh, tells this driver how far it is, and returns when the mesh has ended.

    It is called once, on a thread of its own, so that the end of who asked for it does not end it.
    When it returns, this actor ends itself.
    """

    def __init__(self, serve: Callable[[Driver], None]):
        self._serve = serve
        self._progress = Progress()
        self._thread = threading.Thread(target=self._run, name="driver", daemon=True)

    def __repr__(self) -> str:
        return "driver"

    def start(self) -> None:
        self._thread.start()

    def progress(self) -> Progress:
        return self._progress

    def on_load(self, states: Sequence[Loading]) -> None:
        self._progress = replace(self._progress, states=tuple(states))

    def say(self, text: str) -> None:
        self._progress = replace(self._progress, notices=(*self._progress.notices, text))

    def tell_ready(self, text: str) -> None:
        self._progress = replace(self._progress, ready=text)

    def _run(self) -> None:
        try:
            self._serve(self)
        except SkippyError as error:
            logger.error("the mesh has ended: %s", error)
            self._fail(error)
        except Exception as error:
            logger.exception("the mesh has ended")
            reason = f"{type(error).__name__}: {first_line(error)}"
            self._fail(RuntimeUnavailableError(f"the driver failed: {reason}"))
        ray.kill(ray.get_runtime_context().current_actor)

    def _fail(self, error: SkippyError) -> None:
        self._progress = replace(self._progress, error=error)
        if self._progress.ready is None:
            time.sleep(_LAST_WORDS_S)


def detach(
    serve: Callable[[Driver], None], *, mesh_name: str, on_load: OnLoad | None, say: Say
) -> str:
    """Start a driver that outlives this process and wait until its mesh serves; what it says of it.
    Whatever ends the waiting ends the mesh."""
    try:
        driver = driver_actor(Driver, serve, mesh_name=mesh_name)
    except ValueError as error:  # another took the name since it was looked at
        raise SkippyError(_taken(mesh_name)) from error
    try:
        return _await_ready(driver, on_load, say)
    except BaseException as error:
        ray.kill(driver)
        if isinstance(error, ray.exceptions.RayError):
            raise RuntimeUnavailableError(
                f"the driver of mesh {mesh_name} was lost while it loaded: {first_line(error)}"
            ) from error
        raise


def _await_ready(driver: Any, on_load: OnLoad | None, say: Say) -> str:
    ray.get(driver.start.remote())
    num_said = 0
    while True:
        progress: Progress = ray.get(driver.progress.remote())
        for text in progress.notices[num_said:]:
            say(text)
        num_said = len(progress.notices)
        if on_load is not None and progress.states:
            on_load(progress.states)
        if progress.error is not None:
            raise progress.error
        if progress.ready is not None:
            return progress.ready
        time.sleep(LOOK_S)


def check_name(mesh_name: str) -> None:
    """:class:`SkippyError` if a mesh of this name is on the cluster and stays there."""
    if not _within(_ENDING_S, lambda: not _kinds(mesh_name)):
        raise SkippyError(_taken(mesh_name))


def _taken(mesh_name: str) -> str:
    return (
        f"a mesh named {mesh_name} is on this cluster already: end it with skippy-mesh stop, or "
        f"choose another --mesh-name"
    )


def stop_mesh(mesh_name: str, *, drain_s: float | None) -> None:
    """End a mesh, detached or not, as a signal to its driver would: who runs has ``drain_s``, or
    what ``serve`` was told. Returns when nothing of it is left."""
    kinds = _kinds(mesh_name)
    if not kinds:
        raise SkippyError(f"no mesh named {mesh_name} runs on this cluster{_others()}")
    if not kinds & {"driver", "gateway_0"}:
        raise SkippyError(
            f"mesh {mesh_name} takes no word from here (it still loads, or the old engine serves "
            f"it): Ctrl-C in its terminal ends it, or ray job stop"
        )
    if "gateway_0" in kinds:
        drained_s = _drain(mesh_name, drain_s)
        if _within(drained_s + _GONE_S, lambda: _is_gone(mesh_name)):
            return
    # It loads, so that nobody waits for an answer, or it hangs.
    if "driver" in kinds and (driver := _actor(mesh_name, "driver")) is not None:
        ray.kill(driver)
    if not _within(_GONE_S, lambda: _is_gone(mesh_name)):
        left = ", ".join(sorted(_kinds(mesh_name))) or "its placement group"
        raise SkippyError(f"of mesh {mesh_name} there still is {left}: end its driver's process")


def _drain(mesh_name: str, drain_s: float | None) -> float:
    """What that takes at most; 0 where nobody answers, who then has nobody to finish."""
    try:
        gateway = _actor(mesh_name, "gateway_0")
        if gateway is None:
            return 0.0
        return float(ray.get(gateway.stop.remote(drain_s), timeout=_ANSWER_S))
    except (ray.exceptions.RayError, TimeoutError) as error:
        logger.warning("the gateway does not answer: %s", first_line(error))
        return 0.0


def _kinds(mesh_name: str) -> set[str]:
    """Which of the mesh's actors are not dead: ``driver``, ``gateway_0``, ``stage_0`` and so on."""
    return {
        row["name"].removeprefix(f"{mesh_name}_")
        for row in ray.util.list_named_actors(all_namespaces=True)
        if row["namespace"] == mesh_name and row["name"].startswith(f"{mesh_name}_")
    }


def _actor(mesh_name: str, kind: str) -> Any:
    """None if it has ended meanwhile."""
    try:
        return ray.get_actor(f"{mesh_name}_{kind}", namespace=mesh_name)
    except ValueError:
        return None


def _is_gone(mesh_name: str) -> bool:
    groups = ray.util.placement_group_table().values()
    has_room = any(row["name"] == f"{mesh_name}_pg" and row["state"] != "REMOVED" for row in groups)
    return not has_room and not _kinds(mesh_name)


def _others() -> str:
    names = {
        row["namespace"]
        for row in ray.util.list_named_actors(all_namespaces=True)
        if row["name"] == f"{row['namespace']}_gateway_0"
    }
    return f"; there is {', '.join(sorted(names))}" if names else ""


def _within(limit_s: float, is_so: Callable[[], bool]) -> bool:
    """Whether it came to be so in time; returns as soon as it is."""
    deadline_s = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_POLL_S)
    return True
