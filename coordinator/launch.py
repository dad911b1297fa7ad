"""Start a mesh on Ray: the cluster, the placement group, one actor per stage, and their end.

The only place where classes become actors. The driver owns everything it starts, so nothing
outlives it, and it waits with a limit and says what is missing instead of hanging.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc
import ray
from ray._private.gcs_utils import create_gcs_channel
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from skippy_mesh.config import StageSpec
from skippy_mesh.errors import RuntimeUnavailableError, SkippyError, StageError
from stages.pipeline import RayPipeline, first_line
from stages.worker import StageWorker

logger = logging.getLogger(__name__)

# Activations are the only large objects, and each lives for one step.
_OBJECT_STORE_BYTES = 256 * 2**20
_PLACEMENT_TIMEOUT_S = 600.0
_CONNECT_TIMEOUT_S = 10.0
# A decode must not block a question about health, and one thread must own the context.
_CONCURRENCY_GROUPS = {"step": 1, "control": 2, "health": 1}
_GROUP_OF = {
    "load": "step",
    "step": "step",
    "step_logits": "step",
    "close": "step",
    "times": "control",
    "info": "health",
}


@contextmanager
def ray_cluster(*, address: str | None, num_cpus: int, namespace: str) -> Iterator[None]:
    """Join the cluster at ``address`` (or ``RAY_ADDRESS``), else run one for this process alone.

    A cluster of our own declares at least ``num_cpus`` CPUs, so that more stages than cores start.
    """
    address = address or os.environ.get("RAY_ADDRESS") or None
    own: dict[str, Any] = {
        "address": "local",
        "num_cpus": max(os.cpu_count() or 1, num_cpus),
        "object_store_memory": _OBJECT_STORE_BYTES,
        "include_dashboard": False,
    }
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        if address:
            _check_answers(address)
        ray.init(
            **({"address": address} if address else own),
            namespace=namespace,
            logging_level=logging.ERROR,
            log_to_driver=logger.isEnabledFor(logging.DEBUG),
        )
    except Exception as error:  # whatever is wrong, the user needs the address and the reason
        where = f"the Ray cluster at {address}" if address else "a local Ray cluster"
        raise RuntimeUnavailableError(f"cannot reach {where}: {first_line(error)}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _check_answers(address: str) -> None:
    """Ray itself tries for minutes where nobody listens, and tells stderr line by line."""
    host_port = address.removeprefix("ray://")
    if ":" not in host_port:
        return  # "auto" and the like: ray.init looks that up at once
    channel = create_gcs_channel(host_port)
    try:
        grpc.channel_ready_future(channel).result(timeout=_CONNECT_TIMEOUT_S)
    except grpc.FutureTimeoutError:
        raise ConnectionError(f"no Ray answers there within {_CONNECT_TIMEOUT_S:g} s") from None
    finally:
        channel.close()


@contextmanager
def stage_actors(specs: Sequence[StageSpec], *, mesh_name: str) -> Iterator[RayPipeline]:
    """One loaded actor per spec, spread over the nodes there are; all ended on exit."""
    group = _reserve(specs)
    actors: list[Any] = []
    try:
        actor_class = _stage_actor_class()
        for spec in specs:
            actors.append(
                actor_class.options(
                    name=f"{mesh_name}_stage_{spec.index}",
                    num_cpus=spec.context.num_threads,
                    max_restarts=0,
                    max_task_retries=0,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(
                        placement_group=group, placement_group_bundle_index=spec.index
                    ),
                ).remote(spec)
            )
        yield RayPipeline(actors, _load(actors))
    finally:
        for actor in actors:
            ray.kill(actor)
        remove_placement_group(group)


def _reserve(specs: Sequence[StageSpec]) -> PlacementGroup:
    bundles = [{"CPU": float(spec.context.num_threads)} for spec in specs]
    group = placement_group(bundles, strategy="SPREAD")
    if not group.wait(_PLACEMENT_TIMEOUT_S):
        remove_placement_group(group)
        free = ray.available_resources().get("CPU", 0)
        raise RuntimeUnavailableError(
            f"the Ray cluster cannot place {len(specs)} stages of "
            f"{specs[0].context.num_threads} CPUs after {_PLACEMENT_TIMEOUT_S:.0f} s: "
            f"{free:g} CPUs are free; add nodes, or lower --stages or --threads"
        )
    return group


def _load(actors: Sequence[Any]) -> list[Any]:
    """Load all stages at once; the first failure, named, ends the wait."""
    pending = [actor.load.remote() for actor in actors]
    try:
        return list(ray.get(pending))
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, SkippyError):
            raise error.cause from error
        reason = f"{type(error.cause).__name__}: {first_line(error.cause)}"
        raise StageError(f"a stage could not load: {reason}") from error
    except ray.exceptions.RayError as error:
        raise StageError(f"a stage died while loading: {first_line(error)}") from error


def _stage_actor_class() -> Any:
    for name, group in _GROUP_OF.items():
        ray.method(concurrency_group=group)(getattr(StageWorker, name))
    return ray.remote(concurrency_groups=_CONCURRENCY_GROUPS)(StageWorker)
