"""Gateway and coordinator as actors: what the end of either costs, and overload in front of both.

Without these a coordinator that dies stops the mesh, or what it counted is never given back.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families

from coordinator import launch, reservation
from coordinator.costs import StageSizes
from coordinator.launch import gateway_actor, mesh
from skippy_mesh.config import ContextConfig, EngineSettings, specs_of
from skippy_mesh.errors import RuntimeUnavailableError, SkippyError
from skippy_mesh.gateway.server import GatewayServer, GatewaySpec, listen
from skippy_mesh.places import AdmissionLimits
from skippy_mesh.planning import costs_of_model
from stages import part
from stages.gguf_file import ModelFile
from stages.head import StageHead
from stages.worker import StageWorker
from tests.processes import tree

pytestmark = pytest.mark.usefixtures("cluster")
HAPPENS_WITHIN_S = 120  # seconds in truth, but a stage may have to be loaded again
CONTEXT = ContextConfig(num_cells=2048, num_lanes=8, num_threads=1)
names = (f"gate{number}" for number in itertools.count())


class Served:
    def __init__(self, name, spec, limits, mesh, gateway):
        self.name, self.spec, self.limits = name, spec, limits
        self.mesh, self.gateway = mesh, gateway
        url = gateway.start()
        self.http = httpx.Client(base_url=url, timeout=HAPPENS_WITHIN_S)

    def ask(self, number=0, max_tokens=8):
        prompt = [3 + (7 * at + 31 * number) % 300 for at in range(20)]
        body = {
            "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True,
        }  # fmt: skip
        return self.http.post("/v1/completions", json=body)

    def tokens(self, number=0, max_tokens=8):
        return ids_of(self.ask(number, max_tokens))

    def num_places(self):
        return ray.get(ray.get_actor(f"{self.name}_coordinator").num_open.remote())

    def metric(self, name, **labels):
        families = text_string_to_metric_families(self.http.get("/metrics").text)
        full = name if ":" in name else f"skippy:{name}"
        return sum(
            sample.value for family in families for sample in family.samples
            if sample.name == full and labels.items() <= sample.labels.items()
        )  # fmt: skip


def ids_of(reply):
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["token_ids"]


def kill(title):
    (process,) = [
        process for process in tree(os.getpid(), Path("/no/other/mesh"))
        if process.command.startswith(f"ray::{title}")
    ]  # fmt: skip
    os.kill(process.pid, signal.SIGKILL)


def eventually(is_so):
    deadline = time.monotonic() + HAPPENS_WITHIN_S
    while not is_so():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.05)


@contextlib.contextmanager
def serving(model, *, max_queue, specs=None):
    name = next(names)
    with listen("127.0.0.1", 0) as sock:  # one that is free, and the same after a restart
        port = sock.getsockname()[1]
    limits = AdmissionLimits(ceiling=8, max_queue=max_queue, max_queue_tokens=8192)
    spec = GatewaySpec(host="127.0.0.1", port=port, model_path=str(model), model_name="tiny")
    with (
        mesh(
            specs or specs_of(model, 6, (2,), CONTEXT), EngineSettings(), mesh_name=name
        ) as started,
        gateway_actor(
            GatewayServer, spec, started, limits, mesh_name=name, has_board=True
        ) as gateway,
    ):
        served = Served(name, spec, limits, started, gateway)
        with served.http:
            yield served
            gateway.stop()
            eventually(lambda: gateway.wait(1))


@pytest.fixture(scope="module")
def served(cluster, model):
    with serving(model, max_queue=8) as served:
        yield served


def test_the_actors_have_names_and_the_status_says_where_what_is(served):
    found = {actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)}
    kinds = ("stage_0", "stage_1", "coordinator", "gateway_0")
    assert found == {f"{served.name}_{kind}" for kind in kinds}
    assert served.tokens() == served.tokens()
    status = served.http.get("/status").json()
    assert status["state"] == "ready"
    assert [stage["layers"] for stage in status["stages"]] == [[0, 2], [2, 6]]
    for stage in status["stages"]:
        assert stage["kv_types"] == {"k": "q8_0", "v": "q8_0"}
        assert (stage["epoch"], stage["last_reply_age_s"] >= 0) == (0, True)
        assert 0 <= stage["lease_age_s"] < HAPPENS_WITHIN_S
    assert {stage["node"] for stage in status["stages"]} == {os.uname().nodename}
    assert status["ceiling"] == {
        "value": 8, "stage": "0", "component": "attention", "term": "2048 cells / 256 per session"
    }  # fmt: skip
    assert (status["running"], status["queue"]) == (0, {"requests": 0, "tokens": 0})
    assert served.metric("stage_up") == 2


def exported():
    """What Ray's agent on this node shows Prometheus: values summed over all series of a name."""
    (node,) = ray.nodes()
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    values, labels = Counter(), {}
    for family in text_string_to_metric_families(httpx.get(url).text):
        for sample in family.samples:
            if sample.labels.get("model_name") == "tiny":
                values[sample.name] += sample.value
                labels[sample.name] = sample.labels
    return values, labels


