"""A served mesh, met as its clients meet it: the official client, impatience, signals, a crash."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.processes import SKIPPY, environment, serving, still_alive, tree

# What holds the model, the port or the cluster goes in 2 to 3 s after a kill -9 on a busy machine.
# Two helpers of Ray's own that hold neither, the dashboard and runtime-environment agents, notice
# as soon, then spend 60 s of Ray's on telling a control store that is gone.
GONE_WITHIN_S = 60
AGENTS_GONE_WITHIN_S = 600
AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
ANSWERS_WITHIN_S = 600  # tokens that take a few seconds, sixteen sessions at once

SERVE = ("demo", "-t", "1")
MESH = (*SERVE, "--stages", "2")
GREEDY = {"temperature": 0.0, "max_tokens": 24}
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "max_tokens": 24}
THINGS = (
    "tea", "rain", "iron", "moss", "salt", "owls", "silk", "sand",
    "bees", "rust", "snow", "rope", "wine", "clay", "fire", "time",
)  # fmt: skip
QUESTION = [{"role": "user", "content": "Name three colours."}]
# More tokens than any limit here lets pass.
ENDLESS = {"temperature": 0.0, "max_tokens": 4000, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def env(tmp_path_factory, ray_dir):
    return environment(tmp_path_factory.mktemp("server") / "cache", ray_dir)


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def crash(env, ray_dir, log):
    """A mesh killed in the middle of a stream: its answers before, what it left behind, its port.

    First of all tests here, so that the last one need not wait for what takes Ray a minute.
    """
    with serving(*MESH, "--port", "0", env=env, log=log / "crash") as server:
        answer = complete(client_of(server), "Once upon a time")
        started = tree(server.process.pid, ray_dir)
        with client_of(server).completions.create(
            model="demo", prompt="Count: one, two,", stream=True, **ENDLESS
        ) as stream:
            next(iter(stream))
            server.process.kill()
            server.process.wait()
        yield {"answer": answer, "started": started, "port": server.port}


@pytest.fixture(scope="module")
def server(env, log):
    step_log = ("--step-log", str(log / "steps"))
    with serving(*MESH, "--port", "0", *step_log, env=env, log=log / "mesh") as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with client_of(server) as client:
        yield client


def client_of(server):
    return openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=ANSWERS_WITHIN_S
    )


def complete(client, prompt, **parameters):
    reply = client.completions.create(model="demo", prompt=prompt, **{**GREEDY, **parameters})
    return reply.choices[0].text


def trouble(server):
    """What it said on stderr, but for the line of each request."""
    lines = server.log.read_text().splitlines()
    return [
        line for line in lines if not re.match(r"INFO skippy_mesh\.gateway\.\S+: request", line)
    ]


def stages_in(started):
    return [process for process in started if process.command.startswith("ray::Stage")]


def test_a_killed_mesh_leaves_nothing_that_holds_a_model_or_a_port(crash):
    started = crash["started"]
    agents = [process for process in started if process.command.startswith(AGENTS)]
    assert len(stages_in(started)) == len(agents) == 2
    assert any("gcs_server" in process.command for process in started)
    assert any("raylet/raylet" in process.command for process in started)
    others = [process for process in started if process not in agents]
    assert still_alive(others, within_s=GONE_WITHIN_S) == []
    with socket.socket() as probe, pytest.raises(ConnectionRefusedError):
        probe.connect(("127.0.0.1", crash["port"]))


def test_a_new_mesh_takes_the_port_and_gives_the_same_bytes_until_sigterm(crash, env, ray_dir, log):
    arguments = (*MESH, "--port", str(crash["port"]))
    with serving(*arguments, env=env, log=log / "second") as server:
        assert server.port == crash["port"]
        assert complete(client_of(server), "Once upon a time") == crash["answer"]
        before = {process.pid for process in crash["started"]}
        started = [each for each in tree(server.process.pid, ray_dir) if each.pid not in before]
        assert len(stages_in(started)) == 2
        stream = client_of(server).completions.create(
            model="demo", prompt="Count: one, two,", stream=True, **ENDLESS
        )
        next(received := iter(stream))
        server.process.send_signal(signal.SIGTERM)
        assert [chunk.choices[0].finish_reason for chunk in received][-1] == "abort"
        assert server.process.wait(GONE_WITHIN_S) == 0
    assert still_alive(started, within_s=GONE_WITHIN_S) == []
    assert trouble(server) == []


def test_the_ready_line_names_the_real_url_and_the_stages(server):
    ready = next(line for line in server.lines if line.startswith("skippy_mesh ready"))
    assert ready.startswith(f"skippy_mesh ready on http://127.0.0.1:{server.port} (stages 2,")
    assert server.port != 0


def test_health_is_ok(server):
    reply = httpx.get(f"{server.url}/health")
    assert reply.status_code == 200
    assert reply.json()["status"] == "ok"


def test_the_status_says_what_each_store_takes(server):
    """SmolLM2: keys and values of 3 heads of 64, 32 of them in 34 bytes."""
    stages = httpx.get(f"{server.url}/status").json()["stages"]
    for stage in stages:
        store, (first, end) = stage["components"]["attention"], stage["layers"]
        assert store["bytes"] == store["cells"] * (end - first) * 2 * 3 * 64 * 34 // 32


def test_the_status_command_shows_what_the_server_says(server):
    def status(*arguments):
        command = [*SKIPPY, "status", "--url", server.url, *arguments]
        return subprocess.run(command, capture_output=True, timeout=120, check=True).stdout.decode()

    said = json.loads(status("--json"))
    assert said["state"] == "ready" and len(said["stages"]) == 2
    shown = status()
    assert f"demo is ready at {server.url}" in shown
    assert f"ceiling {said['ceiling']['value']}, bound by " in shown
    for stage in said["stages"]:
        lo, hi = stage["layers"]
        assert f"{lo}:{hi}" in shown
    assert "attention" in shown and " of " in shown


def test_chat_streams_what_it_answers_at_once(client):
    plain = client.chat.completions.create(model="demo", messages=QUESTION, **GREEDY)
    stream = client.chat.completions.create(
        model="demo",
        messages=QUESTION,
        stream=True,
        stream_options={"include_usage": True},
        **GREEDY,
    )
    chunks = list(stream)
    deltas = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(deltas) == plain.choices[0].message.content
    assert len(deltas) > 3
    usage = plain.usage
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert getattr(chunks[-1].usage, name) == getattr(usage, name)
    cached = chunks[-1].usage.prompt_tokens_details.cached_tokens
    assert cached == usage.prompt_tokens - 1, "the same prompt was just computed"
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert 0 < usage.completion_tokens <= 24 and usage.prompt_tokens > 5
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert [reason for reason in reasons if reason] == [plain.choices[0].finish_reason]


def test_completions_stream_what_they_answer_at_once(client):
    plain = client.completions.create(model="demo", prompt="Once upon a time", **GREEDY)
    stream = client.completions.create(
        model="demo", prompt="Once upon a time", stream=True, **GREEDY
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == plain.choices[0].text
    assert plain.usage.completion_tokens == 24
    assert plain.choices[0].finish_reason == "length"


def test_a_schema_and_logprobs_cross_the_stages(client):
    schema = {
        "type": "object",
        "properties": {"capital": {"type": "string", "maxLength": 20}},
        "required": ["capital"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    asked = {"model": "demo", "messages": QUESTION, "max_tokens": 60, "response_format": form,
             "temperature": 1, "seed": 4, "presence_penalty": 0.5}  # fmt: skip
    plain = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    (choice,) = plain.choices
    assert choice.finish_reason == "stop"
    assert list(json.loads(choice.message.content)) == ["capital"]
    assert len(choice.logprobs.content) == plain.usage.completion_tokens
    assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
    again = client.chat.completions.create(**asked)
    assert again.choices[0].message.content == choice.message.content


def test_a_seed_repeats_and_another_differs(client):
    first = complete(client, "Once upon a time", seed=3, **SAMPLED)
    assert complete(client, "Once upon a time", seed=3, **SAMPLED) == first
    assert complete(client, "Once upon a time", seed=4, **SAMPLED) != first


def test_a_crowd_gets_what_each_gets_alone(client):
    prompts = ["Once upon a time", "The capital of France is", "Water boils at"]
    alone = [complete(client, prompt) for prompt in prompts]
    assert len(set(alone)) == 3
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda prompt: complete(client, prompt), prompts)) == alone


def metric(server, name):
    """The values of all series of ``name``."""
    families = text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text)
    return [sample.value for family in families for sample in family.samples if sample.name == name]


def test_sixteen_in_flight_answer_as_each_alone(client, server, log):
    """With no option set: eight clients all run at once, and every byte is as before."""
    prompts = [f"{number} things to know about {thing} are" for number, thing in enumerate(THINGS)]
    kinds = [{}, {"temperature": 0.8, "seed": 5}]

    def ask(number):
        return complete(client, prompts[number], **kinds[number % 2])

    alone = list(map(ask, range(16)))
    assert len(set(alone)) == 16
    num_before = len((log / "steps").read_text().splitlines())
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, range(16))) == alone
    steps = (log / "steps").read_text().splitlines()[num_before:]
    assert max(json.loads(line)["running"] for line in steps) >= 8
    (num_steps,) = {sum(metric(server, "skippy:steps_total"))}
    assert metric(server, "skippy:decode_calls_total") == [num_steps] * 2


@pytest.mark.parametrize("limit", [1, 20])
def test_a_client_that_leaves_frees_the_engine(client, server, limit):
    with client.completions.create(
        model="demo", prompt="Count: one, two,", stream=True, **ENDLESS
    ) as stream:
        for _, _ in zip(range(limit), stream, strict=False):
            pass
    # Its 4,000 tokens would take longer than this.
    deadline = time.monotonic() + ANSWERS_WITHIN_S
    while metric(server, "skippy:requests_running") != [0]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert complete(client, "The capital of France is").startswith(" Paris")


def test_a_plain_request_whose_client_leaves_frees_the_engine(server, client):
    with pytest.raises(openai.APITimeoutError):
        impatient = client.with_options(timeout=2)
        impatient.completions.create(model="demo", prompt="Count: one, two,", **ENDLESS)
    assert complete(client, "The capital of France is").startswith(" Paris")


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_a_prompt_that_can_never_fit_is_refused_before_any_output(client, stream):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="demo", prompt="long " * 9000, stream=stream, **GREEDY)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "prompt"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "long " * 9000}],
            stream=stream,
            **GREEDY,
        )
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")


def test_a_server_without_trouble_says_nothing_but_who_was_served(server):
    assert trouble(server) == []


def test_one_stage_serves_the_same_bytes_without_ray(client, env, ray_dir, log):
    flags = (*SERVE, "--port", "0", "--max-model-len", "4000")
    with serving(*flags, env=env, log=log / "single") as single:
        started = tree(single.process.pid, single.log)  # the tree alone: others run Ray here
        assert [process.pid for process in started] == [single.process.pid]
        for prompt in ("Once upon a time", "The capital of France is"):
            assert complete(client_of(single), prompt) == complete(client, prompt)
        with pytest.raises(openai.BadRequestError, match="the context holds 4000"):
            complete(client_of(single), "long " * 4000)
        stream = client_of(single).completions.create(
            model="demo", prompt="Count: one, two,", stream=True, **ENDLESS
        )
        next(received := iter(stream))
        for _ in range(2):  # the second one does not wait for those who still read
            single.process.send_signal(signal.SIGINT)
        assert [chunk.choices[0].finish_reason for chunk in received][-1] == "abort"
        assert single.process.wait(GONE_WITHIN_S) == 0
    assert trouble(single) == []


def test_a_dead_stage_is_a_pause_and_the_server_still_ends(server, client):
    """The last one to use this server."""
    asked = {"model": "demo", "prompt": "Count: one, two,", "max_tokens": 200, "temperature": 0}
    undisturbed = client.completions.create(**asked)
    stream = client.completions.create(**asked, stream=True)
    received = [next(stream).choices[0].text]
    os.kill(stages_in(tree(server.process.pid, server.log))[0].pid, signal.SIGKILL)
    received += [chunk.choices[0].text for chunk in stream]
    assert "".join(received) == undisturbed.choices[0].text
    deadline = time.monotonic() + GONE_WITHIN_S
    while httpx.get(f"{server.url}/health", timeout=30).status_code != 200:
        assert time.monotonic() < deadline
    assert client.completions.create(**asked).choices[0].text == undisturbed.choices[0].text
    started = tree(server.process.pid, server.log)
    assert server.end(signal.SIGTERM, within_s=GONE_WITHIN_S) == 0
    assert still_alive(started, within_s=GONE_WITHIN_S) == []


@pytest.mark.timeout(AGENTS_GONE_WITHIN_S + 60)
def test_in_the_end_nothing_of_a_killed_mesh_is_left(crash):
    assert still_alive(crash["started"], within_s=AGENTS_GONE_WITHIN_S) == []
