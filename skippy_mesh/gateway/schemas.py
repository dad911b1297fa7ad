"""The bodies of the two generation endpoints.

``null`` means "not given" everywhere, unknown fields are ignored, and a known field that this
server cannot honour is refused: to ignore it would be a lie about the answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AliasChoices, BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError, from_json

from skippy_mesh.errors import RequestError
from skippy_mesh.gateway.body import Body
from skippy_mesh.gateway.constraints import Constrained
from skippy_mesh.gateway.prefixes import Cached
from skippy_mesh.gateway.text import TextRules
from skippy_mesh.gateway.tools import Tool, ToolCall, ToolChoice, ToolUse, tool_use
from skippy_mesh.messages import SamplingParams
from skippy_mesh.sampling import MAX_LOGPROBS

DEFAULT_MAX_CHAT_TOKENS = 8192
DEFAULT_MAX_COMPLETION_TOKENS = 16
_MAX_INT32 = 2**31 - 1
_MAX_STOP_BYTES = 256
_MAX_BIAS = 100
_MAX_BIASES = 1024
_MAX_TOOLS = 128

# What each field may hold, besides null, false and empty, without changing anything.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("n", "best_of"), (1,)),
    **dict.fromkeys(("mirostat", "dynatemp_range", "dry_multiplier", "xtc_probability"), (0,)),
    "priority": (0,),
    "top_n_sigma": (-1, 0),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    **dict.fromkeys(
        (
            "functions", "structural_tag", "timings_per_token", "continue_final_message",
            "suffix", "use_beam_search", "prompt_logprobs", "prompt_embeds", "bad_words",
            "truncate_prompt_tokens", "audio", "prediction", "web_search_options", "lora",
            "chat_template",
        ),
        (),
    ),
}  # fmt: skip
_UNSUPPORTED_PREFIX = "guided_"
_NESTED = ("messages", "tools", "stream_options", "response_format", "structured_outputs")
# Within structured_outputs: other ways to constrain that vLLM knows.
_UNSUPPORTED_OUTPUTS = ("regex", "json_object", "structural_tag")
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


def _bias_pairs(value: Any) -> Any:
    """Both forms, an object by id and llama-server's pairs, as pairs of id and what is added."""
    if isinstance(value, dict):
        try:
            value = [[int(token), bias] for token, bias in value.items()]
        except ValueError:
            raise PydanticCustomError("invalid_value", "each key must be a token id") from None
    return [_bias_pair(pair) for pair in value] if isinstance(value, list) else value


def _bias_pair(pair: Any) -> Any:
    if not isinstance(pair, list) or len(pair) != 2:
        return pair
    token, bias = pair
    if type(bias) in (int, float) and not -_MAX_BIAS <= bias <= _MAX_BIAS:
        raise PydanticCustomError(
            "invalid_value",
            "each bias must be from -100 to 100, or false, got {got}",
            {"got": bias},
        )
    # A bool is an int to Python, and false is the one that means something.
    never = bias is False or (type(bias) in (int, float) and bias == -_MAX_BIAS)
    return token, -math.inf if never else bias


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


