"""From the engine's token events to text on a socket.

The engine calls :meth:`TokenStream.put` on its own thread and never waits for a client. On the
event loop a :class:`Choice` turns them into text, and :class:`EventStream` writes it for as long as
somebody reads.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from skippy_mesh.errors import UsageError
from skippy_mesh.gateway.errors import ApiError, engine_failed, to_api_error, unavailable
from skippy_mesh.gateway.replies import Delta, Reply
from skippy_mesh.gateway.schemas import StreamOptions
from skippy_mesh.gateway.text import Choice
from skippy_mesh.messages import TokenEvent

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """``hold_s``: how long the status line waits for first output or an error. ``ping_s``: silence
    before a comment keeps the connection alive. ``max_pending`` events unread for
    ``stall_timeout_s`` end the request. A request may be in the queue for ``queue_timeout_s`` and
    take ``request_timeout_s`` in all; 0 is off."""

    hold_s: float = 10.0
    ping_s: float = 15.0
    stall_timeout_s: float = 60.0
    max_pending: int = 256
    max_body_bytes: int = 16 << 20
    queue_timeout_s: float = 0.0
    request_timeout_s: float = 0.0

    def __post_init__(self) -> None:
        for flag in ("queue_timeout_s", "request_timeout_s"):
            if not getattr(self, flag) >= 0:
                name = "--" + flag.replace("_", "-")
                raise UsageError(f"{name} must be 0 (off) or more, got {getattr(self, flag)}")


class TokenStream:
    """One request's events on their way from the engine's thread to the event loop.

    ``abort`` tells the engine to end the request; ``on_start`` runs once when it has left the
    queue, ``on_end`` once when it has ended. If the reader leaves ``max_pending`` events unread for
    ``stall_timeout_s``, ``stalled`` is set. Built on the event loop that reads it.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        abort: Callable[[], object],
        on_start: Callable[[], object],
        on_end: Callable[[], object],
    ):
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[TokenEvent | ApiError] = asyncio.Queue()
        self._limits = limits
        self._abort = abort
        self._on_start = on_start
        self._on_end = on_end
        self._has_ended = False
        self._stall_timer: asyncio.TimerHandle | None = None
        self._queue_timer: asyncio.TimerHandle | None = None
        self._request_timer: asyncio.TimerHandle | None = None
        self.stalled = asyncio.Event()

    def put(self, event: TokenEvent) -> None:
        """Any thread; never waits and never fails."""
        with suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            self._loop.call_soon_threadsafe(self._arrive, event)

    def start(self) -> None:
        """It has left the queue. Any thread."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._leave_queue)

    def limit(self, *, in_queue: ApiError, in_all: ApiError) -> None:
        """From now on the two clocks of :class:`Limits` run; their end is what the reader gets."""
        self._queue_timer = self._after(self._limits.queue_timeout_s, in_queue)
        self._request_timer = self._after(self._limits.request_timeout_s, in_all)

    async def get(self) -> TokenEvent:
        event = await self._events.get()
        if self._events.qsize() < self._limits.max_pending:
            self._stop_timer()
        if isinstance(event, ApiError):
            raise event
        return event

    def close(self) -> None:
        """The reader is done; a request that still runs is aborted."""
        self._stop_timer()
        self._stop_clocks()
        if not self._has_ended:
            self._abort()

    def _arrive(self, event: TokenEvent) -> None:
        self._events.put_nowait(event)
        if event.finish_reason is not None:
            self._has_ended = True
            self._stop_clocks()
            self._on_end()
        if self._stall_timer is None and self._events.qsize() >= self._limits.max_pending:
            self._stall_timer = self._loop.call_later(
                self._limits.stall_timeout_s, self.stalled.set
            )

    def _stop_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _leave_queue(self) -> None:
        _cancel(self._queue_timer)
        self._on_start()

    def _stop_clocks(self) -> None:
        _cancel(self._queue_timer)
        _cancel(self._request_timer)

    def _after(self, seconds: float, error: ApiError) -> asyncio.TimerHandle | None:
        if not seconds:
            return None
        return self._loop.call_later(seconds, self._events.put_nowait, error)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


async def next_delta(tokens: TokenStream, choice: Choice) -> Delta:
    """The next delta of ``choice``. May be cancelled at any time without losing anything."""
    while True:
        event = await tokens.get()
        if event.finish_reason == "error":
            if event.is_unavailable:
                raise unavailable("stage_unavailable", event.error or "a stage is lost")
            raise engine_failed()
        if (delta := choice.push(event)) is not None:
            return delta


async def all_deltas(tokens: TokenStream, choice: Choice) -> Delta:
    """The whole of ``choice`` as one delta."""
    deltas = [await next_delta(tokens, choice)]
    while deltas[-1].finish_reason is None:
        deltas.append(await next_delta(tokens, choice))
    return Delta(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        scores=tuple(score for delta in deltas for score in delta.scores),
        calls=tuple(call for delta in deltas for call in delta.calls),
        finish_reason=deltas[-1].finish_reason,
        stop_reason=deltas[-1].stop_reason,
    )


async def unless_gone(work: Coroutine[Any, Any, Result], receive: Receive) -> Result:
    """The result of ``work``, or :class:`ClientDisconnect` if the client leaves before it."""
    return await _first(work, _until_gone(receive))


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _first(work: Coroutine[Any, Any, Result], *enders: Coroutine[Any, Any, object]) -> Result:
    task = asyncio.create_task(work)
    others = [asyncio.create_task(ender) for ender in enders]
    try:
        await asyncio.wait([task, *others], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for each in (task, *others):
            each.cancel()
        await asyncio.gather(task, *others, return_exceptions=True)


class EventStream(Response):
    """A reply as server-sent events. ``first`` is the delta that ended the hold, if one did."""

    def __init__(
        self,
        reply: Reply,
        tokens: TokenStream,
        choice: Choice,
        *,
        first: Delta | None,
        options: StreamOptions,
        limits: Limits,
    ):
        self._reply = reply
        self._tokens = tokens
        self._choice = choice
        self._first = first
        self._options = options
        self._limits = limits
        self.status_code = 200
        self.background = None
        self.init_headers({
            "Content-Type": "text/event-stream; charset=utf-8",
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",
        })  # fmt: skip

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _first(self._write(send), _until_gone(receive), self._tokens.stalled.wait())
        finally:
            self._tokens.close()

    async def _write(self, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        async with aclosing(self._frames()) as frames:
            async for frame in frames:
                await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _frames(self) -> AsyncGenerator[bytes, None]:
        delta, is_first = self._first, True
        try:
            while True:
                if delta is not None:
                    yield self._frame(delta, is_first=is_first)
                    is_first = False
                    if delta.finish_reason is not None:
                        break
                try:
                    async with asyncio.timeout(self._limits.ping_s):
                        delta = await next_delta(self._tokens, self._choice)
                except TimeoutError:
                    delta = None
                    yield PING
            if self._options.include_usage:
                yield _data(self._reply.usage_chunk(self._choice.spent))
        except Exception as error:
            yield _data(to_api_error(error).body)
        yield DONE

    def _frame(self, delta: Delta, *, is_first: bool) -> bytes:
        chunk = self._reply.chunk(delta, is_first=is_first)
        if self._options.continuous_usage_stats:
            chunk["usage"] = self._reply.usage(self._choice.spent)
        elif self._options.include_usage:
            chunk["usage"] = None
        elif delta.finish_reason is not None:
            # No usage chunk follows, so the seed travels with the last one.
            chunk["skippy"] = self._reply.skippy(self._choice.spent)
        return _data(chunk)


def _data(value: Mapping[str, object]) -> bytes:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()
