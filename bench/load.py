"""The one HTTP load generator: it sends streaming completions and writes down what came when.

:func:`closed_loop` keeps N requests open, :func:`open_loop` sends when a request is due and counts
waiting from there. Beside either, one-token probes can ask how long a short request takes while
the others are served.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

import httpx

from bench.arrivals import probe_times
from bench.records import Record, Run
from bench.workloads import Workload
from skippy_mesh.errors import UsageError

MAX_PROBES_S = 3600.0


@dataclass(slots=True)
class Stream:
    """What one answer has said so far, fed line by line. ``code`` names a failure in a word,
    ``error`` in full."""

    chunk_times_s: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    finish_reason: str | None = None
    status: int | None = None
    retry_after: str | None = None
    code: str | None = None
    error: str | None = None

    def feed(self, line: str, now_s: float) -> None:
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or data == "[DONE]":
            return  # comments keep the connection alive; the end is checked by what came before
        frame = json.loads(data)
        if "error" in frame:
            problem = frame["error"]
            self.fail(
                str(problem.get("code") or "stream error"),
                f"error in the stream: {problem.get('message')}",
            )
        self.usage = frame.get("usage") or self.usage
        for choice in frame.get("choices", ()):
            if choice.get("text"):
                self.chunk_times_s.append(now_s)
                self.texts.append(choice["text"])
            self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def refuse(self, reply: httpx.Response, body: bytes) -> None:
        """No stream came, but an error page."""
        detail = body.decode(errors="replace")
        self.retry_after = reply.headers.get("retry-after")
        try:
            name = f" {json.loads(detail)['error']['code']}"
        except (ValueError, KeyError, TypeError):
            name = ""
        self.fail(f"{reply.status_code}{name}", f"HTTP {reply.status_code}: {detail[:200]}")

    def fail(self, code: str, error: str) -> None:
        """The first failure is the one that counts."""
        if self.error is None:
            self.code, self.error = code, error

    def verdict(self, output_tokens: int) -> str | None:
        """Why an answer that ended is not a whole one."""
        if self.error is not None:
            return self.error
        if self.finish_reason is None:
            return "the stream ended without a finish reason"
        if not {"prompt_tokens", "completion_tokens"} <= self.usage.keys():
            return "the stream carried no usage"
        if self.usage["completion_tokens"] != output_tokens:
            return f"{self.usage['completion_tokens']} tokens came, {output_tokens} were asked for"
        return None if self.texts else "no text came"

    def end(self, workload: Workload) -> None:
        if not workload.has_usage and self.finish_reason == "length":
            # Nothing else ends so: exactly as many as were asked for.
            self.usage = {"prompt_tokens": None, "completion_tokens": workload.output_tokens}
        reason = self.verdict(workload.output_tokens)
        if reason is not None:
            self.fail("aborted" if self.finish_reason == "abort" else "incomplete", reason)

    def record(self, index: int, *, sent_s: float, end_s: float) -> Record:
        """Of a request that was sent when it was due and ended by itself."""
        return Record(
            index=index,
            scheduled_s=sent_s,
            sent_s=sent_s,
            end_s=end_s,
            chunk_times_s=tuple(self.chunk_times_s),
            prompt_tokens=self.usage.get("prompt_tokens"),
            completion_tokens=self.usage.get("completion_tokens"),
            cached_tokens=self.cached_tokens,
            finish_reason=self.finish_reason,
            text="".join(self.texts),
            status=self.status,
            retry_after=self.retry_after,
            code=self.code,
            error=self.error,
            is_cut=False,
        )

    @property
    def cached_tokens(self) -> int | None:
        details = self.usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        return cached if isinstance(cached, int) else None


def check_loopback(url: str) -> None:
    """The bench overloads what it talks to, so it talks to this machine only."""
    host = urlsplit(url).hostname or ""
    try:
        is_loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback:
        raise UsageError(f"the load generator only talks to this machine, not to {url}")


async def send(
    client: httpx.AsyncClient,
    workload: Workload,
    index: int,
    *,
    scheduled_s: float,
    until_s: float,
    queue_s: float = 0.0,
) -> Record:
    """One streaming completion, given up at ``until_s``. Every ending becomes a record."""
    stream, is_cut = Stream(), False
    body = workload.body(index)
    sent_s = time.monotonic()
    try:
        async with (
            asyncio.timeout(until_s - sent_s),
            client.stream("POST", "/v1/completions", json=body) as reply,
        ):
            stream.status = reply.status_code
            if reply.status_code == 200:
                async for line in reply.aiter_lines():
                    stream.feed(line, time.monotonic())
                stream.end(workload)
            else:
                stream.refuse(reply, await reply.aread())
    except TimeoutError:
        is_cut = True
    except (httpx.HTTPError, ValueError) as failure:
        stream.fail(type(failure).__name__, f"{type(failure).__name__}: {failure}")
    return replace(
        stream.record(index, sent_s=sent_s, end_s=time.monotonic()),
        scheduled_s=scheduled_s,
        queue_s=queue_s,
        is_cut=is_cut and stream.error is None,
    )


def run_requests(
    url: str, workload: Workload, *, clients: int, requests: int, limit_s: float, first: int = 0
) -> Run:
    """So many requests in a closed loop; what is open after ``limit_s`` is cut."""
    return asyncio.run(
        closed_loop(
            url,
            workload,
            num_clients=clients,
            max_requests=requests,
            send_s=limit_s,
            drain_s=0,
            first_index=first,
        )
    )


async def closed_loop(
    url: str,
    workload: Workload,
    *,
    num_clients: int,
    max_requests: int,
    send_s: float,
    drain_s: float,
    first_index: int = 0,
    refused_pause_s: float = 0.0,
    probe_rate: float = 0.0,
) -> Run:
    """``num_clients`` clients, each sends its next request when its last one ended.

    Nothing new is sent after ``max_requests`` or ``send_s``; what is open then has ``drain_s`` to
    finish before it is cut. The requests are those of ``first_index`` on. A client that was refused
    waits ``refused_pause_s`` first.
    """
    indices = iter(range(first_index, first_index + max_requests))

    async def one_client(client: httpx.AsyncClient, records: list[Record], start_s: float) -> None:
        until_s = start_s + send_s + drain_s
        while (now_s := time.monotonic()) < start_s + send_s:
            index = next(indices, None)
            if index is None:
                return
            record = await send(client, workload, index, scheduled_s=now_s, until_s=until_s)
            records.append(record)
            if record.is_rejected:
                await asyncio.sleep(refused_pause_s)

    async def play(client: httpx.AsyncClient, records: list[Record], start_s: float) -> None:
        async with asyncio.TaskGroup() as clients:
            for _ in range(num_clients):
                clients.create_task(one_client(client, records, start_s))

    return await _observed(url, play, probe_rate=probe_rate)


async def open_loop(
    url: str,
    workload: Workload,
    *,
    times_s: Sequence[float],
    drain_s: float,
    max_concurrency: int | None = None,
    probe_rate: float = 0.0,
) -> Run:
    """Request i is due ``times_s[i]`` after the start, whatever became of the others; with
    ``max_concurrency`` it may have to wait for its turn first. ``drain_s`` after the last is due,
    what is open is cut."""
    permits = None if max_concurrency is None else asyncio.Semaphore(max_concurrency)

    async def one_request(
        client: httpx.AsyncClient, records: list[Record], index: int, start_s: float
    ) -> None:
        due_s = start_s + times_s[index]
        await asyncio.sleep(due_s - time.monotonic())
        until_s, queue_s = start_s + times_s[-1] + drain_s, 0.0
        async with permits or contextlib.nullcontext():
            if permits is not None:
                queue_s = time.monotonic() - due_s
            record = await send(
                client, workload, index, scheduled_s=due_s, until_s=until_s, queue_s=queue_s
            )
        records.append(record)

    async def play(client: httpx.AsyncClient, records: list[Record], start_s: float) -> None:
        async with asyncio.TaskGroup() as requests:
            for index in range(len(times_s)):
                requests.create_task(one_request(client, records, index, start_s))

    return await _observed(url, play, probe_rate=probe_rate)


Play = Callable[[httpx.AsyncClient, list[Record], float], Awaitable[None]]


async def _observed(url: str, play: Play, *, probe_rate: float) -> Run:
    """``play`` with a client, and what it left behind, in the order of the requests."""
    check_loopback(url)
    records: list[Record] = []
    probes: list[Record] = []
    # No proxy from the environment and no pool limit: the client must not queue by itself. Each
    # request has its own connection: a kept one may be closed by the server at the very moment it
    # is used again, which would count as a failure that no user would see.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with (
        httpx.AsyncClient(base_url=url, timeout=None, limits=limits, trust_env=False) as client,
        asyncio.TaskGroup() as beside,
    ):
        cpu_s, start_s = time.process_time(), time.monotonic()
        over = asyncio.Event()
        beside.create_task(_probe(client, probe_rate, probes, over))
        try:
            await play(client, records, start_s)
        finally:
            over.set()
    wall_s = time.monotonic() - start_s
    return Run(
        records=sorted(records, key=lambda r: r.index),
        probes=probes,
        client_cpu_share=(time.process_time() - cpu_s) / wall_s,
    )


async def _probe(
    client: httpx.AsyncClient, rate: float, probes: list[Record], over: asyncio.Event
) -> None:
    """Requests for one token at even distances until ``over``; those open then are waited for."""
    workload = Workload(prompt_tokens=4, output_tokens=1, seed="probe")
    start_s = time.monotonic()
    until_s = start_s + MAX_PROBES_S

    async def ask(index: int, due_s: float) -> None:
        probes.append(await send(client, workload, index, scheduled_s=due_s, until_s=until_s))

    async with asyncio.TaskGroup() as requests:
        for index, time_s in enumerate(probe_times(rate, MAX_PROBES_S)):
            due_s = start_s + time_s
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), due_s - time.monotonic())
            if over.is_set():
                return
            requests.create_task(ask(index, due_s))
