"""Coordinator and gateway as actors, seen from the processes that ask them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

import ray

from coordinator.ray_board import RayBoard
from skippy_mesh.errors import CoordinatorLostError, RuntimeUnavailableError, SkippyError
from skippy_mesh.places import Answer, News, OpenPlace
from stages.pipeline import first_line

logger = logging.getLogger(__name__)

_ANSWERS_WITHIN_S = 3.0
_RESTARTS_WITHIN_S = 60.0
_STARTS_WITHIN_S = 300.0  # its vocabulary may be large and the machine busy
_RETRY_S = 0.2
_LOST = (
    "who may come in cannot be said just now, the coordinator is being restarted; running "
    "requests go on"
)
Found = TypeVar("Found")


class RemoteDoorkeeper:
    """The coordinator's actor. One that is dead or silent is lost, until the next question.

    Silent is one that answers nobody for 3 s: in a crowd a single question may take longer, and
    load alone is no reason to turn anybody away.
    """

    def __init__(self, actor: Any, *, answers_within_s: float = _ANSWERS_WITHIN_S):
        self._actor = actor
        self._answers_within_s = answers_within_s
        self._answered_s = 0.0

    async def register(self, gateway: str, places: Sequence[OpenPlace], ceiling: int | None) -> int:
        term: int = await self._answer(self._actor.register.remote(gateway, places, ceiling))
        return term

    async def take(self, gateway: str, term: int, number: int, news: News) -> Answer:
        answer: Answer = await self._answer(self._actor.take.remote(gateway, term, number, news))
        return answer

    async def count(
        self, gateway: str, term: int, number: int, num_tokens: int, news: News
    ) -> Answer:
        answer: Answer = await self._answer(
            self._actor.count.remote(gateway, term, number, num_tokens, news)
        )
        return answer

    async def note(self, gateway: str, term: int, news: News) -> Answer:
        answer: Answer = await self._answer(self._actor.note.remote(gateway, term, news))
        return answer

    async def _answer(self, ref: Awaitable[Found]) -> Found:
        answer = asyncio.ensure_future(ref)
        asked_s = time.monotonic()
        try:
            while not answer.done():
                silent_s = time.monotonic() - max(asked_s, self._answered_s)
                if silent_s >= self._answers_within_s:
                    raise CoordinatorLostError(_LOST)
                await asyncio.wait([answer], timeout=self._answers_within_s - silent_s)
            found = answer.result()
        except ray.exceptions.RayError as error:
            raise CoordinatorLostError(_LOST) from error
        finally:
            answer.cancel()
        self._answered_s = time.monotonic()
        return found


class RemoteGateway:
    """The gateway's actor, seen from the driver. Ray restarts its process; what it does there is
    for the driver to say, so :meth:`wait` starts it again."""

    def __init__(
        self, actor: Any, served: object, doorkeeper: RemoteDoorkeeper, board: RayBoard | None
    ):
        self._actor = actor
        self._served = served
        self._doorkeeper = doorkeeper
        self._board = board
        self._ended: Any = None
        self._is_stopping = False

    def start(self) -> str:
        """The URL. Waits for a process that is being restarted."""
        deadline_s = time.monotonic() + _RESTARTS_WITHIN_S
        while True:
            try:
                started = self._actor.start.remote(
                    self._served, self._doorkeeper, board=self._board
                )
                url: str = ray.get(started, timeout=_STARTS_WITHIN_S)
                break
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, SkippyError):
                    raise error.cause from error
                raise RuntimeUnavailableError(f"the gateway: {first_line(error.cause)}") from error
            except ray.exceptions.RayError as error:
                if time.monotonic() > deadline_s:
                    raise RuntimeUnavailableError(f"the gateway: {first_line(error)}") from error
                time.sleep(_RETRY_S)
        self._ended = self._actor.wait.remote()
        return url

    def stop(self) -> None:
        self._is_stopping = True
        self._actor.stop.remote()

    def wait(self, timeout_s: float) -> bool:
        ended, _ = ray.wait([self._ended], timeout=timeout_s)
        if not ended:
            return False
        try:
            ray.get(self._ended)
        except ray.exceptions.RayError as error:
            if not self._is_stopping:
                logger.warning("the gateway is started again: %s", first_line(error))
                self.start()
                return False
        return True
