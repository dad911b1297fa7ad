"""From token events to the text a client sees: whole characters, cut at stop strings."""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from skippy_mesh.gateway.chat import Tokenizer
from skippy_mesh.gateway.held import num_held
from skippy_mesh.gateway.replies import Delta, Score
from skippy_mesh.gateway.spent import Spent
from skippy_mesh.gateway.tool_parser import CallDelta, ToolParser
from skippy_mesh.messages import FinishReason, TokenEvent


class StopMatcher:
    """Cuts text at the first of ``stops``, wherever the borders between its pieces fall.

    The longest end of the text that could still become a stop string is held back, no more and no
    less. ``matched`` is the stop string that was found; nothing may be fed after it.
    """

    def __init__(self, stops: Sequence[str] = (), *, keeps_stop: bool = False):
        self._stops = stops
        self._keeps_stop = keeps_stop
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """What may be shown now that ``text`` has followed."""
        text = self._held + text
        found = [(place, stop) for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            place, self.matched = min(found, key=lambda match: (match[0], -len(match[1])))
            return text[: place + len(self.matched) * self._keeps_stop]
        num_shown = len(text) - num_held(text, self._stops)
        self._held = text[num_shown:]
        return text[:num_shown]

    def flush(self) -> str:
        """The text still held when the request ends without a match."""
        held, self._held = self._held, ""
        return held


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRules:
    """What of an answer is shown, and when.

    ``stops`` end it and are shown only with ``keeps_stop``; text of the first ``min_tokens`` tokens
    is not searched for them. ``interval`` is how many tokens share a delta, but for the first and
    the last. ``max_s`` seconds after its first token it ends with ``length``; 0 is no limit.
    ``prefix`` goes ahead of the answer.
    """

    stops: Sequence[str] = ()
    keeps_stop: bool = False
    shows_special: bool = False
    min_tokens: int = 0
    interval: int = 1
    max_s: float = 0.0
    prefix: str = ""


class Choice:
    """One choice of a reply: token events in, deltas out.

    The joined texts are the same however the events were grouped. ``num_tokens`` counts every
    sampled token, those without visible text too. With ``tools`` calls are taken out of the text.
    What ``has_ended`` takes no more events.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        rules: TextRules | None = None,
        *,
        tools: ToolParser | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._tokenizer = tokenizer
        self._rules = rules or TextRules()
        self._tools = tools
        self._clock = clock
        # Holds back an incomplete character; what never completes becomes U+FFFD at the end.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = StopMatcher(self._rules.stops, keeps_stop=self._rules.keeps_stop)
        self._unsent_text = self._rules.prefix
        self._unsent_ids: list[int] = []
        self._unsent_scores: list[Score] = []
        self._unsent_calls: list[CallDelta] = []
        self._num_chars = 0
        self._is_first = True
        self._end_s: float | None = None
        self.num_tokens = 0
        self.has_ended = False
        self._last: TokenEvent | None = None

    @property
    def spent(self) -> Spent:
        if (last := self._last) is None:
            return Spent(0)
        return Spent(self.num_tokens, last.num_cached, last.num_preemptions, last.num_recomputed)

    def push(self, event: TokenEvent) -> Delta | None:
        """What ``event`` adds; None while there is nothing to show."""
        finish: FinishReason | None = event.finish_reason
        stop: str | int | None = None
        data = b""
        self._last = event
        if event.token_id is not None:
            self._take(event, event.token_id)
            if finish != "stop":
                data = self._tokenizer.piece(event.token_id, special=self._rules.shows_special)
            elif event.token_id not in self._tokenizer.eog_ids:
                stop = event.token_id
            if finish is None and self._is_late():
                finish = "length"
        text = self._decoder.decode(data, final=finish is not None)
        self._num_chars += len(text)
        if self.num_tokens >= self._rules.min_tokens:
            text = self._stops.feed(text)
        if self._stops.matched is not None:
            finish, stop = "stop", self._stops.matched
        elif finish is not None:
            text += self._stops.flush()
        if self._tools is not None:
            text, finish, stop = self._parse(self._tools, text, finish, stop)
        self._unsent_text += text
        return self._delta(finish, stop) if self._is_due(finish) else None

    def _parse(
        self, tools: ToolParser, text: str, finish: FinishReason | None, stop: str | int | None
    ) -> tuple[str, FinishReason | None, str | int | None]:
        text, calls = tools.feed(text, final=finish is not None)
        self._unsent_calls += calls
        if tools.num_calls and (finish == "stop" or (finish is None and tools.is_full)):
            return text, "tool_calls", None
        return text, finish, stop

    def _take(self, event: TokenEvent, token: int) -> None:
        self.num_tokens += 1
        self._unsent_ids.append(token)
        if event.logprobs is not None:
            piece = self._tokenizer.piece
            top = tuple((piece(id_, special=True), score) for id_, score in event.logprobs.top)
            data = piece(token, special=True)
            self._unsent_scores.append(Score(data, event.logprobs.logprob, top, self._num_chars))

    def _is_late(self) -> bool:
        if not self._rules.max_s:
            return False
        now_s = self._clock()
        if self._end_s is None:
            self._end_s = now_s + self._rules.max_s
        return now_s >= self._end_s

    def _is_due(self, finish: FinishReason | None) -> bool:
        if finish is not None:
            return True
        is_enough = self._is_first or len(self._unsent_ids) >= self._rules.interval
        return bool(self._unsent_text or self._unsent_calls) and is_enough

    def _delta(self, finish: FinishReason | None, stop: str | int | None) -> Delta:
        delta = Delta(
            text=self._unsent_text,
            token_ids=tuple(self._unsent_ids),
            scores=tuple(self._unsent_scores),
            calls=tuple(self._unsent_calls),
            finish_reason=finish,
            stop_reason=stop,
        )
        self._unsent_text = ""
        self._unsent_ids, self._unsent_scores, self._unsent_calls = [], [], []
        self._is_first = False
        self.has_ended = finish is not None
        return delta
