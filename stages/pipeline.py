"""All stages of a mesh in order, in one process or as Ray actors.

:class:`HeadPipeline` is the engine's: stage 0 in the engine's own process, the others as actors
that hand activations on as object refs, each answer straight from the last stage. The other two are
instruments: all stages in one process, or all of them as actors. Their ``logits`` runs a step but
returns the last stage's logits, for tests that compare bits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from skippy_mesh.client import Deliver
from skippy_mesh.engine import Pending
from skippy_mesh.errors import SkippyError, StageChangedError, StageError, StageLostError
from skippy_mesh.health import WINDOW_S, Pulse, why_silent
from skippy_mesh.messages import Request, StepBatch, StepResult
from skippy_mesh.scheduler.memory import Capacity
from skippy_mesh.wire import Hidden, encode_activations, encode_step
from stages.batch import Floats
from stages.worker import StageInfo, StageTimes, StageWorker

logger = logging.getLogger(__name__)

_SILENCE_S = 3.0
_RETRY_S = 0.1


@dataclass(frozen=True, slots=True)
class Done:
    """The answer to a batch that was run at once, or what went wrong with it."""

    answer: StepResult | Exception

    def result(self) -> StepResult:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class RayPending:
    """The answer of the last stage's actor, as an object ref."""

    def __init__(self, ref: Any, actors: Sequence[Any]):
        self._ref = ref
        self._actors = actors

    def result(self) -> StepResult:
        answer: StepResult = _get(self._ref, self._actors, first_index=1)
        return answer


class HeadPipeline:
    """Stage 0 is ``worker``, in this process and on this thread; ``actors`` are the stages behind
    it, each of which has its one of ``capacities``. Without any, a step makes no Ray call at
    all."""

    def __init__(
        self, worker: StageWorker, actors: Sequence[Any] = (), capacities: Sequence[Capacity] = ()
    ):
        self._worker = worker
        self._actors = list(actors)
        self._capacities = dict(enumerate(capacities, 1))
        self._revival = Revival(actors, first_index=1)

    def submit(self, batch: StepBatch) -> Pending:
        try:
            answer = self._worker.forward(batch)
            if not self._actors:
                assert isinstance(answer, StepResult)
                return Done(answer)
            output = None
            if isinstance(answer, Hidden):
                output = encode_activations(batch.epoch, batch.step_id, answer)
            return RayPending(_chain(self._actors, "step", batch, output), self._actors)
        except Exception as error:  # the engine meets it when it asks for the result
            return Done(error)

    def lane_ends(self) -> list[Mapping[int, int]]:
        ends: list[Mapping[int, int]] = [self._worker.lane_ends()]
        if self._actors:
            refs = [actor.lane_ends.remote() for actor in self._actors]
            ends += _get(refs, self._actors, first_index=1)
        return ends

    def restore(self, timeout_s: float) -> bool:
        if not self._revival.poll(timeout_s):
            return False
        for index, info in self._revival.infos.items():
            before = self._capacities[index]
            if info.capacity != before:
                raise StageChangedError(
                    f"stage {index} came back with {info.capacity.by_component()}, and had "
                    f"{before.by_component()}",
                    index,
                )
        return True


