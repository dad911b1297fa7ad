"""The command line from outside: what it prints, how it ends, one line for whatever is wrong."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from stages.tokenizer import Tokenizer
from tests.processes import SKIPPY, environment, still_alive, tree

PROMPT = "The capital of France is"
STORY = "Once upon a time"
SAMPLED = ("-p", STORY, "-n", "32", "--temp", "0.8", "--top-k", "50", "--top-p", "0.95")
SAMPLED += ("--min-p", "0.02", "--json")

# The library's own high-level interface, which shares nothing with this repository.
LIBRARY = """
import json, sys, llama_cpp
llama = llama_cpp.Llama(
    sys.argv[1], n_ctx=4096, n_batch=512, n_threads=1, n_threads_batch=1, flash_attn=True,
    type_k=8, type_v=8, verbose=False,
)
answers = [
    llama.create_completion(
        prompt, max_tokens=48, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.0
    )["choices"][0]["text"]
    for prompt in sys.argv[2:]
]
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def env(tmp_path_factory, ray_dir):
    """One cache for all children here: each would probe the library and cut the slices again."""
    return environment(tmp_path_factory.mktemp("cli") / "cache", ray_dir)


@pytest.fixture(scope="module")
def run(env):
    def run(*arguments, timeout=240):
        return subprocess.run(
            [*SKIPPY, *arguments], env=env, capture_output=True, timeout=timeout, check=False
        )

    return run


def succeeded(done):
    assert (done.returncode, done.stderr) == (0, b"")
    return done.stdout


def last_line(stdout):
    return json.loads(stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def library(demo_model, env):
    command = [sys.executable, "-c", LIBRARY, str(demo_model), PROMPT, STORY]
    done = subprocess.run(command, env=env, capture_output=True, timeout=240, check=True)
    first, second = json.loads(done.stdout.splitlines()[-1])
    assert first.strip() and len(second) > 100
    return {PROMPT: first, STORY: second}


@pytest.fixture(scope="module")
def demo_model():
    from skippy_mesh.starting import demo_path

    return demo_path()


@pytest.fixture(scope="module")
def tokenizer(demo_model):
    return Tokenizer(str(demo_model))


@pytest.mark.parametrize("stages", ["1", "2", "3"])
def test_any_number_of_stages_prints_what_the_library_prints(run, library, stages):
    done = run("generate", "demo", "-p", PROMPT, "-n", "48", "-t", "1", "--stages", stages)
    assert succeeded(done) == library[PROMPT].encode() + b"\n"


def test_a_url_is_as_good_as_a_file_and_is_fetched_once(run, library, demo_model):
    """By the driver; the two stages of this machine find it there."""
    asked = []

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, _format, *args):
            asked.append(args[0])

    handler = functools.partial(Handler, directory=demo_model.parent)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/{demo_model.name}"
        done = run("generate", url, "-p", PROMPT, "-n", "48", "-t", "1", "--stages", "2")
        server.shutdown()
    assert succeeded(done) == library[PROMPT].encode() + b"\n"
    assert asked == [f"GET /{demo_model.name} HTTP/1.1"]


def test_json_comes_last_and_its_tokens_spell_its_text(run, library, tokenizer):
    stdout = succeeded(run("generate", "demo", "-p", STORY, "-n", "48", "-t", "1", "--json"))
    text, _, line = stdout.rstrip(b"\n").rpartition(b"\n")
    found = json.loads(line)
    assert found["text"] == library[STORY] == text.decode()
    assert b"".join(map(tokenizer.piece, found["token_ids"])) == text
    assert len(found["token_ids"]) == 48
    assert (found["finish_reason"], found["cuts"]) == ("length", [])
    ids = tokenizer.encode(STORY, add_special=True, parse_special=True)
    assert found["prompt_tokens"] == len(ids)


def test_a_seed_repeats_its_draw_at_any_cut_and_another_seed_draws_another(run):
    def draw(*arguments):
        stdout = succeeded(run("generate", "demo", *SAMPLED, "-t", "1", *arguments))
        return last_line(stdout)

    alone = draw("--seed", "7")
    mesh = draw("--seed", "7", "--cuts", "13")
    assert mesh["cuts"] == [13]
    assert (mesh["token_ids"], mesh["text"]) == (alone["token_ids"], alone["text"])
    assert draw("--seed", "8")["token_ids"] != alone["token_ids"]


def test_an_unseeded_draw_names_the_seed_that_repeats_it(run):
    found = last_line(succeeded(run("generate", "demo", *SAMPLED, "-t", "1")))
    again = run("generate", "demo", *SAMPLED, "-t", "1", "--seed", str(found["seed"]))
    assert last_line(succeeded(again)) == found


