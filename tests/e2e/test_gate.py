"""A gate of a minute's fraction on two real servers: a name that changed at /metrics or /status
would leave its rows without figures, and a planted server cannot show that."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import server_side
from bench.gate import num_rows, play_case
from bench.gate.settings import QUICK, Case
from bench.ledger import Ledger
from skippy_mesh.planning import costs_of_model
from skippy_mesh.starting import open_model

SETTINGS = replace(
    QUICK,
    rounds=1,
    stages=1,
    threads=1,
    point_seconds=60.0,
    overload_seconds=0.5,
    num_alone=2,
    max_queue=4,
    long_tokens=200,
    prefix_tokens=64,
    prefix_clients=2,
)


@pytest.fixture(scope="module")
def model(made) -> Path:
    return made("dense", "q8_0").path


@pytest.fixture(scope="module")
def rows(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    case = Case(name="dense", family="dense", model=str(model), levels=(2,))
    ledger = Ledger(tmp_path_factory.mktemp("gate") / "rows.jsonl", {}, {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_side, "SAMPLE_S", 0.03)  # a tiny model's point is over soon
        play_case(case, SETTINGS, ledger, done=lambda key: None)
    assert len(ledger.rows) == num_rows(case, SETTINGS)
    return ledger.rows


def row_of(rows: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (row,) = (row for row in rows if row["kind"] == kind)
    return row


def test_both_engines_give_the_same_answers(rows: list[dict[str, Any]]) -> None:
    exact = row_of(rows, "exact")
    assert exact["crowd"] == exact["baseline"] == {"equal": 2, "of": 2, "asked": 2}
    assert not any(row.get("wrong") for row in rows)


def test_the_mesh_tells_what_a_point_cost_and_what_a_session_held(
    rows: list[dict[str, Any]], model: Path
) -> None:
    point = row_of(rows, "point")
    ours, theirs = point["ours"], point["theirs"]
    assert ours["completed"] == 8 and theirs["completed"] == 8
    for key in ("steps", "rows_a_step", "prefill_tokens", "batches_in_flight"):
        assert ours[key] > 0 and theirs[key] is None
    assert 0 < ours["stage_busy_share"][0] < 1.1 and len(ours["stage_bubble_share"]) == 1
    assert ours["recomputed_tokens"] == ours["preemptions"] == 0
    layers = costs_of_model(open_model(str(model)), "q8_0").layers
    a_cell = sum(layer.attention_per_cell for layer in layers)
    mean = theirs["total_input_tokens"] / 8 + 24 - 1
    longest, rest = divmod(theirs["kv_bytes_per_session"], a_cell)
    assert rest == 0 and mean <= longest <= 1.25 * mean
    assert 0 < ours["kv_bytes_per_session"] <= 1.05 * theirs["kv_bytes_per_session"]
    assert ours["engine_memory"]["rss_bytes"] > 10**7


def test_lengths_are_in_the_model_s_tokens(rows: list[dict[str, Any]]) -> None:
    long = row_of(rows, "long")["ours"]
    assert long["total_input_tokens"] == pytest.approx(SETTINGS.long_tokens, rel=0.15)


def test_a_prefix_is_shared_and_an_overload_refused(rows: list[dict[str, Any]]) -> None:
    warm = row_of(rows, "prefix")["warm"]
    assert warm["prefix_hit_rate"] > 0.5 and warm["prompt_share_not_computed"] > 0.5
    over = row_of(rows, "overload")
    assert over["clients"] == 4 * over["ceiling"] and over["rejected"] > 0
    assert (over["others"], over["without_retry_after"]) == ({}, 0)
    assert (over["failed_decodes"], over["left_cells"]) == (0, 0)
