"""A JSON schema as GBNF, by llama-cpp-python's converter, with its faults put right.

What is changed: inside a literal a backslash is escaped, too (an enum of a text with quotes made
GBNF that does not parse); repetitions use GBNF's own ``{m,n}``, as llama.cpp's converter in C++
does (nested brackets overflow the parser's stack at a few thousand); a string's characters are
those JSON allows (a bare line break is not one), none of them half of a surrogate pair; references
are found beside other references, and their rules have names of their own; and of several types
each keeps the other keywords. Keywords the converter does not know (``minimum`` is one) bind
nobody.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llama_cpp import llama_grammar

MAX_REPETITIONS = 2000  # llama.cpp takes a higher limit for none at all
_CHAR = (
    r"[\x20-\x21\x23-\x5B\x5D-\x7E\x80-\uD7FF\uE000-\U0010FFFF] | "
    r'"\\" (["\\/bfnrt] | "u" ([0-9a-ce-fA-CE-F] [0-9a-fA-F] | [dD] [0-7]) [0-9a-fA-F]{2})'
)


class _Converter(llama_grammar.SchemaConverter):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(prop_order={}, allow_fetch=False, dotall=False, raw_pattern=False)
        self.num_schemas = 0
        self._names: dict[str, str] = {}

    def resolve_refs(self, schema: Any, url: str) -> Any:
        """Find what every reference in ``schema`` refers to; all must be inside it."""
        pending = [schema]
        while pending:
            node = pending.pop()
            if isinstance(node, dict):
                if isinstance(ref := node.get("$ref"), str):
                    self._refs[ref] = _target_of(ref, schema)
                pending.extend(node.values())
            elif isinstance(node, list):
                pending.extend(node)
        return schema

    def begin(self, schema: object) -> None:
        """Go over to another schema; its references are its own."""
        if not isinstance(schema, dict):
            raise ValueError("a schema must be an object")
        _check_limits(schema)
        self._refs.clear()
        self.num_schemas += 1
        self.resolve_refs(schema, "")

    def add(self, name: str, rule: str) -> str:
        return str(self._add_rule(name, rule))

    def literal(self, text: str) -> str:
        return self._format_literal(text)

    def _resolve_ref(self, ref: str) -> Any:
        name = f"ref-{self.num_schemas}-{list(self._refs).index(ref)}-"
        if name not in self._names:
            self._names[name] = name  # for references to it from inside
            self._names[name] = self.visit(self._refs[ref], name)
        return self._names[name]

    def visit(self, schema: Any, name: str) -> Any:
        if isinstance(schema, bool):
            raise ValueError("true and false as schemas are not supported")
        if isinstance(types := schema.get("type"), list):
            schema = {"anyOf": [{**schema, "type": each} for each in types]}
        return super().visit(schema, name)

    def _format_literal(self, literal: str) -> str:
        return f'"{super()._format_literal(_escaped(literal))[1:-1]}"'

    def _add_primitive(self, name: str, rule: Any) -> Any:
        if name == "char":
            rule = llama_grammar.BuiltinRule(_CHAR)
        return super()._add_primitive(name, rule)


def schema_to_gbnf(schema: object) -> str:
    """GBNF whose every text is JSON of this ``schema``, as far as the converter knows schemas.

    Raises whatever it stumbles over.
    """
    converter = _Converter()
    converter.begin(schema)
    converter.visit(schema, "")
    return str(converter.format_grammar())


def calls_to_gbnf(shape: Mapping[str, Any]) -> str:
    """GBNF of tool calls: ``begin``, one of ``calls``, unless ``is_single`` more of them behind
    ``between``, ``end``. A call is a list of texts, of ``{"schema": ...}`` (``root`` is what its
    references are in), ``{"optional": [...]}``, ``{"choices": [...]}`` and
    ``{"text_without": letter, "least": ..., "most": ...}``.
    """
    converter = _Converter()
    names = [
        converter.add(f"call-{number}", _sequence(converter, parts))
        for number, parts in enumerate(shape["calls"])
    ]
    call = converter.add("call", " | ".join(names))
    more = "" if shape["is_single"] else f"({converter.literal(shape['between'])} {call})*"
    begin, end = converter.literal(shape["begin"]), converter.literal(shape["end"])
    converter.add("root", f"{begin} {call} {more} {end}")
    return str(converter.format_grammar())


def _sequence(converter: _Converter, parts: Sequence[Any]) -> str:
    return " ".join(_part(converter, part) for part in parts)


def _part(converter: _Converter, part: Any) -> str:
    if isinstance(part, str):
        return converter.literal(part)
    if "optional" in part:
        return f"({_sequence(converter, part['optional'])})?"
    if "choices" in part:
        return f"({' | '.join(converter.literal(str(choice)) for choice in part['choices'])})"
    if "text_without" in part:
        _check_limits({"minLength": part["least"], "maxLength": part["most"]})
        return _repetition(f"[^{part['text_without']}]", part["least"] or 0, part["most"])
    converter.begin(part.get("root", part["schema"]))
    return str(converter.visit(part["schema"], f"schema-{converter.num_schemas}"))


def _target_of(ref: str, schema: Any) -> Any:
    if ref != "#" and not ref.startswith("#/"):
        raise ValueError(f"$ref {ref!r} is not inside the schema")
    target = schema
    for part in ref.split("/")[1:]:
        if not isinstance(target, dict) or part not in target:
            raise ValueError(f"$ref {ref!r} refers to nothing")
        target = target[part]
    return target


def _escaped(literal: str) -> str:
    return literal.replace("\\", "\\\\")


def _check_limits(value: object) -> None:
    if isinstance(value, list):
        for item in value:
            _check_limits(item)
    if isinstance(value, dict):
        for name in ("minLength", "maxLength", "minItems", "maxItems"):
            count = value.get(name)
            if isinstance(count, int) and count > MAX_REPETITIONS:
                raise ValueError(f"{name} may be at most {MAX_REPETITIONS}, got {count}")
        for item in value.values():
            _check_limits(item)


def _repetition(
    item: str,
    least: int,
    most: int | None,
    separator_rule: str | None = None,
    item_rule_is_literal: bool = False,
) -> str:
    """``build_repetition`` of llama.cpp's common/json-schema-to-grammar.cpp."""
    if most is not None and least > most:
        raise ValueError(f"at least {least} and at most {most} cannot be")
    if separator_rule is None:
        return f"{item}{{{least},{'' if most is None else most}}}"
    if most == 0:
        return ""
    rest_most = None if most is None else most - 1
    rest = _repetition(f"({separator_rule} {item})", max(least - 1, 0), rest_most)
    return f"({item} {rest})?" if least == 0 else f"{item} {rest}"


llama_grammar._build_repetition = _repetition
