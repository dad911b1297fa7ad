"""Tools: what a request may say of them, how the model's template writes calls, and what a forced
call must look like.

The formats are those of the models' public chat templates: Hermes 2 Pro and Qwen 2.5/3
(``<tool_call>`` around an object), Llama 3.1 to 3.3 (a bare object, "Custom Tool Calling" in Meta's
prompt guide), Qwen3-Coder (``<function=...>`` and ``<parameter=...>`` tags) and DeepSeek V3.1. A
template that knows no tools gets them in a system message, in Hermes' words.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import StringConstraints

from skippy_mesh.errors import RequestError
from skippy_mesh.gateway.body import Body
from skippy_mesh.gateway.constraints import Constraint
from skippy_mesh.gateway.tool_parser import Syntax, ToolParser

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
_ANY_OBJECT: Mapping[str, object] = {"type": "object"}
_SYSTEM_TEXT = """\
You may call functions. They are listed here as JSON schemas, one a line:
<tools>
{tools}
</tools>
To call one, write a JSON object with its name and arguments inside these tags:
<tool_call>
{{"name": "the name", "arguments": {{"the argument": "its value"}}}}
</tool_call>"""

HERMES = Syntax(begin="<tool_call>", end="</tool_call>", body="json", between="\n")
LLAMA = Syntax(begin="", end="", body="json", between="; ", dropped=("<|python_tag|>",))
QWEN_CODER = Syntax(begin="<tool_call>", end="</tool_call>", body="xml", between="\n")


def _deepseek(words: str) -> str:
    """A marker in DeepSeek's own letters: a full-width bar, and a low block for a space."""
    letters = words.replace(" ", "\u2581")
    return f"<\uff5c{letters}\uff5c>"


DEEPSEEK = Syntax(
    begin=_deepseek("tool call begin"),
    end=_deepseek("tool call end"),
    body="named",
    between="",
    separator=_deepseek("tool sep"),
    dropped=(_deepseek("tool calls begin"), _deepseek("tool calls end")),
)

SYNTAXES: Mapping[str, Syntax] = {
    "hermes": HERMES, "llama3_json": LLAMA, "qwen3_coder": QWEN_CODER, "deepseek_v31": DEEPSEEK,
}  # fmt: skip
"""By the names vLLM has for its parsers."""


class Function(Body):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class FunctionName(Body):
    name: str


class NamedChoice(Body):
    type: Literal["function"]
    function: FunctionName


class CalledFunction(Body):
    name: str
    arguments: str = "{}"


class ToolCall(Body):
    """A call in the history, as the client got it."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


ToolChoice = Literal["none", "auto", "required"] | NamedChoice


def syntax_of(template: str | None) -> Syntax | None:
    """How the model behind ``template`` writes calls; None if its template knows no tools."""
    if template is None or "tools" not in template:
        return None
    if DEEPSEEK.separator in template and "```json" not in template:
        return DEEPSEEK
    if "<function=" in template and "<parameter=" in template:
        return QWEN_CODER
    if "<tool_call>" in template:
        return HERMES
    if '"parameters"' in template and "ipython" in template:
        return LLAMA
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools of one request. ``forced`` are those of which one must be called, ``has_template``
    says that the model's own template lists them."""

    tools: Sequence[Tool]
    forced: Sequence[Tool]
    max_calls: int | None
    syntax: Syntax
    has_template: bool

    def parser(self) -> ToolParser:
        return ToolParser(self.syntax, self._schemas, max_calls=self.max_calls)

    @property
    def shows_special(self) -> bool:
        """Markers may be control tokens, whose text is hidden otherwise."""
        return self.syntax in (DEEPSEEK, LLAMA)

    @property
    def variables(self) -> dict[str, object]:
        """What the template is given."""
        return {"tools": self._definitions} if self.has_template else {}

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """``messages`` as the template takes them."""
        if self.has_template:
            return [
                _with_arguments(message, as_text=self.syntax is DEEPSEEK) for message in messages
            ]
        listed = "\n".join(json.dumps(each, ensure_ascii=False) for each in self._definitions)
        told = _SYSTEM_TEXT.format(tools=listed)
        first, *others = [_plain(message) for message in messages]
        if first["role"] in ("system", "developer"):
            return [{**first, "content": f"{first['content']}\n\n{told}"}, *others]
        return [{"role": "system", "content": told}, first, *others]

    @property
    def constraint(self) -> Constraint | None:
        """The grammar of a forced call."""
        if not self.forced:
            return None
        shape = {
            "begin": DEEPSEEK.dropped[0] if self.syntax is DEEPSEEK else "",
            "end": DEEPSEEK.dropped[1] if self.syntax is DEEPSEEK else "",
            "between": self.syntax.between,
            "is_single": self.max_calls == 1,
            "calls": [self._call_shape(tool) for tool in self.forced],
        }
        return Constraint("tools", "tool_calls", json.dumps(shape))

    def _call_shape(self, tool: Tool) -> list[object]:
        name = tool.function.name
        schema = {"schema": tool.function.parameters or _ANY_OBJECT}
        match self.syntax.body:
            case "named":
                head = f"{self.syntax.begin}{name}{self.syntax.separator}"
                return [head, schema, self.syntax.end]
            case "xml":
                return [
                    f"{self.syntax.begin}\n<function={name}>\n",
                    *_parameter_shapes(tool.function.parameters or {}),
                    f"</function>\n{self.syntax.end}",
                ]
        key = "parameters" if self.syntax is LLAMA else "arguments"
        begin = f"{self.syntax.begin}\n" if self.syntax.begin else ""
        end = f"\n{self.syntax.end}" if self.syntax.end else ""
        return [f'{begin}{{"name": "{name}", "{key}": ', schema, "}" + end]

    @property
    def _definitions(self) -> list[dict[str, Any]]:
        return [tool.model_dump(exclude_none=True) for tool in self.tools]

    @property
    def _schemas(self) -> dict[str, object]:
        return {tool.function.name: tool.function.parameters or {} for tool in self.tools}


