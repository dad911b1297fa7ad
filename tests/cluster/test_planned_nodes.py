"""A plan for a cluster's nodes is where the stages run. Its own two nodes, on one machine: without
this a stage lands where memory was not planned for it."""

from __future__ import annotations

import json
import shutil
import tempfile
from argparse import Namespace

import pytest
import ray
from ray.cluster_utils import Cluster

from coordinator.nodes import Node
from coordinator.planner import plan
from coordinator.request import PlanRequest
from skippy_mesh.cli import main
from skippy_mesh.config import NUM_SPARE_LANES
from skippy_mesh.errors import PlanError, UsageError
from skippy_mesh.planning import costs_of_model, planned
from skippy_mesh.starting import open_mesh
from stages.gguf_file import ModelFile
from tests.models import make_llama

CELLS = 1024


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return ModelFile.open(make_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", dtype="q8_0"))


@pytest.fixture(scope="module")
def sizes(model):
    """What layers 0:4 and 4:6 take."""
    request = PlanRequest(num_cells=CELLS, cuts=(4,), reserved_ids=NUM_SPARE_LANES)
    roomy = plan(costs_of_model(model, "q8_0"), [Node("a", 2**40)], request)
    return [stage.bytes.total for stage in roomy.stages]


@pytest.fixture(scope="module")
def two_nodes(sizes, tmp_path_factory):
    """The head is the smaller one: whoever fills nodes as they come puts stage 0 there."""
    folder = tempfile.mkdtemp(prefix="skippy-")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("SKIPPY_CACHE_DIR", str(tmp_path_factory.mktemp("mesh") / "cache"))
        patch.delenv("RAY_ADDRESS", raising=False)
        small = {"object_store_memory": 100 * 2**20, "include_dashboard": False}
        cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 3, "memory": sizes[1], **small}
        )
        cluster.add_node(num_cpus=2, memory=sizes[0], object_store_memory=100 * 2**20)
        yield cluster
        cluster.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def flags(cluster, **changed):
    fields = {
        "model": "tiny.gguf", "address": cluster.address, "mesh_name": "planned",
        "ctx_size": CELLS, "cuts": None,
        "stages": None, "memory_fraction": None, "kv": "q8_0", "exact": "auto", "threads": None,
        "allow_unproven": False, "spread": False, "use_head": False, "prefix_cache": True,
        "load_mode": "auto",
    }  # fmt: skip
    return Namespace(**(fields | changed))


@pytest.mark.parametrize("threads", [None, 1])
def test_each_stage_runs_on_its_node_with_its_share_of_the_cpus(two_nodes, model, threads):
    """One thread would find room on either."""
    args = flags(two_nodes, threads=threads)
    with planned(args, model) as found, open_mesh(args, model, found) as mesh:
        assert found.cuts == (4,)
        declared = {row["NodeID"]: row["Resources"]["CPU"] for row in ray.nodes()}
        actors = [ray.get_actor(f"planned_stage_{index}") for index in (0, 1)]
        where = [
            ray.get(actor.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id()))
            for actor in actors
        ]
        assert [declared[node] for node in where] == [2, 3]
        context = ray.get(actors[1].__ray_call__.remote(lambda stage: stage.spec.context))
        assert context.num_threads == (threads or 3)
        assert mesh.ceiling.value == CELLS // 256


def test_one_stage_runs_on_its_node_and_not_in_this_process(two_nodes, model):
    args = flags(two_nodes, ctx_size=256)
    with planned(args, model) as found, open_mesh(args, model, found) as mesh:
        (info,) = mesh.infos
        assert info.capacity == info.planned
        assert ray.get_actor("planned_stage_0") is not None


def test_a_cluster_that_lacks_memory_or_cpus_says_so_before_anything_starts(two_nodes, model):
    with (
        pytest.raises(PlanError, match=r"2 nodes have .* lacks"),
        planned(flags(two_nodes, ctx_size=10**6), model),
    ):
        raise AssertionError("planned")
    args = flags(two_nodes, threads=3)
    with (
        planned(args, model) as found,
        pytest.raises(UsageError, match="has 2 CPUs, and --threads 3"),
        open_mesh(args, model, found),
    ):
        raise AssertionError("started")


def test_stages_that_are_spread_leave_the_head_alone_unless_told(two_nodes, model):
    """The head keeps the whole cluster: a stage there takes it along."""
    with planned(flags(two_nodes, spread=True, ctx_size=256), model) as found:
        (stage,) = found.stages
        assert (stage.node.is_head, stage.node.num_cpus) == (False, 2)
    with (
        pytest.raises(PlanError, match="the node has"),
        planned(flags(two_nodes, spread=True, ctx_size=256, stages=2), model),
    ):
        raise AssertionError("planned")
    with (
        pytest.raises(UsageError, match="for each of 2 stages, and there is room on 1"),
        planned(flags(two_nodes, address=None, spread=True, ctx_size=256, stages=2), model),
    ):
        raise AssertionError("planned")
    args = flags(two_nodes, spread=True, use_head=True, ctx_size=256, stages=2)
    with planned(args, model) as found:
        assert {stage.node.is_head for stage in found.stages} == {False, True}


def test_the_doctor_sees_both_nodes_the_plan_over_them_and_the_hop_between(
    two_nodes, model, capsys
):
    path = str(model.paths[0])
    argv = ["doctor", path, "--address", two_nodes.address, "-c", str(CELLS), "--port", "0"]
    code = main([*argv, "--json"])
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert code == 0, checks
    assert len(checks["ray"]["nodes"]) == 2
    assert (checks["memory"]["stages"], checks["memory"]["cuts"]) == (2, [4])
    assert len(checks["nodes"]["alike"]) == 2 and checks["nodes"]["level"] == "ok"
    assert [hop["num_rows"] for hop in checks["hops"]["hops"]] == [1, 512]
