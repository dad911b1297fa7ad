"""Tool calls in an answer's text, as it arrives: never anything that has to be taken back.

An argument's JSON is passed on as the model writes it. What may still turn out to be a marker is
held back, and so is white space, which counts only where text follows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from skippy_mesh.gateway.held import num_held

_HEAD = re.compile(
    r'\{\s*"name"\s*:\s*"((?:[^"\\]|\\.)*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\S)'
)
_FIRST_KEYS = ('"name"', '"arguments"', '"parameters"', '"type"', '"id"')
_PARAMETER = re.compile(r"\s*<parameter=([^>]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class CallDelta:
    """What a step adds to call ``index``: its ``name`` first, then parts of its arguments."""

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Syntax:
    """How a model writes calls. ``dropped`` markers stand around them and mean nothing.

    ``body`` is what stands between ``begin`` and ``end``: an object with the name and the
    arguments, the name and the arguments with ``separator`` between, or Qwen3-Coder's tags. With an
    empty ``begin`` it is an object at the start of the answer, or behind ``between`` after another.
    """

    begin: str
    end: str
    body: Literal["json", "named", "xml"]
    between: str
    separator: str = ""
    dropped: Sequence[str] = ()


@dataclass(slots=True)
class _Value:
    """Finds the end of a value written as JSON, an object or a list."""

    depth: int = 0
    in_string: bool = False
    is_escaped: bool = False
    has_begun: bool = False

    def take(self, text: str) -> int:
        """How many characters of ``text`` belong to it."""
        for place, letter in enumerate(text):
            if self.is_complete:
                return place
            if self.is_escaped:
                self.is_escaped = False
            elif self.in_string:
                self.is_escaped = letter == "\\"
                self.in_string = letter != '"'
            elif letter == '"':
                self.in_string = True
            else:
                self.depth += (letter in "{[") - (letter in "}]")
            self.has_begun = True
        return len(text)

    @property
    def is_complete(self) -> bool:
        return self.has_begun and self.depth <= 0 and not self.in_string


class _Call:
    """One call being read. ``arguments`` are those not sent yet; ``rest`` is what follows the call,
    None until it is over; ``is_none`` says that the text was no call after all."""

    def __init__(self, syntax: Syntax, schemas: Mapping[str, object]):
        self._syntax = syntax
        self._schemas = schemas
        self._buffer = ""
        self._value = _Value()
        self._num_parameters = 0
        self.text = ""
        self.name: str | None = None
        self.arguments = ""
        self.rest: str | None = None
        self.is_none = False

    def feed(self, text: str) -> None:
        self.text += text
        self._buffer += text
        if self.name is None:
            self._buffer = self._buffer.lstrip()
        {"json": self._read_json, "named": self._read_named, "xml": self._read_xml}[
            self._syntax.body
        ](text)

    def _read_json(self, text: str) -> None:
        if self.name is None:
            if head := _HEAD.match(self._buffer):
                self.name = _unescaped(head[1])
                self._buffer = self._buffer[head.end() :]
                self._value = _Value()
            elif not _may_be_call(self._buffer):
                self.is_none = True
                return
            else:
                self._read_whole(text)
                return
        self._read_arguments()

    def _read_whole(self, text: str) -> None:
        """The object may have its keys in another order: then it is read once it is complete."""
        self._value.take(text if self._value.has_begun else text.lstrip())
        if not self._value.is_complete:
            return
        size = _Value().take(self._buffer)
        try:
            call = json.loads(self._buffer[:size])
            self.name = str(call["name"])
            given = [call[key] for key in ("arguments", "parameters") if key in call]
            # Without markers around it, an object with a name is not a call yet.
            self.arguments = json.dumps(given[0] if given or not self._syntax.begin else {})
        except (ValueError, LookupError, TypeError):
            self.name, self.is_none = None, True
            return
        self._buffer = "}" + self._buffer[size:]
        self._end()

    def _read_named(self, _text: str) -> None:
        if self.name is None:
            name, found, rest = self._buffer.partition(self._syntax.separator)
            if not found:
                return
            self.name, self._buffer = name.strip(), rest.lstrip()
        self._read_arguments()

    def _read_arguments(self) -> None:
        if not self._value.is_complete:
            size = self._value.take(self._buffer)
            self.arguments += self._buffer[:size]
            self._buffer = self._buffer[size:]
        if self._value.is_complete:
            self._end()

    def _end(self) -> None:
        end = self._syntax.end or "}"
        place = self._buffer.find(end)
        if place >= 0:
            self.rest = self._buffer[place + len(end) :]

    def _read_xml(self, text: str) -> None:
        if self.name is not None and ">" not in text:
            return  # every tag ends with one, and a value may be long
        if self.name is None:
            tag = "<function="
            self.is_none = not (self._buffer.startswith(tag) or tag.startswith(self._buffer))
            name, found, rest = self._buffer.removeprefix(tag).partition(">")
            if self.is_none or not found:
                return
            self.name, self._buffer = name.strip(), rest
        while one := _PARAMETER.match(self._buffer):
            key = one[1].strip()
            value = json.dumps(self._typed(key, one[2]), ensure_ascii=False)
            self.arguments += (
                ", " if self._num_parameters else "{"
            ) + f"{json.dumps(key)}: {value}"
            self._num_parameters += 1
            self._buffer = self._buffer[one.end() :]
        if over := re.match(rf"\s*</function>\s*{re.escape(self._syntax.end)}", self._buffer):
            self.arguments += "}" if self._num_parameters else "{}"
            self.rest = self._buffer[over.end() :]

    def _typed(self, key: str, text: str) -> object:
        """The value of a parameter: text where the tool's schema says so, else JSON if it is."""
        declared: Any = self._schemas.get(self.name or "")
        for part in ("properties", key, "type"):
            declared = declared.get(part) if isinstance(declared, dict) else None
        if declared == "string":
            return text
        try:
            return json.loads(text)
        except ValueError:
            return text


