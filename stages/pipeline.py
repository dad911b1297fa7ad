"""All stages of a mesh in order, in one process or as Ray actors.

Both are the engine's ``Pipeline``: ``forward`` runs one StepBatch through every stage. ``logits``
does the same but returns the last stage's logits, for tests that compare bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray

from skippy_mesh.errors import SkippyError, StageError
from skippy_mesh.messages import StepBatch, StepResult
from skippy_mesh.wire import encode_step
from stages.batch import Floats
from stages.worker import StageInfo, StageTimes, StageWorker


class LocalPipeline:
    """Every stage in this process, on the calling thread. No frames: arrays are handed over."""

    def __init__(self, workers: Sequence[StageWorker]):
        self._workers = workers
        self.infos: list[StageInfo] = [worker.load() for worker in workers]

    def forward(self, batch: StepBatch) -> StepResult:
        return self._workers[-1].sample(batch, self._compute(batch))

    def logits(self, batch: StepBatch) -> Floats | None:
        """float32 ``[n_sampled, n_vocab]``, or None for a batch without rows."""
        logits = self._compute(batch)
        return None if logits is None else logits.copy()

    def _compute(self, batch: StepBatch) -> Floats | None:
        hidden: Floats | None = None
        for worker in self._workers:
            hidden = worker.compute(batch, hidden)
        return hidden

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
        result: StepResult = self._run(batch, "step")
        return result

    def logits(self, batch: StepBatch) -> Floats | None:
        found: Floats | None = self._run(batch, "step_logits")
        return found

    def busy_seconds(self) -> float:
        """What all stages have spent inside their steps since the start."""
        times: list[StageTimes] = ray.get([actor.times.remote() for actor in self.actors])
        return sum(stage.busy_s for stage in times)

    def check_alive(self) -> str | None:
        """None if every stage answers, else which one does not."""
        for index, actor in enumerate(self.actors):
            try:
                ray.get(actor.info.remote(), timeout=3)
            except (ray.exceptions.RayError, TimeoutError) as error:
                return f"stage {index} does not answer ({type(error).__name__})"
        return None

    def _run(self, batch: StepBatch, method: str) -> Any:
        frame = encode_step(batch)
        output = None
        for actor in self.actors:
            output = getattr(actor, method).remote(frame, output)
        try:
            return ray.get(output)
        except ray.exceptions.RayError as error:
            # A stage's own error crosses unchanged; a later stage reports an earlier one's end.
            cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
            if isinstance(cause, SkippyError):
                raise cause from error
            reason = self.check_alive() or f"{type(cause).__name__}: {first_line(cause)}"
            raise StageError(f"a stage failed: {reason}") from error


def first_line(error: BaseException) -> str:
    """What Ray says of a failure, without the page of advice that follows it."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
