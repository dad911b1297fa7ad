"""The two dialects of a reply, whole or in chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from skippy_mesh import __version__
from skippy_mesh.gateway.spent import Spent, metrics, timings
from skippy_mesh.gateway.tool_parser import CallDelta
from skippy_mesh.messages import FinishReason
from skippy_mesh.times import RequestTimes

_NEVER = -9999.0


@dataclass(frozen=True, slots=True)
class Score:
    """Log-probabilities at one place: of the token that was drawn and of the likeliest ones, all as
    bytes. ``offset`` is where the token begins in the choice's text, in characters."""

    token: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...]
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one or more steps add to a choice; ``finish_reason`` is set on its last one only.

    ``scores`` are the log-probabilities of ``token_ids``, where the request asked for them;
    ``calls`` is what is new of tool calls.
    """

    text: str
    token_ids: tuple[int, ...]
    scores: tuple[Score, ...] = ()
    calls: tuple[CallDelta, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One reply in the dialect of its endpoint, whole or in chunks.

    ``prefix_kind`` says how cached tokens were come by. ``prompt_ids`` are those of each choice's
    prompt, given only where the client asked for token ids.
    """

    request_id: str
    created: int
    model: str
    is_chat: bool
    seed: int
    num_prompt_tokens: int
    prefix_kind: Callable[[int], str]
    prompt_ids: Sequence[list[int]] | None = None

    def usage(self, spent: Spent) -> dict[str, object]:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": spent.num_output,
            "total_tokens": self.num_prompt_tokens + spent.num_output,
            "prompt_tokens_details": {"cached_tokens": spent.num_cached},
        }

    def summary(self, spent: Spent, times: Sequence[RequestTimes]) -> dict[str, object]:
        """What is said once, at the end, of all choices with these ``times``."""
        return {
            "metrics": metrics(spent, times[0]) if len(times) == 1 else None,
            "timings": timings(spent, times, self.num_prompt_tokens),
            "skippy": {
                "request_id": self.request_id,
                "seed": self.seed,
                "preemptions": spent.num_preemptions,
                "recomputed_tokens": spent.num_recomputed,
                "prefix_kind": self.prefix_kind(spent.num_cached),
            },
        }

    def whole(
        self, deltas: Sequence[Delta], spent: Spent, times: Sequence[RequestTimes]
    ) -> dict[str, object]:
        """The reply of a request without ``stream``: each delta is all of its choice."""
        choices = []
        for index, delta in enumerate(deltas):
            content: dict[str, object] = (
                {"message": self._message(index, delta)} if self.is_chat else {"text": delta.text}
            )
            choices.append(self._choice(index, delta, content, is_first=True))
        return {
            **self._envelope(choices, is_opening=True),
            "usage": self.usage(spent),
            **self.summary(spent, times),
        }

    def chunk(
        self, index: int, delta: Delta, *, is_first: bool, is_opening: bool
    ) -> dict[str, object]:
        """One chunk, of choice ``index``. A choice's first one carries the role; an empty delta has
        no content. ``is_opening`` is said of the stream's first one."""
        content: dict[str, object] = {"role": "assistant"} if is_first else {}
        if delta.text or (is_first and not delta.calls):
            content["content"] = delta.text
        if delta.calls:
            content["tool_calls"] = [self._call_chunk(index, call) for call in delta.calls]
        part: dict[str, object] = {"delta": content} if self.is_chat else {"text": delta.text}
        choice = self._choice(index, delta, part, is_first=is_first)
        return self._envelope([choice], is_opening=is_opening, is_chunk=True)

    def usage_chunk(self, spent: Spent, times: Sequence[RequestTimes]) -> dict[str, object]:
        return {
            **self._envelope([], is_chunk=True),
            "usage": self.usage(spent),
            **self.summary(spent, times),
        }

    def _choice(
        self, index: int, delta: Delta, content: dict[str, object], *, is_first: bool
    ) -> dict[str, object]:
        choice = {
            "index": index,
            **content,
            "logprobs": self._logprobs(delta.scores),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self.prompt_ids is not None:
            choice["token_ids"] = list(delta.token_ids)
            if is_first and not self.is_chat:
                choice["prompt_token_ids"] = self.prompt_ids[index]
        return choice

    def _message(self, index: int, delta: Delta) -> dict[str, object]:
        message: dict[str, object] = {"role": "assistant", "content": delta.text}
        if delta.calls:
            names = [call for call in delta.calls if call.name is not None]
            message["content"] = delta.text or None
            message["tool_calls"] = [
                self._call(
                    index, head, "".join(c.arguments for c in delta.calls if c.index == head.index)
                )
                for head in names
            ]
        return message

    def _call_chunk(self, index: int, call: CallDelta) -> dict[str, object]:
        """The first of a call has everything but arguments, the others have nothing else."""
        if call.name is not None:
            return {"index": call.index, **self._call(index, call, "")}
        return {"index": call.index, "function": {"arguments": call.arguments}}

    def _call(self, index: int, call: CallDelta, arguments: str) -> dict[str, object]:
        return {
            "id": f"call_{self.request_id}_{index}_{call.index}",
            "type": "function",
            "function": {"name": call.name, "arguments": arguments},
        }

    def _logprobs(self, scores: Sequence[Score]) -> dict[str, object] | None:
        if not scores:
            return None
        if self.is_chat:
            return {
                "content": [
                    {
                        **_named(score.token, score.logprob),
                        "top_logprobs": [_named(*one) for one in score.top],
                    }
                    for score in scores
                ]
            }
        return {
            "tokens": [_text(score.token) for score in scores],
            "token_logprobs": [_finite(score.logprob) for score in scores],
            "top_logprobs": [_by_text(score) for score in scores],
            "text_offset": [score.offset for score in scores],
        }

    def _envelope(
        self,
        choices: list[dict[str, object]],
        *,
        is_chunk: bool = False,
        is_opening: bool = False,
    ) -> dict[str, object]:
        chat_kind = "chat.completion.chunk" if is_chunk else "chat.completion"
        ids = self.prompt_ids if self.is_chat and is_opening else None
        return {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{self.request_id}",
            "object": chat_kind if self.is_chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"skippy-mesh-{__version__}",
            "choices": choices,
            **({} if ids is None else {"prompt_token_ids": ids[0]}),
        }


def _named(token: bytes, logprob: float) -> dict[str, object]:
    return {"token": _text(token), "logprob": _finite(logprob), "bytes": list(token)}


def _by_text(score: Score) -> dict[str, float]:
    """Two tokens may have one text, such as U+FFFD: the likelier one is kept."""
    found: dict[str, float] = {}
    for token, logprob in (*score.top, (score.token, score.logprob)):
        found.setdefault(_text(token), _finite(logprob))
    return found


def _text(token: bytes) -> str:
    return token.decode(errors="replace")


def _finite(logprob: float) -> float:
    """JSON has no infinity."""
    return max(logprob, _NEVER)
