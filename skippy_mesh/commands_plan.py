"""``skippy-mesh plan``: which node would run which layers, and what bounds the sessions, without
loading anything."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from skippy_mesh.config import KV_TYPES, NUM_SPARE_LANES
from skippy_mesh.errors import UsageError
from skippy_mesh.sizes import available_bytes, format_size, parse_size

if TYPE_CHECKING:
    from coordinator.ceiling import Term
    from coordinator.costs import ModelCosts
    from coordinator.nodes import Node
    from coordinator.planner import Plan
    from stages.gguf_file import ModelFile

_FREE_PERCENT = 85
"""Of this machine's free memory that a plan may use: the rest is for buffers not yet measured."""


def add_plan_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="a GGUF file (any part of a split one), or demo")
    add(
        "--node", action="append", default=[], type=_node, metavar="NAME=BYTES[@RATE]",
        help="a machine and the memory a stage may take there, as 16GiB; with @50GB, how much it "
        "reads in a second. Repeat for more (default: 85 %% of this machine's free memory)",
    )  # fmt: skip
    add("--address", metavar="RAY", help="plan for the nodes of this Ray cluster")
    add("--stages", type=int, metavar="K", help="so many stages (default: as few as fit)")
    add("--cuts", type=_cuts, metavar="L[,L..]", help="cut before these layers and no others")
    add(
        "-c", "--ctx-size", type=int, default=0, metavar="N",
        help="cells of the KV pool (0: what fits, at most 131072)",
    )  # fmt: skip
    add("--max-model-len", type=int, metavar="N", help="tokens one request may have")
    add("-np", "--parallel", type=int, metavar="N", help="lower the number of sessions at once")
    add("--kv", choices=KV_TYPES, default="q8_0", help="KV cache type (%(default)s)")
    add("--allow-unproven", action="store_true", help="take an unknown model for a dense one")
    add("--json", action="store_true", help="the plan as one JSON object")
    add("--debug", action="store_true", help="show tracebacks")


def _node(argument: str) -> Node:
    from coordinator.nodes import Node

    name, _, size = argument.partition("=")
    size, _, rate = size.partition("@")
    try:
        return Node(name, parse_size(size), parse_size(rate) if rate else None)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _cuts(argument: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in argument.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"takes layers like 5,11, got {argument!r}") from None


def show_plan(args: argparse.Namespace, model: ModelFile) -> int:
    from coordinator.costs import costs_of
    from coordinator.planner import plan
    from coordinator.request import PlanRequest

    tensors = {tensor.name: tensor.num_bytes for tensor in model.tensors.values()}
    costs = costs_of(model.family, model.facts, tensors, width=model.width, kv_type=args.kv)
    request = PlanRequest(
        context=args.max_model_len,
        num_cells=args.ctx_size or None,
        lanes=args.parallel,
        cuts=args.cuts,
        num_stages=args.stages,
        reserved_ids=NUM_SPARE_LANES,
    )
    found = plan(costs, nodes_of(args), request)
    name = model.paths[0].name
    if args.json:
        print(json.dumps({"model": name, "kv_type": args.kv, **as_json(found)}))
    else:
        print(as_text(found, costs, f"{name}, KV {args.kv}"))
    return 0


def nodes_of(args: argparse.Namespace) -> Sequence[Node]:
    """Those named, else those of the cluster asked for, else this machine."""
    if args.node and args.address:
        raise UsageError("--node and --address both say which nodes there are: give one of them")
    if args.address:
        from coordinator.launch import cluster_nodes, ray_cluster

        with ray_cluster(address=args.address, num_cpus=0, namespace="skippy"):
            return cluster_nodes()
    return args.node or [this_machine()]


def this_machine() -> Node:
    from coordinator.nodes import Node

    free = available_bytes()
    if free is None:
        raise UsageError("this system does not tell its free memory: use --node NAME=BYTES")
    return Node(platform.node() or "here", free * _FREE_PERCENT // 100)


def as_json(plan: Plan) -> dict[str, Any]:
    binding = plan.ceiling.binding
    return {
        "context": plan.context,
        "num_cells": plan.num_cells,
        "ceiling": plan.lanes,
        "binding": _term_json(binding),
        "cuts": list(plan.cuts),
        "stages": [
            {
                "index": stage.index,
                "node": stage.node.name,
                "first_layer": stage.first_layer,
                "end_layer": stage.end_layer,
                "bytes": {**stage.bytes.by_term(), "total": stage.bytes.total},
                "free_bytes": stage.free_bytes,
            }
            for stage in plan.stages
        ],
        "terms": [_term_json(term) for term in plan.ceiling.terms],
        "unused": plan.unused,
    }


def _term_json(term: Term) -> dict[str, Any]:
    """``stage`` is its index, null where a term holds for all."""
    stage = int(term.stage) if term.stage.isdigit() else None
    return {
        "stage": stage,
        "component": term.component,
        "value": term.value,
        "formula": term.term,
    }


def as_text(plan: Plan, costs: ModelCosts, title: str) -> str:
    sizes = [stage.bytes.by_term() for stage in plan.stages]
    terms = [term for term in sizes[0] if any(size[term] for size in sizes)]
    rows = [["stage", "node", "layers", *terms, "total", "free"]]
    for stage, size in zip(plan.stages, sizes, strict=True):
        numbers = [*(size[term] for term in terms), stage.bytes.total, stage.free_bytes]
        layers = f"{stage.first_layer}:{stage.end_layer}"
        rows.append([str(stage.index), stage.node.name, layers, *map(format_size, numbers)])
    pool = costs.pool_of(plan.num_cells)
    lines = [
        f"{title}: {len(costs.layers)} layers, context {plan.context} of {costs.native_context}",
        "",
        *_aligned(rows),
        "",
        f"pool: {plan.num_cells} cells for all sessions; {pool} are allocated and priced at 100/85",
        f"a layer: {_layer_text(costs)}",
        f"ceiling: {plan.ceiling} ({plan.ceiling.binding.term})",
        *(f"  {text}" for text in _least_terms(plan.ceiling.terms)),
        *(f"not used: {name}: {reason}" for name, reason in plan.unused.items()),
    ]
    return "\n".join(lines)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (zip(row, widths, strict=True) for row in rows)
    return ["  ".join(cell.rjust(width) for cell, width in line) for line in lines]


def _layer_text(costs: ModelCosts) -> str:
    """What the table is made of, so that it can be checked by hand."""
    units = {
        "weights": "",
        "attention_per_cell": " a cell",
        "window_per_cell": " a cell",
        "recurrent_per_id": " a sequence id",
    }
    texts = []
    for field, unit in units.items():
        sizes = sorted({getattr(layer, field) for layer in costs.layers} - {0})
        if sizes:
            span = " to ".join(format_size(size) for size in (sizes[0], sizes[-1])[: len(sizes)])
            texts.append(f"{field.partition('_')[0]} {span}{unit}")
    return ", ".join(texts)


def _least_terms(terms: Sequence[Term]) -> list[str]:
    """Of each component the stage that allows least."""
    least: dict[str, Term] = {}
    for term in terms:
        if term.component not in least or term.value < least[term.component].value:
            least[term.component] = term
    return [f"{t.component}: {t.term} = {t.value} (stage {t.stage})" for t in least.values()]
