"""Overload in front of a fake model. Without these a refused request costs the engine time, a place
is never given back, or an idle engine sends somebody away."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from skippy_mesh.gateway.app import create_app
from skippy_mesh.gateway.places import Places
from skippy_mesh.gateway.readiness import DRAINING
from skippy_mesh.gateway.token_stream import Limits
from skippy_mesh.messages import StepBatch
from skippy_mesh.telemetry import Telemetry
from stages.fake import FakeGrammars, FakePipeline, FakeTokenizer
from tests.engines import BOUNDS, RunningEngine, places_of
from tests.unit.test_admission import Line, limits
from tests.unit.test_gateway import (
    CHAT,
    COMPLETIONS,
    HELLO,
    ONCE,
    Gate,
    ask,
    chunks,
    eventually,
    serving,
    shown,
)
from tests.unit.test_gateway_streams import require


class Counting(FakeTokenizer):
    """Counts the prompts it is asked to cut into tokens."""

    def __init__(self) -> None:
        super().__init__(adds_bos=False)
        self.num_prompts = 0

    def encode(self, text: str, **options: bool) -> list[int]:
        self.num_prompts += text == "flood"
        return super().encode(text, **options)


def test_of_a_thousand_posts_at_once_the_refused_cost_nothing() -> None:
    gate = Gate()
    engine = RunningEngine(FakePipeline(on_step=gate), num_lanes=4)
    tokenizer, places = Counting(), places_of(ceiling=4, max_queue=8)
    app = create_app(
        engine.client, tokenizer, FakeGrammars(), model_name="fake", health=lambda: None,
        places=places, bounds=BOUNDS,
    )  # fmt: skip

    async def flood() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            posts = [
                asyncio.create_task(
                    http.post(
                        COMPLETIONS, json={"prompt": "flood"}, headers={"X-Request-Id": f"r{n}"}
                    )
                )
                for n in range(1000)
            ]
            while sum(post.done() for post in posts) < 1000 - 12:
                await asyncio.sleep(0.01)
            gate.opened.set()
            return await asyncio.gather(*posts)

    try:
        replies = asyncio.run(flood())
    finally:
        gate.opened.set()
        engine.stop()
    assert Counter(reply.status_code for reply in replies) == {200: 12, 429: 988}
    served = {reply.headers["X-Request-Id"] for reply in replies if reply.status_code == 200}
    assert set(engine.submitted) == served
    assert tokenizer.num_prompts == 12, "a place is taken before the prompt is looked at"
    for reply in replies:
        if reply.status_code == 429:
            error = reply.json()["error"]
            assert (error["code"], error["type"]) == ("queue_full", "rate_limit_error")
            assert error["limit_by"] == {"stage": "0", "component": "lanes", "term": "ids"}
            assert 1 <= int(reply.headers["Retry-After"]) <= 60
    assert places.num_open == 0


@pytest.mark.parametrize("num_cells", [64, 256, 1024, 4096])
@pytest.mark.parametrize("max_queue_tokens", [0, 1024])
def test_an_idle_engine_takes_whatever_fits(num_cells: int, max_queue_tokens: int) -> None:
    engine = RunningEngine(FakePipeline(), max_model_len=num_cells, num_lanes=1)
    places = places_of(ceiling=1, max_queue=0, max_queue_tokens=max_queue_tokens)
    with serving(engine=engine, places=places) as client:
        for size in (num_cells // 2, num_cells - 1):
            answer = ask(client, COMPLETIONS, {"prompt": [7] * size, "max_tokens": 1})
            assert answer["usage"]["total_tokens"] == size + 1
            eventually(lambda: places.num_open == 0)


def test_a_grammar_is_tried_by_whoever_has_a_place_and_a_bad_one_gives_it_back() -> None:
    grammars, places = FakeGrammars(), places_of(ceiling=1, max_queue=0)
    gate = Gate()
    engine = RunningEngine(FakePipeline(on_step=gate), num_lanes=1)
    with serving(engine=engine, places=places, grammars=grammars) as client:
        for _ in range(3):
            reply = client.post(CHAT, json={**HELLO, "grammar": "bad"})
            assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_grammar")
            assert places.num_open == 0
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(ask, client, CHAT, HELLO)
            assert gate.reached.wait(5)
            assert client.post(CHAT, json={**HELLO, "grammar": "bad"}).status_code == 429
            gate.opened.set()
            running.result()
    assert len(grammars.asked) == 3, "who is refused costs nothing"


@pytest.mark.parametrize("stream", [False, True])
def test_what_can_never_fit_is_refused_with_both_counts_and_what_binds(stream: bool) -> None:
    places = places_of(ceiling=1, max_queue=0)
    engine = RunningEngine(FakePipeline())
    with serving(engine=engine, places=places) as client:
        for size in (512, 513):
            reply = client.post(COMPLETIONS, json={"prompt": [7] * size, "stream": stream})
            error = reply.json()["error"]
            assert (reply.status_code, error["code"]) == (400, "context_length_exceeded")
            assert (error["n_prompt_tokens"], error["n_ctx"]) == (size, 512)
            assert error["limit_by"] == {
                "stage": "1", "component": "attention", "term": "512 cells"
            }  # fmt: skip
        assert engine.submitted == []
        ask(client, COMPLETIONS, {"prompt": [7] * 511})


def test_too_many_tokens_may_not_wait_and_every_failure_gives_its_place_back() -> None:
    gate = Gate()
    places = places_of(ceiling=1, max_queue=3, max_queue_tokens=100)
    engine = RunningEngine(FakePipeline(on_step=gate), num_lanes=1)
    with serving(engine=engine, places=places) as client, ThreadPoolExecutor() as pool:
        first = pool.submit(client.post, COMPLETIONS, json=ONCE)
        assert gate.reached.wait(60)
        waiter = pool.submit(client.post, COMPLETIONS, json={"prompt": [7] * 90})
        eventually(lambda: len(engine.submitted) == 2)
        for _ in range(9):
            long = client.post(COMPLETIONS, json={"prompt": [7] * 50})
            assert (long.status_code, long.json()["error"]["code"]) == (429, "queue_tokens_full")
            for body, code in (
                ({"prompt": [999]}, "invalid_value"),
                ({"prompt": [7] * 600}, "context_length_exceeded"),
            ):
                reply = client.post(COMPLETIONS, json=body)
                assert (reply.status_code, reply.json()["error"]["code"]) == (400, code)
        assert places.num_open == 2
        gate.opened.set()
        assert first.result().status_code == waiter.result().status_code == 200
    assert len(engine.submitted) == 2


def test_who_runs_no_longer_counts_as_waiting() -> None:
    gate = Gate()
    places = places_of(ceiling=1, max_queue=3, max_queue_tokens=100)

    def hold_the_second(batch: StepBatch) -> None:
        if 0 not in batch.positions:
            gate(batch)

    engine = RunningEngine(FakePipeline(on_step=hold_the_second), num_lanes=1)
    with serving(engine=engine, places=places) as client, ThreadPoolExecutor() as pool:
        prompt = {"prompt": [7] * 80}
        first = pool.submit(client.post, COMPLETIONS, json=prompt)
        assert gate.reached.wait(60)
        second = pool.submit(client.post, COMPLETIONS, json=prompt)
        eventually(lambda: len(engine.submitted) == 2)
        assert client.post(COMPLETIONS, json=prompt).json()["error"]["code"] == "queue_tokens_full"
        gate.opened.set()
        assert first.result().status_code == second.result().status_code == 200


def test_who_waits_too_long_is_sent_away_and_who_runs_is_not() -> None:
    gate = Gate()

    def hold_the_second(batch: StepBatch) -> None:
        if 0 not in batch.positions:
            gate(batch)

    timeouts = Limits(queue_timeout_s=0.2)
    places = places_of(ceiling=1, max_queue=3)
    engine = RunningEngine(FakePipeline(on_step=hold_the_second), num_lanes=1)
    with serving(engine=engine, places=places, limits=timeouts) as client:
        with ThreadPoolExecutor() as pool:
            # A prompt of several steps: it runs long before its first token.
            first = pool.submit(client.post, COMPLETIONS, json={"prompt": [7] * 200})
            assert gate.reached.wait(60)
            reply = client.post(COMPLETIONS, json={"prompt": "ZZZ"})
            error = reply.json()["error"]
            assert (reply.status_code, error["code"]) == (429, "queue_timeout")
            assert (reply.headers["Retry-After"], error["limit_by"]["stage"]) == ("1", "0")
            gate.opened.set()
            assert first.result().status_code == 200, "it had left the queue"
        eventually(lambda: places.num_open == 0)
        assert ord("Z") not in gate.seen


def test_a_request_over_its_time_ends_and_frees_its_cells() -> None:
    gate = Gate()
    pipeline = FakePipeline(on_step=gate)
    engine = RunningEngine(pipeline)
    with serving(engine=engine, limits=Limits(request_timeout_s=0.05)) as client:
        with ThreadPoolExecutor() as pool:
            post = pool.submit(client.post, CHAT, json=HELLO)
            eventually(lambda: engine.aborted != [])
            gate.opened.set()
            reply = post.result()
        assert (reply.status_code, reply.headers["x-should-retry"]) == (504, "false")
        assert reply.json()["error"]["code"] == "request_timeout"
        eventually(lambda: pipeline.histories == {})
    endless = {**HELLO, "max_tokens": 10**6}
    with serving(
        FakePipeline(on_step=lambda _: time.sleep(0.005)),
        limits=Limits(request_timeout_s=0.3),
    ) as client:
        found = chunks(client, CHAT, endless)
        assert found[-1]["error"]["code"] == "request_timeout"
        assert len(found) > 1


def test_without_a_coordinator_new_requests_are_refused_and_running_ones_end_well() -> None:
    with serving() as client:
        expected = shown(ask(client, COMPLETIONS, ONCE)["choices"][0])
    gate, line = Gate(), Line(limits(1, 1))
    places = Places(line)
    with (
        serving(FakePipeline(on_step=gate), places=places) as client,
        ThreadPoolExecutor() as pool,
    ):
        running = pool.submit(client.post, COMPLETIONS, json=ONCE)
        assert gate.reached.wait(60)
        line.kill()
        reply = client.post(COMPLETIONS, json=ONCE)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "coordinator_lost")
        assert 1 <= int(reply.headers["Retry-After"]) <= 60
        line.restart()
        waiting = pool.submit(client.post, COMPLETIONS, json=ONCE)
        eventually(lambda: places.num_open == 2)
        assert client.post(COMPLETIONS, json=ONCE).status_code == 429, "it was told who runs"
        gate.opened.set()
        for post in (running, waiting):
            assert shown(post.result().json()["choices"][0]) == expected
        eventually(lambda: line.coordinator.num_open() == 0)


def test_a_server_about_to_end_says_so() -> None:
    with serving(health=lambda: DRAINING) as client:
        for reply in (client.get("/health"), client.post(CHAT, json=HELLO)):
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "draining")


def test_the_age_of_the_queue_is_shown_while_there_is_one() -> None:
    now_s = [0.0]
    gate = Gate()
    places = places_of(ceiling=1, max_queue=2)
    places._clock = lambda: now_s[0]
    telemetry = Telemetry(
        model_name="tiny", max_model_len=512, oldest_waiting_s=places.oldest_waiting_s
    )
    options: dict[str, Any] = {"places": places, "metrics": telemetry.render}
    with (
        serving(engine=RunningEngine(FakePipeline(on_step=gate), num_lanes=1), **options) as client,
        ThreadPoolExecutor() as pool,
    ):
        posts = [pool.submit(client.post, COMPLETIONS, json=ONCE) for _ in range(2)]
        eventually(lambda: places.num_open == 2)
        now_s[0] = 3.0
        assert 'skippy:queue_oldest_seconds{model_name="tiny"} 3.0' in client.get("/metrics").text
        gate.opened.set()
        assert [post.result().status_code for post in posts] == [200, 200]
        assert "queue_oldest" not in client.get("/metrics").text


def test_a_server_that_ends_sends_the_queue_away_and_lets_run_what_runs() -> None:
    allowed = threading.Semaphore(1)
    pipeline = FakePipeline(on_step=lambda _: require(allowed.acquire(timeout=20)))
    engine, places = RunningEngine(pipeline, num_lanes=1), places_of()
    app = create_app(
        engine.client, FakeTokenizer(), FakeGrammars(), model_name="fake", health=lambda: None,
        places=places, bounds=BOUNDS,
    )  # fmt: skip

    async def end() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            running = asyncio.create_task(http.post(COMPLETIONS, json=ONCE))
            while all(place.is_waiting for place in places._open.values()):
                await asyncio.sleep(0.001)
            queued = [
                asyncio.create_task(http.post(COMPLETIONS, json={**ONCE, "stream": stream}))
                for stream in (False, True)
            ]
            while len(engine.submitted) < 3:
                await asyncio.sleep(0.001)
            app.state.refuse_waiting()
            refused = await asyncio.gather(*queued)
            allowed.release(1000)
            return [*refused, await running]

    *refused, ran = asyncio.run(end())
    for reply in refused:
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "draining")
        assert int(reply.headers["Retry-After"]) >= 1
    assert len(ran.json()["choices"][0]["text"]) == 12
    engine.stop()
