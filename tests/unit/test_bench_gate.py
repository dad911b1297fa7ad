"""The gate gives planted engines the verdicts they deserve, and keeps what it measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import server_side
from bench.gate import VERDICTS, gate, is_over, num_rows, play_case, rows_of, verdicts_of
from bench.gate.rules import (
    Check,
    check_bytes,
    check_goodput,
    check_level,
    check_overload,
    check_prefix,
    judge_case,
    judge_class,
)
from bench.gate.settings import FULL, LEVELS, QUICK, Case, Margins, Settings, default_cases
from bench.ledger import Ledger
from skippy_mesh.errors import UsageError
from tests.bench_engines import PlantedArms, PlantedEngine

MARGINS = Margins()
# Points end with their requests, never with their time: this machine may be slow.
SETTINGS = replace(
    QUICK, point_seconds=60.0, requests_per_client=1, overload_seconds=1.0, drain_seconds=60.0,
    num_alone=2, exact_clients=2, min_requests=4, lone_requests=4, max_queue=4, long_tokens=40,
    prefix_tokens=24, prefix_clients=2,
    margins=Margins(crowd=8),
)  # fmt: skip
ONCE = replace(SETTINGS, rounds=1)
CURVE = Case(name="dense", family="dense", levels=(1, 8), is_whole=False)
OLD_S = 0.2
STALL_S = 0.3  # long enough for eight requests to be open at once


@pytest.fixture(autouse=True)
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted points take tenths of a second."""
    monkeypatch.setattr(server_side, "SAMPLE_S", 0.02)


def ledger_at(path: Path, **identity: object) -> Ledger:
    return Ledger(path, identity, {"commit": "c0ffee"})


