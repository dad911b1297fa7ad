"""When things happened to a request: in the queue, to its first token, to its last."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class RequestTimes:
    """Seconds on one clock; None what has not happened. One thread writes, any may read.

    It was submitted, left the queue, and had its first and its last token so far.
    """

    submitted_s: float
    started_s: float | None = None
    first_s: float | None = None
    last_s: float | None = None

    def start(self, now_s: float) -> None:
        if self.started_s is None:
            self.started_s = now_s

    def token(self, now_s: float) -> None:
        if self.first_s is None:
            self.first_s = now_s
        self.last_s = now_s

    @property
    def queue_s(self) -> float | None:
        return _between(self.submitted_s, self.started_s)

    @property
    def prefill_s(self) -> float | None:
        """From leaving the queue to the first token."""
        return _between(self.started_s, self.first_s)

    @property
    def first_token_s(self) -> float | None:
        return _between(self.submitted_s, self.first_s)

    @property
    def decode_s(self) -> float | None:
        """From the first token to the last."""
        return _between(self.first_s, self.last_s)


def _between(start_s: float | None, end_s: float | None) -> float | None:
    return None if start_s is None or end_s is None else end_s - start_s
