"""The machines a plan may use: what each may give, how fast it is, how far it is from the others.

Facts only, as values: whoever measures them (Ray, an operator, this machine) is elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skippy_mesh.errors import UsageError
from skippy_mesh.sizes import parse_size


@dataclass(frozen=True, slots=True)
class Node:
    """``usable_bytes`` are what a stage may take there, all else subtracted. ``bytes_per_s`` is how
    fast it reads weights, None if unknown. ``rtt_us`` is to a node that no :class:`Link` names.
    ``num_cpus`` and ``node_id`` are for who starts the stages there; ``is_head`` is said of the
    node that keeps the cluster together. ``num_gpus`` is only told: stages compute on the CPU."""

    name: str
    usable_bytes: int
    bytes_per_s: int | None = None
    rtt_us: int | None = None
    num_cpus: int = 1
    node_id: str = ""
    is_head: bool = False
    num_gpus: int = 0

    def __post_init__(self) -> None:
        if not self.name:
            raise UsageError("a node needs a name: --node NAME=BYTES")
        if self.usable_bytes < 0:
            raise UsageError(f"node {self.name} cannot give {self.usable_bytes} bytes")
        if self.bytes_per_s is not None and self.bytes_per_s < 1:
            raise UsageError(f"node {self.name} cannot read {self.bytes_per_s} bytes a second")


def usable_of(total_bytes: int, *, cap_bytes: int | None = None, headroom_bytes: int = 0) -> int:
    """What is left of a node's memory under an operator's cap, with the headroom kept free."""
    capped = total_bytes if cap_bytes is None else min(total_bytes, cap_bytes)
    return max(capped - headroom_bytes, 0)


RATE_LABEL = "skippy_mesh/bytes_per_s"
"""A Ray node label: how fast the node reads weights, as in ``50GB``."""


_HEAD = "node:__internal_head__"


def nodes_of_cluster(rows: Iterable[Mapping[str, Any]]) -> list[Node]:
    """The nodes of a Ray cluster that may hold a stage, from what ``ray.nodes()`` answers.

    A node may give the memory it declares (``ray start --memory``, else Ray's own part of what was
    free). One that is dead or declares no CPU, as a head often does, is left out.
    """
    alive = [row for row in rows if row["Alive"] and row["Resources"].get("CPU", 0) > 0]
    names = [str(row.get("NodeName") or row["NodeManagerHostname"]) for row in alive]
    found = []
    for row, name in zip(alive, names, strict=True):
        rate = row.get("Labels", {}).get(RATE_LABEL)
        found.append(
            Node(
                # Several nodes of one machine have one name, and are different nodes.
                name if names.count(name) == 1 else f"{name}-{row['NodeID'][:8]}",
                int(row["Resources"].get("memory", 0)),
                None if rate is None else parse_size(rate),
                num_cpus=max(int(row["Resources"]["CPU"]), 1),
                node_id=row["NodeID"],
                is_head=_HEAD in row["Resources"],
                num_gpus=int(row["Resources"].get("GPU", 0)),
            )
        )
    return found


def by_size(nodes: Iterable[Node]) -> list[Node]:
    """Largest first, equals by name: a plan must not depend on the order nodes were named in."""
    found = sorted(nodes, key=lambda node: (-node.usable_bytes, node.name))
    if not found:
        raise UsageError("there is no node to plan for: name one with --node NAME=BYTES")
    names = [node.name for node in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(f"node {twice[0]} is named twice")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One direction between two nodes. Without ``bytes_per_s`` size costs nothing."""

    source: str
    target: str
    rtt_us: int
    bytes_per_s: int | None = None


def token_time_us(ring: Sequence[Node], links: Iterable[Link], *, frame_bytes: int) -> int | None:
    """What the network adds to a token of one lone sequence: every hop from stage to stage with a
    frame of ``frame_bytes``, and the hop back from the last stage to the first with a few bytes.

    A hop counts in its own direction. A missing link is taken from the reverse one, else from the
    farther of the two nodes; None if nothing is known of some hop. Rounded up.
    """
    by_ends = {(link.source, link.target): link for link in links}
    if len({node.name for node in ring}) == 1:
        return 0
    total_us = 0
    for index, source in enumerate(ring):
        target = ring[(index + 1) % len(ring)]
        if source.name == target.name:
            continue
        link = by_ends.get((source.name, target.name)) or by_ends.get((target.name, source.name))
        rtts_us = [node.rtt_us for node in (source, target) if node.rtt_us is not None]
        if link is None and not rtts_us:
            return None
        total_us += max(rtts_us) if link is None else link.rtt_us
        is_forward = index < len(ring) - 1
        if link is not None and link.bytes_per_s and is_forward:
            total_us += -(-frame_bytes * 1_000_000 // link.bytes_per_s)
    return total_us
