"""The bodies of the two generation endpoints, and the two dialects of their replies.

``null`` means "not given" everywhere, unknown fields are ignored, and a known field that this
server cannot honour is refused: to ignore it would be a lie about the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError, from_json

from skippy_mesh import __version__
from skippy_mesh.errors import RequestError
from skippy_mesh.messages import SamplingParams

DEFAULT_MAX_CHAT_TOKENS = 8192
DEFAULT_MAX_COMPLETION_TOKENS = 16
_MAX_INT32 = 2**31 - 1
_MAX_STOP_BYTES = 256

# What each field may hold, besides null, false and empty, without changing anything.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("n", "best_of", "stream_interval"), (1,)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "priority", "min_tokens"), (0,)),
    **dict.fromkeys(("repetition_penalty", "repeat_penalty", "typical_p"), (1,)),
    **dict.fromkeys(("top_logprobs", "t_max_predict_ms"), (0,)),
    **dict.fromkeys(("mirostat", "dynatemp_range", "dry_multiplier", "xtc_probability"), (0,)),
    "top_n_sigma": (-1, 0),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    **dict.fromkeys(
        (
            "logprobs", "logit_bias", "allowed_token_ids", "tools", "functions", "grammar",
            "json_schema", "structured_outputs", "structural_tag", "timings_per_token", "echo",
            "continue_final_message", "suffix", "use_beam_search", "prompt_logprobs",
            "prompt_embeds", "bad_words", "truncate_prompt_tokens", "audio", "prediction",
            "web_search_options", "lora", "chat_template", "tool_calls",
        ),
        (),
    ),
}  # fmt: skip
_UNSUPPORTED_PREFIX = "guided_"
_OWN_ERRORS = ("invalid_value", "unsupported_content", "unsupported_parameter")


def refuse_unsupported(fields: Mapping[str, Any], *, path: str = "") -> None:
    """:class:`RequestError` naming the first field that asks for what is not served."""
    for name, value in fields.items():
        neutral = _NEUTRAL.get(name)
        if neutral is None and not name.startswith(_UNSUPPORTED_PREFIX):
            continue
        if value is None or value is False or value == "" or value == [] or value == {}:
            continue
        if isinstance(value, bool) or value not in (neutral or ()):
            raise RequestError(
                f"{path}{name} is not supported; leave it out",
                param=f"{path}{name}",
                code="unsupported_parameter",
            )


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_not_given(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: item for name, item in value.items() if item is not None}


def _check_limit(value: Any) -> Any:
    """-1 is another spelling of "not given"."""
    if type(value) is int and value < 1 and value != -1:
        raise PydanticCustomError(
            "invalid_value", "must be at least 1, or -1 for the default, got {got}", {"got": value}
        )
    return None if value == -1 else value


def _list_of_stops(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    if isinstance(stops, list):
        for stop in stops:
            if isinstance(stop, str) and not 1 <= len(stop.encode()) <= _MAX_STOP_BYTES:
                raise PydanticCustomError(
                    "invalid_value",
                    "each stop string must have 1 to {most} bytes, got {got}",
                    {"most": _MAX_STOP_BYTES, "got": len(stop.encode())},
                )
    return stops


def _text_of_parts(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise PydanticCustomError(
                "unsupported_content", "only parts of type 'text' are supported"
            )
        if not isinstance(part.get("text"), str):
            raise PydanticCustomError("invalid_value", "a part of type 'text' needs a text")
        texts.append(part["text"])
    return "\n".join(texts)


def _one_prompt(value: Any) -> Any:
    """The prompt itself, where the client wraps a single one in a list."""
    if isinstance(value, list) and value and not isinstance(value[0], int):
        if len(value) > 1:
            raise PydanticCustomError(
                "unsupported_parameter", "one prompt a request, got {got}", {"got": len(value)}
            )
        value = value[0]
    if value in ("", []):
        raise PydanticCustomError("invalid_value", "must not be empty")
    return value


TokenLimit = Annotated[int | None, BeforeValidator(_check_limit)]


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationBody(Body):
    """The fields both endpoints share; ranges of sampling fields: :class:`SamplingParams`."""

    model: str = ""
    request_id: Any = None
    max_tokens: TokenLimit = None
    n_predict: TokenLimit = None
    temperature: float = 1.0
    top_k: int = Field(0, le=_MAX_INT32)
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = -1
    ignore_eos: bool = False
    stop: Annotated[list[str], BeforeValidator(_list_of_stops)] = Field([], max_length=16)
    include_stop_str_in_output: bool = False
    stop_token_ids: list[int] = Field([], max_length=64)
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    skip_special_tokens: bool = True
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream: true", param="stream_options")
        return self

    @property
    def token_limit(self) -> int:
        return self.max_tokens or self.n_predict or DEFAULT_MAX_COMPLETION_TOKENS

    def sampling(self, *, eog_ids: frozenset[int], draw_seed: Callable[[], int]) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=draw_seed() if self.seed == -1 else self.seed,
            suppressed_ids=tuple(sorted(eog_ids)) if self.ignore_eos else (),
        )


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(_text_of_parts)] = ""
    name: str | None = None


class ChatBody(GenerationBody):
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: TokenLimit = None
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: str | None = None
    add_generation_prompt: bool = True

    @property
    def token_limit(self) -> int:
        return (
            self.max_completion_tokens
            or self.max_tokens
            or self.n_predict
            or DEFAULT_MAX_CHAT_TOKENS
        )


class CompletionBody(GenerationBody):
    prompt: Annotated[str | list[int], BeforeValidator(_one_prompt)]


BodyType = TypeVar("BodyType", bound=GenerationBody)


def parse_body(kind: type[BodyType], data: bytes) -> BodyType:
    """The JSON ``data`` as a checked body; :class:`RequestError` naming the field if it is not."""
    try:
        fields = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise RequestError("the body must be a JSON object", code="invalid_json")
    refuse_unsupported(fields)
    messages = fields.get("messages")
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict):
            refuse_unsupported(message, path=f"messages[{index}].")
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _to_request_error(error) from None


def _to_request_error(error: ValidationError) -> RequestError:
    # Without the input: it may be the prompt, which has no place in a message or a log.
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = _field_name(first["loc"])
    reason = first["msg"][:1].lower() + first["msg"][1:]
    if param == "prompt" and first["type"] not in _OWN_ERRORS and first["type"] != "missing":
        reason = "must be a string, a list of token ids, or a list of one of these"
    code = first["type"] if first["type"] in _OWN_ERRORS else "invalid_value"
    return RequestError(f"{param}: {reason}", param=param, code=code)


def _field_name(path: tuple[int | str, ...]) -> str:
    """``messages[0].content``, ``stop``: a fault in an item of a plain list is the list's."""
    if path[0] not in ("messages", "stream_options"):
        return str(path[0])
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in path[1:])
    return str(path[0]) + "".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one or more steps add to a choice; ``finish_reason`` is set on its last one only."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One reply in the dialect of its endpoint, whole or in chunks.

    ``prompt_ids`` is given only where the client asked for token ids.
    """

    request_id: str
    created: int
    model: str
    is_chat: bool
    seed: int
    num_prompt_tokens: int
    prompt_ids: list[int] | None = None

    @property
    def skippy(self) -> dict[str, object]:
        return {
            "request_id": self.request_id,
            "seed": self.seed,
            "preemptions": 0,
            "recomputed_tokens": 0,
            "prefix_kind": "none",
        }

    def usage(self, num_output_tokens: int) -> dict[str, object]:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": num_output_tokens,
            "total_tokens": self.num_prompt_tokens + num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": 0},
        }

    def whole(self, delta: Delta, num_output_tokens: int) -> dict[str, object]:
        """The reply of a request without ``stream``: ``delta`` is all of the choice."""
        content: dict[str, object] = (
            {"message": {"role": "assistant", "content": delta.text}}
            if self.is_chat
            else {"text": delta.text}
        )
        return {
            **self._outer(delta, content, is_first=True),
            "usage": self.usage(num_output_tokens),
            "skippy": self.skippy,
        }

    def chunk(self, delta: Delta, *, is_first: bool) -> dict[str, object]:
        """One chunk. A choice's first one carries the role; an empty delta has no content."""
        if not self.is_chat:
            return self._outer(delta, {"text": delta.text}, is_first=is_first)
        content: dict[str, object] = {"role": "assistant"} if is_first else {}
        if is_first or delta.text:
            content["content"] = delta.text
        return self._outer(delta, {"delta": content}, is_first=is_first, is_chunk=True)

    def usage_chunk(self, num_output_tokens: int) -> dict[str, object]:
        return {
            **self._envelope([], is_chunk=True),
            "usage": self.usage(num_output_tokens),
            "skippy": self.skippy,
        }

    def _outer(
        self,
        delta: Delta,
        content: dict[str, object],
        *,
        is_first: bool,
        is_chunk: bool = False,
    ) -> dict[str, object]:
        choice = {
            "index": 0,
            **content,
            "logprobs": None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        outer = self._envelope([choice], is_chunk=is_chunk)
        if self.prompt_ids is not None:
            choice["token_ids"] = list(delta.token_ids)
            if is_first:
                (outer if self.is_chat else choice)["prompt_token_ids"] = self.prompt_ids
        return outer

    def _envelope(self, choices: list[dict[str, object]], *, is_chunk: bool) -> dict[str, object]:
        chat_kind = "chat.completion.chunk" if is_chunk else "chat.completion"
        return {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{self.request_id}",
            "object": chat_kind if self.is_chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"skippy-mesh-{__version__}",
            "choices": choices,
        }
