"""What may end a process is tried in a child; what passed is what a stage can use."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import jsonschema
import numpy as np
import pytest

from skippy_mesh.errors import RequestError, StageError
from skippy_mesh.gateway.tool_parser import Syntax
from skippy_mesh.gateway.tools import DEEPSEEK, HERMES, LLAMA, QWEN_CODER, Tool, ToolUse
from stages.grammar import Grammar
from stages.grammar_compiler import GrammarCompiler
from stages.schema_grammar import schema_to_gbnf
from stages.tokenizer import Tokenizer

DOUBLING = "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1} r{i + 1}\n" for i in range(40))
NESTED = "root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 6},
        "age": {"type": "integer"},
        "mood": {"enum": ['so "so"', "back\\slash", "Zürich"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
        "spouse": {"type": ["null", "string"], "maxLength": 3},
    },
    "required": ["name", "age", "mood", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer(made) -> Tokenizer:
    return Tokenizer(str(made("dense", "q8_0").path))


@pytest.fixture(scope="module")
def compiler(made) -> Iterator[GrammarCompiler]:
    found = GrammarCompiler(str(made("dense", "q8_0").path))
    yield found
    found.close()


def texts(tokenizer: Tokenizer, gbnf: str, count: int) -> Iterator[str]:
    """Answers by a model that knows nothing but ``gbnf``."""
    draw = np.random.default_rng(1)
    every = np.arange(tokenizer.num_tokens, dtype=np.int32)
    for _ in range(count):
        grammar, data = Grammar(tokenizer, gbnf), b""
        while (token := int(draw.choice(grammar.allowed(every)))) not in tokenizer.eog_ids:
            assert grammar.take(token)
            data += tokenizer.piece(token)
        grammar.close()
        yield data.decode()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("x ::= [a]\n", "does not contain a 'root'"),
        ('root ::= root "a" | "a"', "left recursion"),
        ("root ::= foo\n", "Undefined rule identifier 'foo'"),
        ('root ::= "abc', "unexpected end of input"),
        ('root ::= (("a"{0,1000}){0,1000}){0,1000}', "exceeds sane defaults"),
        ('root ::= "a"{99999999999999999999999}', "out of range|stoull"),
        ("  \n", "empty"),
        ('root ::= "a"\0', "NUL"),
        ('root ::= "\ud800"', "Unicode"),
        ('root ::= "' + "a" * 66_000 + '"', "66011 bytes, at most 65536"),
        (NESTED[:60_000], "SIGSEGV|nested"),
        (DOUBLING + 'r40 ::= "a"?\n', "longer than 2 s|SIGSEGV|SIGABRT"),
    ],
    ids=lambda value: str(value)[:24] if len(str(value)) < 60 else None,
)
def test_a_bad_grammar_is_refused_with_the_reason_and_the_next_one_compiles(
    compiler: GrammarCompiler, text: str, reason: str
) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        compiler.compile("gbnf", text)
    assert caught.value.code == "invalid_grammar"
    assert len(str(caught.value)) < 300
    good = f'root ::= "{len(text)}"'
    assert compiler.compile("gbnf", good) == good


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "strange"}, "Unrecognized schema"),
        ({"$ref": "#/$defs/nobody"}, "refers to nothing"),
        ({"$ref": "https://example.com/x.json"}, "is not inside the schema"),
        ({"type": "string", "maxLength": 5000}, "maxLength may be at most 2000, got 5000"),
        ({"type": "string", "minLength": 5, "maxLength": 4}, "at least 5 and at most 4"),
        ({"type": "string", "pattern": "^a{900000000}$"}, "sane defaults|longer than"),
        ([], "must be an object"),
    ],
)
def test_a_bad_schema_is_refused(compiler: GrammarCompiler, schema: object, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        compiler.compile("json_schema", json.dumps(schema))
    assert caught.value.code == "invalid_grammar"


def test_a_child_that_was_killed_is_replaced(compiler: GrammarCompiler) -> None:
    compiler.compile("gbnf", 'root ::= "before"')
    assert compiler._child is not None
    os.kill(compiler._child.pid, signal.SIGKILL)
    with pytest.raises(RequestError, match="SIGKILL"):
        compiler.compile("gbnf", 'root ::= "during"')
    assert compiler.compile("gbnf", 'root ::= "during"')


def test_what_a_schemas_grammar_allows_is_json_of_that_schema(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    gbnf = compiler.compile("json_schema", json.dumps(PERSON))
    seen = set()
    for text in texts(tokenizer, gbnf, 60):
        value = json.loads(text)
        jsonschema.validate(value, PERSON)
        seen.add(value["mood"])
    assert seen == {'so "so"', "back\\slash", "Zürich"}


def accepts(tokenizer: Tokenizer, gbnf: str, text: str) -> bool:
    """Whether ``text`` is a whole text of the grammar."""
    ids = tokenizer.encode(text, add_special=False, parse_special=False)
    try:
        grammar = Grammar(tokenizer, gbnf, ids)
    except StageError:
        return False
    is_whole = grammar.take(next(iter(tokenizer.eog_ids)))
    grammar.close()
    return is_whole


def test_lengths_are_as_the_schema_says(tokenizer: Tokenizer) -> None:
    text = schema_to_gbnf({"type": "string", "minLength": 2, "maxLength": 4})
    assert [accepts(tokenizer, text, f'"{"a" * size}"') for size in range(7)] == [
        False, False, True, True, True, False, False
    ]  # fmt: skip
    items = schema_to_gbnf({"type": "array", "items": {"const": 1}, "minItems": 1, "maxItems": 3})
    assert [accepts(tokenizer, items, f"[{','.join('1' * size)}]") for size in range(6)] == [
        False, True, True, True, False, False
    ]  # fmt: skip


@pytest.mark.parametrize("text", ['"\n"', '"\t"', r'"\ud800"', '"\x7f"'])
def test_a_string_holds_no_control_character_and_no_half_of_a_pair(
    tokenizer: Tokenizer, text: str
) -> None:
    string = schema_to_gbnf({"type": "string"})
    assert not accepts(tokenizer, string, text)
    assert accepts(tokenizer, string, json.dumps("caf\u00e9 \n \t \\"))


def test_once_complete_only_an_end_of_generation_is_allowed(tokenizer: Tokenizer) -> None:
    every = np.arange(tokenizer.num_tokens, dtype=np.int32)
    (token,) = tokenizer.encode("Q", add_special=False, parse_special=False)
    grammar = Grammar(tokenizer, 'root ::= "Q"')
    assert set(grammar.allowed(every).tolist()) == {token}
    assert not any(grammar.take(end) for end in tokenizer.eog_ids)
    assert grammar.take(token)
    assert set(grammar.allowed(every).tolist()) == set(tokenizer.eog_ids)
    assert not grammar.take(token)  # natively, it would be the end of the process
    with pytest.raises(StageError, match="does not continue"):
        Grammar(tokenizer, 'root ::= "Q"', [token, token])
    grammar.close()


def test_a_grammar_is_where_its_tokens_left_it(tokenizer: Tokenizer) -> None:
    every = np.arange(tokenizer.num_tokens, dtype=np.int32)
    ids = tokenizer.encode('{"name":"\u00e9', add_special=False, parse_special=False)
    gbnf = schema_to_gbnf(PERSON)
    walked = Grammar(tokenizer, gbnf)
    for place, token in enumerate(ids):
        replayed = Grammar(tokenizer, gbnf, ids[:place])
        assert np.array_equal(walked.allowed(every), replayed.allowed(every))
        replayed.close()
        assert walked.take(token)
    walked.close()


def test_only_whole_characters_are_made_of_bytes(tokenizer: Tokenizer) -> None:
    """The matcher takes overlong forms for the character they stand for; no reader does."""
    byte_of = {
        data[0]: t for t in range(tokenizer.num_tokens) if len(data := tokenizer.piece(t)) == 1
    }
    grammar = Grammar(tokenizer, "root ::= [^x]*")
    assert grammar.take(byte_of[0xE0])
    allowed = set(grammar.allowed(np.arange(tokenizer.num_tokens, dtype=np.int32)).tolist())
    assert allowed == {byte_of[byte] for byte in range(0xA0, 0xC0)}, "no end within a character"
    assert grammar.take(byte_of[0xA4]) and grammar.take(byte_of[0x80])
    for byte in (0x80, 0xC0, 0xF5, 0xFF):  # nothing could follow that makes a character of it
        assert not grammar.take(byte_of[byte])
    assert grammar.take(byte_of[0xED]) and not grammar.take(byte_of[0xA0])  # half of a pair
    grammar.close()


def test_no_control_token_is_taken_for_its_name(tokenizer: Tokenizer) -> None:
    (start,) = tokenizer.encode("<|im_start|>", add_special=False, parse_special=True)
    free = Grammar(tokenizer, "root ::= [^x]*")
    named = Grammar(tokenizer, 'root ::= "<|im_start|>" [^x]*')
    assert not free.take(start)
    assert not np.isfinite(free.masked(np.zeros(tokenizer.num_tokens, np.float32))[start])
    assert named.take(start)
    free.close()
    named.close()


def test_what_was_compiled_is_remembered(compiler: GrammarCompiler) -> None:
    compiler.compile("gbnf", 'root ::= "remember"')
    assert compiler._child is not None
    compiler._end_child()
    compiler.compile("gbnf", 'root ::= "remember"')
    assert compiler._child is None


def test_patterns_and_recursion(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    pattern = {"type": "string", "pattern": "^[ab]{2,3}-$"}
    gbnf = compiler.compile("json_schema", json.dumps(pattern))
    assert [accepts(tokenizer, gbnf, f'"{text}"') for text in ("a-", "ab-", "bab-", "baba-")] == [
        False, True, True, False
    ]  # fmt: skip
    child = {"anyOf": [{"$ref": "#/$defs/my_tree"}, {"type": "null"}]}
    node = {"properties": {"left": child}, "type": "object", "required": ["left"]}
    tree = {"$defs": {"my_tree": node}, "$ref": "#/$defs/my_tree"}
    gbnf = compiler.compile("json_schema", json.dumps(tree))
    assert accepts(tokenizer, gbnf, '{"left":{"left":{"left":null}}}')
    assert not accepts(tokenizer, gbnf, '{"left":{"left":{"left":1}}}')


LOOK = {
    "type": "object",
    "properties": {
        "at": {"type": "string", "enum": ["here", "there"]},
        "note": {"type": "string", "maxLength": 5},
        "times": {"$ref": "#/$defs/few"},
    },
    "required": ["at", "times"],
    "additionalProperties": False,
    "$defs": {"few": {"enum": [1, 2]}},
}
WAIT = {"properties": {"on": {"$ref": "#/$defs/few"}}, "$defs": {"few": {"type": "boolean"}},
        "required": ["on"], "type": "object", "additionalProperties": False}  # fmt: skip


@pytest.mark.parametrize("syntax", [HERMES, LLAMA, QWEN_CODER, DEEPSEEK], ids="HLQD")
@pytest.mark.parametrize("is_parallel", [False, True])
def test_a_forced_call_is_read_back_as_a_call_of_its_schema(
    compiler: GrammarCompiler, tokenizer: Tokenizer, syntax: Syntax, is_parallel: bool
) -> None:
    schemas = {"look": LOOK, "wait": WAIT}
    tools = [
        Tool.model_validate({"type": "function", "function": {"name": name, "parameters": schema}})
        for name, schema in schemas.items()
    ]
    use = ToolUse(
        tools=tools, forced=tools, max_calls=None if is_parallel else 1, syntax=syntax,
        has_template=True,
    )  # fmt: skip
    assert use.constraint is not None
    gbnf = compiler.compile(use.constraint.kind, use.constraint.text)
    counts = set()
    for text in texts(tokenizer, gbnf, 12):
        parser = use.parser()
        shown, deltas = parser.feed(text, final=True)
        assert (shown, parser.num_calls > 0) == ("", True)
        for head in (delta for delta in deltas if delta.name is not None):
            arguments = "".join(d.arguments for d in deltas if d.index == head.index)
            jsonschema.validate(json.loads(arguments), schemas[str(head.name)])
        counts.add(parser.num_calls)
    assert counts == {1} if not is_parallel else 1 in counts