def tool_use(
    tools: Sequence[Tool],
    choice: ToolChoice | None,
    *,
    is_parallel: bool,
    template: str | None,
    parser: str | None = None,
) -> ToolUse | None:
    """What a request wants of its tools; None if it has none, or wants none to be called. Calls are
    written as ``template`` has it, unless ``parser`` names another of :data:`SYNTAXES`."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise RequestError("tool_choice needs tools", param="tool_choice")
        return None
    if choice == "none":
        return None
    forced: Sequence[Tool] = tools if choice == "required" else ()
    if isinstance(choice, NamedChoice):
        forced = [tool for tool in tools if tool.function.name == choice.function.name]
        if not forced:
            known = ", ".join(tool.function.name for tool in tools)
            raise RequestError(
                f"tool_choice names {choice.function.name!r}; the tools are {known}",
                param="tool_choice",
            )
    syntax = syntax_of(template)
    if parser is not None and "tools" in (template or ""):
        syntax = SYNTAXES[parser]
    return ToolUse(
        tools=tools,
        forced=forced,
        max_calls=None if is_parallel and not isinstance(choice, NamedChoice) else 1,
        syntax=syntax or HERMES,
        has_template=syntax is not None,
    )


def _parameter_shapes(schema: Mapping[str, Any]) -> list[object]:
    properties = schema.get("properties")
    required = schema.get("required")
    shapes: list[object] = []
    for key, value in properties.items() if isinstance(properties, dict) else ():
        shape = [f"<parameter={key}>\n", _value_shape(value, schema), "\n</parameter>\n"]
        is_required = isinstance(required, list) and key in required
        shapes += shape if is_required else [{"optional": shape}]
    return shapes


def _value_shape(value: Any, root: Mapping[str, Any]) -> dict[str, object]:
    """A text stands as it is between its tags, anything else as JSON."""
    if not isinstance(value, dict) or value.get("type") != "string":
        return {"schema": value, "root": root}
    if "enum" in value:
        return {"choices": value["enum"]}
    return {"text_without": "<", "least": value.get("minLength"), "most": value.get("maxLength")}


def _with_arguments(message: Mapping[str, Any], *, as_text: bool) -> dict[str, Any]:
    """Templates print arguments as JSON themselves, but for those that want them printed."""
    calls = message.get("tool_calls")
    if not calls or as_text:
        return dict(message)
    return {**message, "tool_calls": [_parsed(call) for call in calls]}


def _parsed(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": _arguments_of(function)}}


def _arguments_of(function: Mapping[str, Any]) -> Any:
    try:
        return json.loads(function["arguments"] or "{}")
    except ValueError:
        raise RequestError(
            f"the arguments of a call of {function['name']!r} are not JSON", param="messages"
        ) from None


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without anything that only a template with tools understands."""
    text = str(message.get("content", ""))
    for call in message.get("tool_calls") or ():
        function = call["function"]
        shown = {"name": function["name"], "arguments": _arguments_of(function)}
        block = f"<tool_call>\n{json.dumps(shown, ensure_ascii=False)}\n</tool_call>"
        text = f"{text}\n{block}" if text else block
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{text}\n</tool_response>"}
    return {"role": message["role"], "content": text}