ONCE_A_REQUEST = (
    "vllm_request_success_total", "serve_deployment_request_counter_total",
    "vllm_e2e_request_latency_seconds_count", "vllm_time_to_first_token_seconds_count",
    "vllm_request_time_per_output_token_seconds_count", "vllm_request_prompt_tokens_count",
    "vllm_request_generation_tokens_count", "vllm_request_queue_time_seconds_count",
    "vllm_request_prefill_time_seconds_count", "vllm_request_decode_time_seconds_count",
    "skippy_requests_finished_total",
)  # fmt: skip
TOTALS = {
    "vllm_generation_tokens_total": "vllm:generation_tokens_total",
    "vllm_prompt_tokens_total": "vllm:prompt_tokens_total",
    "vllm_prefix_cache_queries_total": "vllm:prefix_cache_queries_total",
    "skippy_steps_total": "steps_total",
    "skippy_step_rows_count": "step_rows_count",
}
GAUGES = (
    "vllm_num_requests_running", "vllm_num_requests_waiting", "vllm_num_requests_swapped",
    "vllm_kv_cache_usage_perc", "skippy_kv_cells", "skippy_stage_up", "skippy_memory_bytes",
)  # fmt: skip


def test_ray_shows_what_its_boards_ask_for_and_what_the_page_says(served):
    served.tokens()
    expected = dict.fromkeys(ONCE_A_REQUEST, served.metric("requests_finished_total"))
    expected |= {name: served.metric(ours) for name, ours in TOTALS.items()}
    assert all(expected.values())
    eventually(lambda: {name: exported()[0][f"ray_{name}"] for name in expected} == expected)
    values, labels = exported()
    assert labels.keys() >= {f"ray_{name}" for name in GAUGES}
    page_sum = served.metric("vllm:request_prompt_tokens_sum")
    assert values["ray_vllm_request_prompt_tokens_sum"] == pytest.approx(page_sum, rel=0.15)
    # Serve LLM joins by process with the counter of Ray Serve, and Data LLM wants no replica.
    processes = {found["WorkerId"] for name, found in labels.items() if "_vllm_" in name}
    assert processes == {labels["ray_serve_deployment_request_counter_total"]["WorkerId"]}
    assert "ReplicaId" not in labels["ray_vllm_generation_tokens_total"]


def test_what_a_hop_carries_and_what_memory_a_stage_takes(served):
    served.tokens()
    row_bytes = 4 * ModelFile.open(served.spec.model_path).width
    num_rows = served.metric("step_rows_sum")
    assert served.metric("activation_bytes_total", hop="0-1") == num_rows * row_bytes
    assert served.metric("ready") == 1
    assert served.http.post("/v1/peak_reset").status_code == 204
    for stage in "01":
        now, peak = (
            served.metric(f"memory_{name}", stage=stage) for name in ("bytes", "peak_bytes")
        )
        assert 2**24 < now <= peak
    assert "skippy:kv_bytes" not in served.http.get("/metrics").text, "no plan says what one takes"


