"""Start a mesh on Ray: the cluster, the placement group, its actors, and their end.

The only place where classes become actors. A driver, which may be one itself, owns everything it
starts, so nothing outlives it, and it waits with a limit and says what is missing instead of
hanging.
"""

from __future__ import annotations

import functools
import logging
import os
import platform
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import ray
from ray._private import worker as ray_worker
from ray._private.gcs_utils import create_gcs_channel
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from coordinator.calls import CONCURRENCY_GROUPS, with_groups
from coordinator.ceiling import Ceiling
from coordinator.coordinator import Coordinator
from coordinator.hops import Echo
from coordinator.loading import LOOK_S, load_actors
from coordinator.measured import Loaded, engine_plan
from coordinator.nodes import Node, nodes_of_cluster
from coordinator.ray_board import RayBoard
from coordinator.remote import RemoteDoorkeeper, RemoteGateway
from coordinator.reservation import Say, release, reserve, say_on_stderr
from coordinator.supervisor import PlanOf, Supervisor
from skippy_mesh.client import Channel
from skippy_mesh.config import EngineSettings, StageSpec
from skippy_mesh.errors import RuntimeUnavailableError, UsageError
from skippy_mesh.health import MAX_RESTARTS, STUCK_S, OnLoad, Pulse, Watchdog, why_silent
from skippy_mesh.places import AdmissionLimits
from stages.head import StageHead
from stages.pipeline import RemoteHead, first_line, read_pulses, reset_peaks
from stages.worker import StageInfo, StageWorker

logger = logging.getLogger(__name__)

# Activations are the only large objects, and each lives for one step.
_OBJECT_STORE_BYTES = 256 * 2**20
_CONNECT_TIMEOUT_S = 10.0
_MAX_PENDING_CALLS = 64
"""To a stage behind the first. There are as many steps in flight as stages, and a few questions."""


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
        is_talkative = logger.isEnabledFor(logging.DEBUG)
        # Ray tells of a worker's death on stdout, which is the user's text.
        ray_worker._worker_logs_enabled = is_talkative
        ray.init(
            **({"address": address} if address else own),
            namespace=namespace,
            logging_level=logging.ERROR,
            log_to_driver=is_talkative,
        )
    except Exception as error:  # whatever is wrong, the user needs the address and the reason
        where = f"the Ray cluster at {address}" if address else "a local Ray cluster"
        reason = first_line(error)
        if address and reason.startswith("Failed to connect"):  # somebody answers there
            reason += "; does it want a token? RAY_AUTH_MODE=token and RAY_AUTH_TOKEN"
        raise RuntimeUnavailableError(f"cannot reach {where}: {reason}") from error
    try:
        yield
    finally:
        ray.shutdown()


def cluster_nodes() -> list[Node]:
    """What the cluster's nodes may give; inside :func:`ray_cluster`."""
    return nodes_of_cluster(ray.nodes())


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


@dataclass(frozen=True)
class Mesh(Loaded):
    """A running mesh, and what it was when it was started; ``current`` asks what it is now.

    ``pulses`` asks the stages how they are, ``reset_peaks`` lets each count its peak of memory
    anew, and ``nodes`` says where each is. Where the stages are actors, a mesh can be handed to
    another process.
    """

    channel: Channel
    current: Callable[[], Loaded]
    pulses: Callable[[], Mapping[int, Pulse | Exception]]
    reset_peaks: Callable[[], None]
    nodes: Sequence[str]

    def silent_stages(self) -> dict[int, str]:
        """The stages that cannot run a step, and what is wrong with each."""
        return why_silent(self.pulses())

    @property
    def is_remote(self) -> bool:
        """Whether the engine is an actor, which any process can talk to."""
        return isinstance(self.channel, RemoteHead)


