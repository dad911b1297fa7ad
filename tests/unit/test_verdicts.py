"""What the gate found decides which engine serves; nobody is left to guess which one does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from skippy_mesh.errors import UsageError
from skippy_mesh.families import DENSE, GEMMA3, MLA, SSM, WINDOW, family_of
from skippy_mesh.verdicts import Verdict, choose_engine, read_verdicts

FOUND = {
    "dense": Verdict(outcome="pass", reason="20 checks", commit="c0ffee1"),
    "mla": Verdict(outcome="fail", reason="N=1 throughput: 0.80", commit="c0ffee1"),
    "window": Verdict(outcome="undecided", reason="N=4 goodput", commit="c0ffee1"),
}


@pytest.mark.parametrize(
    ("family", "engine", "says"),
    [
        (DENSE, "mesh", "mesh, passed its gate for class dense at commit c0ffee1"),
        (MLA, "baseline", "failed its gate for class mla at commit c0ffee1 (N=1 throughput: 0.80)"),
        (WINDOW, "mesh", "decided nothing for class window"),
        (GEMMA3, "mesh", "class window"),
        (SSM, "mesh", "no verdict of a gate yet for class ssm"),
    ],
)
def test_auto_obeys_the_verdict_of_the_class_and_says_so(family, engine, says):
    choice = choose_engine("auto", family, FOUND)
    assert choice.engine == engine and says in choice.why


def test_a_failed_class_can_be_forced_and_the_way_is_told():
    assert "--engine mesh" in choose_engine("auto", MLA, FOUND).why
    assert choose_engine("mesh", MLA, FOUND).engine == "mesh"
    assert choose_engine("baseline", DENSE, FOUND).engine == "baseline"


def test_an_unproven_architecture_has_nobody_s_verdict():
    family = family_of("somethingelse", allow_unproven=True)
    choice = choose_engine("auto", family, FOUND)
    assert choice.engine == "mesh" and "no verdict" in choice.why


def written(path: Path, **classes: object) -> Path:
    path.write_text(json.dumps({"commit": "c0ffee1234", "classes": classes}))
    return path


def test_verdicts_come_from_the_gate_s_file(tmp_path):
    path = written(tmp_path / "verdicts.json", mla={"verdict": "fail", "reason": "slow"})
    assert read_verdicts(path) == {"mla": Verdict(outcome="fail", reason="slow", commit="c0ffee1")}
    assert read_verdicts(None) == {}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"commit": "c", "classes": {"mla": {}}}',
        '{"commit": "c", "classes": {"mla": {"verdict": "ok", "reason": ""}}}',
    ],
)
def test_a_damaged_file_is_an_error_with_a_way_out(tmp_path, text):
    (path := tmp_path / "verdicts.json").write_text(text)
    with pytest.raises(UsageError, match=r"cannot be read .*--engine mesh"):
        read_verdicts(path)
