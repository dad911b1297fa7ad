"""Fields that come in several forms, brought into one; pydantic checks the rest.

Only what a client may send is coerced. Anything else is passed on, for pydantic to refuse.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic_core import PydanticCustomError

from skippy_mesh.gateway.body import Body

_MAX_STOP_BYTES = 256
_MAX_BIAS = 100


class TextPart(Body):
    type: Literal["text"]
    text: str


Content = str | list[TextPart]
Prompts = str | list[int] | list[str | list[int]]
Biases = dict[str, float | bool] | list[tuple[int, float | bool]]


def token_limit(value: Any) -> Any:
    """-1 is another spelling of "not given"."""
    if type(value) is int and value < 1 and value != -1:
        raise PydanticCustomError(
            "invalid_value", "must be at least 1, or -1 for the default, got {got}", {"got": value}
        )
    return None if value == -1 else value


def list_of_stops(value: Any) -> Any:
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


def bias_pairs(value: Any) -> Any:
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


def text_of_parts(value: Any) -> Any:
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


def prompts_of(value: Any) -> Any:
    """A list of prompts, where the client gave one as a text or as a list of ids."""
    if value in ("", []) or (isinstance(value, list) and ("" in value or [] in value)):
        raise PydanticCustomError("invalid_value", "must not be empty")
    is_one = isinstance(value, str) or (isinstance(value, list) and isinstance(value[0], int))
    return [value] if is_one else value
