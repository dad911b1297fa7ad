"""What requests waited for, took and ended with, added up over all of them.

Plain additions on one thread, as in :mod:`skippy_mesh.step_totals`. A token is counted when it
comes and a prompt with its first token, so that rates move while long answers are being written;
the rest is known when a request ends, and each phase counts that it had.
"""

from __future__ import annotations

from collections.abc import Iterator

from skippy_mesh.exposition import Histogram, Page, geometric
from skippy_mesh.step_totals import DURATIONS_S
from skippy_mesh.times import RequestEnd, RequestNews

FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
PHASES_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
BETWEEN_TOKENS_S = DURATIONS_S[3:]
PREEMPTIONS = (0, 1, 2, 3, 4, 5, 10, 20)
_MOST_TOKENS = 2**20


def token_bounds(max_tokens: int) -> Iterator[int]:
    """1, 2, 5, 10 and so on, up to ``max_tokens``."""
    power = 1
    while power <= max_tokens:
        yield from (bound for bound in (power, 2 * power, 5 * power) if bound <= max_tokens)
        power *= 10


# The same for every model: Ray knows one set of buckets for a name on a node.
_FINE_TOKENS = (*geometric(1, _MOST_TOKENS), *token_bounds(_MOST_TOKENS))


class RequestTotals:
    """``max_model_len`` is the most tokens a request can have."""

    def __init__(self, max_model_len: int):
        fine_s = geometric(DURATIONS_S[0], PHASES_S[-1])
        counts = tuple(token_bounds(max_model_len))
        self.first_token_s = Histogram(FIRST_TOKEN_S, fine_s)
        self.gap_s = Histogram(BETWEEN_TOKENS_S)
        self.per_token_s = Histogram(BETWEEN_TOKENS_S, fine_s)
        self.e2e_s = Histogram(PHASES_S, fine_s)
        self.queue_s = Histogram(PHASES_S, fine_s)
        self.prefill_s = Histogram(PHASES_S, fine_s)
        self.decode_s = Histogram(PHASES_S, fine_s)
        self.inference_s = Histogram(PHASES_S, fine_s)
        self.prompt = Histogram(counts, _FINE_TOKENS)
        self.output = Histogram(counts, _FINE_TOKENS)
        self.preemptions = Histogram(PREEMPTIONS, geometric(1, PREEMPTIONS[-1]))
        self.cancel_s = Histogram(DURATIONS_S, fine_s)
        self.num_prompt = self.num_cached = self.num_output = 0
        self.all_prefill_s = self.all_decode_s = 0.0
        self.longest: int | None = None

    def add(self, news: RequestNews) -> None:
        for first in news.firsts:
            self.first_token_s.add(first.after_s)
            self.all_prefill_s += first.prefill_s
            self.num_prompt += first.num_prompt
            self.num_cached += first.num_cached
        for gap_s in news.gaps_s:
            self.gap_s.add(gap_s)
            self.all_decode_s += gap_s
        self.num_output += len(news.firsts) + len(news.gaps_s)
        for end in news.ended:
            self._end(end)

    def _end(self, end: RequestEnd) -> None:
        times = end.times
        self.e2e_s.add(end.e2e_s)
        for histogram, seconds in (
            (self.queue_s, times.queue_s), (self.prefill_s, times.prefill_s),
            (self.decode_s, times.decode_s), (self.inference_s, times.inference_s),
            (self.cancel_s, end.cancel_s),
        ):  # fmt: skip
            if seconds is not None:
                histogram.add(seconds)
        if times.decode_s is not None and end.num_output > 1:
            self.per_token_s.add(times.decode_s / (end.num_output - 1))
        self.prompt.add(end.num_prompt)
        self.output.add(end.num_output)
        self.preemptions.add(end.num_preemptions)
        self.longest = max(self.longest or 0, end.num_prompt + end.num_output)

    def add_to(self, page: Page) -> None:
        page.histogram(
            "request_preemptions", "Times a request gave up its memory before it ended",
            [({}, self.preemptions)],
        )  # fmt: skip
        page.histogram(
            "cancel_seconds", "From an abort, or the client's leaving, to the request's end: what "
            "it held is then free, or cached, for the next step", [({}, self.cancel_s)],
        )  # fmt: skip
