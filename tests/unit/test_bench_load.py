"""The load generator writes down what a server really did, and the numbers follow from that."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import uvicorn

from bench.figures import percentile, summarise
from bench.load import check_loopback, closed_loop
from bench.points import describe
from bench.records import Record, Run, max_in_flight, same_texts
from bench.sweep import Settings, median_ratios, ratio
from bench.table import table_row
from bench.workloads import Workload
from skippy_mesh.errors import UsageError

Send = Callable[[dict[str, Any]], Awaitable[None]]
Script = Callable[["Answer"], Awaitable[None]]

FIRST_S, GAP_S = 0.06, 0.03
TOKENS = 4


def make_record(**knobs: Any) -> Record:
    """Sent at 10, texts at 12, 13 and 16, counted as 5 tokens: the server joined some."""
    whole = Record(
        index=0,
        scheduled_s=10.0,
        sent_s=10.0,
        end_s=17.0,
        chunk_times_s=(12.0, 13.0, 16.0),
        prompt_tokens=7,
        completion_tokens=5,
        finish_reason="length",
        text="abc",
        error=None,
        is_cut=False,
    )
    return replace(whole, **knobs)


def summary_of(*records: Record) -> dict[str, Any]:
    return summarise(Run(records=list(records), client_cpu_share=0.1))


class Answer:
    """One scripted reply of the fake server."""

    def __init__(self, send: Send, body: dict[str, Any]):
        self._send = send
        self.body = body

    async def start(self, status: int = 200) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, text: str, *, more: bool = True) -> None:
        message = {"type": "http.response.body", "body": text.encode(), "more_body": more}
        await self._send(message)

    async def frame(self, **fields: Any) -> None:
        await self.write(f"data: {json.dumps(fields)}\n\n")

    async def text(self, text: str, finish_reason: str | None = None) -> None:
        choice = {"index": 0, "text": text, "finish_reason": finish_reason}
        await self.frame(choices=[choice], usage=None)

    async def finish(self, num_tokens: int = TOKENS) -> None:
        usage = {"prompt_tokens": 9, "completion_tokens": num_tokens}
        await self.frame(choices=[], usage=usage)
        await self.write("data: [DONE]\n\n", more=False)


async def whole(answer: Answer) -> None:
    """Four tokens in three chunks with text, between a comment, an empty chunk and the usage."""
    await answer.start()
    await answer.write(": ping\n\n")
    await answer.text("")
    await asyncio.sleep(FIRST_S)
    await answer.text("one ")
    await asyncio.sleep(GAP_S)
    await answer.text("two ")
    await asyncio.sleep(GAP_S)
    await answer.text("three four", "length")
    await asyncio.sleep(GAP_S)
    await answer.finish()


async def refused(answer: Answer) -> None:
    await answer.start(429)
    await answer.write('{"error":{"code":"queue_full"}}', more=False)


async def torn(answer: Answer) -> None:
    """The connection dies in the middle: the application fails after its answer began."""
    await answer.start()
    await answer.text("one ")
    raise RuntimeError("scripted")


async def broken(answer: Answer) -> None:
    """An error after output began is a frame inside a stream that ends in good order."""
    await answer.start()
    await answer.text("one ")
    await answer.frame(error={"message": "stage 1 is gone", "code": "stage_unavailable"})
    await answer.write("data: [DONE]\n\n", more=False)


async def unfinished(answer: Answer) -> None:
    await answer.start()
    await answer.text("one ")
    await answer.write("data: [DONE]\n\n", more=False)


async def short(answer: Answer) -> None:
    await answer.start()
    await answer.text("one ", "stop")
    await answer.finish(num_tokens=1)


async def silent_about_usage(answer: Answer) -> None:
    await answer.start()
    await answer.text("one ", "length")
    await answer.write("data: [DONE]\n\n", more=False)


async def garbled(answer: Answer) -> None:
    await answer.start()
    await answer.write("data: {not json\n\n", more=False)


async def endless(answer: Answer) -> None:
    await answer.start()
    await answer.text("one ")
    await asyncio.sleep(60)


@contextlib.contextmanager
def fake_server(*scripts: Script) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A real HTTP server whose n-th request plays the n-th script; yields its URL and the bodies
    it was sent."""
    bodies: list[dict[str, Any]] = []

    async def app(scope: dict[str, Any], receive: Callable[[], Any], send: Send) -> None:
        data = b""
        while (message := await receive())["type"] == "http.request":
            data += message["body"]
            if not message.get("more_body"):
                break
        bodies.append(json.loads(data))
        await scripts[len(bodies) - 1](Answer(send, bodies[-1]))

    config = uvicorn.Config(
        app, port=0, lifespan="off", ws="none", log_level="critical", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", bodies
    finally:
        server.should_exit = True
        thread.join()


def run_against(url: str, num_requests: int, *, num_clients: int = 1, seconds: float = 20) -> Run:
    workload = Workload(prompt_tokens=8, output_tokens=TOKENS)
    return asyncio.run(
        closed_loop(
            url,
            workload,
            num_clients=num_clients,
            max_requests=num_requests,
            send_s=seconds,
            drain_s=seconds,
        )
    )


def record_of(script: Script) -> Record:
    with fake_server(script) as (url, _):
        return run_against(url, 1).records[0]


def test_a_whole_answer_is_timed_from_its_chunks_with_text_and_counted_by_usage() -> None:
    with fake_server(whole) as (url, bodies):
        record = run_against(url, 1).records[0]
    assert record.error is None and record.is_complete
    assert record.text == "one two three four"
    assert (record.prompt_tokens, record.completion_tokens) == (9, 4)
    assert record.finish_reason == "length"
    assert len(record.chunk_times_s) == 3  # neither the comment, nor "", nor the usage chunk
    assert record.ttft_s is not None and FIRST_S <= record.ttft_s < FIRST_S + 1
    assert record.e2e_s is not None and record.e2e_s >= FIRST_S + 2 * GAP_S
    assert record.end_s - record.sent_s >= record.e2e_s + GAP_S * 0.9
    assert record.tpot_s == pytest.approx((record.e2e_s - record.ttft_s) / 3)
    assert min(record.gaps_s) > GAP_S * 0.5
    assert bodies[0]["ignore_eos"] and bodies[0]["max_tokens"] == TOKENS
    assert bodies[0]["temperature"] == 0 and not bodies[0]["cache_prompt"]


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (refused, "HTTP 429"),
        (torn, "RemoteProtocolError"),
        (broken, "stage 1 is gone"),
        (unfinished, "without a finish reason"),
        (short, "1 tokens came, 4 were asked for"),
        (silent_about_usage, "no usage"),
        (garbled, "JSONDecodeError"),
    ],
)
def test_every_way_to_fail_is_written_down(script: Script, says: str) -> None:
    record = record_of(script)
    assert record.error is not None and says in record.error
    assert not record.is_complete and not record.is_cut


