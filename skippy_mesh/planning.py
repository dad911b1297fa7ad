"""From flags to a plan, and from a plan to the stages of a mesh: the same for ``serve``,
``generate`` and ``plan``.

Planning for a Ray cluster means joining it, so :func:`planned` is a context: whoever then starts
the stages is in the cluster they were planned for.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

from skippy_mesh.config import (
    KV_TYPES,
    MAX_THREADS,
    NUM_SPARE_LANES,
    ContextConfig,
    StageSpec,
    num_residents,
    specs_of,
)
from skippy_mesh.errors import UsageError
from skippy_mesh.sizes import available_bytes

if TYPE_CHECKING:
    from coordinator.costs import ModelCosts
    from coordinator.nodes import Node
    from coordinator.planner import Plan
    from coordinator.request import PlanRequest
    from stages.gguf_file import ModelFile

_FREE_FRACTION = Fraction(85, 100)
"""Of this machine's free memory that a plan may use: the rest is for buffers not yet measured."""


def add_layout_flags(parser: argparse.ArgumentParser, *, model: str | None = None) -> None:
    """What narrows a plan; ``model`` is for who names none."""
    add = parser.add_argument
    add_model_flag(parser, default=model)
    add(
        "--stages", "--pipeline-parallel-size", type=int, metavar="K",
        help="cut into K stages (default: as few as fit)",
    )  # fmt: skip
    add("--cuts", type=_cuts, metavar="L[,L..]", help="cut before these layers, e.g. 5,11")
    add(
        "-c", "--ctx-size", type=int, default=0, metavar="N",
        help="cells of the KV pool that all requests share (0: what fits, at most 131072)",
    )  # fmt: skip
    add(
        "--memory-fraction", "--gpu-memory-utilization", type=_fraction, metavar="F",
        help="of this machine's free memory (0.85), or of what a cluster's nodes declare (1)",
    )  # fmt: skip
    add(
        "--kv", "--kv-cache-dtype", type=_kv_type, choices=KV_TYPES, default="q8_0",
        help="KV cache type (%(default)s)",
    )  # fmt: skip
    for part in ("k", "v"):
        add(
            f"-ct{part}", f"--cache-type-{part}", type=_kv_type, choices=KV_TYPES,
            help="as --kv: K and V have one type",
        )  # fmt: skip
    add(
        "--allow-unproven", action="store_true",
        help="take a model of unknown architecture for a dense one",
    )  # fmt: skip


def add_cache_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prefix-cache", "--enable-prefix-caching", "--cache-prompt",
        action=argparse.BooleanOptionalAction, default=True,
        help="keep computed prompts for others that begin alike (on)",
    )  # fmt: skip


def add_model_flag(parser: argparse.ArgumentParser, *, default: str | None = None) -> None:
    what = "a GGUF file (any part of a split one), a URL of one, or demo"
    # Absent, the word must not undo the flag.
    parser.add_argument("model", metavar="MODEL", nargs="?", default=argparse.SUPPRESS, help=what)
    parser.add_argument("-m", "--model", metavar="MODEL", default=default, help="the same")


def _kv_type(argument: str) -> str:
    return {"auto": "q8_0", "bfloat16": "bf16"}.get(argument, argument)


def _cuts(argument: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in argument.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"takes layers like 5,11, got {argument!r}") from None


def _fraction(argument: str) -> Fraction:
    try:
        fraction = Fraction(argument)
    except (ValueError, ZeroDivisionError):
        raise argparse.ArgumentTypeError(f"takes a number like 0.85, got {argument!r}") from None
    if not 0 < fraction <= 1:
        raise argparse.ArgumentTypeError(f"must be over 0 and at most 1, got {argument}")
    return fraction


def cluster_address(args: argparse.Namespace) -> str | None:
    """Of the Ray cluster to join; None where the mesh is for this machine."""
    return args.address or os.environ.get("RAY_ADDRESS") or None


def costs_of_model(model: ModelFile, kv_type: str) -> ModelCosts:
    from coordinator.costs import costs_of

    tensors = {tensor.name: tensor.num_bytes for tensor in model.tensors.values()}
    return costs_of(model.family, model.facts, tensors, width=model.width, kv_type=kv_type)


def request_of(
    args: argparse.Namespace, *, lanes: int | None, context: int | None = None
) -> PlanRequest:
    from coordinator.request import PlanRequest

    return PlanRequest(
        context=context,
        num_cells=args.ctx_size or None,
        lanes=lanes,
        cuts=args.cuts,
        num_stages=args.stages,
        reserved_ids=NUM_SPARE_LANES,
        keeps_prefixes=args.prefix_cache,
    )


