"""Streams against the clock: who waits for whom, and what happens when somebody leaves.

Without these a dead client keeps its cells, and a slow one stops everybody.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from starlette.types import Message

from skippy_mesh.gateway.app import create_app
from skippy_mesh.gateway.token_stream import Limits
from skippy_mesh.messages import StepBatch
from stages.fake import FakeGrammars, FakePipeline, FakeTokenizer
from tests.engines import BOUNDS, RunningEngine, places_of
from tests.unit.test_gateway import (
    CHAT,
    COMPLETIONS,
    HELLO,
    ONCE,
    Gate,
    ask,
    eventually,
    serving,
)

ENDLESS = {**HELLO, "max_tokens": 10**6}


class Slow:
    """Waits ``pause_s`` a step and remembers the highest position that was computed."""

    def __init__(self, pause_s: float = 0.002):
        self.pause_s = pause_s
        self.last_position = -1

    def __call__(self, batch: StepBatch) -> None:
        self.last_position = max((self.last_position, *batch.positions))
        time.sleep(self.pause_s)


def require(is_so: bool) -> None:
    assert is_so


def stream(client: httpx.Client, **changes: Any) -> Any:
    return client.stream("POST", CHAT, json={**ENDLESS, "stream": True, **changes})


def test_the_first_token_leaves_in_the_step_that_sampled_it() -> None:
    allowed = threading.Semaphore(1)
    pipeline = FakePipeline(on_step=lambda _: require(allowed.acquire(timeout=5)))
    with serving(pipeline) as client, stream(client) as response:
        lines = response.iter_lines()
        chunk = json.loads(next(lines).removeprefix("data: "))
        assert chunk["choices"][0]["delta"]["content"]
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert response.headers["Cache-Control"] == "no-cache"
        assert response.headers["X-Accel-Buffering"] == "no"
        allowed.release(10_000)


def test_a_silent_stream_opens_after_the_hold_and_then_pings() -> None:
    gate = Gate()
    limits = Limits(hold_s=0.03, ping_s=0.03)
    with serving(FakePipeline(on_step=gate), limits=limits) as client, stream(client) as response:
        lines = response.iter_lines()
        assert [next(lines) for _ in range(4)] == [": ping", "", ": ping", ""]
        gate.opened.set()
        assert next(line for line in lines if line and line != ": ping").startswith("data: {")


def test_a_reader_that_leaves_mid_stream_frees_its_cells() -> None:
    slow = Slow()
    pipeline = FakePipeline(on_step=slow)
    with serving(pipeline) as client:
        with stream(client) as response:
            next(response.iter_lines())
        eventually(lambda: pipeline.histories == {})
        assert slow.last_position < 250, "the answer was computed to its end for nobody"
        slow.pause_s = 0
        ask(client, CHAT, HELLO)


def test_a_plain_reader_that_leaves_frees_its_cells() -> None:
    slow = Slow()
    pipeline = FakePipeline(on_step=slow)
    with serving(pipeline) as client:
        with pytest.raises(httpx.ReadTimeout):
            client.post(CHAT, json=ENDLESS, timeout=0.05)
        eventually(lambda: pipeline.histories == {})
        assert slow.last_position < 250


def test_a_reader_that_leaves_the_queue_costs_nothing() -> None:
    gate = Gate()
    engine = RunningEngine(FakePipeline(on_step=gate))
    with serving(engine=engine) as client, ThreadPoolExecutor() as pool:
        first = pool.submit(ask, client, COMPLETIONS, ONCE)
        assert gate.reached.wait(60)
        with pytest.raises(httpx.ReadTimeout):
            client.post(
                COMPLETIONS, json={"prompt": "ZZZ"}, timeout=0.1, headers={"X-Request-Id": "gone"}
            )
        eventually(lambda: engine.aborted == ["gone"])
        gate.opened.set()
        first.result()
        eventually(lambda: engine.client.num_open == 0)
        ask(client, COMPLETIONS, ONCE)
        assert ord("Z") not in gate.seen


def test_a_reader_that_stops_reading_is_ended_and_blocks_nobody() -> None:
    pipeline, stalls = FakePipeline(), itertools.count()
    engine = RunningEngine(pipeline)
    limits = Limits(max_pending=8, stall_timeout_s=0.05)
    app = create_app(
        engine.client, FakeTokenizer(), FakeGrammars(),
        model_name="fake", health=lambda: None, limits=limits,
        places=places_of(), bounds=BOUNDS, on_stall=lambda: next(stalls),
    )  # fmt: skip
    body = json.dumps({**ENDLESS, "stream": True}).encode()
    received: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[Message] = []

    async def receive() -> Message:
        return received.pop() if received else await asyncio.Future()

    async def send(message: Message) -> None:
        sent.append(message)
        if len(sent) == 3:
            await asyncio.Future()  # a full socket that nobody empties

    scope = {
        "type": "http", "method": "POST", "path": CHAT, "headers": [], "query_string": b""
    }  # fmt: skip
    try:
        asyncio.run(asyncio.wait_for(app(scope, receive, send), timeout=5))
        eventually(lambda: pipeline.histories == {})
        assert next(stalls) == 1, "it is counted once"
        assert len(sent) == 3, "the stalled reader was not told more than it took"
    finally:
        engine.stop()


class Watched(Slow):
    """Remembers at each step how many sequences hold cells, and how many were told to end."""

    def __init__(self) -> None:
        super().__init__(0.03)  # longer than the gateway takes for forty chunks
        self.seen: list[tuple[int, int]] = []
        self.look: Callable[[], tuple[int, int]] = lambda: (0, 0)

    def __call__(self, batch: StepBatch) -> None:
        self.seen.append(self.look())
        super().__call__(batch)


def test_of_forty_readers_twenty_leave_and_two_steps_later_their_cells_are_free() -> None:
    watched = Watched()
    pipeline = FakePipeline(on_step=watched)
    engine = RunningEngine(pipeline, num_lanes=40, running=40)
    watched.look = lambda: (len(pipeline.histories), len(engine.aborted))
    all_read = threading.Barrier(40)

    def read(number: int) -> int:
        with stream(client, max_tokens=60, ignore_eos=True) as response:
            lines = response.iter_lines()
            next(lines)
            all_read.wait(60)
            return 0 if number % 2 else sum(line.startswith("data: {") for line in lines)

    with (
        serving(engine=engine, places=places_of(ceiling=40)) as client,
        ThreadPoolExecutor(40) as pool,
    ):
        found = list(pool.map(read, range(40)))
        assert found == [59, 0] * 20
        eventually(lambda: engine.client.num_open == 0 and pipeline.histories == {})
    first = next(at for at, (_, ended) in enumerate(watched.seen) if ended >= 20)
    # The step under way, and one more that could be planned before the last was heard of.
    assert max(held for held, _ in watched.seen[first + 3 :]) <= 20
    assert max(held for held, _ in watched.seen[:first]) == 40


def test_many_readers_that_leave_at_any_moment_leave_nothing_behind() -> None:
    pipeline = FakePipeline(on_step=Slow(0.0005))
    engine = RunningEngine(pipeline)

    def leave_after(num_lines: int) -> None:
        with stream(client, max_tokens=40) as response:
            for _, _line in zip(range(num_lines), response.iter_lines(), strict=False):
                pass

    with serving(engine=engine) as client, ThreadPoolExecutor(8) as pool:
        list(pool.map(leave_after, range(0, 48, 2)))
        eventually(lambda: engine.client.num_open == 0 and pipeline.histories == {})
        ask(client, CHAT, HELLO)
