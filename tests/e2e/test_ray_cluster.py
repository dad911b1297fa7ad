"""A cluster that somebody else started: a submitted job, a detached mesh, and the end of both.

Without these a job runs out of what was uploaded, or a mesh that nobody sees any more keeps memory,
CPUs and a port.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import httpx
import openai
import pytest

from tests.models import make_llama
from tests.processes import SKIPPY, serving, still_alive
from tests.ray_head import RAY, free_ports, head_node

ROOT = Path(__file__).parents[2]
HAPPENS_WITHIN_S = 120  # a few seconds in truth
ASKED = {"prompt": [3, 5, 8, 13, 21], "max_tokens": 8, "temperature": 0}
ENDLESS = {"prompt": [3, 5, 8, 13, 21], "max_tokens": 30_000, "temperature": 0}
SERVE = ("--stages", "2", "-t", "1", "-c", str(2**15))


@pytest.fixture(scope="module")
def head(tmp_path_factory, ray_dir):
    """Exactly as many CPUs as one mesh takes: what one leaves behind, the next one lacks."""
    with head_node(tmp_path_factory.mktemp("mesh") / "cache", ray_dir, num_cpus=2) as head:
        yield head


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    # So that a request runs until it is ended.
    extra = {"llama.context_length": 2**15}
    return make_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", dtype="q8_0", extra=extra)


def skippy(head, *arguments):
    return subprocess.run(
        [*SKIPPY, *arguments],
        env=head.env,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def detached(head, model, *flags):
    done = skippy(head, "serve", str(model), *SERVE, "--port", "0", *flags, *detach_to(head))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def detach_to(head):
    return ("--detach", "--address", head.address)


def eventually(is_so):
    deadline = time.monotonic() + HAPPENS_WITHIN_S
    while not is_so():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.1)


def is_ready(url):
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/ready", timeout=30).status_code == 200
    return False


def text(url):
    """None while it cannot be answered."""
    reply = httpx.post(f"{url}/v1/completions", json=ASKED, timeout=HAPPENS_WITHIN_S)
    assert reply.status_code in (200, 503), reply.text
    return reply.json()["choices"][0]["text"] if reply.status_code == 200 else None


@contextlib.contextmanager
def endless(url):
    """A stream that its reader does not end, and the first chunk of it has come."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=240)
    extra = {"extra_body": {"ignore_eos": True}}
    with client, client.completions.create(model="m", stream=True, **ENDLESS, **extra) as stream:
        next(chunks := iter(stream))
        yield chunks


def check_gone(head, mesh_name, processes):
    assert still_alive(processes, within_s=HAPPENS_WITHIN_S) == []
    eventually(lambda: head.left_of(mesh_name) == [])


@pytest.mark.long
def test_who_has_no_token_is_told_so(head):
    assert httpx.get(f"{head.dashboard}/api/jobs/").status_code == 401
    env = {name: value for name, value in head.env.items() if not name.startswith("RAY_AUTH_")}
    command = [*SKIPPY, "stop", "--address", head.address]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("RAY_AUTH_MODE=token and RAY_AUTH_TOKEN")


@pytest.mark.long
def test_a_job_serves_what_was_uploaded_and_its_stop_is_a_drain(head, model):
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    env = {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "60"}}
    head.ray(
        "job", "submit", "--address", head.dashboard, "--submission-id", "tiny", "--no-wait",
        "--working-dir", str(ROOT), "--runtime-env-json", json.dumps(env),
        "--", "python", "-m", "skippy_mesh", "serve", str(model), *SERVE,
        "--port", str(port), "--drain-s", "1",
    )  # fmt: skip
    eventually(lambda: is_ready(url) or job(head)["status"] not in ("PENDING", "RUNNING"))
    log = head.ray("job", "logs", "--address", head.dashboard, "tiny")
    assert f"skippy_mesh ready on {url} (stages 2, ceiling" in log
    assert "stage 1: layers " in log
    assert text(url) is not None
    uploaded = list(head.folder.glob("ray/session_*/runtime_resources/working_dir_files/*/*"))
    assert {"skippy_mesh", "stages", "coordinator"} <= {path.name for path in uploaded}
    assert not {".venv", ".git", "build"} & {path.name for path in uploaded}
    processes = head.mesh_processes()
    assert len(processes) >= 5, "driver, coordinator, gateway and two stages"
    with endless(url) as chunks:
        stop = [*RAY, "job", "stop", "--address", head.dashboard, "tiny"]
        with subprocess.Popen(stop, env=head.env, stdout=subprocess.DEVNULL) as stopping:
            assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "abort"
            assert stopping.wait(HAPPENS_WITHIN_S) == 0
    assert job(head)["status"] == "STOPPED"
    check_gone(head, "skippy", processes)


