"""What a shared prompt saves is only told of answers that are the cold ones, byte for byte."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.prefix import COLD, PEER, WARM, Settings, cells_per_session, play_round, summary_of
from bench.servers import Server
from bench.steplog import read_step
from tests.unit.test_bench_load import Script, fake_server
from tests.unit.test_bench_serve import quick, slow, step_line, wrong

SETTINGS = Settings(
    model="demo",
    levels=[1],
    rounds=1,
    shared_tokens=6,
    own_tokens=2,
    output_tokens=4,
    threads=1,
    limit_seconds=20,
    seed=1,
)
ONE_OF_TEN = "warm/cold N=1"


class Scripted:
    """All three arms played by fake servers, noting what they were asked."""

    def __init__(self, log: Path, **scripts: Script):
        self.log, self.scripts = log, scripts
        self.bodies: dict[str, list[dict[str, object]]] = {}

    @contextmanager
    def start(self, settings: Settings, arm: str) -> Iterator[tuple[Server, list[str], Path]]:
        self.log.write_text("")
        with fake_server(*[self.scripts[arm.replace("-", "_")]] * 20) as (url, bodies):
            yield Server(arm, url, os.getpid(), self.log), [arm], self.log
        self.bodies[arm] = bodies

    def play(self) -> dict[str, object]:
        return play_round(SETTINGS, 1, 0, start=self.start)


def test_warm_has_seen_the_beginning_once_and_cold_asks_for_no_cache(tmp_path: Path) -> None:
    scripted = Scripted(tmp_path / "log", cold=slow, warm=quick, llama_server=quick)
    round_ = scripted.play()
    num_asked = {arm: len(bodies) for arm, bodies in scripted.bodies.items()}
    assert num_asked == {COLD: 1 + 8, WARM: 2 + 8, PEER: 2 + 8}
    prompts = [str(body["prompt"]).split() for body in scripted.bodies[WARM]]
    assert len({tuple(prompt[:6]) for prompt in prompts[1:]}) == 1
    assert prompts[0][:6] != prompts[1][:6], "the first request is not to warm the cache"
    assert not any(body["cache_prompt"] for body in scripted.bodies[COLD])
    assert all(body["cache_prompt"] for body in scripted.bodies[WARM])
    found = summary_of([round_])["ratios"]
    assert found[ONE_OF_TEN]["throughput"]["median"] > 1  # type: ignore[index]


def test_a_warm_answer_that_is_not_the_cold_one_has_no_number(tmp_path: Path) -> None:
    round_ = Scripted(tmp_path / "log", cold=quick, warm=wrong, llama_server=quick).play()
    assert round_[WARM]["void"] == "only 0 warm answers are the cold ones"  # type: ignore[index]
    assert summary_of([round_])["ratios"][ONE_OF_TEN] == {}  # type: ignore[index]


def test_cells_are_those_of_the_step_with_the_most_sequences() -> None:
    few = step_line(running=2, kv=[{"attention": {"active": 990}}])
    early = step_line(running=8, kv=[{"attention": {"active": 16}}, {"attention": {"active": 8}}])
    many = step_line(running=8, kv=[{"attention": {"active": 100}}, {"attention": {"active": 96}}])
    found = cells_per_session(list(map(read_step, (few, early, many, few))))
    assert (found["cells_per_session"], found["max_running"]) == (pytest.approx(12.5), 8)
    assert cells_per_session([]) == {}
