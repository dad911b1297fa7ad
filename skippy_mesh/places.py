"""Places: what a gateway and the coordinator say to each other about who gets in.

A request holds one place from before its prompt is looked at until it has ended. The coordinator
counts them for all gateways; each gateway keeps a book of its own, so that a coordinator that was
restarted, and knows nothing, can be told.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from skippy_mesh.errors import UsageError

MAX_RETRY_AFTER_S = 60
RefusalCode = Literal["queue_full", "queue_tokens_full", "queue_timeout"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """``max_queue`` requests beyond the ``ceiling``, and ``max_queue_tokens`` prompt tokens of all
    that wait. Who would wait longer than ``queue_timeout_s`` is refused at once; 0 is off."""

    ceiling: int
    max_queue: int
    max_queue_tokens: int
    queue_timeout_s: float = 0.0

    def __post_init__(self) -> None:
        if self.ceiling < 1:
            raise UsageError(f"the ceiling must be at least 1, got {self.ceiling}")
        for flag, value in (
            ("--max-queue", self.max_queue),
            ("--max-queue-tokens", self.max_queue_tokens),
            ("--queue-timeout-s", self.queue_timeout_s),
        ):
            if not value >= 0:
                raise UsageError(f"{flag} must be 0 or more, got {value}")

    @property
    def max_open(self) -> int:
        return self.ceiling + self.max_queue


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueBounds:
    """What is asked of the queue before it is known how many may run; None for what follows."""

    max_queue: int | None = None
    max_queue_tokens: int | None = None
    queue_timeout_s: float = 0.0

    def limits(self, *, ceiling: int, num_cells: int) -> AdmissionLimits:
        """Over a mesh of so many sessions, whose smallest pool has so many cells."""
        max_queue, max_tokens = self.max_queue, self.max_queue_tokens
        return AdmissionLimits(
            ceiling=ceiling,
            max_queue=max(4 * ceiling, 16) if max_queue is None else max_queue,
            max_queue_tokens=4 * num_cells if max_tokens is None else max_tokens,
            queue_timeout_s=self.queue_timeout_s,
        )


def retry_after_s(wait_s: float) -> int:
    """What a client is told that would wait so long: whole seconds, from 1 to 60."""
    return min(max(math.ceil(wait_s), 1), MAX_RETRY_AFTER_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Not now: ``code`` is that of the HTTP error, ``retry_after_s`` when to come back."""

    code: RefusalCode
    message: str
    retry_after_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenPlace:
    """A line of a gateway's book. ``number`` is the gateway's own."""

    number: int
    num_tokens: int
    is_waiting: bool


@dataclass(frozen=True, slots=True)
class News:
    """Places of one gateway whose tokens are known now, with how many, those that have left the
    queue, and those that are given back."""

    counted: tuple[tuple[int, int], ...] = ()
    started: tuple[int, ...] = ()
    ended: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.counted or self.started or self.ended)


@dataclass(frozen=True, slots=True)
class Answer:
    """``term`` is the one the coordinator knows this gateway by, None if by none. An answer of
    another term than the one asked in means nothing was done. Who is given a place and ``is_alone``
    in the queue may have any number of tokens, and need not ask again."""

    term: int | None
    refusal: Refusal | None = None
    is_alone: bool = False


class Doorkeeper(Protocol):
    """The coordinator as a gateway sees it, in this process or another.

    Every call may raise :class:`~skippy_mesh.errors.CoordinatorLostError`.
    """

    async def register(self, gateway: str, places: Sequence[OpenPlace], ceiling: int | None) -> int:
        """Replace all that is known of ``gateway`` by ``places``; the new term. ``ceiling`` is what
        its engine can run now, where that may be less than the limits say."""
        ...

    async def take(self, gateway: str, term: int, number: int, news: News) -> Answer:
        """Hear ``news``, then give a place to a request of unknown length."""
        ...

    async def count(
        self, gateway: str, term: int, number: int, num_tokens: int, news: News
    ) -> Answer:
        """Hear ``news``, then whether a prompt of ``num_tokens`` may wait. A refused request keeps
        its place until it is ended."""
        ...

    async def note(self, gateway: str, term: int, news: News) -> Answer: ...