class GenerationBody(Constrained, Cached):
    """The fields both endpoints share; ranges of sampling fields: :class:`SamplingParams`."""

    model: str = ""
    request_id: Any = None
    max_tokens: TokenLimit = None
    n_predict: TokenLimit = None
    temperature: float = 1.0
    top_k: int = Field(0, le=_MAX_INT32)
    top_p: float = 1.0
    typical_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = Field(
        1.0, validation_alias=AliasChoices("repetition_penalty", "repeat_penalty")
    )
    repeat_last_n: int = Field(64, le=_MAX_INT32)
    seed: int = -1
    logit_bias: Annotated[list[tuple[int, float]], BeforeValidator(_bias_pairs)] = Field(
        [], max_length=_MAX_BIASES
    )
    allowed_token_ids: list[int] | None = Field(None, min_length=1)
    min_tokens: int = Field(0, ge=0)
    ignore_eos: bool = False
    stop: Annotated[list[str], BeforeValidator(_list_of_stops)] = Field([], max_length=16)
    include_stop_str_in_output: bool = False
    stop_token_ids: list[int] = Field([], max_length=64)
    stream: bool = False
    stream_options: StreamOptions | None = None
    stream_interval: int = Field(1, ge=1)
    t_max_predict_ms: int = Field(0, ge=0)
    return_token_ids: bool = False
    skip_special_tokens: bool = True
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _fields_fit_together(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream: true", param="stream_options")
        if self.min_tokens > self.token_limit:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, above max_tokens {self.token_limit}",
                param="min_tokens",
            )
        if self.ignore_eos and self.constraint is not None:
            raise RequestError(
                "ignore_eos cannot be met with a constraint, which ends the answer",
                param="ignore_eos",
            )
        return self

    @property
    def token_limit(self) -> int:
        return self.max_tokens or self.n_predict or DEFAULT_MAX_COMPLETION_TOKENS

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens are asked for, None if no log-probabilities are."""
        raise NotImplementedError

    @property
    def named_ids(self) -> dict[str, Sequence[int]]:
        """The token ids in each field that has any."""
        return {
            "stop_token_ids": self.stop_token_ids,
            "allowed_token_ids": self.allowed_token_ids or (),
            "logit_bias": [token for token, _ in self.logit_bias],
        }

    def text_rules(self, *, prefix: str = "", shows_special: bool = False) -> TextRules:
        return TextRules(
            stops=self.stop,
            keeps_stop=self.include_stop_str_in_output,
            shows_special=shows_special or not self.skip_special_tokens,
            min_tokens=self.min_tokens,
            interval=self.stream_interval,
            max_s=self.t_max_predict_ms / 1000,
            prefix=prefix,
        )

    def sampling(
        self, *, eog_ids: frozenset[int], draw_seed: Callable[[], int], grammar: str = ""
    ) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            typical_p=self.typical_p,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            repeat_last_n=self.repeat_last_n,
            seed=draw_seed() if self.seed == -1 else self.seed,
            logit_bias=tuple(self.logit_bias),
            allowed_ids=tuple(self.allowed_token_ids or ()),
            suppressed_ids=tuple(sorted(eog_ids)) if self.ignore_eos else (),
            min_tokens=self.min_tokens,
            ending_ids=tuple(sorted(eog_ids.union(self.stop_token_ids))) if self.min_tokens else (),
            grammar=grammar,
            num_logprobs=self.num_logprobs,
        )


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(_text_of_parts)] = ""
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class ChatBody(GenerationBody):
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: TokenLimit = None
    chat_template_kwargs: dict[str, Any] = Field({})
    reasoning_effort: str | None = None
    add_generation_prompt: bool = True
    tools: list[Tool] = Field([], max_length=_MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS)

    @property
    def template_variables(self) -> dict[str, object]:
        """What the client has for the chat template."""
        if self.reasoning_effort is None:
            return dict(self.chat_template_kwargs)
        return {**self.chat_template_kwargs, "reasoning_effort": self.reasoning_effort}

    def tool_use(self, template: str | None) -> ToolUse | None:
        """What is to be done with the tools, by the model's chat ``template``."""
        use = tool_use(
            self.tools, self.tool_choice, is_parallel=self.parallel_tool_calls, template=template
        )
        if use is not None and use.forced:
            if self.constraint is not None:
                raise RequestError(
                    f"{self.constraint.field} excludes a forced tool call",
                    param=self.constraint.field,
                )
            if self.ignore_eos:
                raise RequestError("ignore_eos excludes a forced tool call", param="ignore_eos")
        return use

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

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
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool = False

    @model_validator(mode="after")
    def _echo_has_no_logprobs(self) -> CompletionBody:
        if self.echo and self.logprobs is not None:
            raise RequestError("echo cannot be combined with logprobs", param="echo")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


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
    _refuse_other_outputs(fields.get("structured_outputs"))
    messages = fields.get("messages")
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict):
            refuse_unsupported(message, path=f"messages[{index}].")
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _to_request_error(error) from None


def _refuse_other_outputs(outputs: object) -> None:
    for name in _UNSUPPORTED_OUTPUTS:
        if isinstance(outputs, dict) and outputs.get(name):
            raise RequestError(
                f"structured_outputs.{name} is not supported; use json, choice or grammar",
                param=f"structured_outputs.{name}",
                code="unsupported_parameter",
            )


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
    if path[0] not in _NESTED:
        return str(path[0])
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in path[1:])
    return str(path[0]) + "".join(parts)