class Revival:
    """Loads stages again whose processes Ray has started again. Those that live are not touched.
    ``infos`` are what those that it has loaded say, by stage."""

    def __init__(
        self,
        actors: Sequence[Any],
        *,
        first_index: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._actors = dict(enumerate(actors, first_index))
        self.infos: dict[int, StageInfo] = {}
        self._clock = clock
        self._loads: dict[int, Any] = {}
        self._absent_since_s: float | None = None

    def poll(self, timeout_s: float) -> bool:
        """Go on for about ``timeout_s``; whether all are loaded. :class:`StageLostError` for one
        that died while it was loaded, :class:`StageError` for one that cannot be had back."""
        if self._loads:
            ray.wait(list(self._loads.values()), timeout=timeout_s)
        for index, load in list(self._loads.items()):
            if ray.wait([load], timeout=0)[0]:
                del self._loads[index]
                self.infos[index] = self._loaded(index, load)
        pulses = read_pulses(self._actors)
        for index, pulse in pulses.items():
            if isinstance(pulse, Pulse) and not pulse.is_loaded and index not in self._loads:
                self._loads[index] = self._actors[index].load.remote()
        absent = [index for index, pulse in pulses.items() if not isinstance(pulse, Pulse)]
        self._wait_for(absent, timeout_s)
        return not self._loads and not absent

    def _loaded(self, index: int, load: Any) -> StageInfo:
        try:
            info: StageInfo = ray.get(load)
            return info
        except ray.exceptions.RayTaskError as error:
            logger.error("stage %d cannot be loaded again: %s", index, first_line(error.cause))
            raise StageError(
                f"stage {index} cannot be loaded again; the reason is in the server's log"
            ) from error
        except ray.exceptions.RayError as error:
            raise StageLostError(f"stage {index} died while it was loaded again", index) from error

    def _wait_for(self, absent: Sequence[int], timeout_s: float) -> None:
        if not absent:
            self._absent_since_s = None
            return
        now_s = self._clock()
        self._absent_since_s = self._absent_since_s or now_s
        if now_s - self._absent_since_s > WINDOW_S:
            raise StageError(f"stage {absent[0]} has not come back within {WINDOW_S:.0f} s")
        time.sleep(min(timeout_s, _RETRY_S))


class LocalPipeline:
    """Every stage in this process, on the calling thread. No frames: arrays are handed over."""

    def __init__(self, workers: Sequence[StageWorker]):
        self._workers = workers
        self.infos: list[StageInfo] = [worker.load() for worker in workers]

    def forward(self, batch: StepBatch) -> StepResult:
        hidden: Hidden | None = None
        for worker in self._workers:
            answer = worker.forward(batch, hidden)
            hidden = answer if isinstance(answer, Hidden) else None
        assert isinstance(answer, StepResult)
        return answer

    def submit(self, batch: StepBatch) -> Pending:
        try:
            return Done(self.forward(batch))
        except Exception as error:
            return Done(error)

    def lane_ends(self) -> list[Mapping[int, int]]:
        return [worker.lane_ends() for worker in self._workers]

    def restore(self, timeout_s: float) -> bool:
        return True  # what dies takes this process along

    def logits(self, batch: StepBatch) -> Floats | None:
        """float32 ``[n_sampled, n_vocab]``, or None for a batch without rows."""
        rows: Floats | None = None
        for worker in self._workers:
            rows = worker.compute(batch, rows)
        return None if rows is None else rows.copy()

    def close(self) -> None:
        for worker in self._workers:
            worker.close()


class RayPipeline:
    """Every stage in its own actor, on its own machine.

    One call per stage and step; activations pass from stage to stage as object refs, so they never
    come through this process. Holds the actors' handles but does not own their lives.
    """

    def __init__(self, actors: Sequence[Any], infos: Sequence[StageInfo]):
        self.actors = list(actors)
        self.infos = list(infos)

    def forward(self, batch: StepBatch) -> StepResult:
        result: StepResult = _get(_chain(self.actors, "step", batch, None), self.actors)
        return result

    def logits(self, batch: StepBatch) -> Floats | None:
        found: Floats | None = _get(_chain(self.actors, "step_logits", batch, None), self.actors)
        return found

    def busy_seconds(self) -> float:
        """What all stages have spent inside their steps since the start."""
        times: list[StageTimes] = ray.get([actor.times.remote() for actor in self.actors])
        return sum(stage.busy_s for stage in times)


class RemoteHead:
    """The engine inside stage 0's actor: the gateway's channel to it."""

    def __init__(self, actor: Any):
        self._actor = actor
        self._is_closed = False

    def connect(self) -> None:
        while not self._is_closed:
            try:
                return ray.get(self._actor.connect.remote())  # type: ignore[no-any-return]
            except ray.exceptions.ActorDiedError as error:  # never again: it was given up
                raise StageLostError("stage 0 is lost and is not started again", 0) from error
            except ray.exceptions.RayTaskError as error:
                if not isinstance(error.cause, StageError):  # that is: no engine yet
                    raise
            except ray.exceptions.RayError:
                pass
            time.sleep(_RETRY_S)
        raise StageLostError("stage 0 was lost, and the mesh is shutting down", 0)

    def submit(self, request: Request) -> None:
        self._actor.submit.remote(request)

    def abort(self, request_id: str) -> None:
        self._actor.abort.remote(request_id)

    def close(self) -> None:
        self._is_closed = True
        self._actor.close.remote()

    def follow(self, deliver: Deliver) -> None:
        try:
            for ref in self._actor.reports.remote():
                deliver(ray.get(ref))
        except ray.exceptions.RayError as error:
            if isinstance(error, ray.exceptions.RayTaskError) and isinstance(
                error.cause, StageChangedError
            ):
                raise error.cause from error
            raise StageLostError(f"stage 0 is lost ({type(error).__name__})", 0) from error

    def loaded(self) -> Any:
        """What the engine that listens was planned for; :class:`StageLostError` without one."""
        try:
            return ray.get(self._actor.loaded.remote())
        except ray.exceptions.RayError as error:
            raise StageLostError(f"stage 0 is lost ({type(error).__name__})", 0) from error


def read_pulses(actors: Mapping[int, Any]) -> dict[int, Pulse | Exception]:
    """How each of ``actors`` is, by stage: a :class:`TimeoutError` if it does not answer within
    3 s, Ray's error if its process is gone."""
    refs = {index: actor.pulse.remote() for index, actor in actors.items()}
    ray.wait(list(refs.values()), num_returns=len(refs), timeout=_SILENCE_S)
    return {index: _pulse(ref) for index, ref in refs.items()}


def read_infos(actors: Mapping[int, Any]) -> list[StageInfo]:
    """What each of ``actors``, all of which are loaded, says of itself; :class:`StageLostError` for
    one that does not."""
    refs = {index: actor.info.remote() for index, actor in actors.items()}
    ray.wait(list(refs.values()), num_returns=len(refs), timeout=_SILENCE_S)
    return [_info(index, ref) for index, ref in refs.items()]


def _info(index: int, ref: Any) -> StageInfo:
    try:
        info: StageInfo | None = ray.get(ref, timeout=0)
    except (ray.exceptions.RayError, TimeoutError) as error:
        raise StageLostError(f"stage {index} does not say what it has", index) from error
    if info is None:
        raise StageLostError(f"stage {index} is no longer loaded", index)
    return info


def _pulse(ref: Any) -> Pulse | Exception:
    try:
        pulse: Pulse = ray.get(ref, timeout=0)
        return pulse
    except (ray.exceptions.RayError, TimeoutError) as error:
        return error


def silent_stages(actors: Sequence[Any], *, first_index: int = 0) -> dict[int, str]:
    """The stages that cannot run a step, and what is wrong with each."""
    return why_silent(read_pulses(dict(enumerate(actors, first_index))))


def reset_peaks(actors: Sequence[Any]) -> None:
    """Let every stage's peak of memory begin anew; returns when all that answer have done so."""
    refs = [actor.reset_peak.remote() for actor in actors]
    ray.wait(refs, num_returns=len(refs), timeout=_SILENCE_S)


def _chain(actors: Sequence[Any], method: str, batch: StepBatch, output: Any) -> Any:
    """Call ``method`` of every stage in order, each with the ref of what the one before returns."""
    frame = encode_step(batch)
    for actor in actors:
        output = getattr(actor, method).remote(frame, output)
    return output


def _get(refs: Any, actors: Sequence[Any], *, first_index: int = 0) -> Any:
    """``ray.get``, whose errors become ours: a stage's own crosses unchanged."""
    try:
        return ray.get(refs)
    except ray.exceptions.RayError as error:
        # A later stage reports an earlier one's end.
        cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
        if isinstance(cause, SkippyError):
            raise cause from error
        lost = silent_stages(actors, first_index=first_index)
        if lost:
            index, reason = next(iter(lost.items()))
            raise StageLostError(reason, index) from error
        raise StageError(f"a stage failed: {type(cause).__name__}: {first_line(cause)}") from error


def first_line(error: BaseException) -> str:
    """What Ray says of a failure, without the page of advice that follows it."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
