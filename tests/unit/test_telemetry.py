"""What the page and the step log say of scripted steps.

Without these a dashboard would show zeros for what nobody knows, states that do not add up, or a
bubble where there was simply no work.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from coordinator.ceiling import ceiling
from skippy_mesh.client import Deliver, EngineClient, ReportQueue
from skippy_mesh.config import StepRules
from skippy_mesh.engine import Engine, EnginePlan
from skippy_mesh.errors import UsageError
from skippy_mesh.gateway.app import create_app
from skippy_mesh.gateway.errors import digests_of
from skippy_mesh.gateway.readiness import LOADING, Problem
from skippy_mesh.gateway.token_stream import Limits
from skippy_mesh.mesh_facts import StageSight
from skippy_mesh.messages import (
    Request,
    StageTime,
    StepBatch,
    StepReport,
    StepResult,
    TokenEvent,
)
from skippy_mesh.scheduler.memory import Capacity
from skippy_mesh.step_log import StepLog
from skippy_mesh.step_totals import DURATIONS_S, STEP_ROWS
from stages.fake import FakeGrammars, FakeTokenizer
from tests.engines import BOUNDS, places_of
from tests.telemetry import (
    STAGES,
    WAITING,
    Clock,
    Seen,
    idle,
    record,
    seen,
    state,
    step,
    telemetry_of,
    token,
)


def test_before_the_mesh_is_loaded_events_count_from_0_and_the_unknown_is_absent() -> None:
    page = seen(telemetry_of(described=False, build={"version": "1", "layout": "0:3,3:6"}))
    assert page("build_info", version="1", layout="0:3,3:6") == 1
    for name in (
        "steps_total", "step_tokens_total", "requests_finished_total", "requests_admitted_total",
        "requests_rejected_total", "preemptions_total", "recomputed_tokens_total",
        "prefix_shares_total", "prefix_tokens_total", "step_seconds_count", "step_rows_count",
    ):  # fmt: skip
        assert page(name) == 0
    for name in (
        "requests_running", "requests_waiting", "kv_cells", "kv_cells_capacity", "lanes",
        "admission_ceiling", "binding_stage", "seconds_since_last_token", "batches_in_flight",
        "decode_calls_total", "stage_wait_seconds_total",
    ):  # fmt: skip
        assert name not in page
    assert "_created" not in page.text


def test_a_loaded_mesh_is_known_to_be_empty() -> None:
    page = seen(telemetry_of())
    assert page("requests_running") == page("requests_waiting") == page("batches_in_flight") == 0
    assert page("kv_cells", stage="1", component="attention", state="free") == 4352
    assert page("lanes", state="free") == page("lanes") == 6
    assert page("decode_calls_total", stage="1") == page("stage_compute_seconds_count") == 0
    assert "seconds_since_last_token" not in page


def test_a_step_is_counted_under_every_name() -> None:
    telemetry = telemetry_of()
    telemetry.observe(step(token(), token("b", finish_reason="stop")))
    telemetry.observe(step(kind="decode"))
    page = seen(telemetry)
    expected = {
        ("steps_total", "kind", "mixed"): 1,
        ("steps_total", "kind", "decode"): 1,
        ("step_tokens_total", "phase", "prefill"): 120,
        ("step_tokens_total", "phase", "decode"): 6,
        ("step_tokens_total", "phase", "recompute"): 28,
        ("recomputed_tokens_total", "part", "prompt"): 20,
        ("recomputed_tokens_total", "part", "output"): 8,
        ("requests_admitted_total", "kind", "new"): 4,
        ("requests_admitted_total", "kind", "resume"): 2,
        ("preemptions_total", "reason", "memory"): 2,
        ("requests_finished_total", "reason", "stop"): 1,
        ("requests_finished_total", "reason", "abort"): 0,
        ("decode_calls_total", "stage", "0"): 2,
        ("decode_calls_total", "stage", "1"): 4,
        ("stage_compute_seconds_count", "stage", "1"): 2,
        ("requests_waiting", "reason", "preempted"): 2,
        ("lanes", "state", "resident"): 1,
    }
    assert {key: page(key[0], **{key[1]: key[2]}) for key in expected} == expected
    assert page("stage_compute_seconds_sum", stage="0") == pytest.approx(0.08)
    assert page("step_seconds_sum") == pytest.approx(0.2)
    assert page("scheduler_seconds_bucket", le="0.001") == 2
    assert (page("requests_running"), page("queue_tokens"), page("batches_in_flight")) == (2, 77, 2)


def test_reasons_sum_to_all_waiting_and_states_to_what_each_stage_has() -> None:
    telemetry = telemetry_of()
    telemetry.observe(step())
    page = seen(telemetry)
    assert page("requests_waiting") == sum(WAITING.values())
    stores = page.samples["skippy:kv_cells_capacity"]
    assert len(stores) == 3
    for labels, capacity in stores:
        assert page("kv_cells", **labels) == capacity
        assert page("kv_cells", **labels, state="active") == 100
    assert page("lanes") == 6


def test_the_buckets_hold_what_is_at_most_their_bound() -> None:
    telemetry = telemetry_of()
    for rows in (1, 8, 9, 5000):
        counts = {"recompute_prompt_tokens": 0, "recompute_output_tokens": 0, "decode_tokens": 0}
        telemetry.observe(step(prefill_tokens=rows, **counts))
    page = seen(telemetry)
    bounds = [labels["le"] for labels, _ in page.samples["skippy:step_rows_bucket"]]
    assert [float(bound) for bound in bounds] == [*STEP_ROWS, float("inf")]
    found = {bound: page("step_rows_bucket", le=bound) for bound in bounds}
    assert (found["1.0"], found["8.0"], found["16.0"], found["+Inf"]) == (1, 2, 3, 4)
    assert page("step_rows_sum") == 5018
    seconds = [labels["le"] for labels, _ in page.samples["skippy:step_seconds_bucket"]]
    assert [float(bound) for bound in seconds] == [*DURATIONS_S, float("inf")]


def test_exactly_one_term_binds_the_ceiling() -> None:
    found = ceiling(STAGES, parallel=2)
    telemetry = telemetry_of(described=False)
    telemetry.describe(STAGES, terms=found.terms, binding=found.binding)
    page = seen(telemetry)
    assert page.samples["skippy:binding_stage"] == [
        ({"stage": "all", "component": "lanes", "term": "operator"}, 1)
    ]
    assert page("admission_ceiling_effective") == 2
    assert page("admission_ceiling", stage="1", component="attention") == 17
    assert page("admission_ceiling", stage="1", component="lanes") == 6


def test_a_wait_counts_where_work_was_left_and_not_where_the_mesh_had_run_dry() -> None:
    telemetry = telemetry_of()
    waited = {"stages": (StageTime(0.04, 9.0), StageTime(0.05, 9.0))}
    telemetry.observe(step(**waited))  # the mesh was idle
    assert seen(telemetry)("stage_wait_seconds_total") == 0
    telemetry.observe(step(state=idle()))
    assert seen(telemetry)("stage_wait_seconds_total", stage="1") == pytest.approx(0.02)
    telemetry.observe(step(**waited))
    assert seen(telemetry)("stage_wait_seconds_total", stage="1") == pytest.approx(0.02)
    telemetry.observe(StepReport((token(finish_reason="abort"),), state=idle()))
    telemetry.observe(step(**waited))
    assert seen(telemetry)("stage_wait_seconds_total", stage="0") == pytest.approx(0.01)


def test_the_last_token_ages_while_requests_run_and_is_absent_when_none_do() -> None:
    clock = Clock()
    telemetry = telemetry_of(clock=clock)
    clock.now_s = 500.0
    telemetry.observe(step())  # runs again: a long pause before is no stall
    clock.now_s = 503.0
    assert seen(telemetry)("seconds_since_last_token") == 3
    telemetry.observe(step(token()))
    clock.now_s = 504.0
    telemetry.observe(step())
    assert seen(telemetry)("seconds_since_last_token") == 1
    telemetry.observe(StepReport((token(finish_reason="abort"),), state=idle()))
    page = seen(telemetry)
    assert "seconds_since_last_token" not in page
    assert page("requests_running") == page("batches_in_flight") == 0


def test_a_report_that_knows_no_state_takes_the_gauges_off_the_page() -> None:
    telemetry = telemetry_of()
    telemetry.observe(step())
    telemetry.observe(StepReport((TokenEvent(request_id="a", finish_reason="error", error="x"),)))
    page = seen(telemetry)
    assert "requests_running" not in page and "kv_cells" not in page and "lanes" not in page
    assert page("requests_finished_total", reason="error") == 1
    assert page("kv_cells_capacity", stage="0", component="attention") == 4096


def test_an_engine_without_records_shows_no_steps_at_all() -> None:
    telemetry = telemetry_of(counts_steps=False)
    telemetry.observe(StepReport((token(finish_reason="length"),)))
    page = seen(telemetry)
    assert page("requests_finished_total", reason="length") == 1
    assert "steps_total" not in page and "requests_running" not in page


def test_the_step_log_has_the_contracts_keys(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    telemetry = telemetry_of(step_log=StepLog(path))
    telemetry.observe(StepReport((token("z", finish_reason="abort"),), state=state()))
    prefixes = {
        "prefix_hits": 2, "prefix_misses": {"cold": 2, "off": 1}, "prefix_hit_tokens": 70
    }  # fmt: skip
    telemetry.observe(step(token(), token("b", finish_reason="stop"), **prefixes))
    telemetry.observe(step(step_id=6))
    telemetry.close()
    first, second = map(json.loads, path.read_text().splitlines())
    store = {"active": 100, "resident": 20, "reserved": 30, "free": 3946}
    assert first == {
        "epoch": 1, "step_id": 5, "kind": "mixed", "rows": 77, "in_flight": 2,
        "running": 2, "waiting": 6, "admitted": 3, "preempted": 1, "finished": 2, "cancelled": 1,
        "prefill_tokens": 60, "decode_tokens": 3, "recompute_tokens": 14,
        "kv": [{"attention": store}, {"attention": {**store, "free": 4202}, "window": store}],
        "prefix_hits": 2, "prefix_misses": 3, "prefix_hit_tokens": 70,
        "answered_s": 7.25, "step_ms": 100.0, "plan_ms": 0.4,
        "stage_ms": [40.0, 50.0], "wait_ms": [10.0, 20.0],
    }  # fmt: skip
    assert (second["step_id"], second["finished"], second["cancelled"]) == (6, 0, 0)


@pytest.mark.parametrize("path", ["", "no/such/folder/log", "nul\0byte"])
def test_a_log_that_cannot_be_written_is_one_error(path: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot write the step log"):
        StepLog(str(tmp_path / path))


def test_a_full_disk_ends_the_log_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    telemetry = telemetry_of(step_log=StepLog("/dev/full"))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            telemetry.observe(step())
        telemetry.close()
    assert [entry.getMessage() for entry in caplog.records] == [
        "the step log /dev/full ends here, serving goes on: No space left on device"
    ]
    assert seen(telemetry)("steps_total") == 3


def test_steps_that_are_quicker_than_the_log_waits_are_all_written(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "steps")
    for number in range(20_000):
        log.write(lambda number=number: {"step": number})  # type: ignore[misc]
    log.close()
    lines = (tmp_path / "steps").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(20_000))


def test_a_disk_that_hangs_holds_up_nobody_but_the_log(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    log = StepLog(tmp_path / "pipe")
    telemetry = telemetry_of(step_log=log)
    for number in range(1000):  # a pipe takes 64 KiB: 150 lines
        telemetry.observe(step(step_id=number))
    assert seen(telemetry)("steps_total") == 1000
    assert log._thread.is_alive()
    os.set_blocking(reader, True)
    data = b""
    while data.count(b"\n") < 1000:
        data += os.read(reader, 1 << 16)
    assert [json.loads(line)["step_id"] for line in data.splitlines()] == list(range(1000))
    telemetry.close()
    os.close(reader)


class OneStage:
    """Answers every lane 1, after a quarter of a second on ``clock`` for a batch with rows."""

    def __init__(self, clock: Clock):
        self._clock = clock

    def submit(self, batch: StepBatch) -> OneStage:
        self._batch = batch
        self._clock.now_s += 0.25 * (batch.num_rows > 0)
        return self

    def result(self) -> StepResult:
        batch = self._batch
        return StepResult(
            epoch=batch.epoch,
            step_id=batch.step_id,
            tokens=dict.fromkeys(batch.sampled_lanes, 1),
            stages=(StageTime(0.25, 0.0, int(batch.num_rows > 0)),),
        )

    def lane_ends(self) -> list[dict[int, int]]:
        return [{}]


def test_a_real_engines_reports_add_up_and_end_idle() -> None:
    capacity = Capacity(lanes=4, attention=512)
    plan = EnginePlan(
        capacity=capacity,
        rules=StepRules(max_rows=64),
        max_model_len=512,
        max_in_flight=1,
        ceiling=2,
    )
    telemetry = telemetry_of(described=False)
    found = ceiling([capacity])
    telemetry.describe([capacity], terms=found.terms, binding=found.binding)
    clock = Clock()
    engine = Engine(plan.scheduler(), OneStage(clock), telemetry.observe, clock=clock)

    def run(num_steps: int) -> Seen:
        engine._take_commands(wait=False)
        for _ in range(num_steps):
            engine.step()
        return seen(telemetry)

    for name in ("a", "b", "c"):
        engine.submit(Request(request_id=name, token_ids=(1, 2, 3), max_tokens=4))
    page = run(12)  # ends of their own, whose ids come back in a batch without rows
    assert page("lanes", state="free") == page("lanes") == 4
    engine.submit(Request(request_id="long", token_ids=(1, 2, 3), max_tokens=400))
    assert run(12)("requests_running") == 1
    engine.abort("long")
    page = run(1)
    assert page("requests_running") == page("requests_waiting") == 0
    assert page("kv_cells", state="free") == page("kv_cells") == 512
    assert page("lanes", state="free") == page("lanes") == 4
    assert page("requests_finished_total", reason="length") == 3
    assert page("requests_finished_total", reason="abort") == 1
    assert page("requests_admitted_total", kind="new") == 4
    assert page("decode_calls_total", stage="0") == page("steps_total") == page("step_rows_count")
    assert page("step_tokens_total") == page("step_rows_sum")
    assert (
        page("step_seconds_sum") == page("stage_compute_seconds_sum") == 0.25 * page("steps_total")
    )


class Echo:
    """A channel that answers every request with one token, and is lost when it is told to be."""

    def __init__(self) -> None:
        self._reports = ReportQueue()
        self._is_lost = False

    def submit(self, request: Request) -> None:
        if request.max_tokens > 1:
            self._reports.put(StepReport((token(request.request_id),), record()))
            return
        last = TokenEvent(request_id=request.request_id, token_id=104, finish_reason="length")
        self._reports.put(StepReport((last,), record(state=idle())))

    def abort(self, request_id: str) -> None: ...

    def connect(self) -> None: ...

    def close(self) -> None:
        self._reports.close()

    def lose(self) -> None:
        self._is_lost = True
        self._reports.close()

    def follow(self, deliver: Deliver) -> None:
        for report in self._reports:
            deliver(report)
        if self._is_lost:
            raise ConnectionError("the actor died")


def client_of(channel: Echo, telemetry: Any) -> EngineClient:
    return EngineClient(channel, max_model_len=100, on_report=telemetry.observe)


def test_what_a_lost_engine_leaves_behind_is_counted_as_ended() -> None:
    channel, telemetry = Echo(), telemetry_of()
    client = client_of(channel, telemetry)
    events = client.generate(Request(request_id="a", token_ids=(1,), max_tokens=9))
    next(events)
    channel.lose()
    assert next(events).finish_reason == "error"
    page = seen(telemetry)
    assert page("requests_finished_total", reason="error") == 1
    assert "requests_running" not in page
    client.close()


def test_an_observer_that_fails_ends_no_request(caplog: pytest.LogCaptureFixture) -> None:
    def fail(report: StepReport) -> None:
        raise ZeroDivisionError

    channel = Echo()
    client = EngineClient(channel, max_model_len=100, on_report=fail)
    events = list(client.generate(Request(request_id="a", token_ids=(1,), max_tokens=1)))
    client.close()
    assert [event.finish_reason for event in events] == ["length"]
    assert "the observer of reports failed" in caplog.text


def test_the_page_is_public_works_while_loading_and_counts_refusals() -> None:
    channel, telemetry = Echo(), telemetry_of()
    client = client_of(channel, telemetry)
    health: list[Problem | None] = [LOADING]
    places = places_of(ceiling=1, max_queue=0)
    app = create_app(
        client,
        FakeTokenizer(),
        FakeGrammars(),
        model_name="tiny",
        health=lambda: health[0],
        places=places,
        bounds=BOUNDS,
        key_digests=digests_of("key"),
        limits=Limits(max_body_bytes=1000),
        metrics=telemetry.render,
        on_reject=telemetry.reject,
    )

    async def visit() -> Seen:
        transport = httpx.ASGITransport(app)
        key = {"Authorization": "Bearer key"}
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:

            async def post(code: int, body: dict[str, Any], **options: Any) -> None:
                reply = await http.post("/v1/completions", json=body, **{"headers": key, **options})
                assert reply.status_code == code, reply.text

            page = await http.get("/metrics")
            assert page.status_code == 200
            assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
            assert Seen(page.content)("requests_rejected_total") == 0
            await post(503, {"prompt": "a"})
            assert (await http.get("/health")).status_code == 503
            assert (await http.post("/v1/nothing", headers=key)).status_code == 404
            health[0] = None
            await post(401, {"prompt": "a"}, headers={})
            await post(400, {"prompt": "a" * 200})
            await post(400, {"prompt": "a", "temperature": 5})
            await post(413, {"prompt": "a" * 2000})
            await post(200, {"prompt": "a", "max_tokens": 1})
            await places.take()
            await post(429, {"prompt": "a"})
            return Seen((await http.get("/metrics")).content)

    page = asyncio.run(visit())
    client.close()
    rejected = {labels["reason"]: n for labels, n in page.samples["skippy:requests_rejected_total"]}
    assert {reason: n for reason, n in rejected.items() if n} == dict.fromkeys(
        ("loading", "invalid_api_key", "context_length_exceeded", "invalid_value",
         "request_too_large", "queue_full"), 1,
    )  # fmt: skip
    assert page("requests_finished_total", reason="length") == 1
    assert page("requests_finished_total") == 1


def test_a_silent_stage_is_down_and_before_the_first_answer_none_is_known() -> None:
    sights: list[StageSight] = []
    telemetry = telemetry_of(sights=lambda: sights)
    names = ("stage_up", "stage_last_reply_age_seconds", "memory_bytes", "memory_peak_bytes")
    assert not any(name in seen(telemetry) for name in names)
    sights[:] = [StageSight(True, 0.5, 1000, 3000), StageSight(False, 4.0)]
    page = seen(telemetry)
    assert [page("stage_up", stage=stage) for stage in "01"] == [1, 0]
    assert page("stage_last_reply_age_seconds", stage="1") == 4
    assert page.samples["skippy:memory_bytes"] == [({"stage": "0", "kind": "rss"}, 1000)]
    assert page.samples["skippy:memory_peak_bytes"] == [({"stage": "0", "kind": "rss"}, 3000)]


def test_a_log_that_is_there_is_gone_on_with(tmp_path: Path) -> None:
    for is_new, lines in ((True, 1), (False, 2), (True, 1)):
        log = StepLog(tmp_path / "steps", is_new=is_new)
        log.write(lambda: {"step": 1})
        log.close()
        assert len((tmp_path / "steps").read_text().splitlines()) == lines
