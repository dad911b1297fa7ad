"""From the engine's token events to text on a socket.

On the event loop an :class:`Answer` turns the events of a :class:`TokenStream` into text, and
:class:`EventStream` writes it for as long as somebody reads.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from skippy_mesh.gateway.errors import engine_failed, to_api_error, unavailable
from skippy_mesh.gateway.replies import Delta, Reply
from skippy_mesh.gateway.schemas import StreamOptions
from skippy_mesh.gateway.spent import Spent, timings
from skippy_mesh.gateway.text import Choice
from skippy_mesh.gateway.token_stream import Limits, TokenStream
from skippy_mesh.messages import FinishReason
from skippy_mesh.times import RequestTimes

Result = TypeVar("Result")
PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
_as_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode  # made once


class Answer:
    """What the engine says of one request, as text: ``num_samples`` choices of each prompt.

    ``on_close`` is called once, when nobody reads it any more. ``ends`` is then why each choice
    ended, None if it was left before, and ``texts`` what was said if it ``keeps_text``.
    """

    def __init__(
        self,
        tokens: TokenStream,
        choices: Sequence[Choice],
        times: Sequence[RequestTimes] = (),
        *,
        num_samples: int = 1,
        keeps_text: bool = False,
        on_close: Callable[[Answer], object] = lambda _: None,
    ):
        self._tokens = tokens
        self._choices = choices
        self.num_samples = num_samples
        self.times = times
        self.num_open = len(choices)
        self.ends: list[FinishReason | None] = [None] * len(choices)
        self.texts = [""] * len(choices)
        self._keeps_text = keeps_text
        self._on_close: Callable[[Answer], object] | None = on_close

    async def next(self) -> tuple[int, Delta] | None:
        """Which choice gets more, and what; None after a :meth:`nudge`. May be cancelled at any
        time without losing anything."""
        while True:
            if (item := await self._tokens.get()) is None:
                return None
            index, event = item
            if self._choices[index].has_ended:
                continue
            if event.finish_reason == "error":
                if event.is_unavailable:
                    raise unavailable("stage_unavailable", event.error or "a stage is lost")
                raise engine_failed()
            if (delta := self._choices[index].push(event)) is not None:
                if self._keeps_text:
                    self.texts[index] += delta.text
                if delta.finish_reason is not None:
                    self.ends[index] = delta.finish_reason
                    self.num_open -= 1
                    self._tokens.end(index, delta.finish_reason)
                return index, delta

    async def whole(self) -> list[Delta]:
        """Each choice as one delta."""
        deltas: list[list[Delta]] = [[] for _ in self._choices]
        while self.num_open:
            if (found := await self.next()) is not None:
                deltas[found[0]].append(found[1])
        return [joined(each) for each in deltas]

    @property
    def spent(self) -> Spent:
        """So far. Of the choices of one prompt the first has computed it."""
        spent = [choice.spent for choice in self._choices]
        return Spent(
            num_output=sum(each.num_output for each in spent),
            num_cached=sum(each.num_cached for each in spent[:: self.num_samples]),
            num_preemptions=sum(each.num_preemptions for each in spent),
            num_recomputed=sum(each.num_recomputed for each in spent),
        )

    def nudge(self) -> None:
        self._tokens.nudge()

    async def until_stalled(self) -> None:
        await self._tokens.stalled.wait()

    def close(self) -> None:
        self._tokens.close()
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close(self)


def joined(deltas: Sequence[Delta]) -> Delta:
    """All ``deltas`` of a choice as one."""
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
    """A reply as server-sent events. ``first`` is what ended the hold, if something did."""

    def __init__(
        self,
        reply: Reply,
        answer: Answer,
        *,
        first: tuple[int, Delta] | None,
        options: StreamOptions,
        has_timings: bool = False,
        limits: Limits,
        on_stall: Callable[[], None],
    ):
        self._reply = reply
        self._answer = answer
        self._first = first
        self._options = options
        self._has_timings = has_timings
        self._limits = limits
        self._on_stall = on_stall
        self._said_s = 0.0
        self._begun: set[int] = set()
        self.status_code = 200
        self.background = None
        self.init_headers({
            "Content-Type": "text/event-stream; charset=utf-8",
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",
        })  # fmt: skip

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _first(self._write(send), _until_gone(receive), self._until_stalled())
        finally:
            self._answer.close()

    async def _until_stalled(self) -> None:
        await self._answer.until_stalled()
        self._on_stall()

    async def _write(self, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        with self._pinging():
            async with aclosing(self._frames()) as frames:
                async for frame in frames:
                    await send({"type": "http.response.body", "body": frame, "more_body": True})
                    self._said_s = time.monotonic()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _frames(self) -> AsyncGenerator[bytes, None]:
        try:
            if self._first is not None:
                yield self._frame(*self._first)
            while self._answer.num_open:
                found = await self._answer.next()
                yield PING if found is None else self._frame(*found)
            if self._options.include_usage:
                yield _data(self._reply.usage_chunk(self._answer.spent, self._answer.times))
        except Exception as error:
            yield _data(to_api_error(error).body)
        yield DONE

    @contextmanager
    def _pinging(self) -> Iterator[None]:
        """A ping whenever nothing was said for ``ping_s``. One timer that looks at the clock: one
        for each token would cost more than the token's text."""
        loop = asyncio.get_running_loop()
        self._said_s = time.monotonic()
        timer: asyncio.TimerHandle

        def look() -> None:
            nonlocal timer
            silent_s = time.monotonic() - self._said_s
            if silent_s >= self._limits.ping_s:
                self._answer.nudge()
                silent_s = 0.0
            timer = loop.call_later(self._limits.ping_s - silent_s, look)

        timer = loop.call_later(self._limits.ping_s, look)
        try:
            yield
        finally:
            timer.cancel()

    def _frame(self, index: int, delta: Delta) -> bytes:
        answer, reply = self._answer, self._reply
        chunk = reply.chunk(
            index, delta, is_first=index not in self._begun, is_opening=not self._begun
        )
        self._begun.add(index)
        is_last = not answer.num_open and delta.finish_reason is not None
        if self._options.continuous_usage_stats:
            chunk["usage"] = reply.usage(answer.spent)
        elif self._options.include_usage:
            chunk["usage"] = None
        if is_last and not self._options.include_usage:
            # No usage chunk follows, so what it would have said travels with the last one.
            chunk |= reply.summary(answer.spent, answer.times)
        elif self._has_timings:
            chunk["timings"] = timings(answer.spent, answer.times, reply.num_prompt_tokens)
        return _data(chunk)


def _data(value: Mapping[str, object]) -> bytes:
    return f"data: {_as_json(value)}\n\n".encode()
