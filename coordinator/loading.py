"""Load the stages of a mesh, all at once, and say how far each is to whoever wants to know."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import ray

from skippy_mesh.errors import SkippyError, StageError
from skippy_mesh.health import Loading, OnLoad
from stages.pipeline import first_line

LOOK_S = 0.2
"""Between two looks at how far the stages are."""
_ANSWER_S = 1.0


def load_actors(actors: Sequence[Any], on_load: OnLoad | None) -> list[Any]:
    """The stages' own descriptions; the first failure, named, ends the wait."""
    pending = [actor.load.remote() for actor in actors]
    try:
        if on_load is not None:
            for states in _looks(actors, pending):
                on_load(states)
        return list(ray.get(pending))
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, SkippyError):
            raise error.cause from error
        reason = f"{type(error.cause).__name__}: {first_line(error.cause)}"
        raise StageError(f"a stage could not load: {reason}") from error
    except ray.exceptions.RayError as error:
        raise StageError(f"a stage died while loading: {first_line(error)}") from error


def _looks(actors: Sequence[Any], pending: Sequence[Any]) -> Iterator[list[Loading]]:
    """How far each is, until all are loaded. A failed one raises what ``ray.get`` does."""
    states = [Loading() for _ in actors]
    waiting = list(pending)
    while waiting:
        done, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=LOOK_S)
        ray.get(done)
        asked = {actor.loading.remote(): index for index, actor in enumerate(actors)}
        for ref in ray.wait(list(asked), num_returns=len(asked), timeout=_ANSWER_S)[0]:
            states[asked[ref]] = ray.get(ref)
        yield states
