"""The bodies of the two generation endpoints: fields, ranges, defaults, and what fits together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, Field, model_validator

from skippy_mesh.errors import RequestError
from skippy_mesh.gateway import fields
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
MAX_PROMPTS = 64
_MAX_BIASES = 1024
_MAX_TOOLS = 128

TokenLimit = Annotated[int | None, BeforeValidator(fields.token_limit, json_schema_input_type=int)]


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
    n: int = Field(1, ge=1)
    best_of: int | None = None
    priority: int = Field(0, ge=-_MAX_INT32 - 1, le=_MAX_INT32)
    logit_bias: Annotated[
        list[tuple[int, float]],
        BeforeValidator(fields.bias_pairs, json_schema_input_type=fields.Biases),
    ] = Field([], max_length=_MAX_BIASES)
    allowed_token_ids: list[int] | None = Field(None, min_length=1)
    min_tokens: int = Field(0, ge=0)
    ignore_eos: bool = False
    stop: Annotated[
        list[str], BeforeValidator(fields.list_of_stops, json_schema_input_type=str | list[str])
    ] = Field([], max_length=16)
    include_stop_str_in_output: bool = False
    stop_token_ids: list[int] = Field([], max_length=64)
    stream: bool = False
    stream_options: StreamOptions | None = None
    stream_interval: int = Field(1, ge=1)
    t_max_predict_ms: int = Field(0, ge=0)
    return_token_ids: bool = False
    timings_per_token: bool = False
    skip_special_tokens: bool = True
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _fields_fit_together(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream: true", param="stream_options")
        if self.best_of not in (None, self.n):
            raise RequestError(
                f"best_of is {self.best_of}, and only as many as n, {self.n}, are sampled",
                param="best_of",
                code="unsupported_parameter",
            )
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
    content: Annotated[
        str, BeforeValidator(fields.text_of_parts, json_schema_input_type=fields.Content)
    ] = ""
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class ChatBody(GenerationBody):
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: TokenLimit = None
    chat_template_kwargs: dict[str, Any] = Field({})
    reasoning_effort: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
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

    def tool_use(self, template: str | None, parser: str | None = None) -> ToolUse | None:
        """What is to be done with the tools, by the model's chat ``template``, or as ``parser``
        says."""
        use = tool_use(
            self.tools, self.tool_choice,
            is_parallel=self.parallel_tool_calls, template=template, parser=parser,
        )  # fmt: skip
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
    def _chat_fields_fit_together(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestError(
                "continue_final_message needs add_generation_prompt: false",
                param="continue_final_message",
            )
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
    prompt: Annotated[
        list[str | list[int]],
        Field(min_length=1, max_length=MAX_PROMPTS),
        BeforeValidator(fields.prompts_of, json_schema_input_type=fields.Prompts),
    ]
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