@contextmanager
def mesh(
    specs: Sequence[StageSpec],
    settings: EngineSettings,
    *,
    mesh_name: str = "skippy",
    parallel: int | None = None,
    planned: Ceiling | None = None,
    spread: bool = False,
    max_restarts: int = MAX_RESTARTS,
    on_load: OnLoad | None = None,
    say: Say = say_on_stderr,
) -> Iterator[Mesh]:
    """Stages and engine, running: in a thread where there is one stage, else as Ray actors, each
    on a node of its own with ``spread`` and started again ``max_restarts`` times in 10 minutes.

    ``planned`` is the ceiling these stages were planned for, which holds unless they came out
    smaller; without it ``parallel`` may lower what they have. ``on_load`` is told how far they are,
    ``say`` what they wait for.
    """
    plan_of = functools.partial(
        engine_plan,
        settings=settings,
        parallel=parallel,
        planned=planned,
        max_restarts=max_restarts,
    )
    with ExitStack() as stack:
        if is_local(specs):
            yield stack.enter_context(_local_mesh(specs[0], plan_of, on_load))
        else:
            yield stack.enter_context(_ray_mesh(specs, plan_of, mesh_name, spread, on_load, say))


def is_local(specs: Sequence[StageSpec]) -> bool:
    """One stage, planned for this machine: it needs no Ray."""
    return len(specs) == 1 and not specs[0].node_id


@contextmanager
def _local_mesh(spec: StageSpec, plan_of: PlanOf, on_load: OnLoad | None) -> Iterator[Mesh]:
    head = StageHead(spec)

    def load() -> tuple[Mesh, Callable[[], object]]:
        info = head.load()
        plan, loaded = plan_of([info])
        head.prepare(plan)
        found = Mesh(
            **vars(loaded),
            channel=head,
            current=lambda: loaded,
            pulses=lambda: {0: head.pulse()},
            reset_peaks=head.reset_peak,
            nodes=[platform.node()],
        )
        return found, head.serve

    look = None if on_load is None else functools.partial(_look, head, on_load)
    with on_own_thread(load, look) as loaded:
        yield loaded


def _look(head: StageHead, on_load: OnLoad) -> None:
    on_load([head.loading()])


@contextmanager
def on_own_thread(
    load: Callable[[], tuple[Mesh, Callable[[], object]]], look: Callable[[], None] | None = None
) -> Iterator[Mesh]:
    """A mesh and what serves it, loaded and then run on one new thread, which owns the contexts
    that are built there. Serving ends when the mesh's channel is closed, which is on exit. Until
    it is loaded this thread calls ``look`` now and then."""
    loading: Future[Mesh] = Future()

    def run() -> None:
        try:
            loaded, serve = load()
        except BaseException as error:
            loading.set_exception(error)
            return
        loading.set_result(loaded)
        serve()

    thread = threading.Thread(target=run, name="engine")
    thread.start()
    try:
        while look is not None and not wait([loading], timeout=LOOK_S).done:
            look()
        yield loading.result()
    finally:
        if not loading.exception():
            loading.result().channel.close()
        thread.join()


@contextmanager
def _ray_mesh(
    specs: Sequence[StageSpec],
    plan_of: PlanOf,
    mesh_name: str,
    spread: bool,
    on_load: OnLoad | None,
    say: Say,
) -> Iterator[Mesh]:
    with stage_actors(
        specs, mesh_name=mesh_name, first=StageHead, spread=spread, on_load=on_load, say=say
    ) as (actors, infos):
        supervisor = Supervisor(actors, infos, plan_of, Watchdog(STUCK_S))
        head = RemoteHead(actors[0])
        try:
            yield Mesh(
                **vars(supervisor.loaded),
                channel=head,
                current=head.loaded,
                pulses=functools.partial(read_pulses, dict(enumerate(actors))),
                reset_peaks=functools.partial(reset_peaks, actors),
                nodes=ray.get([actor.node.remote() for actor in actors]),
            )
        finally:
            supervisor.close()


