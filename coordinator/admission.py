"""Who gets in: a queue bounded by requests and by prompt tokens, pure and on the caller's clock.

A place is taken before anything is known of a request, its tokens are counted when they are known,
and it is given back at the end, whatever that is. Nothing here waits: who may come in waits in the
scheduler's queue, who may not is told when to come back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass

from skippy_mesh.places import AdmissionLimits, Refusal, RefusalCode, retry_after_s

_NUM_ENDS = 32


@dataclass(slots=True)
class _Place:
    taken_s: float
    num_tokens: int = 0
    is_waiting: bool = True


class ServiceRate:
    """How many requests end in a second of work, over the last 32 that did. Idle time counts for
    nothing, or the first crowd of the morning would be told to come back at noon."""

    def __init__(self) -> None:
        self._busy_s = 0.0
        self._ends: deque[float] = deque([0.0], maxlen=_NUM_ENDS + 1)

    def work(self, seconds: float) -> None:
        self._busy_s += seconds

    def end(self) -> None:
        self._ends.append(self._busy_s)

    def seconds_for(self, num_requests: int) -> float | None:
        """What ``num_requests`` will take; None before the first has ended."""
        num_ends = len(self._ends) - 1
        if not num_ends:
            return None
        return num_requests * (self._busy_s - self._ends[0]) / num_ends


class Admission:
    """The places of one mesh. ``now_s`` never goes back."""

    def __init__(self, limits: AdmissionLimits):
        self.limits = limits
        self._places: dict[Hashable, _Place] = {}
        self._num_waiting = self._waiting_tokens = 0
        self._rate = ServiceRate()
        self._now_s = 0.0

    @property
    def num_open(self) -> int:
        return len(self._places)

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    @property
    def waiting_tokens(self) -> int:
        return self._waiting_tokens

    def take(self, key: Hashable, now_s: float) -> Refusal | None:
        """A place, or why there is none. With nobody there, there is one."""
        self._pass(now_s)
        limits, num_open = self.limits, self.num_open
        if num_open >= limits.max_open:
            return self._refuse(
                "queue_full",
                f"{limits.ceiling} requests may run and {limits.max_queue} may wait, and "
                f"{num_open} do",
            )
        wait_s = self._rate.seconds_for(num_open + 1 - limits.ceiling)
        if 0 < limits.queue_timeout_s < (wait_s or 0.0):
            return self._refuse(
                "queue_timeout",
                f"it would wait {wait_s:.0f} s, and {limits.queue_timeout_s:g} s are the limit",
            )
        self.restore(key, now_s)
        return None

    def count(self, key: Hashable, num_tokens: int, now_s: float) -> Refusal | None:
        """Whether a prompt of ``num_tokens`` may wait, too. Alone in the queue, any may."""
        self._pass(now_s)
        place = self._places[key]
        others = self._waiting_tokens - place.num_tokens
        limit = self.limits.max_queue_tokens
        if others and others + num_tokens > limit:
            return self._refuse(
                "queue_tokens_full",
                f"{others} prompt tokens wait and {limit} may: there is no room for "
                f"{num_tokens} more",
            )
        self.tell(key, num_tokens)
        return None

    def tell(self, key: Hashable, num_tokens: int) -> None:
        """A prompt has so many tokens, whatever the bound says. Unknown keys are no error."""
        if (place := self._places.get(key)) is not None:
            if place.is_waiting:
                self._waiting_tokens += num_tokens - place.num_tokens
            place.num_tokens = num_tokens

    def restore(
        self, key: Hashable, now_s: float, *, num_tokens: int = 0, is_waiting: bool = True
    ) -> None:
        """A place for one that is in already, whatever the bounds say."""
        self._pass(now_s)
        self._places[key] = _Place(now_s, num_tokens, is_waiting)
        if is_waiting:
            self._num_waiting += 1
            self._waiting_tokens += num_tokens

    def start(self, key: Hashable, now_s: float) -> None:
        """It has left the queue. Unknown keys are no error."""
        self._pass(now_s)
        if (place := self._places.get(key)) is not None:
            self._leave_queue(place)

    def end(self, key: Hashable, now_s: float) -> None:
        """It is gone. Unknown keys are no error."""
        self._pass(now_s)
        place = self._places.pop(key, None)
        if place is None:
            return
        if not place.is_waiting:  # who was refused or left the queue was not served
            self._rate.end()
        self._leave_queue(place)

    def _leave_queue(self, place: _Place) -> None:
        if place.is_waiting:
            place.is_waiting = False
            self._num_waiting -= 1
            self._waiting_tokens -= place.num_tokens

    def _pass(self, now_s: float) -> None:
        if self._places:
            self._rate.work(now_s - self._now_s)
        self._now_s = now_s

    def _refuse(self, code: RefusalCode, message: str) -> Refusal:
        """Told to come back when those who wait now have been served."""
        wait_s = self._rate.seconds_for(max(self._num_waiting, 1))
        if wait_s is None:  # nobody has ended yet: one takes at least as long as the oldest has
            wait_s = self._now_s - next(iter(self._places.values())).taken_s
        told_s = retry_after_s(wait_s)
        return Refusal(
            code=code, message=f"{message}; try again in {told_s} s", retry_after_s=told_s
        )