def _unescaped(text: str) -> str:
    try:
        return str(json.loads(f'"{text}"'))
    except ValueError:
        return text


def _may_be_call(text: str) -> bool:
    """Whether ``text`` is, or could become, the beginning of an object with a call's keys."""
    if not text.startswith("{"):
        return not text
    rest = text[1:].lstrip()
    return any(key.startswith(rest) or rest.startswith(key) for key in _FIRST_KEYS)


class ToolParser:
    """Splits an answer into its text and its calls. ``schemas`` are the tools' by name.

    After ``max_calls`` calls ``is_full`` says that nothing more is wanted.
    """

    def __init__(
        self, syntax: Syntax, schemas: Mapping[str, object], *, max_calls: int | None = None
    ):
        self._syntax = syntax
        self._schemas = schemas
        self._max_calls = max_calls
        self._markers = [marker for marker in (syntax.begin, *syntax.dropped) if marker]
        self._buffer = ""
        self._space = ""
        self._dropped_space = ""  # ahead of a call, unless it turns out to be none
        self._call: _Call | None = None
        self._may_begin = True
        self._is_announced = False
        self.num_calls = 0

    @property
    def is_full(self) -> bool:
        return self._max_calls is not None and self.num_calls >= self._max_calls

    def feed(self, text: str, *, final: bool = False) -> tuple[str, list[CallDelta]]:
        """The text that is no call, and what is new of calls, now that ``text`` has followed."""
        shown, deltas = "", list[CallDelta]()
        if self._call is None:
            self._buffer += text
        else:
            self._call.feed(text)
        while not self.is_full:
            if self._call is None:
                shown += self._scan(final=final)
            if self._call is None:
                break
            self._take(self._call, deltas)
            if self._call is not None and self._call.is_none:
                shown += self._give_up(self._call)
            elif self._call is not None:
                break
        if final and self._call is not None and not self._is_announced:
            text = self._dropped_space + self._syntax.begin + self._call.text
            shown += self._visible(text, final=True)
        return shown, deltas

    def _take(self, call: _Call, deltas: list[CallDelta]) -> None:
        if call.name is not None and not self._is_announced:
            deltas.append(CallDelta(self.num_calls, call.name))
            self._is_announced = True
        if call.arguments:
            deltas.append(CallDelta(self.num_calls, arguments=call.arguments))
            call.arguments = ""
        if call.rest is not None:
            self.num_calls += 1
            self._buffer, self._call, self._may_begin = call.rest, None, True

    def _give_up(self, call: _Call) -> str:
        self._buffer, self._call, self._may_begin = call.text, None, False
        return self._visible(self._dropped_space + self._syntax.begin)

    def _scan(self, *, final: bool) -> str:
        """What may be shown of the buffer; sets the call if one begins there."""
        for marker in self._syntax.dropped:
            self._buffer = self._buffer.replace(marker, "")
        if not self._syntax.begin:
            return self._scan_start(final=final)
        text, found, rest = self._buffer.partition(self._syntax.begin)
        if found:
            self._begin(rest)
            return self._visible(text, before_call=True)
        size = 0 if final else num_held(self._buffer, self._markers)
        text, self._buffer = text[: len(text) - size], text[len(text) - size :]
        return self._visible(text, final=final)

    def _scan_start(self, *, final: bool) -> str:
        rest = self._buffer.lstrip()
        if self.num_calls and self._may_begin:
            rest = rest.removeprefix(self._syntax.between.strip()).lstrip()
        if (
            self._may_begin
            and not final
            and (not rest or num_held(rest, self._markers) == len(rest))
        ):
            return ""
        if self._may_begin and rest.startswith("{"):
            self._dropped_space = self._buffer[: len(self._buffer) - len(rest)]
            self._begin(rest)
            return ""
        self._may_begin = False
        text, self._buffer = self._buffer, ""
        return self._visible(text, final=final)

    def _begin(self, text: str) -> None:
        self._call, self._buffer, self._is_announced = _Call(self._syntax, self._schemas), "", False
        self._call.feed(text)

    def _visible(self, text: str, *, before_call: bool = False, final: bool = False) -> str:
        """``text`` but for white space at its end, which waits: ahead of a call it is dropped."""
        text = self._space + text
        body = text.rstrip()
        self._space = text[len(body) :]
        if before_call:
            self._dropped_space, self._space = self._space, ""
        return text if final and not self.num_calls else body
