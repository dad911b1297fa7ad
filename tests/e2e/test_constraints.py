"""Constrained answers over HTTP, from a model that knows nothing: only the grammar can help."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
import pytest
from openai import BadRequestError, OpenAI

from tests.gateways import served

SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "minLength": 1, "maxLength": 6},
        "is": {"enum": ["up", '"so"']},
        "at": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["id", "is", "at"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def url(made, session_cache, repacks) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SKIPPY_CACHE_DIR", str(session_cache))
        with served(made("dense", "q8_0", num_layers=2)) as found:
            yield found


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as found:
        yield found


def chat(client: OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Go"}], **fields
    )


def test_a_hundred_answers_of_a_bounded_schema_at_sixteen_in_flight(client: OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}

    def ask(seed: int) -> Any:
        return chat(client, temperature=1, seed=seed, max_tokens=400, response_format=form)

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(100)))
    texts = [answer.choices[0].message.content for answer in answers]
    assert {answer.choices[0].finish_reason for answer in answers} == {"stop"}
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len(set(texts)) > 80
    assert [ask(seed).choices[0].message.content for seed in (3, 50)] == [texts[3], texts[50]]


def test_a_stream_of_a_constrained_answer_is_the_same_text(client: OpenAI) -> None:
    asked = {"temperature": 1, "seed": 5, "response_format": {"type": "json_object"},
             "max_tokens": 300, "logprobs": True}  # fmt: skip
    plain = chat(client, **asked).choices[0]
    chunks = [chunk.choices[0] for chunk in chat(client, **asked, stream=True)]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == plain.message.content
    scores = [entry for chunk in chunks if chunk.logprobs for entry in chunk.logprobs.content]
    assert scores == plain.logprobs.content
    assert plain.message.content.startswith("{")


@pytest.mark.parametrize("field", ["choice", "grammar"])
def test_every_choice_is_given_and_nothing_else(client: OpenAI, field: str) -> None:
    choices = ["aa", "ab", 'a "c"']
    grammar = 'root ::= "aa" | "ab" | "a \\"c\\""'
    body = {"structured_outputs": {"choice": choices}} if field == "choice" else {field: grammar}
    found = {
        chat(client, temperature=2, seed=seed, extra_body=body).choices[0].message.content
        for seed in range(20)
    }
    assert found <= set(choices)
    assert len(found) > 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_required_call_is_made(client: OpenAI, stream: bool) -> None:
    tools = [{"type": "function", "function": {"name": "report", "parameters": SCHEMA}}]
    asked = {"temperature": 1, "seed": 9, "max_tokens": 300, "tools": tools,
             "tool_choice": "required", "parallel_tool_calls": False}  # fmt: skip
    if stream:
        chunks = [chunk.choices[0] for chunk in chat(client, **asked, stream=True)]
        parts = [part for chunk in chunks for part in chunk.delta.tool_calls or ()]
        name, reason = parts[0].function.name, chunks[-1].finish_reason
        arguments = "".join(part.function.arguments for part in parts)
    else:
        choice = chat(client, **asked).choices[0]
        (call,) = choice.message.tool_calls
        name, reason, arguments = call.function.name, choice.finish_reason, call.function.arguments
        assert choice.message.content is None
    assert (name, reason) == ("report", "tool_calls")
    jsonschema.validate(json.loads(arguments), SCHEMA)


def test_a_bad_grammar_is_a_400_while_others_go_on(client: OpenAI) -> None:
    nested = "root ::= " + "(" * 25_000 + '"a"' + ")" * 25_000
    asked = {"temperature": 1, "seed": 1, "max_tokens": 200}
    alone = chat(client, **asked).choices[0].message.content
    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(chat, client, **asked) for _ in range(4)]
        for grammar in (nested, "root ::= nothing", 'root ::= root "a"'):
            with pytest.raises(BadRequestError) as caught:
                chat(client, extra_body={"grammar": grammar})
            assert (caught.value.code, caught.value.param) == ("invalid_grammar", "grammar")
        assert [other.result().choices[0].message.content for other in others] == [alone] * 4


def test_fields_over_http_do_what_they_say(url: str) -> None:
    def complete(**fields: Any) -> Any:
        body = {"prompt": "Once", "temperature": 1, "seed": 3, "max_tokens": 30, **fields}
        reply = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]

    plain = complete()["text"]
    biased = complete(logit_bias={"300": 100}, return_token_ids=True)
    assert biased["token_ids"] == [300] * 30
    assert set(complete(allowed_token_ids=[300, 301], return_token_ids=True)["token_ids"]) == {
        300, 301
    }  # fmt: skip
    changes = (
        {"repetition_penalty": 1.9},
        {"frequency_penalty": 2},
        {"typical_p": 0.2},
        {"top_k": 3},
    )
    assert all(complete(**change)["text"] != plain for change in changes)
    assert complete(echo=True)["text"] == "Once" + plain
