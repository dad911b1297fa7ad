"""A report shows what the rows say, and one with a hole is none."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from bench.blocks import blocks_of, missing
from bench.report import BEGIN, END, README, peers_of, put_into, report
from skippy_mesh.errors import SkippyError, UsageError

HEAD = {
    "date": "2026-11-30T10:00:00+00:00", "commit": "c0ffee1234", "dirty": False,
    "machine": {"cpu": "EPYC", "cores": 2}, "threads_a_stage": 1,
    "settings": {"mode": "quick", "stages": 2, "rounds": 3, "mixes": ["short-short-unique"]},
}  # fmt: skip


def point(clients: int, round_: int, ours: float, theirs: float) -> dict[str, Any]:
    def arm(rate: float) -> dict[str, Any]:
        return {
            "void": None, "output_throughput": rate, "p99_e2el_ms": 1000 / rate,
            "request_goodput": rate / 10, "engine_memory": {"rss_bytes": 10**8 + clients},
            "kv_bytes_per_session": 5000, "stage_busy_share": [0.9, 0.8],
            "stage_bubble_share": [0.0, 0.1],
        }  # fmt: skip

    return {
        "key": f"{clients}/{round_}", "case": "dense", "kind": "point", "mix": "short-short-unique",
        "clients": clients, "round": round_, "ours": arm(ours), "theirs": arm(theirs),
    }  # fmt: skip


ROWS: list[dict[str, Any]] = [
    {"key": "exact", "case": "dense", "kind": "exact"},
    *(point(n, r, 10.0 * n + r, 10.0) for n in (1, 2, 32) for r in range(3)),
    {"key": "prefix", "case": "dense", "kind": "prefix", "warm": {"p50_ttft_ms": 10.0},
     "cold": {"p50_ttft_ms": 100.0}},
    {"key": "over", "case": "dense", "kind": "overload", "completed": 5, "rejected": 7,
     "others": {"500": 1}},
]  # fmt: skip


def gate_at(folder: Path, rows: list[dict[str, Any]]) -> Path:
    check = {"name": "short-short-unique x <N=32>", "outcome": "fail", "detail": "0.5 | b"}
    classes = {"dense": {"verdict": "fail", "reason": "a | b", "checks": {"dense": [check]}}}
    (folder / "verdicts.json").write_text(json.dumps(HEAD | {"classes": classes}))
    lines = [{"identity": {}}, *rows]
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_curve_has_the_median_of_its_rounds_and_their_spread() -> None:
    blocks = {block.name: block for block in blocks_of(ROWS)}
    new, old = blocks["scaling"].panels["dense"]
    assert new.xs == (1, 2, 32) == old.xs
    assert new.ys == (11, 21, 321) and new.lows == (10, 20, 320) and new.highs == (12, 22, 322)
    assert old.ys == (10, 10, 10)
    assert [s.label for s in blocks["bubbles"].panels["dense"]] == [
        "stage 0 busy", "stage 0 bubble", "stage 1 busy", "stage 1 bubble"
    ]  # fmt: skip
    bars = {s.label: s.ys[0] for s in blocks["overload"].panels["dense"]}
    assert bars == {"200": 5, "429": 7, "else": 1}
    cold, warm = blocks["prefix"].panels["dense"]
    assert math.isclose(cold.ys[0], 0.1) and math.isclose(warm.ys[0], 0.01)


def test_an_unknown_number_gives_no_point() -> None:
    rows = [point(1, 0, 10.0, 10.0)]
    rows[0]["theirs"]["output_throughput"] = None
    new, *others = blocks_of(rows)[0].panels["dense"]
    assert new.ys == (10,) and not others


def test_a_report_is_one_file_a_picture_a_block_and_a_table(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    report(gate_at(tmp_path, ROWS), tmp_path / "out", readme)
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 7 == len(list((tmp_path / "out").glob("*.png")))
    assert 'src="http' not in page and "href" not in page and "x &lt;N=32&gt;" in page
    table = readme.read_text()
    assert table.startswith("before\n") and table.endswith("after\n") and "\nold\n" not in table
    assert "2026-11-30, commit c0ffee1, 2 cores (EPYC)" in table
    line = "| dense | **fail** | 11.0 / 10.0 | 321.0 / 10.0 | 0.0 / 0.1 | 5.0 / 5.0 | 0.10 | "
    assert f"{line}x <N=32>: 0.5 / b |" in table


@pytest.mark.parametrize(
    ("kind", "lacks"),
    [("prefix", "prefix of dense"), ("overload", "overload of dense"), ("point", "scaling of")],
)
def test_a_missing_block_fails_the_run(tmp_path: Path, kind: str, lacks: str) -> None:
    rows = [row for row in ROWS if row["kind"] != kind]
    with pytest.raises(SkippyError, match=lacks):
        report(gate_at(tmp_path, rows), tmp_path / "out", None)
    assert missing(blocks_of(ROWS), ["dense", "mla"])[0] == "scaling of mla"


def test_no_gate_and_a_readme_without_marks_are_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no gate was run"):
        report(tmp_path, tmp_path / "out", None)
    with pytest.raises(UsageError, match="once each"):
        put_into("no marks", "table")
    assert put_into(README.read_text(), "table").count("table\n") >= 1


def test_ratios_to_peers_are_taken_from_the_documents_that_have_them(tmp_path: Path) -> None:
    ratio = {"median": 1.1, "low": 1.0, "high": 1.2, "rounds": 4}
    (tmp_path / "serve.json").write_text(json.dumps({"ratios": {"one N=8": {"p99": ratio}}}))
    (tmp_path / "else.json").write_text(json.dumps({"points": []}))
    assert peers_of(tmp_path) == {"serve": [["one N=8", "p99", 1.1, 1.0, 1.2, 4]]}
