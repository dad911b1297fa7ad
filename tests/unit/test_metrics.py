"""What the page says of requests, under our names and those of other servers.

Without these a dashboard asks for a name that is not there, or shows a number of something else.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import queue
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from skippy_mesh.api_flags import add_api_flags, aliases_of
from skippy_mesh.client import Deliver, EngineClient, ReportQueue
from skippy_mesh.config import METRICS_ALIASES
from skippy_mesh.errors import UsageError
from skippy_mesh.exposition import Histogram, exposition, geometric
from skippy_mesh.gateway.app import create_app
from skippy_mesh.gateway.errors import digests_of
from skippy_mesh.gateway.rules import ApiRules
from skippy_mesh.gateway.watch import Watch
from skippy_mesh.health import Pulse
from skippy_mesh.mesh_facts import StageSight
from skippy_mesh.messages import Request, StepReport, TokenEvent
from skippy_mesh.request_totals import BETWEEN_TOKENS_S, FIRST_TOKEN_S, PHASES_S
from skippy_mesh.scheduler.memory import Capacity
from skippy_mesh.times import RequestNews
from stages.fake import FakeGrammars, FakeTokenizer
from tests.engines import BOUNDS, places_of
from tests.telemetry import (
    STAGES,
    Clock,
    Seen,
    idle,
    record,
    seen,
    step,
    telemetry_of,
    token,
)

HAPPENS_WITHIN_S = 20
STEP_S = 0.25
BOARD = Path(__file__).parents[2] / "deploy/grafana/skippy_mesh.json"
STAGE = ("stage",)
CELLS = ("stage", "component", "state")
OURS = {
    "build_info": ("gauge", ("version",)),
    "ready": ("gauge", ()),
    "stage_up": ("gauge", STAGE),
    "stage_epoch": ("gauge", STAGE),
    "stage_last_reply_age_seconds": ("gauge", STAGE),
    "stage_restarts": ("counter", STAGE),
    "requests_running": ("gauge", ()),
    "requests_waiting": ("gauge", ("reason",)),
    "queue_tokens": ("gauge", ()),
    "queue_oldest_seconds": ("gauge", ()),
    "requests_admitted": ("counter", ("kind",)),
    "preemptions": ("counter", ("reason",)),
    "requests_finished": ("counter", ("reason",)),
    "requests_rejected": ("counter", ("reason",)),
    "recomputed_tokens": ("counter", ("part",)),
    "request_preemptions": ("histogram", ()),
    "steps": ("counter", ("kind",)),
    "step_seconds": ("histogram", ()),
    "scheduler_seconds": ("histogram", ()),
    "step_rows": ("histogram", ()),
    "step_tokens": ("counter", ("phase",)),
    "stage_compute_seconds": ("histogram", STAGE),
    "stage_wait_seconds": ("counter", STAGE),
    "decode_calls": ("counter", STAGE),
    "activation_bytes": ("counter", ("hop",)),
    "kv_cells": ("gauge", CELLS),
    "kv_bytes": ("gauge", CELLS),
    "kv_cells_capacity": ("gauge", ("stage", "component")),
    "lanes": ("gauge", ("state",)),
    "batches_in_flight": ("gauge", ()),
    "admission_ceiling": ("gauge", ("stage", "component")),
    "admission_ceiling_effective": ("gauge", ()),
    "binding_stage": ("gauge", ("stage", "component", "term")),
    "prefix_shares": ("counter", ("result", "kind")),
    "prefix_misses": ("counter", ("reason",)),
    "prefix_tokens": ("counter", ("result",)),
    "prefix_evictions": ("counter", ("reason",)),
    "memory_bytes": ("gauge", ("stage", "kind")),
    "memory_peak_bytes": ("gauge", ("stage", "kind")),
    "cancel_seconds": ("histogram", ()),
    "stream_stalls": ("counter", ()),
    "seconds_since_last_token": ("gauge", ()),
}
VLLM = {
    "num_requests_running": ("gauge", ()),
    "num_requests_waiting": ("gauge", ()),
    "num_requests_waiting_by_reason": ("gauge", ("reason",)),
    "kv_cache_usage_perc": ("gauge", ()),
    "prompt_tokens": ("counter", ()),
    "prompt_tokens_cached": ("counter", ()),
    "generation_tokens": ("counter", ()),
    "prefix_cache_queries": ("counter", ()),
    "prefix_cache_hits": ("counter", ()),
    "num_preemptions": ("counter", ()),
    "request_success": ("counter", ("finished_reason",)),
    "time_to_first_token_seconds": ("histogram", ()),
    "inter_token_latency_seconds": ("histogram", ()),
    "request_time_per_output_token_seconds": ("histogram", ()),
    "e2e_request_latency_seconds": ("histogram", ()),
    "request_queue_time_seconds": ("histogram", ()),
    "request_prefill_time_seconds": ("histogram", ()),
    "request_decode_time_seconds": ("histogram", ()),
    "request_inference_time_seconds": ("histogram", ()),
    "request_prompt_tokens": ("histogram", ()),
    "request_generation_tokens": ("histogram", ()),
    "iteration_tokens_total": ("histogram", ()),
    "request_num_preemptions": ("histogram", ()),
}
LLAMACPP = {
    **dict.fromkeys(
        ("prompt_tokens", "prompt_tokens_cached", "prompt_seconds", "tokens_predicted",
         "tokens_predicted_seconds", "n_decode"), ("counter", ()),
    ),
    **dict.fromkeys(
        ("n_tokens_max", "requests_processing", "requests_deferred", "n_busy_slots_per_decode",
         "prompt_tokens_seconds", "predicted_tokens_seconds"), ("gauge", ()),
    ),
}  # fmt: skip
NAMES = {
    **{f"skippy:{name}": about for name, about in OURS.items()},
    **{f"vllm:{name}": (kind, ("engine", *labels)) for name, (kind, labels) in VLLM.items()},
    "vllm:admission_rejections": ("counter", ("reason",)),
    **{f"llamacpp:{name}": about for name, about in LLAMACPP.items()},
}


class Scripted:
    """An engine that says what it is told to say."""

    def __init__(self) -> None:
        self.queue = ReportQueue()

    def connect(self) -> None: ...
    def submit(self, request: Request) -> None: ...
    def abort(self, request_id: str) -> None: ...

    def follow(self, deliver: Deliver) -> None:
        for report in self.queue:
            deliver(report)

    def close(self) -> None:
        self.queue.close()


class Told:
    """A client of a scripted engine, what it tells of requests, and the clock of both."""

    def __init__(self, **options: Any):
        self.clock = Clock()
        self.telemetry = telemetry_of(aliases=METRICS_ALIASES, **options)
        self.engine = Scripted()
        self.counted: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.client = EngineClient(
            self.engine,
            max_model_len=4096,
            on_report=self.telemetry.observe,
            on_requests=self._observe_requests,
            clock=self.clock,
        )

    def submit(self, name: str, num_prompt: int = 5) -> Any:
        request = Request(request_id=name, token_ids=(1,) * num_prompt, max_tokens=9)
        return self.client.submit(request, lambda event: None)

    def say(self, after_s: float, *events: TokenEvent, admitted: tuple[str, ...] = ()) -> None:
        """All ``events`` in one report, ``after_s`` after the one before. Returns when they are
        counted."""
        self.clock.now_s += after_s
        self.engine.queue.put(StepReport(events, record(step_s=STEP_S), admitted=admitted))
        self.counted.get(timeout=HAPPENS_WITHIN_S)

    def _observe_requests(self, news: RequestNews) -> None:
        self.telemetry.observe_requests(news)
        self.counted.put(None)

    def page(self) -> Seen:
        return seen(self.telemetry)


@pytest.fixture
def told() -> Iterator[Told]:
    told = Told()
    yield told
    told.client.close()


def eventually(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + HAPPENS_WITHIN_S
    while not is_so():
        assert time.monotonic() < deadline_s, "did not happen in time"
        time.sleep(0.001)


def test_a_requests_phases_are_told_by_one_clock(told: Told) -> None:
    times = told.submit("a")
    told.say(1.0, admitted=("a",))
    eventually(lambda: times.started_s is not None)
    told.say(2.0, token("a", num_cached=2))
    told.say(0.5, token("a", num_cached=2))
    told.say(1.0, token("a", num_cached=2, num_preemptions=3, finish_reason="length"))
    page = told.page()
    sums = {
        "time_to_first_token_seconds": 3.0, "inter_token_latency_seconds": 1.5,
        "request_time_per_output_token_seconds": 0.75, "e2e_request_latency_seconds": 4.5,
        "request_queue_time_seconds": 0.75, "request_prefill_time_seconds": 2.25,
        "request_decode_time_seconds": 1.5, "request_inference_time_seconds": 3.75,
        "request_prompt_tokens": 5, "request_generation_tokens": 3, "request_num_preemptions": 3,
    }  # fmt: skip
    assert {name: page(f"vllm:{name}_sum") for name in sums} == sums
    counts = {name: page(f"vllm:{name}_count") for name in sums}
    assert counts == {**dict.fromkeys(sums, 1), "inter_token_latency_seconds": 2}
    assert page("request_preemptions_sum") == 3
    assert page("cancel_seconds_count") == 0, "nobody told it to end"
    numbers = {
        "vllm:prompt_tokens_total": 5, "vllm:prompt_tokens_cached_total": 2,
        "vllm:generation_tokens_total": 3, "llamacpp:prompt_tokens_total": 3,
        "llamacpp:prompt_tokens_cached_total": 2, "llamacpp:prompt_seconds_total": 2.25,
        "llamacpp:tokens_predicted_total": 3, "llamacpp:tokens_predicted_seconds_total": 1.5,
        "llamacpp:n_tokens_max": 8, "llamacpp:prompt_tokens_seconds": 3 / 2.25,
        "llamacpp:predicted_tokens_seconds": 2.0,
    }  # fmt: skip
    assert {name: page(name) for name in numbers} == numbers


def test_tokens_count_when_they_come_and_not_when_the_request_ends(told: Told) -> None:
    told.submit("a")
    told.submit("b", num_prompt=7)
    told.say(1.0, token("a"), token("b", num_cached=4))
    told.say(0.25, token("a"))
    page = told.page()
    assert page("vllm:generation_tokens_total") == 3
    assert page("vllm:prompt_tokens_total") == 12
    assert page("llamacpp:prompt_tokens_total") == 8
    assert page("vllm:time_to_first_token_seconds_count") == 2
    assert page("vllm:inter_token_latency_seconds_sum") == 0.25
    assert page("vllm:e2e_request_latency_seconds_count") == 0
    assert "llamacpp:n_tokens_max" not in page


def test_who_is_cancelled_tells_how_long_that_took_and_counts_no_phase_it_had_not(
    told: Told,
) -> None:
    for name in ("left", "stopped"):
        told.submit(name)
    told.client.abort("left")
    told.client.abort("stopped", "stop")
    told.client.abort("left", "timeout")  # the first counts
    told.say(
        0.25,
        TokenEvent(request_id="left", finish_reason="abort"),
        TokenEvent(request_id="stopped", finish_reason="abort"),
    )
    page = told.page()
    assert (page("cancel_seconds_count"), page("cancel_seconds_sum")) == (1, 0.25)
    assert page("vllm:e2e_request_latency_seconds_count") == 2
    for phase in ("queue", "prefill", "decode", "inference"):
        assert page(f"vllm:request_{phase}_time_seconds_count") == 0
    assert page("vllm:prompt_tokens_total") == page("vllm:generation_tokens_total") == 0
    assert page("vllm:request_success_total", finished_reason="abort") == 1
    assert page("vllm:request_success_total", finished_reason="stop") == 1


def everything() -> Seen:
    """A page on which nothing is unknown."""
    told = Told(
        build={"version": "1"},
        is_ready=lambda: True,
        oldest_waiting_s=lambda: 1.0,
        sights=lambda: [StageSight(True, 0.5, 1000, 2000)] * 2,
    )
    bound = BOUNDS.ceiling
    told.telemetry.describe(
        STAGES, terms=[bound], binding=bound, cell_bytes=[{"attention": 10}, {"window": 20}]
    )
    times = told.submit("a")
    told.say(1.0, admitted=("a",))
    eventually(lambda: times.started_s is not None)
    told.say(1.0, token("a"))
    told.say(1.0, token("a", finish_reason="stop"))
    page = told.page()
    told.client.close()
    return page


def test_every_name_is_on_the_page_with_its_kind_and_its_labels() -> None:
    page = everything()
    assert page.types == {name: kind for name, (kind, _) in NAMES.items()}
    for name, samples in page.samples.items():
        family = next(part for part in _families_of(name) if part in NAMES)
        for labels, _ in samples:
            assert labels.keys() - {"le"} == set(NAMES[family][1]), name
    assert page("vllm:num_requests_running", engine="0") == 2
    assert "_created" not in page.text


def _families_of(series: str) -> Iterator[str]:
    yield series
    for suffix in ("_total", "_bucket", "_count", "_sum"):
        if series.endswith(suffix):
            yield series.removesuffix(suffix)


def test_every_name_our_board_asks_for_is_on_the_page() -> None:
    page = everything()
    board = json.loads(BOARD.read_text())
    asked = set(re.findall(r"\w+:\w+", json.dumps(board["templating"])))
    for panel in board["panels"]:
        for target in panel["targets"]:
            found = set(re.findall(r"(?:skippy|vllm|llamacpp):\w+", target["expr"]))
            assert found, f"{panel['title']} asks for nothing"
            asked |= found
    assert asked - page.samples.keys() == set()


def test_without_a_mesh_and_without_records_only_what_is_counted_is_there() -> None:
    telemetry = telemetry_of(described=False, aliases=METRICS_ALIASES, counts_steps=False)
    page = seen(telemetry)
    assert page("vllm:generation_tokens_total") == page("llamacpp:tokens_predicted_total") == 0
    for name in (
        "vllm:num_requests_running", "vllm:kv_cache_usage_perc", "vllm:num_preemptions_total",
        "vllm:iteration_tokens_total_count", "llamacpp:n_decode_total",
        "llamacpp:prompt_tokens_seconds", "llamacpp:n_busy_slots_per_decode", "kv_bytes", "ready",
    ):  # fmt: skip
        assert name not in page


def test_aliases_tell_what_they_name() -> None:
    telemetry = telemetry_of(aliases=METRICS_ALIASES)
    telemetry.observe(
        step(token("a", finish_reason="tool_calls"), token("b", finish_reason="timeout"),
             prefix_hit_tokens=30, prefix_queried_tokens=70)
    )  # fmt: skip
    for code in ("queue_full", "queue_full", "queue_tokens_full", "loading"):
        telemetry.reject(code)
    page = seen(telemetry)
    # All that wait; of them those behind an older one.
    assert page("vllm:num_requests_waiting") == page("llamacpp:requests_deferred") == 6
    assert page("vllm:num_requests_waiting_by_reason", reason="capacity") == 5
    assert page("vllm:num_requests_waiting_by_reason", reason="deferred") == 1
    # The fullest store; residents give way.
    assert page("vllm:kv_cache_usage_perc") == (100 + 30) / 4096
    assert page("vllm:request_success_total", finished_reason="stop") == 1
    assert page("vllm:request_success_total", finished_reason="error") == 1
    assert page("vllm:num_preemptions_total") == 1
    assert page("vllm:prefix_cache_queries_total") == 70
    assert page("vllm:prefix_cache_hits_total") == 30
    assert page("vllm:admission_rejections_total", reason="max_num_queued_reqs") == 2
    assert page("vllm:admission_rejections_total", reason="max_num_queued_tokens") == 1
    assert page("vllm:iteration_tokens_total_sum") == 77
    assert page("llamacpp:n_decode_total") == 1
    # Two run on and two ended with the step.
    assert page("llamacpp:n_busy_slots_per_decode") == 4
    assert page.samples["skippy:activation_bytes_total"] == [({"hop": "0-1"}, 512)]


def bounds_of(page: Seen, name: str) -> list[float]:
    return [float(labels["le"]) for labels, _ in page.samples[f"{name}_bucket"]][:-1]


def test_buckets_are_those_the_dashboards_know() -> None:
    page = seen(telemetry_of(aliases=METRICS_ALIASES))
    expected = {
        "time_to_first_token_seconds": FIRST_TOKEN_S,
        "inter_token_latency_seconds": BETWEEN_TOKENS_S,
        "request_time_per_output_token_seconds": BETWEEN_TOKENS_S,
        "request_queue_time_seconds": PHASES_S,
        "e2e_request_latency_seconds": PHASES_S,
        "request_prompt_tokens": (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000),
        "iteration_tokens_total": (1, *(2**power for power in range(3, 15))),
        "request_num_preemptions": (0, 1, 2, 3, 4, 5, 10, 20),
    }
    assert {name: bounds_of(page, f"vllm:{name}") for name in expected} == {
        name: list(bounds) for name, bounds in expected.items()
    }
    assert BETWEEN_TOKENS_S[0] == 0.01 and bounds_of(page, "skippy:cancel_seconds")[0] == 0.001


def test_finer_buckets_change_nothing_on_the_page() -> None:
    bounds = (0.01, 0.1, 1.0)
    plain, fine = Histogram(bounds), Histogram(bounds, geometric(0.01, 1.0))
    for value in (0.0, 0.01, 0.011, 0.1, 0.5, 1.0, 1.01):
        plain.add(value)
        fine.add(value)
    assert plain.seen().cumulative() == fine.seen().cumulative()
    assert [count for _, count in plain.seen().cumulative()] == [2, 4, 6, 7]


def test_a_set_of_aliases_can_be_dropped() -> None:
    def names(*flags: str) -> tuple[str, ...]:
        parser = argparse.ArgumentParser()
        add_api_flags(parser)
        return aliases_of(parser.parse_args(flags))

    assert names() == ("vllm", "llamacpp")
    assert names("--metrics-aliases", "") == ()
    assert names("--metrics-aliases", "vllm, vllm") == ("vllm",)
    with pytest.raises(UsageError, match="'tgi' is not one of vllm, llamacpp"):
        names("--metrics-aliases", "vllm,tgi")
    prefixes = {name.split(":")[0] for name in seen(telemetry_of(aliases=("vllm",))).types}
    assert prefixes == {"skippy", "vllm"}


def test_the_page_can_be_guarded_and_peaks_are_reset_with_a_key() -> None:
    resets: list[None] = []

    async def visit(rules: ApiRules) -> list[int]:
        app = create_app(
            client, FakeTokenizer(), FakeGrammars(), model_name="tiny", health=lambda: None,
            places=places_of(), bounds=BOUNDS, key_digests=digests_of("key"), rules=rules,
            metrics=lambda: exposition([]), reset_peaks=lambda: resets.append(None),
        )  # fmt: skip
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            key = {"Authorization": "Bearer key"}
            replies = [
                await http.get("/metrics"), await http.get("/metrics", headers=key),
                await http.post("/v1/peak_reset"), await http.post("/v1/peak_reset", headers=key),
                await http.get("/health"),
            ]  # fmt: skip
        return [reply.status_code for reply in replies]

    client = EngineClient(Scripted(), max_model_len=100)
    assert asyncio.run(visit(ApiRules())) == [200, 200, 401, 204, 200]
    assert len(resets) == 1
    assert asyncio.run(visit(ApiRules(guards_metrics=True))) == [401, 200, 401, 204, 200]
    client.close()


def test_the_watch_knows_no_memory_of_a_stage_that_is_silent() -> None:
    pulses: dict[int, Pulse | Exception] = {
        0: Pulse(True, 1, 0.0, rss_bytes=10, peak_rss_bytes=20),
        1: TimeoutError(),
    }
    watch = Watch(lambda: pulses, num_stages=2)
    try:
        watch.look()
        well, silent = watch.sights()
        assert (well.is_up, well.rss_bytes, well.peak_rss_bytes) == (True, 10, 20)
        assert well.silent_s is not None
        assert silent == StageSight(False)
        assert watch.problem is not None and watch.problem.stage == 1
        pulses[1] = Pulse(True, 1, 0.0)
        watch.look()
        assert [sight.is_up for sight in watch.sights()] == [True, True]
    finally:
        watch.close()


def test_bytes_follow_the_cells_where_a_cells_size_is_known() -> None:
    telemetry = telemetry_of(described=False)
    stage = Capacity(lanes=8, attention=4096, window=4096)
    bound = BOUNDS.ceiling
    telemetry.describe([stage], terms=[bound], binding=bound, cell_bytes=[{"attention": 272}])
    telemetry.observe(step(state=idle()))
    page = seen(telemetry)
    for name, cells in {"active": 100, "resident": 20, "reserved": 30, "free": 3946}.items():
        assert page("kv_bytes", component="attention", state=name) == 272 * cells
    assert {labels["component"] for labels, _ in page.samples["skippy:kv_bytes"]} == {"attention"}


def test_a_short_prompt_waits_no_longer_than_until_its_only_step_begins(told: Told) -> None:
    told.submit("late")
    told.say(3.0, token("late"), admitted=("late",))
    told.submit("soon")
    told.say(0.1, token("soon"), admitted=("soon",))  # a step that began before it came
    page = told.page()
    assert page("vllm:request_queue_time_seconds_count") == 0, "nobody has ended"
    for name in ("late", "soon"):
        told.say(0.0, token(name, finish_reason="stop"))
    page = told.page()
    assert page("vllm:request_queue_time_seconds_sum") == pytest.approx(2.75 + 0.0)
    assert page("vllm:request_prefill_time_seconds_sum") == pytest.approx(0.25 + 0.1)