def test_what_a_torn_stream_had_said_is_kept() -> None:
    record = record_of(torn)
    assert record.text == "one " and record.ttft_s is not None
    assert record.completion_tokens is None and record.tpot_s is None


def test_a_failure_does_not_stop_the_others_and_is_counted_over_sent() -> None:
    with fake_server(whole, broken, whole, refused, whole) as (url, _):
        run = run_against(url, 5, num_clients=2)
    summary = summarise(run)
    assert (summary["sent"], summary["completed"], summary["failed"]) == (5, 3, 2)
    assert summary["max_concurrent_requests"] == 2
    assert summary["total_output_tokens"] == 3 * TOKENS
    assert run.client_cpu_share > 0


def test_each_client_keeps_one_request_open() -> None:
    with fake_server(*[whole] * 6) as (url, bodies):
        run = run_against(url, 6, num_clients=3)
    assert len(bodies) == 6 and len({body["prompt"] for body in bodies}) == 6
    assert max_in_flight(run.records) == 3
    later = sorted(r.sent_s for r in run.records)[3:]
    assert min(later) >= min(r.end_s for r in run.records)


def test_time_up_cuts_what_is_open_and_sends_nothing_more() -> None:
    with fake_server(whole, endless) as (url, bodies):
        began = time.monotonic()
        run = run_against(url, 100, num_clients=1, seconds=0.5)
        took = time.monotonic() - began
        assert len(bodies) == 2
    assert 1.0 <= took < 5
    assert [r.is_cut for r in run.records] == [False, True]
    summary = summarise(run)
    assert (summary["completed"], summary["timeouts"], summary["failed"]) == (1, 1, 0)


def test_an_unreachable_server_is_a_failure() -> None:
    with fake_server() as (url, _):
        pass
    record = run_against(url, 1).records[0]
    assert record.error is not None and "ConnectError" in record.error


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "http://localhost", "http://[::1]:1"])
def test_this_machine_is_accepted(url: str) -> None:
    check_loopback(url)


@pytest.mark.parametrize(
    "url", ["http://10.0.0.1", "http://example.org", "http://127.0.0.1.example.org", "127.0.0.1"]
)
def test_no_other_machine_is_loaded(url: str) -> None:
    with pytest.raises(UsageError, match="only talks to this machine"):
        run_against(url, 1)


def test_prompts_repeat_by_seed_and_never_share_a_prefix() -> None:
    workload = Workload(seed="1")
    prompts = [workload.prompt(i) for i in range(64)]
    assert prompts == [workload.prompt(i) for i in range(64)]
    assert len({prompt[:24] for prompt in prompts}) == 64
    assert Workload(seed="2").prompt(0) != prompts[0]
    assert len(prompts[0].split()) == workload.prompt_tokens


def test_prompts_share_what_they_are_meant_to_and_no_more() -> None:
    workload = Workload(seed="1", prompt_tokens=40, shared_tokens=30, uses_cache=True)
    prompts = [workload.prompt(i).split() for i in range(20)]
    assert {tuple(prompt[:30]) for prompt in prompts} == {tuple(prompts[0][:30])}
    assert len({tuple(prompt[30:]) for prompt in prompts}) == 20
    assert {len(prompt) for prompt in prompts} == {40}
    assert workload.body(0)["cache_prompt"] and not Workload().body(0)["cache_prompt"]


