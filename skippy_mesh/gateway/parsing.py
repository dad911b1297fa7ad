"""From the bytes of a body to a checked one, or to one error that names the field.

``null`` means "not given" everywhere, unknown fields are ignored, and a known field that this
server cannot honour is refused: to ignore it would be a lie about the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import AliasChoices, ValidationError
from pydantic_core import from_json

from skippy_mesh.errors import RequestError
from skippy_mesh.gateway.body import Body
from skippy_mesh.gateway.schemas import MAX_PROMPTS

# What each field may hold, besides null, false and empty, without changing anything.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("mirostat", "dynatemp_range", "dry_multiplier", "xtc_probability"), (0,)),
    "top_n_sigma": (-1, 0),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    **dict.fromkeys(
        (
            "functions", "structural_tag", "suffix", "use_beam_search", "prompt_logprobs",
            "prompt_embeds", "bad_words", "truncate_prompt_tokens", "audio", "prediction",
            "web_search_options", "lora", "chat_template",
        ),
        (),
    ),
}  # fmt: skip
_UNSUPPORTED_PREFIX = "guided_"
_IGNORED = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "verbosity", "id_slot", "session_id", "n_keep", "samplers", "spaces_between_special_tokens",
)  # fmt: skip
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


BodyType = TypeVar("BodyType", bound=Body)


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyParser:
    """``defaults`` are this server's own, for fields that a client leaves out. ``is_strict``
    refuses fields that nobody knows."""

    defaults: Mapping[str, object] = field(default_factory=dict)
    is_strict: bool = False

    def parse(self, kind: type[BodyType], data: bytes) -> BodyType:
        """The JSON ``data`` as a checked body; :class:`RequestError` naming the field if it is
        not."""
        return self.check(kind, read_json(data))

    def check(self, kind: type[BodyType], fields: Mapping[str, Any]) -> BodyType:
        """The same of ``fields`` that are read already."""
        refuse_unsupported(fields)
        _refuse_other_outputs(fields.get("structured_outputs"))
        messages = fields.get("messages")
        for index, message in enumerate(messages if isinstance(messages, list) else ()):
            if isinstance(message, dict):
                refuse_unsupported(message, path=f"messages[{index}].")
        if self.is_strict:
            _refuse_unknown(kind, fields)
        given = {name: value for name, value in fields.items() if value is not None}
        try:
            return kind.model_validate({**self.defaults, **given})
        except ValidationError as error:
            raise _to_request_error(error) from None


def read_json(data: bytes) -> dict[str, Any]:
    """The object in ``data``; :class:`RequestError` ``invalid_json`` if there is none."""
    try:
        fields = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise RequestError("the body must be a JSON object", code="invalid_json")
    return fields


def _refuse_unknown(kind: type[Body], fields: Mapping[str, object]) -> None:
    known = {*_IGNORED, *_NEUTRAL}
    for name, info in kind.model_fields.items():
        known.add(name)
        if isinstance(info.validation_alias, AliasChoices):
            known.update(alias for alias in info.validation_alias.choices if isinstance(alias, str))
    for name in fields:
        if name not in known and not name.startswith(_UNSUPPORTED_PREFIX):
            raise RequestError(f"{name} is not a field of this endpoint", param=name)


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
        reason = f"must be a string, a list of token ids, or a list of up to {MAX_PROMPTS} of these"
    code = first["type"] if first["type"] in _OWN_ERRORS else "invalid_value"
    return RequestError(f"{param}: {reason}", param=param, code=code)


def _field_name(path: tuple[int | str, ...]) -> str:
    """``messages[0].content``, ``stop``: a fault in an item of a plain list is the list's."""
    if path[0] not in _NESTED:
        return str(path[0])
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in path[1:])
    return str(path[0]) + "".join(parts)
