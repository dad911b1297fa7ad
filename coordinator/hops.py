"""What a hop between two stages costs, measured with real frames and without a model.

A step goes through two stages that compute nothing, and through the first of them alone, in turn;
the difference is the hop. So nothing of the driver's own way to the cluster is counted, and a
machine that is busy meanwhile slows both.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import ray

from skippy_mesh.errors import RuntimeUnavailableError
from skippy_mesh.messages import StepBatch
from skippy_mesh.wire import (
    Hidden,
    decode_activations,
    decode_step,
    encode_activations,
    encode_step,
)
from stages.download import is_url
from stages.library import this_cpu, versions
from stages.pipeline import first_line

_ROUNDS = 12
_ANSWER_S = 60.0  # also for the actors' start


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """``cpu`` are the instruction sets that its kernels may use."""

    name: str
    versions: Mapping[str, str | None]
    cpu: tuple[str, ...]
    has_model: bool

    def as_json(self) -> dict[str, object]:
        return asdict(self)


class Echo:
    """A stage that unpacks what it is sent and passes on as many rows, and computes nothing."""

    def about(self, model_path: str) -> NodeFacts:
        has_model = is_url(model_path) or Path(model_path).is_file()
        return NodeFacts(platform.node(), versions(), tuple(sorted(this_cpu())), has_model)

    def step(self, frame: bytes, width: int, activations: bytes | None = None) -> bytes:
        batch = decode_step(frame)
        if activations is None:
            rows = np.zeros((batch.num_rows, width), np.float32)
        else:
            rows = decode_activations(activations)[2].rows
        return encode_activations(batch.epoch, batch.step_id, Hidden(rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """The median of ``num_rows`` rows on their way, in ``frame_bytes``."""

    source: str
    target: str
    num_rows: int
    frame_bytes: int
    ms: float

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def node_facts(actors: Sequence[Any], model_path: str) -> list[NodeFacts]:
    """What the actors find where they run."""
    found: list[NodeFacts] = _answers([actor.about.remote(model_path) for actor in actors])
    return found


def measure_hops(
    actors: Sequence[Any], nodes: Sequence[str], *, width: int, row_counts: Sequence[int]
) -> list[Hop]:
    """Every hop along ``actors``, which are on ``nodes``, for every count of rows, each ``width``
    floats."""
    return [
        _measure(list(pair), names, width, num_rows)
        for pair, names in zip(pairwise(actors), pairwise(nodes), strict=True)
        for num_rows in row_counts
    ]


def _answers(refs: Any) -> Any:
    try:
        return ray.get(refs, timeout=_ANSWER_S)
    except (ray.exceptions.RayError, TimeoutError) as error:
        raise RuntimeUnavailableError(
            f"a step does not get from node to node: {first_line(error)}"
        ) from error


def _measure(pair: list[Any], names: tuple[str, str], width: int, num_rows: int) -> Hop:
    frame = encode_step(
        StepBatch(
            epoch=0,
            step_id=0,
            lanes=(0,) * num_rows,
            positions=tuple(range(num_rows)),
            tokens=(0,) * num_rows,
            samples=(*(False,) * (num_rows - 1), True),
        )
    )
    _, size = _time(pair, frame, width)  # the first pays for connections
    differences = [
        _time(pair, frame, width)[0] - _time(pair[:1], frame, width)[0] for _ in range(_ROUNDS)
    ]
    return Hop(
        source=names[0],
        target=names[1],
        num_rows=num_rows,
        frame_bytes=size,
        ms=max(1e3 * statistics.median(differences), 0.0),
    )


def _time(actors: Sequence[Any], frame: bytes, width: int) -> tuple[float, int]:
    """Seconds for a step through ``actors``, and the size of what the last one answers."""
    started_s = time.perf_counter()
    answer = None
    for actor in actors:
        answer = actor.step.remote(frame, width, answer)
    size = len(_answers(answer))
    return time.perf_counter() - started_s, size
