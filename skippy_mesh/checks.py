"""What ``skippy-mesh doctor`` looks at. Each check answers a :class:`Finding`; nothing is printed.

``fix`` is said of what would stop ``serve``, with what to do about it; ``warn`` of what makes it
slower, or less than it could be.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from skippy_mesh.config import MAX_THREADS
from skippy_mesh.errors import SkippyError
from skippy_mesh.sizes import format_size
from skippy_mesh.starting import profile_text

if TYPE_CHECKING:
    from coordinator.hops import Hop, NodeFacts
    from coordinator.nodes import Node
    from coordinator.planner import Plan
    from stages.gguf_file import ModelFile
    from stages.library import Library

Level = Literal["ok", "warn", "fix"]

# What llama.cpp was built for, in its words, and what the kernel calls it.
_FEATURES = {
    "AVX": "avx", "AVX2": "avx2", "FMA": "fma", "F16C": "f16c", "BMI2": "bmi2",
    "AVX512": "avx512f", "AVX512_VBMI": "avx512vbmi", "AVX512_VNNI": "avx512_vnni",
    "AVX512_BF16": "avx512_bf16", "AMX_INT8": "amx_int8",
    "NEON": "asimd", "DOTPROD": "asimddp", "MATMUL_INT8": "i8mm", "SVE": "sve",
}  # fmt: skip
_UNPROVEN = "AMX_INT8"  # compiled out: some virtual CPUs have it in name only
_SMALL = 2 << 30
"""Bytes of weights that are loaded for a look."""
_SPARE_BYTES = 1 << 30
_SLOW_HOP_MS = 20.0


@dataclass(frozen=True, slots=True)
class Finding:
    """``text`` is one line; ``facts`` are what it says, for machines."""

    name: str
    level: Level
    text: str
    facts: Mapping[str, object] = field(default_factory=dict)


def failed(name: str, error: SkippyError) -> Finding:
    return Finding(name, "fix", str(error))


def pinned_versions() -> dict[str, str]:
    """The versions that skippy_mesh itself asks for and no other."""
    try:
        requirements = importlib.metadata.requires("skippy-mesh") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    named = (line.partition(";")[0].partition("==") for line in requirements)
    return {name.partition("[")[0].strip(): pin.strip() for name, _, pin in named if pin}


def check_versions(installed: Mapping[str, str | None], pinned: Mapping[str, str]) -> Finding:
    missing = [name for name, version in installed.items() if version is None]
    if missing:
        return Finding("versions", "fix", f"not installed: {', '.join(missing)}: make setup")
    text = ", ".join(f"{name} {version}" for name, version in installed.items())
    other = [
        f"{name} {version}"
        for name, version in pinned.items()
        if installed.get(name, version) != version
    ]
    if other:
        text = f"{text}; all was measured with {', '.join(other)}: make setup"
    return Finding("versions", "warn" if other else "ok", text, dict(installed))


def check_library(library: Library) -> Finding:
    facts = {"folder": library.folder, "features": list(library.features)}
    if library.tap_problem is not None:
        return Finding("library", "fix", library.tap_problem, facts)
    text = f"llama.cpp and the tap load; built with {' '.join(library.features)}"
    return Finding("library", "ok", text, facts)


def check_cpu(built_for: Sequence[str], has: frozenset[str]) -> Finding:
    """Whether the library's build is one for this CPU."""
    known = {ours: theirs for ours, theirs in _FEATURES.items() if theirs in has}
    facts = {"features": sorted(known.values())}
    beyond = [name for name in built_for if name in _FEATURES and name not in known]
    again = "make clean setup builds it for this one"
    if has and beyond:
        text = f"llama.cpp was built for {' '.join(beyond)}, which this CPU has not: {again}"
        return Finding("cpu", "fix", text, facts)
    unused = [name for name in known if name not in built_for and name != _UNPROVEN]
    if unused:
        text = f"llama.cpp was built without {' '.join(unused)} of this CPU: slower; {again}"
        return Finding("cpu", "warn", text, facts)
    if _UNPROVEN in built_for:
        text = f"llama.cpp was built with {_UNPROVEN}, which nobody has proved exact; {again}"
        return Finding("cpu", "warn", text, facts)
    return Finding("cpu", "ok", f"{' '.join(sorted(known.values()))}, and the build fits", facts)


def check_kernels(*, can_repack: bool) -> Finding:
    """What the library's own probe said, in a child."""
    facts = {"can_repack": can_repack}
    if can_repack:
        return Finding("kernels", "ok", "a tiny model ran in a child process", facts)
    text = "weights cannot be repacked on this CPU: slower, and still right"
    return Finding("kernels", "warn", text, facts)


def check_exact(model: ModelFile, *, kv_type: str, can_repack: bool) -> Finding:
    """What this CPU's self-test says of ``model``; of a large one, what is expected of it."""
    from stages.library import try_stage
    from stages.profile import choose_profile, matrix_types

    profile = choose_profile(matrix_types(model.tensors.values()), can_repack=can_repack)
    facts: dict[str, object] = {"profile": profile_text(profile)}
    if not model.family.is_proven:
        text = f"nothing is proven of architecture {model.architecture}"
        return Finding("exact", "warn", text, {**facts, "exact": False})
    size = sum(tensor.num_bytes for tensor in model.tensors.values())
    if size > _SMALL:
        text = f"expected with {facts['profile']}; serve's self-test proves it as it loads"
        return Finding("exact", "ok", text, {**facts, "exact": None})
    threads = min(os.cpu_count() or 1, MAX_THREADS)
    why = try_stage(model.paths[0], kv_type=kv_type, num_threads=threads).why_inexact
    if why is not None:
        return Finding("exact", "warn", f"no: {why}", {**facts, "exact": False})
    text = f"yes: the self-test passed, with {facts['profile']}"
    return Finding("exact", "ok", text, {**facts, "exact": True})