def played(
    tmp_path: Path, settings: Settings, **planted: Any
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows and the verdict of dense for a new engine like that."""
    old = PlantedEngine(service_s=OLD_S, num_lanes=1, keeps_records=False)
    arms = PlantedArms(PlantedEngine(**planted), old)
    ledger = ledger_at(tmp_path / "rows.jsonl")
    play_case(CURVE, settings, ledger, done=lambda key: None, start=arms.start)
    return ledger.rows, verdicts_of([CURVE], settings, ledger.rows)["dense"]


def outcomes(entry: dict[str, Any]) -> dict[str, str]:
    return {check["name"]: check["outcome"] for check in entry["checks"]["dense"]}


def test_an_engine_that_serves_many_at_once_passes(tmp_path: Path) -> None:
    for attempt in range(4):  # what a busy machine leaves undecided is played again
        rows, entry = played(tmp_path / str(attempt), SETTINGS, service_s=OLD_S / 3)
        if entry["verdict"] != "undecided":
            break
    assert entry["verdict"] == "pass", entry["checks"]
    assert len(rows) == num_rows(CURVE, SETTINGS) == 7
    crowd = [row for row in rows if row.get("clients") == 8]
    assert all(row["ours"]["max_concurrent_requests"] == 8 for row in crowd)
    assert crowd[0]["ours"]["kv_bytes_per_session"] == 20 * 10
    assert crowd[0]["theirs"]["kv_bytes_per_session"] == (32 + 24 - 1) * 10


def test_a_slow_engine_fails_where_it_had_to_win(tmp_path: Path) -> None:
    _, entry = played(tmp_path, SETTINGS, service_s=OLD_S, num_lanes=1)
    assert entry["verdict"] == "fail"
    assert outcomes(entry)["short-short-unique N=8 throughput"] == "fail"


def test_an_engine_that_is_wrong_in_company_has_no_speed(tmp_path: Path) -> None:
    rows, entry = played(tmp_path, ONCE, service_s=STALL_S, wrong_above=1)
    assert entry["verdict"] == "fail" and "in a crowd" in entry["reason"]
    assert [row["kind"] for row in rows] == ["exact"]
    assert "throughput" not in json.dumps([rows, entry])


def test_an_engine_that_is_wrong_under_load_only_is_seen_when_its_speed_is_taken(
    tmp_path: Path,
) -> None:
    rows, entry = played(tmp_path, ONCE, service_s=STALL_S, wrong_above=3)
    assert entry["verdict"] == "fail" and "are not the old engine's" in entry["reason"]
    assert "output_throughput" not in rows[-1]["ours"]
    assert len(entry["checks"]["dense"]) == 1, "a wrong engine has no other figures"


def test_an_engine_that_drops_requests_under_load_fails(tmp_path: Path) -> None:
    _, entry = played(tmp_path, ONCE, service_s=STALL_S, drops_above=3)
    assert entry["verdict"] == "fail"
    assert outcomes(entry)["short-short-unique N=8 requests"] == "fail"
    assert "of 8 requests failed" in entry["reason"]


def test_a_whole_case_has_every_row_and_is_not_measured_twice(tmp_path: Path) -> None:
    case = Case(name="dense", family="dense", levels=(1, 2))
    settings = ONCE
    ours = PlantedEngine(service_s=0.3, cached_s=0.002, num_lanes=4, max_open=8)
    old = PlantedEngine(service_s=0.01, num_lanes=1, keeps_records=False)
    arms = PlantedArms(ours, old)
    path, done = tmp_path / "rows.jsonl", list[str]()
    ledger = ledger_at(path)
    play_case(case, settings, ledger, done=done.append, start=arms.start)
    kinds = [row["kind"] for row in ledger.rows]
    assert kinds == ["exact", "point", "point", "long", "prefix", "overload"]
    assert len(done) == num_rows(case, settings) and is_over(case, settings, ledger.rows)
    over = ledger.rows[-1]
    assert over["rejected"] > 0 and not over["others"] and not over["left_cells"]
    prefix = ledger.rows[-2]
    assert prefix["warm"]["prefix_hit_rate"] == 1.0
    assert prefix["warm"]["p50_ttft_ms"] < prefix["cold"]["p50_ttft_ms"]
    again = ledger_at(path)
    play_case(case, settings, again, done=done.append, start=arms.start)
    assert again.rows == ledger.rows and arms.num_started == 1
    path.write_text("\n".join(path.read_text().splitlines()[:3]) + '\n{"key": "half')
    torn = ledger_at(path)
    play_case(case, settings, torn, done=done.append, start=arms.start)
    assert [row["kind"] for row in torn.rows] == kinds and arms.num_started == 2
    assert ledger_at(path).rows == torn.rows
    outcome, reason = judge_class(judge_case(case, torn.rows, settings))
    assert outcome != "pass", "levels that were left out decide nothing"
    assert reason


def test_rows_of_another_engine_are_refused(tmp_path: Path) -> None:
    ledger_at(tmp_path / "rows.jsonl", commit="a")
    ledger_at(tmp_path / "rows.jsonl", commit="a")
    with pytest.raises(UsageError, match="other settings: --fresh"):
        ledger_at(tmp_path / "rows.jsonl", commit="b")
    (tmp_path / "else").write_text("{}\n")
    with pytest.raises(UsageError, match="is no file of rows"):
        ledger_at(tmp_path / "else")


def test_verdicts_are_written_with_where_they_come_from(tmp_path: Path) -> None:
    found = gate([], SETTINGS, tmp_path)
    assert found == {}
    document = json.loads((tmp_path / VERDICTS).read_text())
    assert {"commit", "dirty", "machine", "date", "settings", "classes"} <= document.keys()


def test_five_classes_and_real_weights_are_judged_unless_others_are_named() -> None:
    names = [case.name for case in default_cases(("dense", "mla"), {})]
    assert names == ["dense", "dense/demo", "mla"]
    (given,) = default_cases(("dense",), {"dense": "/models/Big.gguf"})
    assert (given.name, given.model, given.levels) == ("dense/Big", "/models/Big.gguf", LEVELS)
    assert (QUICK.rounds, QUICK.point_seconds) == (3, 10) and len(FULL.mixes) == 8
    assert QUICK.num_cells % 256 == 0 and FULL.num_cells > QUICK.num_cells


def point(**knobs: Any) -> dict[str, Any]:
    base = {
        "void": None, "output_throughput": 10.0, "p99_e2el_ms": 100.0, "p50_ttft_ms": 100.0,
        "request_goodput": 1.0, "attainment": 1.0, "kv_bytes_per_session": 100,
    }  # fmt: skip
    return base | knobs


def levels(*pairs: tuple[dict[str, Any], dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"ours": ours, "theirs": theirs} for ours, theirs in pairs]


def throughput(level: int, *ratios: float) -> str:
    rows = levels(*((point(output_throughput=10 * r), point()) for r in ratios))
    return check_level("x", level, rows, MARGINS)[0].outcome


@pytest.mark.parametrize(
    ("level", "ratios", "says"),
    [
        (32, (2.0, 2.1, 3.0), "pass"),
        (32, (1.9, 2.1, 3.0), "undecided"),
        (32, (1.2, 1.3, 1.9), "fail"),
        (32, (5.0, 5.0), "undecided"),
        (4, (0.96, 1.0, 1.1), "pass"),
        (4, (0.90, 1.0, 1.1), "undecided"),
        (4, (0.80, 0.9, 0.94), "fail"),
    ],
)
def test_the_whole_interval_decides(level: int, ratios: tuple[float, ...], says: str) -> None:
    assert throughput(level, *ratios) == says


def test_slowest_answers_first_tokens_and_bytes_are_judged_where_they_belong() -> None:
    worse = point(output_throughput=30.0, p99_e2el_ms=101.0, p50_ttft_ms=126.0,
                  kv_bytes_per_session=106)  # fmt: skip
    rows = levels(*[(worse, point())] * 3)

    def failed(level: int) -> set[str]:
        return {c.name for c in check_level("x", level, rows, MARGINS) if c.outcome == "fail"}

    assert failed(32) == {"x p99", "x KV bytes a session"}
    assert failed(1) == {"x first token", "x KV bytes a session"}
    assert failed(8) == {"x KV bytes a session"}
    # The way through the actors is no fault of the engine's: 124 ms are 1.04 times 100 and 20 more.
    near = levels(*[(point(output_throughput=30.0, p50_ttft_ms=124.0), point())] * 3)
    assert "fail" not in {c.outcome for c in check_level("x", 1, near, MARGINS)}
    unknown = [point(kv_bytes_per_session=None)] * 3
    assert check_bytes("x", unknown, [point()] * 3, MARGINS).outcome == "undecided"


def test_goodput_is_void_where_nobody_attains_it_and_may_be_nothing_on_one_side() -> None:
    def said(ours: tuple[float, float], theirs: tuple[float, float]) -> str:
        one, other = ([point(request_goodput=g, attainment=a)] * 3 for g, a in (ours, theirs))
        return check_goodput("x", one, other, MARGINS).outcome

    assert said((0.0, 0.0), (0.1, 0.09)) == "void"
    assert said((1.0, 0.9), (0.0, 0.0)) == "pass"
    assert said((0.0, 0.0), (1.0, 0.9)) == "fail"
    assert said((0.96, 1.0), (1.0, 1.0)) == "pass"


def test_a_prefix_must_win_unless_the_class_owes_none() -> None:
    def rows(warm_ms: float, rate: float) -> list[dict[str, Any]]:
        return [
            {"warm": point(p50_ttft_ms=warm_ms, prefix_hit_rate=rate), "cold": point()}
        ] * 3  # fmt: skip

    def said(warm_ms: float, rate: float, *, owes_win: bool = True) -> list[str]:
        found = check_prefix(rows(warm_ms, rate), MARGINS, owes_win=owes_win)
        return [check.outcome for check in found]

    assert said(10.0, 0.9) == ["pass"]
    assert said(90.0, 0.9) == ["fail"]
    assert said(1.0, 0.1) == ["pass", "fail"]
    assert said(20.0, 0.0, owes_win=False) == ["void"]


OVERLOAD = {
    "sent": 9, "completed": 5, "rejected": 4, "others": {}, "without_retry_after": 0,
    "failed_decodes": 0.0, "left_cells": 0.0, "peak_bytes": [100, 105],
}  # fmt: skip


@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        ({}, "pass"),
        ({"others": {"500": 1}}, "fail"),
        ({"without_retry_after": 1}, "fail"),
        ({"failed_decodes": 1.0}, "fail"),
        ({"left_cells": 3.0}, "fail"),
        ({"peak_bytes": [100, 120]}, "fail"),
        ({"rejected": 0}, "undecided"),
    ],
)
def test_overload_permits_200_and_429_and_nothing_else(knobs: dict[str, Any], says: str) -> None:
    (check,) = check_overload([OVERLOAD | knobs], MARGINS)
    assert check.outcome == says


def test_one_failure_fails_a_class_and_one_doubt_keeps_it_from_passing() -> None:
    def verdict(*said: Any) -> str:
        return judge_class([Check(name="x", outcome=one, detail="d") for one in said])[0]

    assert verdict("pass", "void") == "pass"
    assert verdict("pass", "undecided") == "undecided"
    assert verdict("undecided", "fail", "pass") == "fail"
    whole = Case(name="mla", family="mla")
    checks = judge_case(whole, [], QUICK)
    assert {check.outcome for check in checks} <= {"undecided"}
    assert rows_of(whole, [{"case": "dense"}]) == []
