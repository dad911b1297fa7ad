"""Beside peers: what is read of them is what they said, and a run that was stopped goes on."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bench import peers
from bench.ledger import Ledger
from bench.pairs import LLAMA_CPP_PYTHON, Arm, Pair, peer_arm, play_round
from bench.peers import compare, ratios_of, roofline_ratios
from bench.points import OURS
from bench.programs import paths_in, server_requirements
from bench.roofline import BATCHED_BENCH, RUNTIME, Work, chunks_of, point_of, read_batched_bench
from bench.servers import Server, llama_cpp_python_command, llama_server_command
from skippy_mesh.errors import RuntimeUnavailableError, UsageError
from tests.unit.test_bench_load import fake_server, silent_about_usage, whole
from tests.unit.test_bench_serve import SETTINGS, Scripted, quick

URL_PAIR = Pair(name="other", stages=1, threads=2, peer="other")


def work(num_sessions: int, prompt_tokens: int) -> Work:
    return Work(
        num_sessions=num_sessions,
        prompt_tokens=prompt_tokens,
        output_tokens=10,
        num_cells=4096,
        num_threads=2,
    )


def served(rate: float | None, *, clients: int = 8, round_: int = 0) -> dict[str, Any]:
    ours = {"output_throughput": rate} if rate else {"void": "torn"}
    return {"pair": "one", "clients": clients, "round": round_, "ours": ours, "theirs": {}}


def bare(runtime: float, batched: float, *, clients: int = 8, round_: int = 0) -> dict[str, Any]:
    rates = {RUNTIME: runtime, BATCHED_BENCH: batched}
    points = {name: {"output_throughput": rate} for name, rate in rates.items()}
    return {"pair": "roofline", "clients": clients, "round": round_, "points": points}


def test_prompts_fill_steps_to_the_brim_and_recurrent_ones_go_one_by_one() -> None:
    chunks = partial(chunks_of, work(5, 128), max_rows=512)
    assert list(chunks(is_mixed=True)) == [[(k, 0, 128) for k in range(4)], [(4, 0, 128)]]
    assert list(chunks(is_mixed=False)) == [[(k, 0, 128)] for k in range(5)]
    long = list(chunks_of(work(2, 700), max_rows=512, is_mixed=True))
    assert long == [[(0, 0, 512)], [(0, 512, 700), (1, 0, 324)], [(1, 324, 700)]]


def test_the_roofline_counts_as_a_server_does() -> None:
    assert point_of(work(8, 128), 1.5, 0.5)["output_throughput"] == 8 * 10 / 2.0


def test_the_times_of_batched_bench_are_those_of_all_prompts_and_all_tokens() -> None:
    line = json.dumps({"pp": 128, "tg": 64, "pl": 8, "t_pp": 3.25, "t_tg": 1.75, "speed": 300.0})
    assert read_batched_bench(f"main: n_kv_max = 8192\n{line}\n") == (3.25, 1.75)
    with pytest.raises(RuntimeUnavailableError, match="told no times: 'usage"):
        read_batched_bench("usage: llama-batched-bench")


def test_a_server_is_held_against_the_bare_loops_of_its_own_round() -> None:
    rows = [
        served(80.0), bare(100.0, 160.0), served(30.0, round_=1), bare(50.0, 40.0, round_=1),
        served(None, round_=2), bare(50.0, 50.0, round_=2), served(7.0, clients=1),
    ]  # fmt: skip
    found = roofline_ratios(rows)["roofline N=8"]
    over_runtime = found[f"our server / {RUNTIME}"]
    assert (over_runtime.low, over_runtime.high, over_runtime.rounds) == (0.6, 0.8, 2)
    assert found[f"our server / {BATCHED_BENCH}"].high == 0.75
    assert found[f"{RUNTIME} / {BATCHED_BENCH}"].rounds == 3
    assert set(ratios_of(rows)) == {"one N=8", "one N=1", "roofline N=8"}


def test_a_server_that_streams_no_usage_counts_where_the_end_says_how_many(
    tmp_path: Path,
) -> None:
    """Of llama-cpp-python's: what ended by length has exactly as many tokens as were asked for."""
    fakes = Scripted(tmp_path / "log", [quick] * 13, [])
    wants = {"extra": {"logit_bias": {"2": -100}}, "has_usage": False}
    with fake_server(*[silent_about_usage] * 9) as (url, bodies):
        (tmp_path / "peer").write_text("")
        server = Server("peer", url, 0, tmp_path / "peer")

        @contextmanager
        def theirs(settings: Any, pair: Pair) -> Any:
            yield Arm(server, ["peer"], wants=wants)

        found = play_round(
            SETTINGS, URL_PAIR, 2, 0,
            ours=lambda settings, pair: fakes.arm(OURS), theirs=theirs,
        )  # fmt: skip
    assert found["theirs"]["void"] is None and found["theirs"]["total_output_tokens"] == 8 * 4
    assert found["theirs"]["total_input_tokens"] is None
    assert found["theirs"]["peak_memory"]["engine"]["rss_bytes"] is None  # not ours to watch
    assert all(body["logit_bias"] == {"2": -100} for body in bodies)


