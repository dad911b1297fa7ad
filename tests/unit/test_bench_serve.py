"""Paired rounds give honest ratios, and a wrong or unfinished run of ours gives none."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.pairs import Arm, Settings, intervals, play_round
from bench.points import OURS
from bench.serve import PAIRS, TARGETS
from bench.servers import Server, check_split
from bench.steplog import StepLog, profile, read_step
from bench.verdict import Interval, Target, interval, judgements, paired_ratios, verdict
from skippy_mesh.errors import RuntimeUnavailableError
from tests.unit.test_bench_load import Answer, Script, fake_server, refused, whole

PEER = PAIRS["one"].peer
SETTINGS = Settings(
    model="demo",
    pairs=["one"],
    levels=[2],
    rounds=1,
    prompt_tokens=8,
    output_tokens=4,
    requests_per_client=2,
    limit_seconds=20,
    seed=1,
)
NUM_SENT = 8  # MIN_REQUESTS
FLOOR = Target(pair="one", clients=8, metric="throughput", bound=1.2)
LIMIT = Target(pair="one", clients=8, metric="p99_e2e", bound=1.0, is_floor=False)


async def slow(answer: Answer) -> None:
    await answer.start()
    await asyncio.sleep(0.6)
    await answer.text("one two three four", "length")
    await answer.finish()


async def quick(answer: Answer) -> None:
    await answer.start()
    await answer.text("one two three four", "length")
    await answer.finish()


async def wrong(answer: Answer) -> None:
    await answer.start()
    await answer.text("one two three five", "length")
    await answer.finish()


def step_line(**knobs: Any) -> str:
    """A step of two stages as the server writes it."""
    entry = {
        "stage_ms": [300.0, 400.0],
        "wait_ms": [100.0, 0.0],
        "plan_ms": 10.0,
        "answered_s": 7.25,
        "step_ms": 700.0,
        "running": 8,
        "waiting": 3,
        "prefill_tokens": 5,
        "decode_tokens": 3,
        "recompute_tokens": 3,
        "kv": [{"attention": {"active": 900, "resident": 0, "reserved": 0, "free": 100}}] * 2,
    }
    return json.dumps(entry | knobs) + "\n"


class Scripted:
    """Both arms of a pair played by fake servers, noting the order they ran in."""

    def __init__(self, log: Path, ours: list[Script], theirs: list[Script]):
        self.log, self.scripts, self.order = log, {OURS: ours, PEER: theirs}, list[str]()
        self.prompts: dict[str, list[str]] = {}

    def play(self, round_: int = 0) -> dict[str, object]:
        return play_round(
            SETTINGS,
            PAIRS["one"],
            2,
            round_,
            ours=lambda settings, pair: self.arm(OURS),
            theirs=lambda settings, pair: self.arm(PEER),
        )

    @contextmanager
    def arm(self, label: str) -> Iterator[Arm]:
        self.order.append(label)
        self.log.write_text("")
        with fake_server(*self.scripts[label]) as (url, bodies):
            yield Arm(Server(label, url, os.getpid(), self.log), [label],
                      self.log if label == OURS else None)  # fmt: skip
        self.prompts[label] = [str(body["prompt"]) for body in bodies]


def test_a_round_gives_both_arms_the_same_prompts_and_alternates_who_is_first(
    tmp_path: Path,
) -> None:
    fakes = Scripted(tmp_path / "log", [quick] * 13, [slow] * 9)
    rounds = [fakes.play(round_) for round_ in (0, 1)]
    assert fakes.order == [OURS, PEER, PEER, OURS]
    ours, theirs = fakes.prompts[OURS], fakes.prompts[PEER]
    assert sorted(ours[1 : 1 + NUM_SENT]) == sorted(theirs[1:])  # the first is the warm-up
    assert set(ours[1 + NUM_SENT :]) <= set(theirs[1:])  # again, alone
    found = intervals(rounds)["one", 2]
    assert found["throughput"].low > 1 and found["throughput"].rounds == 2
    assert found["p99_e2e"].high < 1
    for one in rounds:
        assert one["same_texts"] == {"equal": NUM_SENT, "of": NUM_SENT}
        assert isinstance(one["ours"], dict)
        assert one["ours"]["alone"] == {"equal": 4, "of": 4, "asked": 4}
        assert one["ours"]["max_concurrent_requests"] == 2


@pytest.mark.parametrize(
    ("ours", "says"),
    [
        ([whole, *[wrong] * 8, *[quick] * 4], "only 0 of 4 texts are the same alone"),
        ([whole, *[quick] * 8, *[refused] * 4], "only 0 of 4 texts are the same alone"),
        ([whole, *[quick] * 7, *[refused] * 5], "1 of 8 requests failed"),
    ],
)
def test_a_fast_wrong_engine_has_no_number(tmp_path: Path, ours: list[Script], says: str) -> None:
    found = Scripted(tmp_path / "log", ours, [quick] * 9).play()
    assert isinstance(found["ours"], dict) and says in found["ours"]["void"]
    assert "output_throughput" not in found["ours"]
    assert "throughput" not in intervals([found])["one", 2]


def test_ratios_pair_by_round_and_leave_out_a_round_without_both() -> None:
    ours = [{"output_throughput": 3.0}, {"void": "torn"}, {"output_throughput": 8.0}]
    theirs = [{"output_throughput": v} for v in (2.0, 2.0, 4.0)]
    assert paired_ratios(ours, theirs)["throughput"] == [1.5, 2.0]
    assert paired_ratios(ours, theirs)["p99_e2e"] == []


@pytest.mark.parametrize(
    ("count", "low", "high"),
    [(1, 0, 0), (4, 0, 3), (8, 0, 7), (9, 1, 7), (12, 2, 9), (20, 5, 14)],
)
def test_the_interval_is_that_of_the_sign_test(count: int, low: int, high: int) -> None:
    found = interval([float(v) for v in reversed(range(count))])
    assert found == Interval((count - 1) / 2, low, high, count)


def test_no_rounds_have_no_interval() -> None:
    assert interval([]) is None


@pytest.mark.parametrize(
    ("target", "low", "high", "says"),
    [
        (FLOOR, 1.2, 1.4, "met"),
        (FLOOR, 1.1, 1.3, "undecided"),
        (FLOOR, 1.0, 1.19, "missed"),
        (LIMIT, 0.8, 1.0, "met"),
        (LIMIT, 0.9, 1.1, "undecided"),
        (LIMIT, 1.01, 1.1, "missed"),
    ],
)
def test_a_target_is_met_or_missed_by_the_whole_interval(
    target: Target, low: float, high: float, says: str
) -> None:
    assert verdict(target, Interval((low + high) / 2, low, high, 4)) == says
    assert verdict(target, Interval((low + high) / 2, low, high, 3)) == "undecided"
    assert verdict(target, None) == "no number"


def test_only_what_was_measured_is_judged_and_a_stage_s_idleness_counts() -> None:
    points = [{"profile": {"busy_share": [0.95, share]}} for share in (0.8, 0.85, 0.88, 0.89)]
    rounds: list[dict[str, object]] = [
        {"pair": "two", "clients": 32, "ours": point, "theirs": {}} for point in points
    ]
    verdicts = {str(j["target"]): j["verdict"] for j in judgements(TARGETS, intervals(rounds))}
    assert verdicts == {
        "two, N=32: throughput >= 1.65": "no number",
        "two, N=32: busy_share >= 0.9": "missed",
    }
    assert {(t.pair, t.clients) for t in TARGETS} == {
        ("one", 1), ("one", 8), ("one", 32), ("two", 8), ("two", 32)
    }  # fmt: skip


def test_a_step_log_is_read_from_where_the_run_began(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text(step_line(decode_tokens=99))
    log = StepLog(path)
    with path.open("a") as file:
        file.write(step_line() + step_line() + step_line()[:20])
    steps = log.steps()
    assert len(steps) == 2 and steps[0] == read_step(step_line())
    assert (steps[0].waiting, steps[0].recompute_tokens) == (3, 3)
    found = profile(steps, duration_s=1.0)
    assert found["busy_share"] == [0.6, 0.8]
    assert found["scheduler_share"] == 0.02
    assert found["decode_rows_a_step"] == 3
    assert profile([], 1.0) == {"steps": 0}


def test_a_peer_that_left_layers_behind_is_not_the_peer() -> None:
    lines = [
        "load_tensors: offloaded 31/31 layers to GPU",
        "load_tensors:   CPU_Mapped model buffer size =    28.69 MiB",
        "load_tensors: RPC0[127.0.0.1:1] model buffer size =    33.82 MiB",
        "load_tensors: RPC0[127.0.0.1:2] model buffer size =    58.28 MiB",
    ]
    assert check_split(lines, 2) == {"RPC0[127.0.0.1:1]": 33.82, "RPC0[127.0.0.1:2]": 58.28}
    with pytest.raises(RuntimeUnavailableError, match="1 of 2 RPC workers"):
        check_split(lines[:-1], 2)
    with pytest.raises(RuntimeUnavailableError, match="offloaded 15/31"):
        check_split([lines[0].replace("31/31", "15/31"), *lines[1:]], 2)