def test_a_coordinator_killed_under_load_ends_nobody_and_comes_back_knowing_who_is_in(served):
    alone = [served.tokens(number, 300) for number in range(2)]
    with ThreadPoolExecutor() as pool:
        running = [pool.submit(served.ask, number % 2, 300) for number in range(4)]
        eventually(lambda: served.metric("requests_running") == 4)
        kill("Coordinator")
        codes = []
        while 200 not in codes:
            reply = served.ask(9)
            codes.append(reply.status_code)
            if reply.status_code != 200:
                error = reply.json()["error"]
                assert (reply.status_code, error["code"]) == (503, "coordinator_lost")
                assert 1 <= int(reply.headers["Retry-After"]) <= 60
                time.sleep(0.05)
        assert not any(each.done() for each in running), "the load has gone before the end"
        eventually(lambda: served.num_places() == 4)
        assert [ids_of(each.result()) for each in running] == alone * 2
    eventually(lambda: served.num_places() == 0)


def overload(served, seconds):
    """Four times the ceiling, all asking again and again: counts by status, and what was wrong."""
    alone = [served.tokens(number) for number in range(8)]
    end_s, codes, wrong = time.monotonic() + seconds, Counter(), []

    def client(number):
        while time.monotonic() < end_s:
            reply = served.ask(number % 8)
            codes[reply.status_code] += 1
            if reply.status_code == 200 and ids_of(reply) != alone[number % 8]:
                wrong.append(number)
            if reply.status_code == 429:
                assert 1 <= int(reply.headers["Retry-After"]) <= 60
                assert reply.json()["error"]["limit_by"]["component"] == "attention"
                time.sleep(0.1)  # not what it was told: pressure is what this is about

    threads = [threading.Thread(target=client, args=(number,)) for number in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return codes, wrong


@pytest.mark.parametrize("seconds", [5, pytest.param(60, marks=pytest.mark.long)])
def test_four_times_the_ceiling_meets_only_success_and_come_back_later(served, seconds):
    num_before = served.metric("requests_finished_total")
    codes, wrong = overload(served, seconds)
    assert set(codes) == {200, 429}
    assert wrong == []
    finished = served.metric("requests_finished_total") - num_before
    assert finished == codes[200] + 8
    assert served.metric("requests_finished_total", reason="error") == 0
    assert served.metric("requests_rejected_total", reason="queue_full") >= codes[429]
    epochs = {stage: served.metric("decode_calls_total", stage=stage) for stage in "01"}
    assert set(epochs.values()) == {served.metric("steps_total")}, "a step failed"
    eventually(lambda: served.metric("kv_cells", state="active") == 0)
    assert served.metric("kv_cells", state="reserved") == 0
    eventually(lambda: served.num_places() == 0)


def test_a_killed_gateway_is_started_again_and_what_it_asked_for_is_ended(served):
    with ThreadPoolExecutor() as pool:
        cut_off = pool.submit(served.ask, 1, 1900)
        eventually(lambda: served.metric("requests_running") == 1)
        kill("GatewayServer")
        assert not served.gateway.wait(HAPPENS_WITHIN_S), "it has not ended, it was started again"
        with pytest.raises(httpx.TransportError):
            cut_off.result()
    assert len(served.tokens()) == 8
    assert served.metric("requests_running") == 0, "nobody is left to hear of it"
    eventually(lambda: served.metric("kv_cells", state="active") == 0)
    eventually(lambda: served.num_places() == 0)


@pytest.mark.parametrize("stage", [1, 0])
def test_a_stage_killed_under_load_is_a_pause_for_who_runs_and_503_for_who_comes(served, stage):
    alone = [served.tokens(number, 300) for number in range(2)]
    restarts = served.metric("stage_restarts_total", stage=str(stage))
    with ThreadPoolExecutor() as pool:
        running = [pool.submit(served.ask, number % 2, 300) for number in range(4)]
        eventually(lambda: served.metric("requests_running") == 4)
        kill("StageHead" if stage == 0 else "StageWorker")
        eventually(lambda: served.metric("stage_up", stage=str(stage)) == 0)
        reply = served.ask(9)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "stage_unavailable")
        assert f"stage {stage} " in reply.json()["error"]["message"]
        assert int(reply.headers["Retry-After"]) >= 1
        assert [ids_of(each.result()) for each in running] == alone * 2
    eventually(lambda: served.http.get("/health").status_code == 200)
    assert served.metric("stage_restarts_total", stage=str(stage)) == restarts + 1
    assert served.metric("preemptions_total", reason="stage_loss") >= 4
    epochs = [each["epoch"] for each in served.http.get("/status").json()["stages"]]
    assert epochs[0] == epochs[1] == served.metric("stage_epoch", stage="0") > 0
    eventually(lambda: served.num_places() == 0)