def test_a_running_server_is_taken_by_its_url() -> None:
    with fake_server(*[whole] * 1) as (url, _):
        pair = Pair(name="other", stages=1, threads=2, peer="other", url=url)
        with peer_arm(SETTINGS, pair) as arm:
            assert (arm.server.url, arm.command) == (url, [url])


def test_only_servers_of_this_machine_are_taken() -> None:
    with pytest.raises(UsageError, match="only talks to this machine"):
        peers.main(["--pairs", "one", "--url", "far=http://10.0.0.1:8000"])


def test_a_comparison_that_was_stopped_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, played = tmp_path / "peers.json", list[str]()

    def play(settings: Any, pair: Pair, level: int, round_: int) -> dict[str, Any]:
        played.append(f"{pair.name} {level} {round_}")
        if len(played) == 3:
            raise KeyboardInterrupt
        return served(80.0, clients=level, round_=round_) | {
            "pair": pair.name, "theirs": {"output_throughput": 40.0}
        }  # fmt: skip

    monkeypatch.setattr(peers, "play_round", play)
    settings = replace(SETTINGS, pairs=["one", "python"], levels=[2], rounds=2)
    both = [peers.ONE, peers.PYTHON]
    with pytest.raises(KeyboardInterrupt):
        compare(both, settings, out)
    compare(both, settings, out)
    assert played == ["one 2 0", "python 2 0", "one 2 1", "one 2 1", "python 2 1"]
    found = json.loads(out.read_text())
    assert found["ratios"]["python N=2"]["throughput"]["rounds"] == 2
    assert len(Ledger(out.with_suffix(".jsonl"), found["identity"], {}).rows) == 4


def test_all_of_llama_cpp_is_told_alike() -> None:
    model = Path("m.gguf")
    server = llama_server_command(
        Path("llama-server"), model, num_slots=32, num_cells=8192, num_threads=2
    )
    python = llama_cpp_python_command(Path("site"), model, num_cells=8192, num_threads=2)
    for flag, value in (("-ctk", "q8_0"), ("-fa", "on"), ("-t", "2"), ("-c", "8192")):
        assert server[server.index(flag) + 1] == value
    for flag, value in (("--type_k", "8"), ("--flash_attn", "true"), ("--n_threads", "2"),
                        ("--n_ctx", "8192"), ("--interrupt_requests", "false")):  # fmt: skip
        assert python[python.index(flag) + 1] == value


def test_what_the_python_server_needs_is_read_from_its_package() -> None:
    names = {text.split(">")[0].split("<")[0] for text in server_requirements()}
    assert {"pydantic-settings", "sse-starlette"} <= names
    assert "numpy" not in names and "pytest" not in names
    assert paths_in(Path("home"))[LLAMA_CPP_PYTHON].parent == Path("home")
