"""``serve --detach``: what is decided before anything is loaded is an :class:`Order`, which an
actor of the cluster then serves."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skippy_mesh.config import EngineSettings, StageSpec
from skippy_mesh.places import QueueBounds
from skippy_mesh.progress import load_bars
from skippy_mesh.starting import ready_text
from skippy_mesh.verdicts import Choice

if TYPE_CHECKING:
    from coordinator.ceiling import Ceiling
    from coordinator.detached import Driver
    from skippy_mesh.gateway.server import GatewaySpec

_POLL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A mesh to be served. Its gateway is on ``gateway_node``, or where the driver is;
    ``has_board`` is whether Ray is told its numbers."""

    mesh_name: str
    specs: Sequence[StageSpec]
    settings: EngineSettings
    planned: Ceiling
    spread: bool
    choice: Choice
    gateway: GatewaySpec
    gateway_node: str | None
    bounds: QueueBounds
    has_board: bool


def detach_order(order: Order) -> str:
    """Have ``order`` served by an actor that outlives this process; what to say when it is. Inside
    the cluster it is for."""
    from coordinator.detached import detach
    from coordinator.reservation import say_on_stderr

    with load_bars(order.specs) as on_load:
        return detach(
            functools.partial(serve_order, order),
            mesh_name=order.mesh_name,
            on_load=on_load,
            say=say_on_stderr,
        )


def serve_order(order: Order, driver: Driver) -> None:
    """What the actor does, until its gateway has ended."""
    from coordinator.launch import gateway_actor, mesh
    from skippy_mesh.gateway.server import GatewayServer

    with ExitStack() as stack:
        started = stack.enter_context(
            mesh(
                order.specs,
                order.settings,
                mesh_name=order.mesh_name,
                planned=order.planned,
                spread=order.spread,
                on_load=driver.on_load,
                say=driver.say,
            )
        )
        limits = order.bounds.limits(ceiling=started.ceiling.value, num_cells=started.num_cells)
        gateway = stack.enter_context(
            gateway_actor(
                GatewayServer,
                order.gateway.with_limits(limits),
                started,
                limits,
                mesh_name=order.mesh_name,
                node=order.gateway_node,
                has_board=order.has_board,
            )
        )
        driver.tell_ready(ready_text(started, order.choice, gateway.start()))
        while not gateway.wait(_POLL_S):
            pass
