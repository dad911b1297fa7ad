"""Servers for the bench to measure that are as fast, as wrong or as careless as a test plants."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
import time
import zlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from bench.gate.arms import Arm, Arms
from bench.gate.settings import Case, Settings
from bench.servers import Server
from bench.workloads import WORDS

CELL_BYTES = 10


class PlantedEngine:
    """Answers any prompt with words that follow from it, ``service_s`` after a lane is free.

    ``num_lanes`` requests are served at a time and ``max_open`` let in. From ``wrong_above`` or
    ``drops_above`` open requests on, answers depend on the company or break off in the middle.
    ``keeps_records``: it shows steps and cells at /metrics; a session holds ``cells_each``.
    ``cached_s`` is the service time of a prompt whose beginning was seen.
    """

    def __init__(
        self,
        *,
        service_s: float,
        num_lanes: int = 64,
        max_open: int = 1000,
        wrong_above: int | None = None,
        drops_above: int | None = None,
        keeps_records: bool = True,
        cells_each: int = 20,
        cached_s: float | None = None,
    ):
        self.service_s, self.cached_s = service_s, cached_s
        self.num_lanes, self.max_open = num_lanes, max_open
        self.wrong_above, self.drops_above = wrong_above, drops_above
        self.keeps_records, self.cells_each = keeps_records, cells_each
        self.num_open = self.num_running = self.num_asked = self.num_hit = 0
        self._seen: set[str] = set()
        self._lanes = asyncio.Semaphore(num_lanes)

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/completions", self.complete, methods=["POST"]),
                Route("/metrics", self.metrics),
                Route("/tokenize", self.tokenize, methods=["POST"]),
            ]
        )

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        if self.num_open >= self.max_open:
            return JSONResponse(
                {"error": {"code": "queue_full"}}, status_code=429, headers={"Retry-After": "1"}
            )
        self.num_open += 1
        return StreamingResponse(self._answer(body), media_type="text/event-stream")

    async def _answer(self, body: dict[str, object]) -> AsyncIterator[str]:
        prompt, num_tokens = str(body["prompt"]), int(str(body["max_tokens"]))
        try:
            async with self._lanes:
                self.num_running += 1
                self.num_asked += 1
                try:
                    async for frame in self._serve(prompt, num_tokens, bool(body["cache_prompt"])):
                        yield frame
                finally:
                    self.num_running -= 1
        finally:
            self.num_open -= 1

    async def _serve(self, prompt: str, num_tokens: int, uses_cache: bool) -> AsyncIterator[str]:
        await asyncio.sleep(self._time_of(prompt, uses_cache=uses_cache))
        first, *rest = self._words(prompt, num_tokens)
        yield _frame(first, None)
        if self.drops_above is not None and self.num_open > self.drops_above:
            raise RuntimeError("planted")
        yield _frame(" ".join(rest) or ".", "length")
        yield _usage(len(prompt.split()), num_tokens)

    def _words(self, prompt: str, num_tokens: int) -> list[str]:
        is_wrong = self.wrong_above is not None and self.num_open > self.wrong_above
        start = zlib.crc32(prompt.encode()) + is_wrong
        return [WORDS[(start + at) % len(WORDS)] for at in range(num_tokens)]

    def _time_of(self, prompt: str, *, uses_cache: bool) -> float:
        beginning = " ".join(prompt.split()[:8])
        is_known = uses_cache and beginning in self._seen
        self._seen |= {beginning} if uses_cache else set()
        self.num_hit += is_known
        return self.cached_s if is_known and self.cached_s is not None else self.service_s

    async def metrics(self, request: Request) -> Response:
        lines = ['skippy:requests_finished_total{reason="error"} 0']
        if self.keeps_records:
            cells = self.num_running * self.cells_each
            lines += [
                f'skippy:steps_total{{kind="decode"}} {self.num_asked}',
                f'skippy:step_tokens_total{{phase="prefill"}} {self.num_asked * 8}',
                "skippy:recomputed_tokens_total 0",
                f'skippy:prefix_tokens_total{{result="hit"}} {self.num_hit * 8}',
                f'skippy:prefix_tokens_total{{result="queried"}} {self.num_asked * 8}',
                f"skippy:requests_running {self.num_running}",
                f"skippy:batches_in_flight {min(self.num_running, 1)}",
                f'skippy:stage_compute_seconds_sum{{stage="0"}} {self.num_asked * 0.001}',
                f'skippy:stage_wait_seconds_total{{stage="0"}} {self.num_asked * 0.0001}',
                f'skippy:kv_cells{{stage="0",component="attention",state="active"}} {cells}',
            ]
        return PlainTextResponse("\n".join(lines) + "\n")

    async def tokenize(self, request: Request) -> Response:
        return JSONResponse({"count": len((await request.json())["content"].split())})


def _frame(text: str, finish_reason: str | None) -> str:
    choice = {"index": 0, "text": text, "finish_reason": finish_reason}
    return f"data: {json.dumps({'choices': [choice], 'usage': None})}\n\n"


def _usage(num_prompt: int, num_tokens: int) -> str:
    usage = {"prompt_tokens": num_prompt, "completion_tokens": num_tokens}
    return f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"


@contextlib.contextmanager
def up(engine: PlantedEngine) -> Iterator[str]:
    config = uvicorn.Config(
        engine.app(), port=0, lifespan="off", ws="none", log_level="critical",
        timeout_graceful_shutdown=1,
    )  # fmt: skip
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


class PlantedArms:
    """``start`` of a gate, with planted engines in place of real servers; counts its starts."""

    def __init__(self, ours: PlantedEngine, theirs: PlantedEngine):
        self.engines = {"ours": ours, "theirs": theirs}
        self.num_started = 0

    @contextlib.contextmanager
    def start(self, case: Case, settings: Settings) -> Iterator[Arms]:
        self.num_started += 1
        with contextlib.ExitStack() as stack:
            ours, theirs = (
                Arm(
                    server=Server(label, stack.enter_context(up(engine)), os.getpid(), Path()),
                    prices=[{"attention": CELL_BYTES}],
                    ceiling=engine.num_lanes,
                )
                for label, engine in self.engines.items()
            )
            yield Arms(ours=ours, theirs=theirs, words_per_token=1.0, model={"file": "planted"})
