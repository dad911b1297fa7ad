"""A gateway's book of places: asked of the coordinator, told again to one that was restarted.

One call takes a place, and unless it is alone in the queue one counts its tokens. Who left the
queue or ended is told with the next question, or else in one call for all of a few milliseconds,
and nobody waits for it. Everything here runs on the event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable

from skippy_mesh.errors import CoordinatorLostError
from skippy_mesh.places import Answer, Doorkeeper, News, OpenPlace, Refusal

logger = logging.getLogger(__name__)

_MAX_TERMS = 3
"""Terms tried for one question. A second one means that a restart came between."""
_TELL_AFTER_S = 0.05
"""News without a question waits so long for one: a call of its own would be made at the very moment
a first token is on its way to its client, on the same thread."""


class PlaceRefusedError(Exception):
    def __init__(self, refusal: Refusal):
        super().__init__(refusal.message)
        self.refusal = refusal


class Place:
    """One request's place. Given back once, however often :meth:`end` is called."""

    def __init__(self, places: Places, number: int, taken_s: float):
        self._places = places
        self.number = number
        self.taken_s = taken_s
        self.num_tokens = 0
        self.is_waiting = True
        self.is_alone = False

    async def count(self, num_tokens: int) -> None:
        """:class:`PlaceRefusedError` if so many prompt tokens may not wait."""
        await self._places.count(self, num_tokens)

    def start(self) -> None:
        """It has left the queue."""
        if self.is_waiting:
            self.is_waiting = False
            self._places.tell_started(self)

    def end(self) -> None:
        self._places.tell_ended(self)


class Places:
    """All places of one gateway. ``gateway`` is its name; a new gateway of the same name takes the
    place of the old one. Its :attr:`ceiling` may be set on any thread."""

    def __init__(
        self,
        doorkeeper: Doorkeeper,
        *,
        gateway: str = "gateway_0",
        clock: Callable[[], float] = time.monotonic,
        tell_after_s: float = _TELL_AFTER_S,
    ):
        self._doorkeeper = doorkeeper
        self._gateway = gateway
        self._clock = clock
        self._tell_after_s = tell_after_s
        self._numbers = itertools.count()
        self._open: dict[int, Place] = {}
        self._ceiling: int | None = None
        self._term: int | None = None
        self._registering: asyncio.Task[int] | None = None
        self._counted: list[tuple[int, int]] = []
        self._started: list[int] = []
        self._ended: list[int] = []
        self._telling: asyncio.Task[None] | None = None

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def ceiling(self) -> int | None:
        """How many requests the engine can run, if it is not what the coordinator was told."""
        return self._ceiling

    @ceiling.setter
    def ceiling(self, ceiling: int) -> None:
        self._ceiling = ceiling
        self._term = None  # whoever asks next tells it

    def oldest_waiting_s(self) -> float | None:
        """How long the first of those in the queue has been there. Any thread."""
        waiting = [place.taken_s for place in list(self._open.values()) if place.is_waiting]
        return self._clock() - min(waiting) if waiting else None

    async def take(self) -> Place:
        """A place; :class:`PlaceRefusedError` or :class:`CoordinatorLostError` if there is none."""
        place = Place(self, next(self._numbers), self._clock())
        try:
            answer = await self._ask(
                lambda term: self._doorkeeper.take(
                    self._gateway, term, place.number, self._take_news()
                )
            )
        except asyncio.CancelledError:  # it may have been given all the same
            self._ended.append(place.number)
            self._tell_soon()
            raise
        place.is_alone = answer.is_alone
        self._open[place.number] = place
        return place

    async def count(self, place: Place, num_tokens: int) -> None:
        if place.is_alone:
            self._counted.append((place.number, num_tokens))
            self._tell_soon()
        else:
            await self._ask(
                lambda term: self._doorkeeper.count(
                    self._gateway, term, place.number, num_tokens, self._take_news()
                )
            )
        place.num_tokens = num_tokens

    def tell_started(self, place: Place) -> None:
        self._started.append(place.number)
        self._tell_soon()

    def tell_ended(self, place: Place) -> None:
        if self._open.pop(place.number, None) is not None:
            self._ended.append(place.number)
            self._tell_soon()

    async def _ask(self, question: Callable[[int], Awaitable[Answer]]) -> Answer:
        for _ in range(_MAX_TERMS):
            term = await self._current_term()
            try:
                answer = await question(term)
            except CoordinatorLostError:
                self._forget(term)
                raise
            if answer.term == term == self._term:
                if answer.refusal is not None:
                    raise PlaceRefusedError(answer.refusal)
                return answer
            if answer.term != term:
                self._forget(term)
        raise CoordinatorLostError("the coordinator is being restarted over and over")

    async def _current_term(self) -> int:
        """All who find the term gone share one try, and its failure: one after another they would
        wait for a silent coordinator for minutes."""
        if self._term is not None:
            return self._term
        if self._registering is None:
            self._registering = asyncio.get_running_loop().create_task(self._register())
        return await asyncio.shield(self._registering)

    async def _register(self) -> int:
        book = [
            OpenPlace(number=place.number, num_tokens=place.num_tokens, is_waiting=place.is_waiting)
            for place in self._open.values()
        ]
        ceiling = self._ceiling
        try:
            term = await self._doorkeeper.register(self._gateway, book, ceiling)
        finally:
            self._registering = None
        # Else it was set while this was on its way, and the next question tells it.
        self._term = term if ceiling == self._ceiling else None
        logger.debug("registered %d open requests, term %d", len(book), term)
        if self._counted or self._started or self._ended:  # meanwhile
            self._tell_soon()
        return term

    def _take_news(self) -> News:
        news = News(tuple(self._counted), tuple(self._started), tuple(self._ended))
        self._counted, self._started, self._ended = [], [], []
        return news

    def _forget(self, term: int) -> None:
        if self._term == term:
            self._term = None

    def _tell_soon(self) -> None:
        if self._telling is None:
            self._telling = asyncio.get_running_loop().create_task(self._tell())

    async def _tell(self) -> None:
        await asyncio.sleep(self._tell_after_s)
        term = self._term
        self._telling = None
        if term is None:
            return  # the next one who asks hands in the whole book
        if not (news := self._take_news()):
            return  # told already
        try:
            answer = await self._doorkeeper.note(self._gateway, term, news)
        except CoordinatorLostError:
            self._forget(term)
            return
        if answer.term != term:
            self._forget(term)
