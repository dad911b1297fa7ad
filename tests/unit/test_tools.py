"""Tool calls out of an answer's text, wherever its tokens are cut.

Without these a client gets a call in pieces that do not add up, a marker as text, or text as a
call.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skippy_mesh.gateway.tool_parser import CallDelta, Syntax, ToolParser
from skippy_mesh.gateway.tools import DEEPSEEK, HERMES, LLAMA, QWEN_CODER, syntax_of
from stages.fake import CHATML, FakeGrammars, FakePipeline, FakeTokenizer, recite
from tests.engines import RunningEngine
from tests.unit.test_gateway import CHAT, HELLO, ask, chunks, serving

SCHEMAS = {"write": {"properties": {"text": {"type": "string"}, "count": {"type": "integer"}}}}
D = {
    "begin": DEEPSEEK.begin,
    "end": DEEPSEEK.end,
    "sep": DEEPSEEK.separator,
    "all": DEEPSEEK.dropped[0],
    "all_end": DEEPSEEK.dropped[1],
}
ARGUMENTS = '{"text": "a } \\" </tool_call> b", "list": [1, {"x": []}]}'
Found = tuple[str, list[tuple[str, Any]]]

ANSWERS: list[tuple[Syntax, str, str, list[tuple[str, Any]]]] = [
    (HERMES, "just words <tool", "just words <tool", []),
    (HERMES, "a < b and <b>", "a < b and <b>", []),
    (HERMES, '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>', "",
     [("f", {"x": 1})]),
    (HERMES, 'Sure. \n<tool_call>{"name":"f","arguments":{}}</tool_call>\n\n<tool_call>\n'
     '{"name": "g", "arguments": ' + ARGUMENTS + "}\n</tool_call>\n", "Sure.",
     [("f", {}), ("g", json.loads(ARGUMENTS))]),
    (HERMES, '<tool_call>{"arguments": {"x": "}"}, "name": "f"}</tool_call> then', " then",
     [("f", {"x": "}"})]),
    (HERMES, "<tool_call>no call</tool_call>", "<tool_call>no call</tool_call>", []),
    (HERMES, '<tool_call>{"name": "f"', '<tool_call>{"name": "f"', []),
    (LLAMA, '{"name": "f", "parameters": {"x": 1}}', "", [("f", {"x": 1})]),
    (LLAMA, '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', "",
     [("f", {}), ("g", {})]),
    (LLAMA, '{"type": "function", "name": "f", "parameters": {"x": 1}}', "", [("f", {"x": 1})]),
    (LLAMA, '{"answer": {"name": "f"}}', '{"answer": {"name": "f"}}', []),
    (LLAMA, 'Like {"name": "f", "parameters": {}}', 'Like {"name": "f", "parameters": {}}', []),
    (LLAMA, '{"name": "only data"}', '{"name": "only data"}', []),
    (QWEN_CODER, "Now:\n<tool_call>\n<function=write>\n<parameter=text>\n12\n</parameter>\n"
     "<parameter=count>\n12\n</parameter>\n<parameter=more>\n{\"a\": [true]}\n</parameter>\n"
     "</function>\n</tool_call>", "Now:",
     [("write", {"text": "12", "count": 12, "more": {"a": [True]}})]),
    (QWEN_CODER, "<tool_call>\n<function=f>\n</function>\n</tool_call>", "", [("f", {})]),
    (QWEN_CODER, "<tool_call>\n<function=write>\n<parameter=text>\nif a > b:\n  <c>\n</parameter>\n"
     "</function>\n</tool_call>", "", [("write", {"text": "if a > b:\n  <c>"})]),
    (DEEPSEEK, f'Ok.{D["all"]}{D["begin"]}f{D["sep"]}{ARGUMENTS}{D["end"]}{D["begin"]}g{D["sep"]}'
     f'{{}}{D["end"]}{D["all_end"]}', "Ok.", [("f", json.loads(ARGUMENTS)), ("g", {})]),
]  # fmt: skip


def collect(parser: ToolParser, pieces: Sequence[str]) -> Found:
    """What a client has in the end, having believed every delta."""
    text = ""
    calls: list[list[str]] = []
    for place, piece in enumerate(pieces):
        shown, deltas = parser.feed(piece, final=place == len(pieces) - 1)
        text += shown
        for delta in deltas:
            assert isinstance(delta, CallDelta)
            if delta.name is not None:
                assert (delta.index, delta.arguments) == (len(calls), "")
                calls.append([delta.name, ""])
            else:
                assert delta.index == len(calls) - 1
                calls[-1][1] += delta.arguments
    return text, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize(("syntax", "answer", "text", "calls"), ANSWERS)
def test_calls_and_text_come_apart_however_the_answer_is_cut(
    syntax: Syntax, answer: str, text: str, calls: list[tuple[str, Any]]
) -> None:
    cuts = [[answer], list(answer), [answer[at : at + 3] for at in range(0, len(answer), 3)]]
    cuts += [[answer[:at], answer[at:]] for at in range(1, len(answer))]
    for pieces in cuts:
        assert collect(ToolParser(syntax, SCHEMAS), pieces) == (text, calls)


@given(st.lists(st.text('<{}"tool_call>\n ;na', max_size=6), min_size=1, max_size=12))
def test_no_answer_breaks_a_parser_and_what_is_no_call_is_shown(pieces: list[str]) -> None:
    for syntax in (HERMES, LLAMA, QWEN_CODER, DEEPSEEK):
        parser = ToolParser(syntax, SCHEMAS)
        shown = "".join(
            parser.feed(piece, final=place == len(pieces) - 1)[0]
            for place, piece in enumerate(pieces)
        )
        if not parser.num_calls:
            assert shown == "".join(pieces)


def test_arguments_arrive_as_they_are_written() -> None:
    parser = ToolParser(HERMES, SCHEMAS)
    _, deltas = parser.feed('<tool_call>\n{"name": "f", "arguments": {"text": "once up')
    assert deltas == [CallDelta(0, "f"), CallDelta(0, arguments='{"text": "once up')]
    assert parser.feed('on"}')[1] == [CallDelta(0, arguments='on"}')]
    assert parser.feed("}\n</tool_call>", final=True) == ("", [])


def test_after_the_most_calls_there_may_be_nothing_more_is_read() -> None:
    answer = '<tool_call>{"name": "f", "arguments": {}}</tool_call>' * 2 + "more"
    parser = ToolParser(HERMES, SCHEMAS, max_calls=1)
    assert collect(parser, list(answer)) == ("", [("f", {})])
    assert parser.is_full


@pytest.mark.parametrize(
    ("template", "syntax"),
    [
        (None, None),
        (CHATML, None),
        ("{% for tool in tools %}{% endfor %}", None),
        ("{{ tools }}<tool_call>", HERMES),
        ("{{ tools }}<tool_call><function=x><parameter=y>", QWEN_CODER),
        ("{{ tools }}" + D["begin"] + D["sep"], DEEPSEEK),
        ("{{ tools }}" + D["begin"] + "function" + D["sep"] + "```json", None),
        ('{{ tools }} Environment: ipython {"name": n, "parameters": p}', LLAMA),
    ],
)
def test_a_template_shows_how_its_model_calls(template: str | None, syntax: Syntax | None) -> None:
    assert syntax_of(template) is syntax


TOOLS = [
    {"type": "function", "function": {"name": "look", "description": "See", "parameters": {
        "type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}}},
    {"type": "function", "function": {"name": "wait"}},
]  # fmt: skip
WITH_TOOLS = CHATML.replace(
    "{% for message", "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}{% for message"
)
ANSWER = 'Let me see.\n<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>'
GRAMMARS = FakeGrammars()


@pytest.fixture(scope="module", params=[CHATML, WITH_TOOLS], ids=["generic", "template"])
def client(request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    tokenizer = FakeTokenizer(chat_template=request.param)
    pipeline = FakePipeline(recite(ANSWER.encode()))
    engine = RunningEngine(pipeline, max_model_len=2048)
    with serving(engine=engine, tokenizer=tokenizer, grammars=GRAMMARS) as found:
        yield found


def test_a_call_in_a_plain_reply(client: httpx.Client) -> None:
    answer = ask(client, CHAT, HELLO, tools=TOOLS, max_tokens=200, request_id="r1")
    (choice,) = answer["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": "Let me see.",
        "tool_calls": [
            {"id": "call_r1_0_0", "type": "function",
             "function": {"name": "look", "arguments": '{"at": "é"}'}}
        ],
    }  # fmt: skip
    assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls", None)
    ignoring = ask(client, CHAT, HELLO, tools=TOOLS, tool_choice="none", max_tokens=200)
    assert ignoring["choices"][0]["message"]["content"] == ANSWER


def test_a_call_in_a_stream_is_only_ever_extended(client: httpx.Client) -> None:
    found = chunks(client, CHAT, HELLO, tools=TOOLS, max_tokens=200, request_id="r2")
    deltas = [chunk["choices"][0]["delta"] for chunk in found]
    assert "".join(delta.get("content", "") for delta in deltas) == "Let me see."
    parts = [part for delta in deltas for part in delta.get("tool_calls", ())]
    assert parts[0] == {
        "index": 0, "id": "call_r2_0_0", "type": "function",
        "function": {"name": "look", "arguments": ""},
    }  # fmt: skip
    assert all(set(part) == {"index", "function"} for part in parts[1:])
    assert "".join(part["function"]["arguments"] for part in parts) == '{"at": "é"}'
    assert len(parts) > 5
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in found]
    assert reasons == [None] * (len(reasons) - 1) + ["tool_calls"]
    assert [delta.get("role") for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)


def test_the_model_is_told_of_tools_calls_and_their_results(client: httpx.Client) -> None:
    call = {"id": "c", "type": "function",
            "function": {"name": "look", "arguments": '{"at": "x"}'}}  # fmt: skip
    history = [
        {"role": "user", "content": "Go"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "a wall"},
    ]
    asked = {"messages": history, "temperature": 0, "max_tokens": 1, "return_token_ids": True}
    told = ask(client, CHAT, asked, tools=TOOLS)
    untold = ask(client, CHAT, asked)
    assert told["usage"]["prompt_tokens"] > untold["usage"]["prompt_tokens"] + 100
    prompt = bytes(token for token in told["prompt_token_ids"] if token < 256).decode()
    assert '"description": "See"' in prompt and "a wall" in prompt
    bad = {**call, "function": {"name": "look", "arguments": "{"}}
    broken = [*history[:1], {**history[1], "tool_calls": [bad]}]
    response = client.post(CHAT, json={**asked, "messages": broken, "tools": TOOLS})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")


@pytest.mark.parametrize(
    ("fields", "names", "is_single"),
    [
        ({"tool_choice": "required"}, ["look", "wait"], False),
        ({"tool_choice": "required", "parallel_tool_calls": False}, ["look", "wait"], True),
        ({"tool_choice": {"type": "function", "function": {"name": "wait"}}}, ["wait"], True),
    ],
)
def test_a_forced_call_has_a_grammar(
    client: httpx.Client, fields: dict[str, Any], names: list[str], is_single: bool
) -> None:
    GRAMMARS.asked.clear()
    ask(client, CHAT, HELLO, tools=TOOLS, **fields)
    ((kind, text),) = GRAMMARS.asked
    shape = json.loads(text)
    assert (kind, shape["is_single"], len(shape["calls"])) == ("tool_calls", is_single, len(names))
    assert [f'{{"name": "{name}", "arguments": ' in call[0] for name, call in zip(
        names, shape["calls"], strict=True)] == [True] * len(names)  # fmt: skip
