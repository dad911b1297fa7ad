"""The coordinator: one count of places for all gateways, off the path of a token.

A plain class; over several stages it is an actor of its own. It owns nobody, so its end ends
nobody: Ray starts it again, empty but for its limits, and each gateway that asks is told by the
term that it must hand in its book first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from coordinator.admission import Admission
from skippy_mesh.places import AdmissionLimits, Answer, News, OpenPlace


class Coordinator:
    """``first_term`` must be above any term of a coordinator that was here before."""

    def __init__(
        self,
        limits: AdmissionLimits,
        *,
        clock: Callable[[], float] = time.monotonic,
        first_term: Callable[[], int] = time.time_ns,
    ):
        self._limits = limits
        self._admission = Admission(limits)
        self._clock = clock
        self._next_term = first_term()
        self._terms: dict[str, int] = {}
        self._numbers: dict[str, set[int]] = {}

    def __repr__(self) -> str:
        limits = self._admission.limits
        return f"coordinator ceiling {limits.ceiling} queue {limits.max_queue}"

    def register(
        self, gateway: str, places: Sequence[OpenPlace], ceiling: int | None = None
    ) -> int:
        now_s = self._clock()
        limits = self._limits
        if ceiling is not None:
            limits = replace(limits, ceiling=min(ceiling, limits.ceiling))
        self._admission.limits = limits
        for number in self._numbers.get(gateway, ()):
            self._admission.end((gateway, number), now_s)
        for place in places:
            self._admission.restore(
                (gateway, place.number), now_s,
                num_tokens=place.num_tokens, is_waiting=place.is_waiting,
            )  # fmt: skip
        self._numbers[gateway] = {place.number for place in places}
        self._terms[gateway] = term = self._next_term
        self._next_term += 1
        return term

    def take(self, gateway: str, term: int, number: int, news: News) -> Answer:
        answer = self.note(gateway, term, news)
        if answer.term != term:
            return answer
        refusal = self._admission.take((gateway, number), self._clock())
        if refusal is not None:
            return Answer(term, refusal)
        self._numbers[gateway].add(number)
        return Answer(term, is_alone=self._admission.num_waiting == 1)

    def count(self, gateway: str, term: int, number: int, num_tokens: int, news: News) -> Answer:
        answer = self.note(gateway, term, news)
        if answer.term != term:
            return answer
        return Answer(term, self._admission.count((gateway, number), num_tokens, self._clock()))

    def note(self, gateway: str, term: int, news: News) -> Answer:
        if self._terms.get(gateway) != term:
            return Answer(self._terms.get(gateway))
        now_s = self._clock()
        for number, num_tokens in news.counted:
            self._admission.tell((gateway, number), num_tokens)
        for number in news.started:
            self._admission.start((gateway, number), now_s)
        for number in news.ended:
            self._admission.end((gateway, number), now_s)
            self._numbers[gateway].discard(number)
        return Answer(term)

    def num_open(self) -> int:
        return self._admission.num_open


class DirectDoorkeeper:
    """A coordinator in the gateway's own process."""

    def __init__(self, coordinator: Coordinator):
        self._coordinator = coordinator

    async def register(self, gateway: str, places: Sequence[OpenPlace], ceiling: int | None) -> int:
        return self._coordinator.register(gateway, places, ceiling)

    async def take(self, gateway: str, term: int, number: int, news: News) -> Answer:
        return self._coordinator.take(gateway, term, number, news)

    async def count(
        self, gateway: str, term: int, number: int, num_tokens: int, news: News
    ) -> Answer:
        return self._coordinator.count(gateway, term, number, num_tokens, news)

    async def note(self, gateway: str, term: int, news: News) -> Answer:
        return self._coordinator.note(gateway, term, news)
