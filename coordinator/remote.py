"""Coordinator and gateway as actors, seen from the processes that ask them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

import ray

from skippy_mesh.errors import CoordinatorLostError, RuntimeUnavailableError, SkippyError
from skippy_mesh.places import Answer, News, OpenPlace
from stages.pipeline import first_line

logger = logging.getLogger(__name__)

_ANSWERS_WITHIN_S = 3.0
_RESTARTS_WITHIN_S = 60.0
_RETRY_S = 0.2
Found = TypeVar("Found")


class RemoteDoorkeeper:
    """The coordinator's actor. One that is dead or silent is lost, until the next question."""

    def __init__(self, actor: Any):
        self._actor = actor

    async def register(self, gateway: str, places: Sequence[OpenPlace]) -> int:
        term: int = await _answer(self._actor.register.remote(gateway, places))
        return term

    async def take(self, gateway: str, term: int, number: int, news: News) -> Answer:
        answer: Answer = await _answer(self._actor.take.remote(gateway, term, number, news))
        return answer

    async def count(self, gateway: str, term: int, number: int, num_tokens: int) -> Answer:
        answer: Answer = await _answer(self._actor.count.remote(gateway, term, number, num_tokens))
        return answer

    async def note(self, gateway: str, term: int, news: News) -> Answer:
        answer: Answer = await _answer(self._actor.note.remote(gateway, term, news))
        return answer


async def _answer(ref: Awaitable[Found]) -> Found:
    try:
        async with asyncio.timeout(_ANSWERS_WITHIN_S):
            return await ref
    except (ray.exceptions.RayError, TimeoutError) as error:
        raise CoordinatorLostError(
            "who may come in cannot be said just now, the coordinator is being restarted; "
            "running requests go on"
        ) from error


class RemoteGateway:
    """The gateway's actor, seen from the driver. Ray restarts its process; what it does there is
    for the driver to say, so :meth:`wait` starts it again."""

    def __init__(self, actor: Any, served: object, doorkeeper: RemoteDoorkeeper):
        self._actor = actor
        self._served = served
        self._doorkeeper = doorkeeper
        self._ended: Any = None
        self._is_stopping = False

    def start(self) -> str:
        """The URL. Waits for a process that is being restarted."""
        deadline_s = time.monotonic() + _RESTARTS_WITHIN_S
        while True:
            try:
                url: str = ray.get(self._actor.start.remote(self._served, self._doorkeeper))
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