def needing(specs):
    """``specs``, each of which has what a plan says its stage takes."""
    sizes = StageSizes(
        costs_of_model(ModelFile.open(specs[0].model_path), "q8_0"), num_cells=1, num_ids=1
    )
    return [replace(each, need=sizes.need(each.first_layer, each.end_layer)) for each in specs]


@pytest.mark.parametrize("stage", [1, 0])
def test_a_stage_that_comes_back_with_less_memory_lowers_the_ceiling(
    model, monkeypatch, tmp_path, stage
):
    short = tmp_path / "short"

    def load_with_what_is_free(worker):
        if short.exists():
            need = worker.spec.need
            part.available_bytes = lambda: need.of(1024, 8)
        return StageWorker.load(worker)

    class Worker(StageWorker):
        load = load_with_what_is_free

    class Head(StageHead):
        def load(self):
            return load_with_what_is_free(self._worker)

    monkeypatch.setattr(launch, "StageWorker", Worker)
    monkeypatch.setattr(launch, "StageHead", Head)
    specs = needing(specs_of(model, 6, (2,), CONTEXT))
    with serving(model, max_queue=2, specs=specs) as served:
        alone = [served.tokens(number, 200) for number in range(2)]
        for is_short in (True, False):
            short.touch() if is_short else short.unlink()
            cells, sessions = (1024, 4) if is_short else (2048, 8)
            with ThreadPoolExecutor(12) as pool:
                running = [pool.submit(served.ask, number % 2, 200) for number in range(4)]
                eventually(lambda: served.metric("requests_running") == 4)
                kill("Worker" if stage else "Head")
                assert [ids_of(each.result()) for each in running] == alone * 2
            eventually(lambda: served.http.get("/health").status_code == 200)
            page = served.http.get("/status").json()
            assert page["ceiling"] == {
                "value": sessions, "stage": str(stage if is_short else 0),
                "component": "attention", "term": f"{cells} cells / 256 per session",
            }  # fmt: skip
            (card,) = served.http.get("/v1/models").json()["data"]
            assert card["max_model_len"] == cells
            with ThreadPoolExecutor(20) as pool:
                replies = list(pool.map(lambda number: served.ask(number % 2, 24), range(20)))
            assert {reply.status_code for reply in replies} == {200, 429}
            refusal = next(reply for reply in replies if reply.status_code == 429).json()["error"]
            assert refusal["message"].startswith(f"{sessions} requests may run and 2 may wait")
            assert refusal["limit_by"]["stage"] == page["ceiling"]["stage"]
        assert served.metric("stage_restarts_total", stage=str(stage)) == 2
        assert served.metric("stage_restarts_total") == 2
        eventually(lambda: served.num_places() == 0)


def test_a_port_in_use_is_one_line(served):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with (
            gateway_actor(
                GatewayServer, replace(served.spec, port=port), served.mesh, served.limits,
                mesh_name=next(names),
            ) as gateway,
            pytest.raises(SkippyError, match=f"cannot listen on 127.0.0.1:{port}: .* another"),
        ):  # fmt: skip
            gateway.start()


def test_a_node_for_each_stage_is_asked_for_and_what_lacks_is_said(model, monkeypatch, capfd):
    monkeypatch.setattr(reservation, "_TIMEOUT_S", 2.0)
    monkeypatch.setattr(reservation, "_NOTICE_S", 0.5)
    specs = specs_of(model, 6, (2,), CONTEXT)
    with (
        pytest.raises(RuntimeUnavailableError, match=r"no room for stage 1 \(1 CPU\), each on a"),
        mesh(specs, EngineSettings(), mesh_name=next(names), spread=True),
    ):
        raise AssertionError("started")
    assert "skippy-mesh: waiting for nodes: no room for stage" in capfd.readouterr().err
