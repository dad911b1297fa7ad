"""``skippy-mesh doctor``: would ``serve`` start here with these flags, and what is in the way.

The checks are in ``checks.py``; here is their order, since some can only be made where others went
well: a library that ends its process is looked at in a child, before anything here imports it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from skippy_mesh import checks
from skippy_mesh.checks import Finding, failed
from skippy_mesh.errors import SkippyError
from skippy_mesh.planning import (
    add_cache_flag,
    add_layout_flags,
    cluster_address,
    costs_of_model,
    nodes_of,
    request_of,
    source_of,
)
from skippy_mesh.sizes import available_bytes
from skippy_mesh.starting import open_model

if TYPE_CHECKING:
    from coordinator.planner import Plan
    from stages.gguf_file import ModelFile
    from stages.library import Library

_ROW_COUNTS = (1, 512)  # a lone session's token, and a whole chunk of a prompt
_WIDTH = 4096  # of a row where no model says
_MAX_PINGED = 8
_COLORS = {"ok": "green", "warn": "yellow", "fix": "red"}


def add_doctor_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_layout_flags(parser, model="demo")
    add_cache_flag(parser)
    add("--address", metavar="RAY", help="look at this Ray cluster (RAY_ADDRESS, else a local one)")
    add("--host", default="127.0.0.1", help="address serve would listen on (%(default)s)")
    add("--port", type=int, default=8000, help="port serve would listen on (%(default)s)")
    add("--json", action="store_true", help="all findings as one JSON object")
    add("--debug", action="store_true", help="show tracebacks")


def run_doctor(args: argparse.Namespace) -> int:
    """1 if something would stop ``serve``."""
    show = None if args.json else _printer()
    found = []
    for finding in findings(args):
        found.append(finding)
        if show is not None:
            show(finding)
    is_well = all(finding.level != "fix" for finding in found)
    if args.json:
        rows = [{"name": f.name, "level": f.level, "text": f.text, **f.facts} for f in found]
        print(json.dumps({"ok": is_well, "checks": rows}))
    return 0 if is_well else 1


def _printer() -> Callable[[Finding], None]:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)

    def show(finding: Finding) -> None:
        level = Text(f"{finding.level:5}", _COLORS[finding.level])
        console.print(level + Text(f"{finding.name:9}{finding.text}"))

    return show


def findings(args: argparse.Namespace) -> Iterator[Finding]:
    """In the order in which one would repair things."""
    from stages.library import library, this_cpu, versions

    yield checks.check_versions(versions(), checks.pinned_versions())
    try:
        native = library()
    except SkippyError as error:
        yield Finding("library", "fix", f"llama.cpp does not load: {error}: make setup")
        return
    yield checks.check_library(native)
    yield checks.check_cpu(native.features, this_cpu())
    model: ModelFile | None = None
    try:
        model = open_model(args.model, allow_unproven=args.allow_unproven)
        yield checks.check_model(model)
    except SkippyError as error:
        yield failed("model", error)
    yield from _native_findings(args, model, native)
    yield checks.check_port(args.host, args.port)
    yield from _cluster_findings(args, model)


def _native_findings(
    args: argparse.Namespace, model: ModelFile | None, native: Library
) -> Iterator[Finding]:
    """What runs llama.cpp, in a child."""
    from stages.probe import can_repack

    if native.tap_problem is not None:
        return
    try:
        repacks = can_repack()
    except SkippyError as error:
        yield failed("kernels", error)
        return
    yield checks.check_kernels(can_repack=repacks)
    if model is not None:
        try:
            yield checks.check_exact(model, kv_type=args.kv, can_repack=repacks)
        except SkippyError as error:
            yield failed("exact", error)


def _cluster_findings(args: argparse.Namespace, model: ModelFile | None) -> Iterator[Finding]:
    """Ray, the hops, and what would run where: on the cluster's nodes if there is an address, else
    on this machine before a cluster of our own takes some of it."""
    from coordinator.launch import cluster_nodes, ray_cluster

    address = cluster_address(args)
    if address is None:
        yield from _plan_findings(args, model)
    started_s = time.monotonic()
    with ExitStack() as stack:
        try:
            stack.enter_context(ray_cluster(address=address, num_cpus=2, namespace="doctor"))
        except SkippyError as error:
            yield failed("ray", error)
            return
        nodes = cluster_nodes()
        start_s = time.monotonic() - started_s
        yield checks.check_nodes(nodes, address=address, start_s=start_s)
        if address is not None and nodes:
            yield from _plan_findings(args, model)
        if nodes:
            yield from _hop_findings(args, [node.node_id for node in nodes], model, address)


def _plan_findings(args: argparse.Namespace, model: ModelFile | None) -> Iterator[Finding]:
    from coordinator.planner import plan
    from stages.disk import cache_dir
    from stages.library import cached_bytes

    found: Plan | None = None
    if model is not None:
        try:
            costs = costs_of_model(model, args.kv)
            found = plan(costs, nodes_of(args), request_of(args, lanes=None))
            yield checks.check_plan(found, available_bytes())
        except SkippyError as error:
            yield failed("memory", error)
    needed = 0
    if found is not None and found.cuts and cluster_address(args) is None:
        needed = sum(stage.bytes.weights + stage.bytes.head for stage in found.stages)
    yield checks.check_disk(cache_dir(), needed_bytes=needed, kept=cached_bytes())


def _hop_findings(
    args: argparse.Namespace,
    node_ids: Sequence[str],
    model: ModelFile | None,
    address: str | None,
) -> Iterator[Finding]:
    """Along all nodes, or between two stages on the only one."""
    from coordinator.hops import measure_hops, node_facts
    from coordinator.launch import echoes

    ids = list(node_ids[:_MAX_PINGED])
    path = "" if model is None else source_of(args, model)
    width = _WIDTH if model is None else model.width
    try:
        with echoes(ids if len(ids) > 1 else ids * 2) as actors:
            nodes = node_facts(actors, path)
            if address is not None and model is not None:
                yield checks.check_alike(nodes)
            names = [node.name for node in nodes]
            hops = measure_hops(actors, names, width=width, row_counts=_ROW_COUNTS)
            yield checks.check_hops(hops)
    except SkippyError as error:
        yield failed("hops", error)
