"""The official client, feature by feature, streaming and not, in front of a real model.

Without these a reply has the shape of our own reading of the API and not of its client's.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field

from skippy_mesh.gateway.errors import digests_of
from tests.gateways import served

MESSAGES: Any = [
    {"role": "system", "content": "Answer."},
    {"role": "user", "content": [{"type": "text", "text": "Go"}]},
]
WARM = {"temperature": 1.0, "seed": 11, "max_tokens": 24}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {
            "type": "object",
            "properties": {"word": {"enum": ["up", "down"]}},
            "required": ["word"],
            "additionalProperties": False,
        },
    },
}


class Person(BaseModel):
    name: str = Field(min_length=1, max_length=5)
    is_tall: bool


@pytest.fixture(scope="module")
def url(made, session_cache, repacks) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SKIPPY_CACHE_DIR", str(session_cache))
        with served(made("dense", "q8_0", num_layers=2), key_digests=digests_of("secret")) as found:
            yield f"{found}/v1"


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=url, api_key="secret", max_retries=0) as found:
        yield found


def chat(client: OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(
        **{"model": "tiny", "messages": MESSAGES, **WARM, **fields}
    )


def texts(chunks: list[Any], num_choices: int = 1) -> list[str]:
    joined = [""] * num_choices
    for chunk in chunks:
        for choice in chunk.choices:
            joined[choice.index] += choice.delta.content or ""
    return joined


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3},
        {"stop": ["e", "q"]},
        {"max_completion_tokens": 5},
        {"temperature": 0},
        {"top_p": 0.5},
        {"presence_penalty": 1.5, "frequency_penalty": 1.5},
        {"logit_bias": {"300": 5, "301": -100}},
        {"logprobs": True, "top_logprobs": 3},
        {"response_format": {"type": "json_object"}, "max_tokens": 200},
        {"user": "me", "store": False, "metadata": {"a": "b"}, "service_tier": "auto"},
        {"reasoning_effort": "low"},
        {"extra_body": {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "min_tokens": 3,
                        "ignore_eos": True, "cache_salt": "mine", "stream_interval": 3}},
    ],
    ids=str,
)  # fmt: skip
def test_a_stream_joins_to_the_plain_answer(client: OpenAI, fields: dict[str, Any]) -> None:
    plain = chat(client, **fields)
    n = fields.get("n", 1)
    assert [choice.index for choice in plain.choices] == list(range(n))
    assert plain.object == "chat.completion"
    options = {"include_usage": True}
    *chunks, last = chat(client, **fields, stream=True, stream_options=options)
    assert texts(chunks, n) == [choice.message.content for choice in plain.choices]
    ends = {c.index: c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason}
    assert ends == {choice.index: choice.finish_reason for choice in plain.choices}
    assert (last.choices, last.usage.completion_tokens) == ([], plain.usage.completion_tokens)
    assert last.usage.total_tokens == plain.usage.prompt_tokens + plain.usage.completion_tokens
    if "logprobs" in fields:
        scores = [s for chunk in chunks for s in (chunk.choices[0].logprobs or _None).content]
        assert scores == plain.choices[0].logprobs.content
        assert all(len(score.top_logprobs) == 3 for score in scores)


class _None:
    content = ()


def test_the_clients_own_accumulator_agrees(client: OpenAI) -> None:
    # It takes an answer that ends at a limit for an error.
    choices = {"structured_outputs": {"choice": ["one", "two", "three"]}}
    plain = chat(client, n=2, extra_body=choices)
    asked: dict[str, Any] = {
        "model": "tiny", "messages": MESSAGES, **WARM, "n": 2, "extra_body": choices,
    }  # fmt: skip
    with client.chat.completions.stream(**asked) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert [c.message.content for c in final.choices] == [c.message.content for c in plain.choices]
    assert {choice.message.role for choice in final.choices} == {"assistant"}


def test_an_answer_parses_into_the_clients_model(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, **WARM, "max_tokens": 200}
    found = client.chat.completions.parse(**asked, response_format=Person)
    person = found.choices[0].message.parsed
    assert isinstance(person, Person)
    with client.chat.completions.stream(**asked, response_format=Person) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == person


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "look_up"}}]
)
def test_a_forced_call_comes_whole_and_in_parts(client: OpenAI, choice: Any) -> None:
    asked = {"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False,
             "max_tokens": 200}  # fmt: skip
    plain = chat(client, **asked).choices[0]
    (call,) = plain.message.tool_calls
    assert (plain.finish_reason, call.function.name) == ("tool_calls", "look_up")
    assert json.loads(call.function.arguments)["word"] in ("up", "down")
    chunks = list(chat(client, **asked, stream=True))
    parts = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or ()]
    assert (parts[0].id, parts[0].type, parts[0].function.name) != (None, None, None)
    assert [part.function.name for part in parts[1:]] == [None] * (len(parts) - 1)
    assert "".join(part.function.arguments for part in parts) == call.function.arguments
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    again = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "found"},
    ]
    assert chat(client, messages=again, tools=[TOOL]).usage.prompt_tokens > 0
    assert chat(client, tools=[TOOL], tool_choice="none").choices[0].message.tool_calls is None


def test_completions_take_prompts_and_echo_them(client: OpenAI) -> None:
    def complete(**fields: Any) -> Any:
        return client.completions.create(**{"model": "tiny", "prompt": "Once", **WARM, **fields})

    plain = complete(n=2, logprobs=2)
    assert plain.object == "text_completion"
    assert len(plain.choices[0].logprobs.tokens) == 24
    # Two tokens may have one text: bytes that are no character by themselves.
    assert {len(top) for top in plain.choices[0].logprobs.top_logprobs} <= {1, 2, 3}
    both = complete(prompt=["Once", "Then"])
    assert both.choices[0].text == plain.choices[0].text
    assert complete(echo=True).choices[0].text == "Once" + plain.choices[0].text
    chunks = list(complete(prompt=["Once", "Then"], stream=True))
    joined = ["", ""]
    for chunk in chunks:
        joined[chunk.choices[0].index] += chunk.choices[0].text
    assert joined == [choice.text for choice in both.choices]


def test_models_are_listed_and_found(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "skippy"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("huge")


def test_errors_are_the_clients_own_kinds(client: OpenAI, url: str) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        chat(client, temperature=9)
    assert (bad.value.code, bad.value.param) == ("invalid_value", "temperature")
    with pytest.raises(openai.BadRequestError) as long:
        chat(client, messages=[{"role": "user", "content": "word " * 3000}])
    assert long.value.code == "context_length_exceeded"
    with (
        OpenAI(base_url=url, api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        chat(stranger)


def test_the_raw_reply_carries_the_requests_id(client: OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model="tiny", messages=MESSAGES, max_tokens=2, extra_headers={"X-Request-Id": "mine"}
    )
    assert raw.headers["X-Request-Id"] == "mine"
    assert raw.parse().id == "chatcmpl-mine"


def test_many_at_once_get_what_each_gets_alone(url: str, client: OpenAI) -> None:
    async def crowd() -> list[str]:
        async with AsyncOpenAI(base_url=url, api_key="secret", max_retries=0) as many:
            replies = await asyncio.gather(*(
                many.chat.completions.create(
                    model="tiny", messages=MESSAGES, temperature=1.0, seed=seed, max_tokens=24
                )
                for seed in range(12)
            ))  # fmt: skip
        return [str(reply.choices[0].message.content) for reply in replies]

    found = asyncio.run(crowd())
    assert found == [chat(client, seed=seed).choices[0].message.content for seed in range(12)]


def test_leaving_a_stream_is_no_error_of_the_next(client: OpenAI) -> None:
    with chat(client, stream=True, max_tokens=500) as stream:
        next(iter(stream))
    assert chat(client).choices[0].message.content == chat(client).choices[0].message.content