@contextmanager
def stage_actors(
    specs: Sequence[StageSpec],
    *,
    mesh_name: str,
    first: type[Any] = StageWorker,
    spread: bool = False,
    on_load: OnLoad | None = None,
    say: Say = say_on_stderr,
) -> Iterator[tuple[list[Any], list[StageInfo]]]:
    """One loaded actor per spec, on the node it was planned for or else on as few as they fit or,
    with ``spread``, on one each; all ended on exit. The first is of class ``first``."""
    group = reserve(specs, mesh_name=mesh_name, spread=spread, say=say)
    actors: list[Any] = []
    try:
        for spec in specs:
            actor_class = _actor_class(StageWorker if spec.index else first)
            actors.append(
                actor_class.options(
                    name=f"{mesh_name}_stage_{spec.index}",
                    num_cpus=spec.context.num_threads,
                    max_restarts=-1,  # how many is for RestartLimit to say
                    max_task_retries=0,
                    max_pending_calls=_MAX_PENDING_CALLS if spec.index else -1,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(
                        placement_group=group, placement_group_bundle_index=spec.index
                    ),
                ).remote(spec)
            )
        yield actors, load_actors(actors, on_load)
    finally:
        for actor in actors:
            ray.kill(actor)
        release(group)


@contextmanager
def gateway_actor(
    gateway_class: type[Any],
    spec: object,
    served: Mesh,
    limits: AdmissionLimits,
    *,
    mesh_name: str,
    node: str | None = None,
    has_board: bool = False,
) -> Iterator[RemoteGateway]:
    """A coordinator and a gateway of ``gateway_class`` for ``served``, on ``node`` or on this one.
    Neither owns anybody: what one of them takes with it when it dies is nothing but itself. With
    ``has_board`` the gateway tells Ray its numbers."""
    options: dict[str, Any] = {
        "num_cpus": 0,
        "max_restarts": -1,
        "max_task_retries": 0,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(_node_id(node), soft=False),
    }
    actors: list[Any] = []
    try:
        named = ray.remote(Coordinator).options(name=f"{mesh_name}_coordinator", **options)
        actors.append(named.remote(limits))
        # Threads: one waits for its end, the others start it, drain it and are there for more.
        named = ray.remote(gateway_class).options(
            name=f"{mesh_name}_gateway_0", max_concurrency=4, **options
        )
        actors.append(named.remote(spec))
        board = RayBoard(mesh_name) if has_board else None
        yield RemoteGateway(actors[1], served, RemoteDoorkeeper(actors[0]), board)
    finally:
        for actor in reversed(actors):
            ray.kill(actor)


def driver_actor(driver_class: type[Any], serve: Callable[[Any], None], *, mesh_name: str) -> Any:
    """A driver of ``driver_class`` on this node, which outlives this process. It is not started
    again: what it owned has ended with it."""
    options: dict[str, Any] = {
        "name": f"{mesh_name}_driver",
        "namespace": mesh_name,
        "lifetime": "detached",
        "num_cpus": 0,
        "max_restarts": 0,
        "max_task_retries": 0,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(_node_id(None), soft=False),
    }
    return ray.remote(driver_class).options(**options).remote(serve)


@contextmanager
def echoes(node_ids: Sequence[str]) -> Iterator[list[Any]]:
    """A stage without a model on each of these nodes, to measure what lies between them."""
    actors: list[Any] = []
    try:
        for node_id in node_ids:
            strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
            echo = ray.remote(Echo).options(num_cpus=0, scheduling_strategy=strategy)
            actors.append(echo.remote())
        yield actors
    finally:
        for actor in actors:
            ray.kill(actor)


def _node_id(node: str | None) -> str:
    """Of the node with this name, address or id, or the beginning of one; this node for None."""
    if node is None:
        own: str = ray.get_runtime_context().get_node_id()
        return own
    alive = [row for row in ray.nodes() if row["Alive"]]
    for row in alive:
        if node in (row["NodeName"], row["NodeManagerHostname"], row["NodeManagerAddress"]):
            return str(row["NodeID"])
    for row in alive:
        if row["NodeID"].startswith(node):
            return str(row["NodeID"])
    names = ", ".join(row["NodeManagerHostname"] for row in alive)
    raise UsageError(f"the cluster has no node {node!r}; it has {names}")


def _actor_class(plain: type[Any]) -> Any:
    return ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(with_groups(plain))
