"""A mesh that starts from its plan, on real files: cuts, ceiling, and what a stage makes of memory
that is not there."""

from __future__ import annotations

import subprocess
from argparse import Namespace
from dataclasses import replace

import httpx
import pytest

from coordinator.launch import engine_plan
from coordinator.nodes import Node
from coordinator.planner import plan
from coordinator.request import PlanRequest
from skippy_mesh.config import NUM_SPARE_LANES, EngineSettings
from skippy_mesh.errors import PlanError, RuntimeUnavailableError
from skippy_mesh.planning import costs_of_model, stage_specs
from stages.pipeline import LocalPipeline
from stages.worker import StageWorker
from tests.models import make_llama
from tests.processes import SKIPPY, environment, serving

FLAGS = Namespace(
    model="falcon.gguf",
    kv="q8_0",
    exact="off",
    threads=1,
    allow_unproven=False,
    prefix_cache=False,
    load_mode="auto",
)
RESERVED = {"reserved_ids": NUM_SPARE_LANES}


@pytest.fixture
def falcon(made, shared_cache):
    return made("ssm", "q8_0").model


def load(model, found):
    """The stages of a plan, loaded in this process, and what the engine over them may do."""
    specs = stage_specs(FLAGS, model, found)
    pipeline = LocalPipeline([StageWorker(spec) for spec in specs])
    pipeline.close()
    limit = engine_plan(pipeline.infos, EngineSettings(), planned=found.ceiling)[1].ceiling
    return pipeline.infos, limit


def test_ceiling_one_byte_under_the_need_is_refused_and_the_need_loads(falcon):
    costs = costs_of_model(falcon, "q8_0")
    request = PlanRequest(num_cells=2048, lanes=7, **RESERVED)
    roomy = plan(costs, [Node("a", 2**40)], request)
    need = roomy.stages[0].bytes.total
    with pytest.raises(PlanError, match=r"lacks 1B .* with --ctx-size .*, or with --parallel 6|6,"):
        plan(costs, [Node("a", need - 1)], request)
    infos, limit = load(falcon, plan(costs, [Node("a", need)], request))
    assert infos[0].capacity == infos[0].planned
    assert (infos[0].capacity.recurrent, infos[0].capacity.attention) == (7, 2048)
    assert str(limit) == "7, bound by stage all lanes"
    # Of the states alone, the plan charges to the byte what sessions more would take.
    fewer = plan(costs, [Node("a", need)], replace(request, lanes=6)).stages[0].bytes
    assert roomy.stages[0].bytes.recurrent - fewer.recurrent == sum(
        layer.recurrent_per_id for layer in costs.layers
    ) + costs.per_id  # fmt: skip


def test_ceiling_of_a_huge_pool_stops_at_the_ids(falcon):
    costs = costs_of_model(falcon, "q8_0")
    found = plan(costs, [Node("a", 2**40)], PlanRequest(num_cells=10**6, **RESERVED))
    assert str(found.ceiling) == "252, bound by stage 0 lanes"
    found = plan(costs, [Node("a", 2**40)], PlanRequest(num_cells=65_536, **RESERVED))
    infos, limit = load(falcon, found)
    assert infos[0].capacity.recurrent == infos[0].capacity.lanes == 252
    assert str(limit) == "252, bound by stage 0 lanes"


@pytest.mark.parametrize(
    ("less", "said"),
    [
        ({"num_lanes": 3}, "3, bound by stage 1 recurrent"),
        ({"num_cells": 512}, "1, bound by stage 1 recurrent"),
    ],
)
def test_ceiling_of_a_stage_that_finds_too_little_memory_is_lower_and_it_loads(
    falcon, monkeypatch, caplog, less, said
):
    found = plan(
        costs_of_model(falcon, "q8_0"), [Node("a", 2**40)],
        PlanRequest(num_cells=2048, num_stages=2, **RESERVED),
    )  # fmt: skip
    need = found.stages[1].need
    enough = found.stages[0].need.of(2048, 8)
    context = {"num_cells": 2048, "num_lanes": 1} | less
    answers = iter([enough, need.of(**context)])
    monkeypatch.setattr("stages.part.available_bytes", lambda: next(answers))
    infos, limit = load(falcon, found)
    assert str(limit).startswith(said)
    assert infos[0].capacity == infos[0].planned == infos[1].planned
    assert infos[1].capacity.num_cells == context["num_cells"]
    assert "stage 1 found too little memory free" in caplog.text


def test_a_stage_without_memory_for_one_session_says_what_it_takes(falcon, monkeypatch):
    found = plan(costs_of_model(falcon, "q8_0"), [Node("a", 2**40)], PlanRequest(**RESERVED))
    monkeypatch.setattr("stages.part.available_bytes", lambda: 2**20)
    with pytest.raises(RuntimeUnavailableError, match=r"stage 0 has no memory .* 1\.00MiB are f"):
        load(falcon, found)


def test_what_a_context_takes_is_within_what_its_plan_charges(falcon):
    found = plan(
        costs_of_model(falcon, "q8_0"), [Node("a", 2**40)],
        PlanRequest(num_cells=65_536, **RESERVED),
    )  # fmt: skip
    (info,), _ = load(falcon, found)
    assert 0 < info.context_bytes <= info.planned_context_bytes


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    # A head as large as two layers.
    return make_llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf", dtype="q8_0", num_vocab=2000)


@pytest.fixture(scope="module")
def env(tmp_path_factory, ray_dir):
    return environment(tmp_path_factory.mktemp("planned") / "cache", ray_dir)


def test_serve_starts_the_stages_that_are_planned(tiny, env, tmp_path):
    """On any number of cores, with a thread each or more."""
    arguments = (str(tiny), "--stages", "3", "--port", "0")
    with serving(*arguments, env=env, log=tmp_path / "log") as server:
        (ready,) = [line for line in server.lines if " ready on " in line]
        assert "(stages 3, ceiling 16, bound by stage 0 attention, exact yes)" in ready
        (build,) = [
            line
            for line in httpx.get(f"{server.url}/metrics").text.splitlines()
            if line.startswith("skippy:build_info")
        ]
        assert 'layout="0:2,2:4,4:6"' in build
        body = {"model": "tiny", "prompt": "a b c", "max_tokens": 4, "temperature": 0}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
        assert answer["usage"]["completion_tokens"] == 4
    assert (tmp_path / "log").read_text() == ""


def test_a_model_too_large_for_the_memory_given_never_loads(tiny, env):
    done = subprocess.run(
        [*SKIPPY, "serve", str(tiny), "--memory-fraction", "0.0001", "--port", "0"],
        env=env, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("skippy-mesh: the model does not fit: ")
    assert "for layers 0:6, by its" in done.stderr and len(done.stderr.splitlines()) == 1
