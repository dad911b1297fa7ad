"""``skippy-mesh plan`` on five public models: what it prints, and that the documentation shows what
it really answers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from coordinator.nodes import Node
from coordinator.planner import plan
from coordinator.request import PlanRequest
from skippy_mesh.cli import main
from skippy_mesh.commands_plan import as_json, as_text
from skippy_mesh.errors import PlanError
from skippy_mesh.planning import costs_of_model
from stages.gguf_file import ModelFile
from tests.real_models import REAL_MODELS, write_header

ROOT = Path(__file__).parents[2]
NODE_SIZES = {
    "Llama-3.1-70B": "16GiB",
    "DeepSeek-V2-Lite": "8GiB",
    "Gemma-2-9B": "4GiB",
    "Falcon-H1-1.5B": "2GiB",
    "Qwen3-Next-80B-A3B": "24GiB",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("real")
    for name in REAL_MODELS:
        write_header(name, folder)
    return folder


@pytest.fixture
def run(folder, capsys):
    def run(name: str, *flags: str, nodes: tuple[str, ...] = ()) -> tuple[int, str, str]:
        flags = (*flags, *(part for node in nodes for part in ("--node", node)))
        code = main(["plan", str(folder / f"{name}.gguf"), *flags])
        return code, *capsys.readouterr()

    return run


def alike(size: str, count: int) -> tuple[str, ...]:
    return tuple(f"n{index}={size}" for index in range(count))


def outcome(result: tuple[int, str, str], count: int) -> str:
    code, out, err = result
    if code:
        found = re.search(r"with (\w+) more nodes?", err)
        assert found, err
        more = 1 if found[1] == "one" else int(found[1])
        return f"| | | does not fit; {count + more} nodes would |"
    plan = json.loads(out)
    layers = ", ".join(str(s["end_layer"] - s["first_layer"]) for s in plan["stages"])
    binding = f"{plan['ceiling']} ({plan['binding']['component']})"
    return f"| {plan['context']:,} | {binding} | {layers} |"


def test_the_table_in_the_documentation_is_what_the_command_answers(run):
    lines = ["| model, each node | nodes | context | sessions | layers of each stage |"]
    lines.append("|---|---|---|---|---|")
    for name, size in NODE_SIZES.items():
        counts: dict[str, list[int]] = {}
        for count in range(1, 9):
            result = run(name, "--json", nodes=alike(size, count))
            counts.setdefault(outcome(result, count), []).append(count)
        for text, same in counts.items():
            span = f"{same[0]} to {same[-1]}" if len(same) > 1 else f"{same[0]}"
            lines.append(f"| {name}, {size} | {span} {text}")
    table = "\n".join(lines)
    text = (ROOT / "skippy_mesh/ARCHITECTURE.md").read_text()
    assert table in text, f"skippy_mesh/ARCHITECTURE.md should have\n{table}"


def test_json_holds_what_bounds_the_sessions_and_every_byte(run):
    code, out, _ = run("Falcon-H1-1.5B", "--json", nodes=alike("1GiB", 8))
    plan = json.loads(out)
    assert code == 0
    assert plan["binding"].keys() == {"stage", "component", "value", "formula"}
    assert plan["binding"] in plan["terms"]
    assert plan["ceiling"] == min(term["value"] for term in plan["terms"])
    assert plan["cuts"] == [stage["first_layer"] for stage in plan["stages"][1:]]
    for stage in plan["stages"]:
        total = stage["bytes"].pop("total")
        assert total == sum(stage["bytes"].values())
        assert total + stage["free_bytes"] == 2**30
    lowered = json.loads(run("Gemma-2-9B", "--json", "-np", "2", nodes=("a=16GiB",))[1])
    assert (lowered["ceiling"], lowered["binding"]["stage"]) == (2, None)


def test_the_text_names_nodes_bytes_and_the_formula(run):
    code, out, _ = run("Gemma-2-9B", nodes=("small=4GiB", "large=12.5GB", "spare=1GiB"))
    assert code == 0
    head, *_ = out.splitlines()
    assert head == "Gemma-2-9B.gguf, KV q8_0: 42 layers, context 8192 of 8192"
    assert "pool: 8192 cells for all sessions; 9472 are allocated and priced at 100/85" in out
    assert "ceiling: 32, bound by stage 0 attention (8192 cells / 256 per session)" in out
    assert "not used: spare: the model fits on 2 nodes as large or larger" in out
    rows = [line.split() for line in out.splitlines()[3:5]]
    assert [row[1] for row in rows] == ["large", "small"]


def test_known_speeds_move_layers(run):
    slow, fast = "a=60GiB@10GB", "b=60GiB@30GB"
    plan = json.loads(run("Llama-3.1-70B", "--json", nodes=(slow, fast))[1])
    layers = {s["node"]: s["end_layer"] - s["first_layer"] for s in plan["stages"]}
    assert layers == {"a": 32, "b": 48}  # as many as the memory of the fast one holds


def test_cuts_are_kept_or_refused_with_the_reason_per_stage(run):
    cuts = "--cuts=16,32"
    plan = json.loads(run("Qwen3-Next-80B-A3B", "--json", cuts, nodes=("a=100GiB",))[1])
    assert plan["cuts"] == [16, 32]
    code, _, err = run("Qwen3-Next-80B-A3B", "--cuts=2,47", nodes=("a=100GiB",))
    assert code == 2
    assert "stage 0: layers 0:2 of this qwen3next model hold no attention layer" in err
    assert "stage 2: layers 47:48 of this qwen3next model hold no recurrent layer" in err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--node", "a"], "argument --node: '' is not a size"),
        (["--node", "=1GiB"], "argument --node: a node needs a name"),
        (["--node", "a=1GiB@fast"], "argument --node: 'fast' is not a size"),
        (["--node", "a=1GiB", "--node", "a=2GiB"], "node a is named twice"),
        (["--node", "a=1GiB", "--address", "auto"], "give one of them"),
        (["--cuts", "x"], "argument --cuts: takes layers like 5,11, got 'x'"),
        (["--node", "a=16GiB", "--max-model-len", "8193"], "from 1 to 8192 tokens"),
        (["--node", "a=16GiB", "--parallel", "33"], "more than 32"),
        (["--memory-fraction", "1.1"], "must be over 0 and at most 1, got 1.1"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(run, flags, said):
    code, out, err = run("Gemma-2-9B", *flags)
    assert (code, out) == (2, "")
    assert said in err and len(err.splitlines()) == 1


def test_a_model_too_large_is_one_line_and_exit_1(run):
    code, out, err = run("Gemma-2-9B", nodes=("a=1GiB",))
    assert (code, out) == (1, "")
    assert "a (1.00GiB) lacks" in err and len(err.splitlines()) == 1


def test_without_nodes_it_plans_for_this_machine(run, monkeypatch):
    monkeypatch.setattr("skippy_mesh.planning.available_bytes", lambda: 20 * 2**30)
    monkeypatch.setattr("skippy_mesh.planning.platform.node", lambda: "here")
    plan = json.loads(run("Gemma-2-9B", "--json")[1])
    (stage,) = plan["stages"]
    assert stage["node"] == "here"
    assert stage["bytes"]["total"] + stage["free_bytes"] == 17 * 2**30


def test_a_plan_that_fails_carries_its_numbers():
    assert PlanError("no", {"a": 1}).shortfalls == {"a": 1}
    assert PlanError("no", {}).exit_code == 1


def test_gpus_of_a_cluster_are_told_to_be_idle(folder):
    costs = costs_of_model(ModelFile.open(folder / "Falcon-H1-1.5B.gguf"), "q8_0")
    nodes = [Node("a", 4 << 30, num_gpus=2), Node("b", 1 << 20, num_gpus=1)]
    found = plan(costs, nodes, PlanRequest(lanes=1))
    assert "not used: 2 GPU of a: stages compute on the CPU" in as_text(found, costs, "falcon")
    assert as_json(found)["stages"][0]["node_gpus"] == 2