def check_model(model: ModelFile) -> Finding:
    size = sum(tensor.num_bytes for tensor in model.tensors.values())
    kind = f"{model.architecture}, {model.num_layers} layers, {format_size(size)}"
    facts = {
        "path": str(model.paths[0]), "architecture": model.architecture,
        "layers": model.num_layers, "bytes": size,
    }  # fmt: skip
    return Finding("model", "ok", f"{model.paths[0].name}: {kind}", facts)


def check_plan(plan: Plan, free_bytes: int | None) -> Finding:
    nodes = sorted({stage.node.name for stage in plan.stages})
    binding = plan.ceiling.binding
    text = (
        f"{_count(len(plan.stages), 'stage')} on {', '.join(nodes)}, {plan.num_cells} cells, "
        f"{plan.lanes} sessions (bound by {binding.component}: {binding.term})"
    )
    if free_bytes is not None:
        text += f"; {format_size(free_bytes)} of this machine's memory are free"
    facts = {
        "stages": len(plan.stages), "cuts": list(plan.cuts), "nodes": nodes,
        "cells": plan.num_cells, "ceiling": plan.lanes, "free_bytes": free_bytes,
    }  # fmt: skip
    return Finding("memory", "ok", text, facts)


def check_disk(folder: Path, *, needed_bytes: int, kept: Mapping[str, int]) -> Finding:
    """Whether the cache in ``folder`` can be written and takes ``needed_bytes`` of slices more."""
    name, change = "disk", "choose another with SKIPPY_CACHE_DIR"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free
    except OSError as error:
        text = f"the cache {folder} cannot be written: {error.strerror}; {change}"
        return Finding(name, "fix", text, {"folder": str(folder)})
    facts = {"folder": str(folder), "free_bytes": free, "needed_bytes": needed_bytes, **kept}
    text = f"{format_size(free)} free in {folder}, which keeps {format_size(sum(kept.values()))}"
    if needed_bytes > free:
        text += f"; slices take {format_size(needed_bytes)}: free some, or {change}"
        # They may be among those that are kept.
        is_lost = needed_bytes > free + kept.get("slices", 0)
        return Finding(name, "fix" if is_lost else "warn", text, facts)
    if free < _SPARE_BYTES:
        return Finding(name, "warn", f"{text}: little room for slices; {change}", facts)
    return Finding(name, "ok", text, facts)


def check_port(host: str, port: int) -> Finding:
    from skippy_mesh.gateway.server import listen

    facts = {"host": host, "port": port}
    try:
        with closing(listen(host, port)):
            return Finding("port", "ok", f"{host}:{port} can be listened on", facts)
    except SkippyError as error:
        return Finding("port", "fix", str(error), facts)


def check_nodes(nodes: Sequence[Node], *, address: str | None, start_s: float) -> Finding:
    """The Ray cluster that was joined or started."""
    facts = {
        "address": address, "start_s": round(start_s, 2),
        "nodes": [
            {"name": node.name, "cpus": node.num_cpus, "bytes": node.usable_bytes}
            for node in nodes
        ],
    }  # fmt: skip
    if not nodes:
        text = f"the cluster at {address} has no node with a CPU: ray start --num-cpus N"
        return Finding("ray", "fix", text, facts)
    if address is None:
        return Finding("ray", "ok", f"a local cluster starts in {start_s:.1f} s", facts)
    each = ", ".join(
        f"{node.name} ({_count(node.num_cpus, 'CPU')}, {format_size(node.usable_bytes)})"
        for node in nodes
    )
    return Finding("ray", "ok", f"{address} answers: {each}", facts)


def check_alike(nodes: Sequence[NodeFacts]) -> Finding:
    """Whether every node of a cluster has the model and computes as the others do."""
    without = sorted({node.name for node in nodes if not node.has_model})
    facts = {"alike": [node.as_json() for node in nodes]}
    if without:
        text = f"no such model file on {', '.join(without)}: every node needs it at the same path"
        return Finding("nodes", "fix", text, facts)
    names = ", ".join(sorted({node.name for node in nodes}))
    if len({tuple(sorted(node.versions.items())) for node in nodes}) > 1:
        text = f"{names} have other versions than each other: install the same everywhere"
        return Finding("nodes", "warn", text, facts)
    if len({node.cpu for node in nodes}) > 1:
        text = f"{names} differ in CPU features: where a layer runs changes its last bits"
        return Finding("nodes", "warn", text, facts)
    return Finding("nodes", "ok", f"{names}: the same versions and CPU features", facts)


def check_hops(hops: Sequence[Hop]) -> Finding:
    texts = [
        f"{hop.source} to {hop.target}: {hop.ms:.1f} ms for {_count(hop.num_rows, 'row')} "
        f"({format_size(hop.frame_bytes)})"
        for hop in hops
    ]
    facts = {"hops": [hop.as_json() for hop in hops]}
    slow = [hop for hop in hops if hop.num_rows == 1 and hop.ms > _SLOW_HOP_MS]
    text = "; ".join(texts)
    if slow:
        text += f"; over {_SLOW_HOP_MS:g} ms with every token: fewer stages, or a nearer node"
    return Finding("hops", "warn" if slow else "ok", text, facts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
