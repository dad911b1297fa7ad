"""Room for all stages of a mesh on the cluster, or what is missing, said while waiting for it."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from coordinator.placement import why_unplaced
from skippy_mesh.config import StageSpec
from skippy_mesh.errors import RuntimeUnavailableError

logger = logging.getLogger(__name__)

_TIMEOUT_S = 600.0
_NOTICE_S = 10.0
_REMOVAL_S = 3.0

Say = Callable[[str], None]
"""Told, one line at a time, what a user is to know while there is nothing to see."""


def say_on_stderr(text: str) -> None:
    print(f"skippy-mesh: {text}", file=sys.stderr, flush=True)


def reserve(
    specs: Sequence[StageSpec], *, mesh_name: str, spread: bool, say: Say = say_on_stderr
) -> PlacementGroup:
    bundles = [{"CPU": float(spec.context.num_threads)} for spec in specs]
    strategy = "STRICT_SPREAD" if spread else "PACK"
    nodes = [{"ray.io/node-id": spec.node_id} if spec.node_id else {} for spec in specs]
    group = placement_group(
        bundles, strategy=strategy, name=f"{mesh_name}_pg", bundle_label_selector=nodes
    )
    deadline_s = time.monotonic() + _TIMEOUT_S
    if group.wait(min(_NOTICE_S, _TIMEOUT_S)):
        return group
    try:
        why = why_unplaced(bundles, _free_resources(), spread=spread)
        say(f"waiting for nodes: {why}")
        if group.wait(max(deadline_s - time.monotonic(), 0)):
            return group
        why = why_unplaced(bundles, _free_resources(), spread=spread)
        raise RuntimeUnavailableError(
            f"after {_TIMEOUT_S:.0f} s there is {why}; add nodes, or lower --stages or --threads"
        )
    except BaseException:
        release(group)
        raise


def release(group: PlacementGroup) -> None:
    """With a limit: when all of our process group got the signal, the cluster is gone already, and
    Ray would wait a minute for it and then end this process."""
    removal = threading.Thread(target=remove_placement_group, args=(group,), daemon=True)
    removal.start()
    removal.join(_REMOVAL_S)
    if removal.is_alive():
        logger.warning("the cluster does not answer: it is left as it is")


def _free_resources() -> list[tuple[str, Mapping[str, float]]]:
    free = available_resources_per_node()
    return [
        (node["NodeManagerHostname"], free.get(node["NodeID"], {}))
        for node in ray.nodes()
        if node["Alive"]
    ]