def test_the_numbers_of_a_hand_made_trace() -> None:
    second = make_record(
        index=1, scheduled_s=11.0, sent_s=11.0, end_s=20.0, chunk_times_s=(15.0, 19.0)
    )
    summary = summary_of(make_record(), second)
    assert summary["duration"] == 10.0  # first send to last end
    assert summary["output_throughput"] == 1.0
    assert summary["total_input_tokens"] == 14
    assert summary["p50_ttft_ms"] == 3000.0 and summary["num_ttft"] == 2
    assert summary["p50_tpot_ms"] == 1000.0
    assert summary["p50_itl_ms"] == 3000.0 and summary["num_itl"] == 3
    assert summary["max_itl_ms"] == 4000.0
    assert summary["p99_e2el_ms"] == pytest.approx(7980.0)


def test_what_is_not_known_is_none_and_never_zero() -> None:
    summary = summary_of(make_record(error="gone", chunk_times_s=(), completion_tokens=None))
    assert (summary["sent"], summary["failed"], summary["completed"]) == (1, 1, 0)
    for key in ("duration", "output_throughput", "total_output_tokens", "p99_ttft_ms"):
        assert summary[key] is None
    assert summary["failures"] == {"gone": 1}


def test_failed_and_cut_requests_lend_no_tokens_and_no_latencies() -> None:
    failed = make_record(index=1, error="torn", end_s=99.0)
    cut = make_record(index=2, is_cut=True, completion_tokens=None, end_s=99.0)
    summary = summary_of(make_record(), failed, cut)
    assert summary["total_output_tokens"] == 5 and summary["duration"] == 7.0
    assert summary["num_ttft"] == 1


def test_one_token_has_no_time_per_token() -> None:
    record = make_record(chunk_times_s=(12.0,), completion_tokens=1)
    assert record.tpot_s is None and record.e2e_s == 2.0
    assert summary_of(record)["num_tpot"] == 0


def test_percentiles_lie_between_ranks() -> None:
    assert percentile([], 50) is None
    assert percentile([3.0], 99) == 3.0
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([float(i) for i in range(101)], 99) == 99.0


def test_in_flight_counts_overlaps_only() -> None:
    spans = [(0.0, 2.0), (2.0, 4.0), (3.0, 5.0)]
    assert max_in_flight(make_record(sent_s=a, end_s=b) for a, b in spans) == 2
    assert max_in_flight([]) == 0


def test_equal_texts_are_counted_over_what_both_finished() -> None:
    ours = [make_record(index=0), make_record(index=1, text="x"), make_record(index=2, error="e")]
    theirs = [make_record(index=i) for i in range(4)]
    runs = [Run(records=records, client_cpu_share=0.0) for records in (ours, theirs)]
    assert same_texts(*runs) == {"equal": 1, "of": 2}


SETTINGS = Settings(
    model="demo",
    stages=2,
    engine="baseline",
    levels=[4],
    peer="llama-server",
    rounds=1,
    send_seconds=1,
    drain_seconds=1,
    prompt_tokens=8,
    output_tokens=4,
    seed=1,
)


def point_of(*records: Record) -> dict[str, Any]:
    point = describe(Run(records=list(records), client_cpu_share=0.1), SETTINGS.num_requests(4))
    return {**point, "peak_memory": None, "others_cpu_share": 0.4}


def test_a_point_with_a_failed_request_has_no_number_and_says_why() -> None:
    point = point_of(*[make_record(index=i) for i in range(7)], make_record(index=7, error="torn"))
    assert "1 of 8 requests failed" in point["void"] and "torn" in point["void"]
    assert (point["sent"], point["failed"]) == (8, 1)
    assert "output_throughput" not in point and "p50_ttft_ms" not in point
    assert "no number: 1 of 8" in table_row(4, "ours", point, None)
    whole = point_of(*[make_record(index=i) for i in range(8)])
    assert ratio({"ours": point, "llama-server": whole}, "llama-server") is None


def test_a_point_cut_by_time_counts_what_finished_and_says_so() -> None:
    done, cut = make_record(), make_record(index=1, is_cut=True)
    point = point_of(done, cut)
    assert point["void"] is None and point["output_throughput"] == 5 / 7
    assert "1 requests were still open, 6 were never sent" in point["cut_by_time"]
    row = table_row(4, "ours", point, None)
    assert row.endswith("cut by time, others used 40% of the machine")
    assert point_of(cut)["void"] == "no request finished in time"
    assert point_of(*[make_record(index=i) for i in range(8)])["cut_by_time"] is None


def test_the_ratio_of_a_level_is_the_median_of_its_rounds() -> None:
    rounds: list[dict[str, object]] = [
        {"clients": 4, "ratio": value} for value in (0.5, 2.0, 1.5, None)
    ]
    assert median_ratios(rounds) == {"4": {"median": 1.5, "min": 0.5, "max": 2.0, "rounds": 3}}