def start(env, *arguments):
    return subprocess.Popen(
        [*SKIPPY, "generate", "demo", "-p", STORY, "-t", "1", *arguments],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def await_text(child):
    if not os.read(child.stdout.fileno(), 1):
        raise AssertionError(child.stderr.read())


def test_text_appears_as_it_is_made(env):
    with start(env, "-n", "100") as child:
        reads = list(iter(lambda: os.read(child.stdout.fileno(), 1 << 16), b""))
        assert child.wait(60) == 0
        assert child.stderr.read() == b""
    # In one piece if it waited for the end. A busy machine may join some, never all.
    assert len(reads) > 5


def test_a_reader_that_leaves_is_not_an_error_to_talk_about(env):
    with start(env, "-n", "200") as child:
        await_text(child)
        child.stdout.close()
        assert child.wait(60) == 1
        assert child.stderr.read() == b""


def test_an_interrupt_ends_a_mesh_and_all_it_started(env, ray_dir):
    with start(env, "-n", "1000", "--stages", "2") as child:
        await_text(child)
        started = tree(child.pid, ray_dir)
        assert sum("ray::" in process.command for process in started) >= 2
        child.send_signal(signal.SIGINT)
        assert child.wait(60) == 130
        assert child.stderr.read() == b""
    assert still_alive(started, within_s=60) == []


def test_a_stage_that_dies_is_started_again_and_the_text_goes_on(env, ray_dir):
    with start(env, "-n", "200", "--stages", "2") as child:
        await_text(child)
        started = tree(child.pid, ray_dir)
        stages = [process.pid for process in started if "ray::Stage" in process.command]
        assert len(stages) == 2
        os.kill(stages[-1], signal.SIGKILL)
        assert child.wait(120) == 0
        text = child.stdout.read()
    assert still_alive(started, within_s=60) == []
    with start(env, "-n", "200") as undisturbed:
        assert undisturbed.wait(120) == 0
        assert undisturbed.stdout.read().endswith(text)


@pytest.fixture(scope="module")
def bad_files(tmp_path_factory, demo_model):
    folder = tmp_path_factory.mktemp("bad")
    whole = demo_model.read_bytes()
    (folder / "text.gguf").write_text("A capital idea\n" * 100)
    (folder / "empty.gguf").write_bytes(b"")
    (folder / "header.gguf").write_bytes(whole[:100_000])
    (folder / "weights.gguf").write_bytes(whole[: len(whole) // 2])
    return folder


GENERATE = ("generate", "demo", "-p", "Hello", "-n", "2", "-t", "1")
LONG = " ".join(["long"] * 600)

FAILURES = {
    "missing file": (("generate", "{bad}/none.gguf", "-p", "Hello"), "none.gguf"),
    "folder": (("generate", "{bad}", "-p", "Hello"), "folder"),
    "text file": (("generate", "{bad}/text.gguf", "-p", "Hello"), "not a GGUF"),
    "empty file": (("generate", "{bad}/empty.gguf", "-p", "Hello"), "empty"),
    "truncated header": (("generate", "{bad}/header.gguf", "-p", "Hello"), "truncated"),
    "truncated weights": (("generate", "{bad}/weights.gguf", "-p", "Hello"), "truncated"),
    "serve a missing file": (("serve", "{bad}/none.gguf", "--port", "0"), "none.gguf"),
    "port in use": (("serve", "demo", "--port", "{port}"), "{port}"),
    "address of no Ray": ((*GENERATE, "--stages", "2", "--address", "127.0.0.1:1"), ":1"),
    "address of a mute": ((*GENERATE, "--stages", "2", "--address", "127.0.0.1:{port}"), "Ray"),
    "address of no form": ((*GENERATE, "--stages", "2", "--address", "nonsense"), "nonsense"),
    "stop where no Ray is": (("stop", "--address", "127.0.0.1:1"), ":1"),
    "pool beyond memory": ((*GENERATE, "--ctx-size", "2000000000"), "--ctx-size"),
    "model beyond memory": ((*GENERATE, "--memory-fraction", "0.001"), "for layers 0:30, by its"),
}

USAGES = {
    "no command": ((), "COMMAND"),
    "unknown command": (("bogus",), "bogus"),
    "unknown flag": ((*GENERATE, "--nonsense"), "--nonsense"),
    "no prompt": (("generate", "demo"), "--prompt"),
    "99 stages": ((*GENERATE, "--stages", "99"), "99"),
    "0 stages": ((*GENERATE, "--stages", "0"), "0"),
    "cut at the end": ((*GENERATE, "--cuts", "30"), "30"),
    "cut twice": ((*GENERATE, "--cuts", "5,5"), "5,5"),
    "cut at a word": ((*GENERATE, "--cuts", "x"), "x"),
    "stages against cuts": ((*GENERATE, "--stages", "3", "--cuts", "5"), "2 stages"),
    "port beyond all": (("serve", "demo", "--port", "99999"), "99999"),
    "host of no name": (("serve", "demo", "--host", "no.such.host.invalid"), "no.such.host"),
    "engine of no name": (("serve", "demo", "--engine", "steam"), "steam"),
    "policy that needs a disk": (("serve", "demo", "--preemption-policy", "swap"), "swap needs"),
    "policy of no name": (("serve", "demo", "--preemption-policy", "luck"), "luck"),
    "nobody running": (("serve", "demo", "--pin-running", "0"), "running must be at least 1"),
    "no time between tokens": (("serve", "demo", "--inter-token-ms", "0"), "must be positive"),
    "detached from nothing": (("serve", "demo", "--detach"), "--address"),
    "no time to drain": (("stop", "--drain-s", "-1"), "0 or more, got -1"),
    "log in no folder": (("serve", "demo", "--port", "0", "--step-log", "/no/log"), "/no/log"),
    "temperature 9": ((*GENERATE, "--temp", "9"), "temperature"),
    "temperature nan": ((*GENERATE, "--temp", "nan"), "temperature"),
    "top_p 0": ((*GENERATE, "--top-p", "0"), "top_p"),
    "top_k -3": ((*GENERATE, "--top-k", "-3"), "top_k"),
    "min_p 2": ((*GENERATE, "--min-p", "2"), "min_p"),
    "seed of 70 bits": ((*GENERATE, "--seed", str(2**70)), "64 bits"),
    "no tokens": ((*GENERATE, "-n", "0"), "max_tokens"),
    "empty prompt": (("generate", "demo", "-p", "", "-n", "2"), "empty"),
    "prompt of no text": (("generate", "demo", "-p", b"\xff", "-n", "2"), "UTF-8"),
    "prompt beyond the pool": (("generate", "demo", "-p", LONG, "-c", "256", "-t", "1"), "255"),
    "cells of no number": ((*GENERATE, "--ctx-size", "many"), "many"),
    "no memory": ((*GENERATE, "--memory-fraction", "0"), "over 0"),
    "more sessions than ids": (("serve", "demo", "-c", "99999", "-np", "253"), "256 ids"),
    "more sessions than cells": (("serve", "demo", "-np", "33"), "8192 cells / 256"),
    "negative cells": ((*GENERATE, "--ctx-size", "-5"), "-5"),
    "cells that wrap around": ((*GENERATE, "--ctx-size", str(2**32 + 256)), "4294967552"),
    "no threads": ((*GENERATE, "--threads", "0"), "0"),
    "threads beyond ggml's": ((*GENERATE, "--threads", "100000"), "100000"),
    "KV type of no name": ((*GENERATE, "--kv", "q3"), "q3"),
}


def refused(done, code, needle):
    stderr = done.stderr.decode()
    assert done.returncode == code, stderr
    assert done.stdout == b""
    assert re.fullmatch(r"skippy-mesh: [^\n]+\n", stderr), stderr
    assert needle in stderr
    assert len(stderr) < 300


@pytest.fixture(scope="module")
def outcomes(run, bad_files):
    """How every command above ends, some at a time: most of it is starting Python and waiting."""
    with socket.socket() as taken, ThreadPoolExecutor(4) as pool:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        names = {"bad": bad_files, "port": taken.getsockname()[1]}

        def outcome(arguments):
            filled = [each.format(**names) if isinstance(each, str) else each for each in arguments]
            # Ray would try an address for minutes; here the limit is 10 s and the start of Python.
            return run(*filled, timeout=200)

        cases = {**FAILURES, **USAGES}
        ended = pool.map(outcome, (case[0] for case in cases.values()))
        yield dict(zip(cases, ended, strict=True)), names


@pytest.mark.parametrize("case", FAILURES)
def test_a_failure_is_one_line_and_exit_1(outcomes, case):
    ended, names = outcomes
    refused(ended[case], 1, FAILURES[case][1].format(**names))


@pytest.mark.parametrize("case", USAGES)
def test_bad_usage_is_one_line_and_exit_2(outcomes, case):
    ended, _ = outcomes
    refused(ended[case], 2, USAGES[case][1])


def test_debug_shows_where(run):
    done = run("generate", "demo", "-p", "Hello", "--stages", "99", "--debug")
    assert done.returncode == 1
    assert done.stdout == b""
    assert b"Traceback" in done.stderr and done.stderr.endswith(b"from 1 to 30\n")


def test_help_and_version_answer_on_stdout(run):
    for arguments in (("--help",), ("generate", "--help"), ("--version",)):
        assert b"skippy" in succeeded(run(*arguments))
