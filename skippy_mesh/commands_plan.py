"""``skippy-mesh plan``: which node would run which layers, and what bounds the sessions, without
loading anything."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from skippy_mesh.errors import UsageError
from skippy_mesh.planning import (
    add_cache_flag,
    add_layout_flags,
    cluster_address,
    costs_of_model,
    nodes_of,
    request_of,
)
from skippy_mesh.sizes import format_size, parse_size

if TYPE_CHECKING:
    from coordinator.ceiling import Term
    from coordinator.costs import ModelCosts
    from coordinator.nodes import Node
    from coordinator.planner import Plan
    from stages.gguf_file import ModelFile


def add_plan_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_layout_flags(parser)
    add(
        "--node", action="append", default=[], type=_node, metavar="NAME=BYTES[@RATE]",
        help="a machine and the memory a stage may take there, as 16GiB; with @50GB, how much it "
        "reads in a second. Repeat for more (default: 85 %% of this machine's free memory)",
    )  # fmt: skip
    add("--address", metavar="RAY", help="plan for the nodes of this Ray cluster (RAY_ADDRESS)")
    add("--max-model-len", type=int, metavar="N", help="tokens one request may have")
    add(
        "-np", "--parallel", "--max-num-seqs", type=int, metavar="N",
        help="lower the number of sessions at once",
    )  # fmt: skip
    add_cache_flag(parser)
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


def show_plan(args: argparse.Namespace, model: ModelFile) -> int:
    from coordinator.planner import plan

    costs = costs_of_model(model, args.kv)
    request = request_of(args, lanes=args.parallel, context=args.max_model_len)
    with _nodes(args) as nodes:
        found = plan(costs, nodes, request)
    name = model.paths[0].name
    if args.json:
        print(json.dumps({"model": name, "kv_type": args.kv, **as_json(found)}))
    else:
        print(as_text(found, costs, f"{name}, KV {args.kv}"))
    return 0


@contextmanager
def _nodes(args: argparse.Namespace) -> Iterator[Sequence[Node]]:
    """Those named, else those of the cluster asked for, else this machine."""
    if args.node and args.address:
        raise UsageError("--node and --address both say which nodes there are: give one of them")
    if args.node or not cluster_address(args):
        yield args.node or nodes_of(args)
        return
    from coordinator.launch import ray_cluster

    with ray_cluster(address=args.address, num_cpus=0, namespace="skippy"):
        yield nodes_of(args)


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
                "node_gpus": stage.node.num_gpus,
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
        *_idle_gpus(plan),
    ]
    return "\n".join(lines)


def _idle_gpus(plan: Plan) -> list[str]:
    nodes = {stage.node for stage in plan.stages if stage.node.num_gpus}
    return [
        f"not used: {node.num_gpus} GPU of {node.name}: stages compute on the CPU"
        for node in sorted(nodes, key=lambda node: node.name)
    ]


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
