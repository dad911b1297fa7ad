"""One request's token events on their way from the engine's thread to the event loop.

The engine calls :meth:`TokenStream.put` on its own thread and never waits for a client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from skippy_mesh.errors import UsageError
from skippy_mesh.gateway.errors import ApiError
from skippy_mesh.messages import FinishReason, TokenEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """``hold_s``: how long the status line waits for first output or an error. ``ping_s``: silence
    before a comment keeps the connection alive. ``max_pending`` events unread for
    ``stall_timeout_s`` end the request. A request may be in the queue for ``queue_timeout_s`` and
    take ``request_timeout_s`` in all; 0 is off. A token that came through ``ready_window_s`` ago
    or less shows that the mesh is ready."""

    hold_s: float = 10.0
    ping_s: float = 15.0
    stall_timeout_s: float = 60.0
    max_pending: int = 256
    max_body_bytes: int = 16 << 20
    queue_timeout_s: float = 0.0
    request_timeout_s: float = 0.0
    ready_window_s: float = 30.0

    def __post_init__(self) -> None:
        for field, name in (
            ("queue_timeout_s", "--queue-timeout-s"),
            ("request_timeout_s", "--request-timeout-s"),
            ("stall_timeout_s", "--stream-stall-timeout-s"),
            ("ready_window_s", "--ready-window-s"),
        ):
            if not getattr(self, field) >= 0:
                raise UsageError(f"{name} must be 0 or more, got {getattr(self, field)}")
        if self.max_body_bytes < 1:
            raise UsageError(f"--max-request-bytes must be 1 or more, got {self.max_body_bytes}")


class TokenStream:
    """The events of one request's choices on their way from the engine's thread to the event loop.

    ``abort`` tells the engine to end a choice, and with what reason; ``on_start`` runs when one has
    left the queue, ``on_end`` once when all have ended. If the reader leaves ``max_pending`` events
    of each choice unread for ``stall_timeout_s``, ``stalled`` is set. Built on the event loop that
    reads it.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        num_choices: int = 1,
        abort: Callable[[int, FinishReason], object],
        on_start: Callable[[], object],
        on_end: Callable[[], object],
    ):
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, TokenEvent] | ApiError | None] = asyncio.Queue()
        self._limits = limits
        self._max_pending = limits.max_pending * num_choices
        self._open = set(range(num_choices))
        self._told: set[int] = set()  # those the engine was told to end
        self._abort = abort
        self._on_start = on_start
        self._on_end = on_end
        self._end_reason: FinishReason = "abort"
        self._is_waiting = True
        self._stall_timer: asyncio.TimerHandle | None = None
        self._queue_timer: asyncio.TimerHandle | None = None
        self._request_timer: asyncio.TimerHandle | None = None
        self.stalled = asyncio.Event()

    def put(self, index: int, event: TokenEvent) -> None:
        """What happened to choice ``index``. Any thread; never waits and never fails."""
        with suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            self._loop.call_soon_threadsafe(self._arrive, index, event)

    def start(self) -> None:
        """A choice has left the queue. Any thread."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._leave_queue)

    def limit(self, *, in_queue: ApiError, in_all: ApiError) -> None:
        """From now on the two clocks of :class:`Limits` run; their end is what the reader gets."""
        self._queue_timer = self._after(self._limits.queue_timeout_s, in_queue, "abort")
        self._request_timer = self._after(self._limits.request_timeout_s, in_all, "timeout")

    async def get(self) -> tuple[int, TokenEvent] | None:
        """What comes next; None if it is a :meth:`nudge`."""
        item = await self._events.get()
        if self._events.qsize() < self._max_pending:
            self._stop_timer()
        if isinstance(item, ApiError):
            raise item
        return item

    def nudge(self) -> None:
        """Let the reader have a look around, though nothing has come."""
        self._events.put_nowait(None)

    def refuse(self, error: ApiError) -> None:
        """If nothing of it has left the queue, the reader gets ``error``. Any thread."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._refuse, error)

    def end(self, index: int, reason: FinishReason) -> None:
        """The reader needs no more of choice ``index``."""
        if index in self._open and index not in self._told:
            self._told.add(index)
            self._abort(index, reason)

    def end_all(self) -> None:
        for index in list(self._open):
            self.end(index, self._end_reason)

    def close(self) -> None:
        """The reader is done; whatever still runs is aborted."""
        self._stop_timer()
        self._stop_clocks()
        self.end_all()

    def _arrive(self, index: int, event: TokenEvent) -> None:
        self._events.put_nowait((index, event))
        if event.finish_reason is not None:
            self._open.discard(index)
            if not self._open:
                self._stop_clocks()
                self._on_end()
        if self._stall_timer is None and self._events.qsize() >= self._max_pending:
            self._stall_timer = self._loop.call_later(
                self._limits.stall_timeout_s, self.stalled.set
            )

    def _stop_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _refuse(self, error: ApiError) -> None:
        if self._is_waiting and self._open:
            self._events.put_nowait(error)

    def _leave_queue(self) -> None:
        self._is_waiting = False
        _cancel(self._queue_timer)
        self._on_start()

    def _stop_clocks(self) -> None:
        _cancel(self._queue_timer)
        _cancel(self._request_timer)

    def _after(
        self, seconds: float, error: ApiError, reason: FinishReason
    ) -> asyncio.TimerHandle | None:
        return self._loop.call_later(seconds, self._fail, error, reason) if seconds else None

    def _fail(self, error: ApiError, reason: FinishReason) -> None:
        self._end_reason = reason
        self._events.put_nowait(error)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
