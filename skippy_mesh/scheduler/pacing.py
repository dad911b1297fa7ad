"""How much of a step may be prefill, and how many sequences are worth running at once.

Two small controllers over measured step times. Both can be pinned, both say in the log what they
decided and why. Time comes in as an argument.
"""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

EWMA_WEIGHT = 0.25
FIRST_PREFILL_ROWS = 64
MIN_PREFILL_ROWS = 8
"""Even where a decode step alone misses the target, prompts must get on."""


class PrefillPacer:
    """Rows of prefill that may ride with live decodes, so that a step stays within ``target_s``.

    A step is taken for a decode step, whose time is known, plus so much per row of prefill. The
    limit falls at once and rises by a quarter of the gap (mesh-llm's rule).
    """

    def __init__(self, target_s: float = 0.2, *, pinned: int | None = None):
        self._target_s = target_s
        self._pinned = pinned
        self._decode_s: float | None = None
        self._row_s: float | None = None
        self.num_rows = FIRST_PREFILL_ROWS if pinned is None else pinned

    def observe(self, *, step_s: float, num_prefill: int, num_decode: int) -> None:
        """Learn from one step. Leave out steps in which a prompt was completed: its first sample
        costs what no other row does."""
        if self._pinned is not None:
            return
        if num_prefill == 0:
            self._decode_s = _ewma(self._decode_s, step_s)
        elif num_decode and self._decode_s is not None:
            self._row_s = _ewma(self._row_s, max(step_s - self._decode_s, 0.0) / num_prefill)
        if self._row_s and self._decode_s is not None:
            self._settle((self._target_s - self._decode_s) / self._row_s)

    def limit(self, num_decoding: int) -> int:
        """Rows of prefill beside ``num_decoding`` live decodes. As many as these always: where the
        target is out of reach, a step may double, and prompts are not kept waiting for nothing."""
        return self.num_rows if self._pinned is not None else max(self.num_rows, num_decoding)

    def _settle(self, affordable: float) -> None:
        before = self.num_rows
        if affordable < before:
            self.num_rows = max(int(affordable), MIN_PREFILL_ROWS)
        else:
            self.num_rows += int(min(affordable - before, 4 * before) * EWMA_WEIGHT)
        if self.num_rows != before:
            logger.debug(
                "prefill beside decodes: %d rows, was %d (decode step %.1f ms, %.2f ms a row)",
                self.num_rows, before, 1e3 * (self._decode_s or 0), 1e3 * (self._row_s or 0),
            )  # fmt: skip


def _ewma(mean: float | None, value: float) -> float:
    return value if mean is None else mean + EWMA_WEIGHT * (value - mean)


FIRST_RUNNING = 8
MIN_GAIN = 1.03
WINDOW_S = 2.0
MIN_WINDOW_STEPS = 16
COOLDOWN_S = 20.0
MAX_COOLDOWN_S = 320.0


class RunLimit:
    """How many sequences run at once; at most ``ceiling``.

    More lanes can lower throughput, and where is a matter of model and machine, so it is tried:
    while requests wait, the limit is doubled for a window; if the rows computed per second rise by
    3 % it stays and is doubled again, else it goes back, and the next try waits twice as long.
    """

    def __init__(self, ceiling: int, *, pinned: int | None = None):
        self._ceiling = ceiling
        self._is_pinned = pinned is not None
        self.limit = min(ceiling, FIRST_RUNNING if pinned is None else pinned)
        self._kept = self.limit
        self._kept_rate: float | None = None
        self._cooldown_s = COOLDOWN_S
        self._next_try_s = 0.0
        self._start_window(None)

    def observe(self, *, now_s: float, num_rows: int, num_waiting: int) -> None:
        """Note a step of ``num_rows`` rows (recomputed ones left out) that ended at ``now_s``."""
        if self._is_pinned:
            return
        if not num_waiting:
            self._start_window(None)
            return
        if self._window_start_s is None:
            self._start_window(now_s)
            return
        self._num_rows += num_rows
        self._num_steps += 1
        elapsed_s = now_s - self._window_start_s
        if elapsed_s >= WINDOW_S and self._num_steps >= MIN_WINDOW_STEPS:
            self._decide(self._num_rows / elapsed_s, now_s)
            self._start_window(now_s)

    def _start_window(self, now_s: float | None) -> None:
        self._window_start_s = now_s
        self._num_rows = self._num_steps = 0

    def _decide(self, rate: float, now_s: float) -> None:
        is_try = self.limit > self._kept
        if is_try and self._kept_rate is not None and rate < MIN_GAIN * self._kept_rate:
            logger.debug(
                "running: back to %d: %.1f rows/s at %d, %.1f before",
                self._kept, rate, self.limit, self._kept_rate,
            )  # fmt: skip
            self.limit = self._kept
            self._next_try_s = now_s + self._cooldown_s
            self._cooldown_s = min(2 * self._cooldown_s, MAX_COOLDOWN_S)
            return
        if is_try:
            logger.debug("running: keep %d: %.1f rows/s", self.limit, rate)
            self._cooldown_s = COOLDOWN_S
        self._kept, self._kept_rate = self.limit, rate
        if now_s >= self._next_try_s and self.limit < self._ceiling:
            self.limit = min(self._ceiling, 2 * self.limit)
            logger.debug("running: try %d, at %d %.1f rows/s", self.limit, self._kept, rate)
