"""From token to client, on hand-made times. Without these a lag is taken to the wrong step."""

from __future__ import annotations

import asyncio
import itertools
import json

import pytest

from bench.lag import lags_of, summary, times_of
from bench.steplog import Step
from bench.workloads import Workload

USAGE = {"prompt_tokens": 4, "completion_tokens": 3}


def step(answered_s: float, *, step_s: float = 0.02, prefill: int = 0) -> Step:
    return Step(
        compute_s=(step_s,), scheduler_s=0.0, step_s=step_s, answered_s=answered_s,
        prefill_tokens=prefill, decode_tokens=1, recompute_tokens=0, running=1, waiting=0,
        active_cells=(),
    )  # fmt: skip


def test_a_chunk_belongs_to_the_last_answer_before_it():
    assert lags_of([0.5, 1.001, 1.9, 2.0], [1.0, 2.0]) == pytest.approx([0.001, 0.9, 0.0])


def test_the_share_is_of_a_step_without_prompts():
    steps = [step(1.0, step_s=5.0, prefill=100), step(2.0), step(3.0)]
    found = summary([1.001, 2.001, 3.001], steps)
    assert (found["chunks"], found["step_ms"], found["p50_lag_ms"]) == (3, 20.0, 1.0)
    assert found["p50_share"] == pytest.approx(0.05)


async def times_from_a_server_that_pauses() -> list[float]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 200 OK\r\n\r\n")
        for end in (None, None, "length"):
            choice = {"text": "a", "finish_reason": end}
            frame = json.dumps({"choices": [choice], "usage": USAGE})
            for half in (f"data: {frame[:20]}", f"{frame[20:]}\n\n"):
                writer.write(half.encode())
                await writer.drain()
                await asyncio.sleep(0.02)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return await times_of(url, Workload(prompt_tokens=4, output_tokens=3, seed="s"), 0)


def test_a_chunk_has_come_with_its_last_byte():
    times_s = asyncio.run(times_from_a_server_that_pauses())
    assert len(times_s) == 3
    assert all(later - sooner >= 0.03 for sooner, later in itertools.pairwise(times_s))
