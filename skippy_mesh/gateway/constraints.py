"""What an answer must look like: a request's one constraint, and the grammar it becomes.

Grammars come from anywhere and may end the process that compiles them, so the gateway only passes
them to a :class:`GrammarCompiler`, and nothing reaches a stage that it has not returned.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from pydantic import Field

from skippy_mesh.errors import RequestError
from skippy_mesh.gateway.body import Body
from skippy_mesh.sampling import GrammarKind

_GENERIC_OBJECT = '{"type":"object"}'
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}


class GrammarCompiler(Protocol):
    """Turns a grammar, a JSON schema or the shape of tool calls into GBNF that cannot harm a stage.

    Blocks; any thread.
    """

    def compile(self, kind: GrammarKind, text: str) -> str:
        """:class:`RequestError` ``invalid_grammar`` with the reason if there is none."""
        ...


@dataclass(frozen=True, slots=True)
class Constraint:
    """``text`` of ``kind``, as the request's ``field`` asks."""

    field: str
    kind: GrammarKind
    text: str


class JsonSchema(Body):
    body: dict[str, Any] | None = Field(None, alias="schema")


class ResponseFormat(Body):
    """OpenAI's, and llama-server's with the schema one level up."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    body: dict[str, Any] | None = Field(None, alias="schema")

    def constraint(self) -> Constraint | None:
        if self.type == "text":
            return None
        inner = self.json_schema.body if self.json_schema else None
        schema = self.body if inner is None else inner
        if schema is None and self.type == "json_schema":
            raise RequestError(
                "response_format needs a schema, as json_schema.schema", param="response_format"
            )
        text = _GENERIC_OBJECT if schema is None else json.dumps(schema)
        return Constraint("response_format", "json_schema", text)


class StructuredOutputs(Body):
    """vLLM's: exactly one of the three."""

    schema_: dict[str, Any] | str | None = Field(None, alias="json")
    choice: list[str] | None = Field(None, min_length=1)
    grammar: str | None = None

    def constraint(self) -> Constraint:
        given = [item for item in (self.schema_, self.choice, self.grammar) if item is not None]
        if len(given) != 1:
            raise RequestError(
                f"structured_outputs takes exactly one of json, choice and grammar, "
                f"got {len(given)}",
                param="structured_outputs",
            )
        if self.choice is not None:
            return Constraint("structured_outputs", "gbnf", choice_grammar(self.choice))
        if self.grammar is not None:
            return Constraint("structured_outputs", "gbnf", self.grammar)
        is_text = isinstance(self.schema_, str)
        text = str(self.schema_) if is_text else json.dumps(self.schema_)
        return Constraint("structured_outputs", "json_schema", text)


class Constrained(Body):
    """The fields that constrain an answer, of which a request may have one."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None

    @property
    def constraint(self) -> Constraint | None:
        found = list(self._constraints())
        if len(found) > 1:
            names = " and ".join(constraint.field for constraint in found)
            raise RequestError(
                f"one constraint a request: {names} exclude each other", param=found[1].field
            )
        return found[0] if found else None

    def _constraints(self) -> Iterator[Constraint]:
        if self.response_format is not None:
            constraint = self.response_format.constraint()
            if constraint is not None:
                yield constraint
        if self.structured_outputs is not None:
            yield self.structured_outputs.constraint()
        if self.grammar:
            yield Constraint("grammar", "gbnf", self.grammar)
        if self.json_schema is not None:
            yield Constraint("json_schema", "json_schema", json.dumps(self.json_schema))


def choice_grammar(choices: list[str]) -> str:
    """GBNF of exactly these texts."""
    if "" in choices:
        raise RequestError(
            "structured_outputs.choice: a choice must not be empty", param="structured_outputs"
        )
    literals = (
        '"' + "".join(_ESCAPES.get(letter, letter) for letter in choice) + '"' for choice in choices
    )
    return "root ::= " + " | ".join(literals)


class Grammars:
    """Compiles off the event loop, one at a time: a slow grammar must not take every thread."""

    def __init__(self, compiler: GrammarCompiler):
        self._compiler = compiler
        self._turn = asyncio.Lock()

    async def compiled(self, constraint: Constraint | None) -> str:
        """The GBNF of ``constraint``, empty if there is none."""
        if constraint is None:
            return ""
        async with self._turn:
            try:
                return await asyncio.to_thread(
                    self._compiler.compile, constraint.kind, constraint.text
                )
            except RequestError as error:
                raise RequestError(
                    f"{constraint.field}: {error}", param=constraint.field, code=error.code
                ) from None