@contextmanager
def planned(
    args: argparse.Namespace,
    model: ModelFile,
    *,
    lanes: int | None = None,
    need_tokens: int | None = None,
) -> Iterator[Plan]:
    """The plan for a mesh, inside the Ray cluster it is for if it is for one.

    ``need_tokens`` are all that will be asked of the mesh: without ``-c`` the pool is no larger.
    """
    from coordinator.planner import plan

    costs = costs_of_model(model, args.kv)
    context = None
    if need_tokens is not None and not args.ctx_size:
        context = min(need_tokens, costs.native_context)
    request = request_of(args, lanes=lanes, context=context)
    with ExitStack() as stack:
        if cluster_address(args):
            from coordinator.launch import ray_cluster

            stack.enter_context(
                ray_cluster(address=args.address, num_cpus=0, namespace=args.mesh_name)
            )
        found = plan(costs, _nodes_to_use(args), request)
        _check_spread(args, found)
        yield found


def _nodes_to_use(args: argparse.Namespace) -> Sequence[Node]:
    nodes = nodes_of(args)
    if not args.spread or args.use_head:
        return nodes
    found = [node for node in nodes if not node.is_head]
    if not found:
        raise UsageError(
            "--spread leaves the head node alone, and the cluster has no other with a CPU: add "
            "nodes, or take the head, too, with --use-head"
        )
    return found


def _check_spread(args: argparse.Namespace, plan: Plan) -> None:
    """Ray would wait for nodes that nobody has promised."""
    names = {stage.node.name for stage in plan.stages}
    if args.spread and len(names) < len(plan.stages):
        raise UsageError(
            f"--spread wants a node for each of {len(plan.stages)} stages, and there is room on "
            f"{len(names)}: add nodes, lower --stages, or leave out --spread"
        )


def nodes_of(args: argparse.Namespace) -> Sequence[Node]:
    """The nodes of the cluster that was joined, else this machine."""
    if not cluster_address(args):
        return [this_machine(args.memory_fraction or _FREE_FRACTION)]
    from coordinator.launch import cluster_nodes

    fraction = args.memory_fraction or 1
    nodes = cluster_nodes()
    return [replace(node, usable_bytes=int(node.usable_bytes * fraction)) for node in nodes]


def this_machine(fraction: Fraction = _FREE_FRACTION) -> Node:
    from coordinator.nodes import Node

    free = available_bytes()
    if free is None:  # all there is, then: the stages measure again when they load
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    name = platform.node() or "here"
    return Node(name, int(free * fraction), num_cpus=os.cpu_count() or 1)


def stage_specs(args: argparse.Namespace, model: ModelFile, plan: Plan) -> list[StageSpec]:
    """What to start: each stage on its node, with its share of that node's CPUs as threads."""
    context = ContextConfig(
        num_cells=plan.num_cells,
        num_lanes=plan.lanes,
        num_residents=num_residents(plan.lanes, is_recurrent=model.family.is_recurrent)
        if args.prefix_cache
        else 0,
        kv_type=args.kv,
        exact=args.exact == "auto",
        num_threads=1 if args.threads is None else args.threads,
        load_mode=args.load_mode,
    )
    specs = specs_of(
        source_of(args, model),
        model.num_layers,
        plan.cuts,
        context,
        allow_unproven=args.allow_unproven,
    )
    on_node = [stage.node.name for stage in plan.stages]
    return [
        replace(
            spec,
            need=stage.need,
            node_id=stage.node.node_id,
            context=replace(
                context,
                num_threads=_threads(args.threads, stage.node, on_node.count(stage.node.name)),
            ),
        )
        for spec, stage in zip(specs, plan.stages, strict=True)
    ]


def source_of(args: argparse.Namespace, model: ModelFile) -> str:
    """What another machine opens: a URL as it is, for it has to fetch the file itself."""
    from stages.download import is_url

    return args.model if is_url(args.model) else str(model.paths[0].resolve())


def _threads(asked: int | None, node: Node, num_stages: int) -> int:
    if asked is None:
        return min(max(node.num_cpus // num_stages, 1), MAX_THREADS)
    if node.node_id and asked * num_stages > node.num_cpus:
        raise UsageError(
            f"node {node.name} has {node.num_cpus} CPUs, and --threads {asked} for {num_stages} "
            f"stages there takes {asked * num_stages}"
        )
    return asked


def layout_of(plan: Plan) -> str:
    """As ``0:15,15:30``."""
    borders = (0, *plan.cuts, plan.stages[-1].end_layer)
    return ",".join(f"{lo}:{hi}" for lo, hi in itertools.pairwise(borders))