def job(head):
    return head.get("/api/jobs/tiny")


@pytest.mark.long
def test_a_detached_mesh_outlives_its_command_and_its_stages_but_not_its_driver(head, model):
    said = detached(head, model)
    url = re.search(r"ready on (\S+) \(stages 2, ceiling", said)[1]
    assert f"skippy-mesh stop --address {head.address}" in said
    answer = text(url)
    assert answer is not None
    processes = head.mesh_processes()
    (driver,) = (each for each in processes if each.command.startswith("ray::Driver"))
    for title in ("ray::StageWorker", "ray::StageHead"):
        (stage,) = (each for each in processes if each.command.startswith(title))
        os.kill(stage.pid, signal.SIGKILL)
        eventually(lambda: not stage.is_alive())  # noqa: B023
        eventually(lambda: text(url) == answer)
    again = skippy(head, "serve", str(model), *SERVE, "--port", "0", *detach_to(head))
    assert (again.returncode, again.stdout) == (1, "")
    assert re.fullmatch(r"skippy-mesh: a mesh named skippy is on .* stop, or .*\n", again.stderr)
    processes += head.mesh_processes()
    os.kill(driver.pid, signal.SIGKILL)
    check_gone(head, "skippy", processes)


def test_stop_drains_a_detached_mesh_and_leaves_nothing(head, model):
    said = detached(head, model, "--mesh-name", "other")
    url = re.search(r"ready on (\S+) ", said)[1]
    processes = head.mesh_processes()
    missing = skippy(head, "stop", "--address", head.address)
    assert (missing.returncode, missing.stdout) == (1, "")
    assert missing.stderr == (
        "skippy-mesh: no mesh named skippy runs on this cluster; there is other\n"
    )
    with endless(url) as chunks:
        stop = ("stop", "--mesh-name", "other", "--address", head.address, "--drain-s", "1")
        with subprocess.Popen([*SKIPPY, *stop], env=head.env, stdout=subprocess.PIPE) as stopping:
            assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "abort"
            assert stopping.communicate(timeout=HAPPENS_WITHIN_S) == (
                b"mesh other has ended\n", None
            )  # fmt: skip
            assert stopping.returncode == 0
    assert head.left_of("other") == [], "it waits until nothing is left"
    check_gone(head, "other", processes)


def loading(head, model):
    """A command that waits for a detached mesh, whose processes these are as soon as it loads."""
    command = [*SKIPPY, "serve", str(model), *SERVE, "--port", "0", *detach_to(head)]
    child = subprocess.Popen(
        command, env=head.env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    eventually(lambda: any("ray::Stage" in each.command for each in head.mesh_processes()))
    return child, head.mesh_processes()


def test_a_driver_that_is_killed_takes_all_along(head, model):
    child, processes = loading(head, model)
    with child:
        (driver,) = (each for each in processes if each.command.startswith("ray::Driver"))
        os.kill(driver.pid, signal.SIGKILL)
        _, said = child.communicate(timeout=HAPPENS_WITHIN_S)
    assert child.returncode == 1
    assert re.fullmatch(rb"skippy-mesh: the driver of mesh skippy was lost while [^\n]+\n", said)
    check_gone(head, "skippy", processes)


@pytest.mark.long
def test_an_interrupt_while_a_detached_mesh_loads_ends_it(head, model):
    child, processes = loading(head, model)
    with child:
        child.send_signal(signal.SIGINT)
        assert child.wait(HAPPENS_WITHIN_S) == 130
    check_gone(head, "skippy", processes)


@pytest.mark.long
def test_stop_ends_a_mesh_in_a_terminal_too(head, model, tmp_path):
    flags = (str(model), *SERVE, "--port", "0", "--address", head.address)
    with serving(*flags, env=head.env, log=tmp_path / "log") as server:
        processes = head.mesh_processes()
        done = skippy(head, "stop", "--address", head.address)
        assert (done.returncode, done.stdout) == (0, "mesh skippy has ended\n"), done.stderr
        assert server.process.wait(HAPPENS_WITHIN_S) == 0
    check_gone(head, "skippy", processes)
