"""A model of an architecture that no family has: refused, or run on the user's own word."""

from __future__ import annotations

import json
import re
import subprocess

import pytest

from skippy_mesh.config import ContextConfig
from skippy_mesh.families import FAMILIES
from stages.tokenizer import Tokenizer
from tests.models import make_model
from tests.processes import SKIPPY, environment
from tests.reference import Reference, step_of

PROMPT = "Once upon a time"
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    assert not any("qwen2" in family.architectures for family in FAMILIES)
    folder = tmp_path_factory.mktemp("unproven")
    return make_model("qwen2", folder / "m.gguf", dtype="q8_0", max_trained_tokens=512)


@pytest.fixture(scope="module")
def generate(model_path, tmp_path_factory, ray_dir):
    env = environment(tmp_path_factory.mktemp("cli") / "cache", ray_dir)
    command = [*SKIPPY, "generate", str(model_path), "-p", PROMPT, "-n", str(NUM_TOKENS)]
    command += ["-t", "1", "-c", "512", "--temp", "0", "--json"]

    def generate(*arguments):
        return subprocess.run(
            [*command, *arguments],
            env=env,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    return generate


@pytest.fixture(scope="module")
def undivided(model_path):
    """The most likely tokens, from llama.cpp by itself."""
    tokens = Tokenizer(str(model_path)).encode(PROMPT, add_special=True, parse_special=True)
    num_prompt = len(tokens)
    reference = Reference(model_path, ContextConfig(num_cells=512, num_lanes=1, num_threads=1))
    rows = [(0, at) for at in range(num_prompt)]
    for step in range(NUM_TOKENS):
        tokens.append(int(reference.logits(step_of(step, rows, {0: tokens}))[0].argmax()))
        rows = [(0, len(tokens) - 1)]
    reference.close()
    return tokens[num_prompt:]


def test_it_is_refused_in_one_line_that_names_the_flag(generate):
    done = generate()
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"skippy-mesh: architecture 'qwen2' is not supported[^\n]+\n", done.stderr)
    assert "--allow-unproven" in done.stderr
    assert len(done.stderr) < 300


@pytest.mark.parametrize("cut", [(), ("--cuts", "3")], ids=["undivided", "two stages"])
def test_with_the_flag_it_runs_and_says_what_is_not_proven(generate, undivided, cut):
    done = generate("--allow-unproven", *cut)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(
        r"skippy-mesh: qwen2 is an unproven architecture, taken for a dense one: [^\n]+\n",
        done.stderr,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["token_ids"] == undivided
    assert len(set(undivided)) > NUM_TOKENS // 2
    assert found["cuts"] == ([3] if cut else [])
    assert found["exact"] is False
    assert found["why_inexact"] == "nothing is proven of architecture qwen2 (--allow-unproven)"
