"""What each sampling field does to a reply, in front of a fake model that obeys it.

Without these a field is taken and not applied, or a number belongs to another piece of text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest

from skippy_mesh.gateway.prefixes import Sharing
from skippy_mesh.gateway.replies import Reply
from skippy_mesh.gateway.text import Choice, TextRules
from skippy_mesh.messages import SamplingParams, TokenEvent, TokenLogprobs
from stages.fake import BOS, FakeGrammars, FakePipeline, FakeTokenizer, babble, recite
from tests.unit.test_gateway import (
    BOTH,
    CHAT,
    COMPLETIONS,
    HELLO,
    ONCE,
    ask,
    chunks,
    eventually,
    serving,
    shown,
)

EOG = tuple(sorted(FakeTokenizer.eog_ids))


class Listening:
    """A fake model that remembers how it was asked to draw."""

    def __init__(self) -> None:
        self.params = SamplingParams()

    def __call__(self, history: Sequence[int], params: SamplingParams) -> int:
        self.params = params
        return babble(history, params)


LISTENING, GRAMMARS = Listening(), FakeGrammars()


@pytest.fixture(scope="module")
def listening_client() -> Iterator[httpx.Client]:
    with serving(FakePipeline(LISTENING), grammars=GRAMMARS) as client:
        yield client


@pytest.fixture(scope="module")
def model_client() -> Iterator[httpx.Client]:
    with serving(FakePipeline(recite("one é two".encode()))) as client:
        yield client


def scores(reply: dict[str, Any]) -> Any:
    return reply["choices"][0]["logprobs"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"typical_p": 0.5}, {"typical_p": 0.5}),
        ({"presence_penalty": -2, "frequency_penalty": 2},
         {"presence_penalty": -2, "frequency_penalty": 2}),
        ({"repetition_penalty": 1.5, "repeat_last_n": -1},
         {"repetition_penalty": 1.5, "repeat_last_n": -1}),
        ({"repeat_penalty": 1.5}, {"repetition_penalty": 1.5, "repeat_last_n": 64}),
        ({"logit_bias": {"7": 3, "8": -100}}, {"logit_bias": ((7, 3), (8, -math.inf))}),
        ({"logit_bias": [[7, -2.5], [8, False]]}, {"logit_bias": ((7, -2.5), (8, -math.inf))}),
        ({"allowed_token_ids": [1, 2]}, {"allowed_ids": (1, 2)}),
        ({"ignore_eos": True}, {"suppressed_ids": EOG}),
        ({"min_tokens": 3, "stop_token_ids": [9]}, {"min_tokens": 3, "ending_ids": (9, *EOG)}),
        ({"grammar": "root"}, {"grammar": "root"}),
        ({"min_tokens": 0, "stop_token_ids": [9]}, {"ending_ids": ()}),
    ],
    ids=str,
)  # fmt: skip
def test_a_field_reaches_the_sampler(
    fields: dict[str, Any], expected: dict[str, Any], listening_client: httpx.Client
) -> None:
    ask(listening_client, CHAT, HELLO, **fields)
    assert {name: getattr(LISTENING.params, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", '{"type": "object"}'),
        ({"response_format": {"type": "json_object", "schema": {"a": 1}}}, "json_schema",
         '{"a": 1}'),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"a": 1}}}},
         "json_schema", '{"a": 1}'),
        ({"response_format": {"type": "json_schema", "schema": {"a": 1}}}, "json_schema",
         '{"a": 1}'),
        ({"structured_outputs": {"json": {"a": 1}}}, "json_schema", '{"a": 1}'),
        ({"structured_outputs": {"json": '{"a": 1}'}}, "json_schema", '{"a": 1}'),
        ({"structured_outputs": {"choice": ["a", 'b"\n\\']}}, "gbnf",
         r'root ::= "a" | "b\"\n\\"'),
        ({"structured_outputs": {"grammar": "root"}}, "gbnf", "root"),
        ({"json_schema": {"a": 1}}, "json_schema", '{"a": 1}'),
        ({"response_format": {"type": "text"}, "grammar": "root"}, "gbnf", "root"),
    ],
    ids=str,
)  # fmt: skip
def test_every_form_of_a_constraint_is_compiled(
    fields: dict[str, Any], kind: str, text: str, listening_client: httpx.Client
) -> None:
    GRAMMARS.asked.clear()
    ask(listening_client, COMPLETIONS, ONCE, **fields)
    ((asked, given),) = GRAMMARS.asked
    if kind == "json_schema":
        assert (asked, json.loads(given)) == (kind, json.loads(text))
    else:
        assert (asked, given) == (kind, text)
    assert LISTENING.params.grammar == given


def test_min_tokens_hold_back_the_end_and_stop_strings() -> None:
    with serving(FakePipeline(recite(b"ab"))) as client:
        assert ask(client, CHAT, HELLO)["usage"]["completion_tokens"] == 3
        answer = ask(client, CHAT, HELLO, min_tokens=12)
        assert answer["usage"]["completion_tokens"] == 12
        assert answer["choices"][0]["finish_reason"] == "length"
    with serving(FakePipeline(recite(b"one two one two"))) as client:
        answer = ask(client, CHAT, HELLO, max_tokens=50, stop="two", min_tokens=9)
        assert (shown(answer["choices"][0]), answer["usage"]["completion_tokens"]) == (
            "one two one ", len("one two one two")
        )  # fmt: skip
        answer = ask(client, CHAT, HELLO, stop_token_ids=[ord(" ")], min_tokens=5, max_tokens=50)
        assert shown(answer["choices"][0]).startswith("one")
        assert answer["usage"]["completion_tokens"] > 5


@BOTH
def test_no_logprobs_unless_asked_for(
    path: str, body: dict[str, Any], model_client: httpx.Client
) -> None:
    assert scores(ask(model_client, path, body)) is None
    assert all(scores(chunk) is None for chunk in chunks(model_client, path, body))


def test_chat_logprobs_are_the_same_in_both_modes(model_client: httpx.Client) -> None:
    asked = {"logprobs": True, "top_logprobs": 2, "max_tokens": 50}
    plain = ask(model_client, CHAT, HELLO, **asked)
    content = scores(plain)["content"]
    assert len(content) == plain["usage"]["completion_tokens"]
    found = chunks(model_client, CHAT, HELLO, **asked)
    parts = [scores(chunk)["content"] for chunk in found if scores(chunk)]
    assert [entry for part in parts for entry in part] == content
    assert [bytes(entry["bytes"]) for entry in content[:-1]] == [
        bytes([byte]) for byte in "one é two".encode()
    ]
    assert (content[4]["token"], content[4]["bytes"]) == ("\ufffd", [0xC3])
    assert content[-1]["token"] == "<|im_end|>"
    assert content[0] == {
        "token": "o", "logprob": -math.log(2), "bytes": [ord("o")],
        "top_logprobs": [
            {"token": "o", "logprob": -math.log(2), "bytes": [ord("o")]},
            {"token": "n", "logprob": -math.log(4), "bytes": [ord("n")]},
        ],
    }  # fmt: skip
    none = scores(ask(model_client, CHAT, HELLO, logprobs=True))["content"]
    assert all(entry["top_logprobs"] == [] for entry in none)


def test_completions_logprobs_say_where_each_token_begins(model_client: httpx.Client) -> None:
    plain = ask(model_client, COMPLETIONS, ONCE, logprobs=1, max_tokens=50)
    found = scores(plain)
    text = plain["choices"][0]["text"]
    assert text == "one é two"
    # Two tokens make one character: both begin where it does.
    assert found["text_offset"] == [0, 1, 2, 3, 4, 4, 5, 6, 7, 8, 9]
    assert [found["tokens"][place] for place in (0, 3, 6, 7)] == ["o", " ", " ", "t"]
    assert found["token_logprobs"] == [-math.log(2)] * 11
    assert found["top_logprobs"][0] == {"o": -math.log(2)}
    assert scores(ask(model_client, COMPLETIONS, ONCE, logprobs=0))["top_logprobs"][0] == {
        "o": -math.log(2)
    }


def test_logprobs_wait_with_the_text_that_a_stop_string_holds_back() -> None:
    choice = Choice(FakeTokenizer(), TextRules(stops=("abX",)))
    events = [
        TokenEvent(request_id="r", token_id=letter, logprobs=TokenLogprobs(-letter))
        for letter in b"1abc"
    ]
    deltas = [choice.push(event) for event in events]
    assert [delta and delta.text for delta in deltas] == ["1", None, None, "abc"]
    assert deltas[3] is not None
    assert [score.logprob for score in deltas[3].scores] == [-97, -98, -99]
    assert [score.offset for score in deltas[3].scores] == [1, 2, 3]


def test_what_has_no_chance_has_a_finite_logprob() -> None:
    choice = Choice(FakeTokenizer())
    delta = choice.push(
        TokenEvent(request_id="r", token_id=97, logprobs=TokenLogprobs(-math.inf, ((98, -1.0),)))
    )
    assert delta is not None
    reply = Reply(
        request_id="r",
        created=0,
        model="m",
        is_chat=False,
        seed=0,
        num_prompt_tokens=1,
        prefix_kind=Sharing().kind,
    ).chunk(0, delta, is_first=True, is_opening=True)
    assert scores(reply)["token_logprobs"] == [-9999.0]  # type: ignore[arg-type]
    assert scores(reply)["top_logprobs"] == [{"b": -1.0, "a": -9999.0}]  # type: ignore[arg-type]


@pytest.mark.parametrize("prompt", ["once é", [BOS, *"once é".encode()]], ids=["text", "ids"])
def test_an_echo_is_the_prompt_ahead_of_the_answer(prompt: Any, model_client: httpx.Client) -> None:
    asked = {"prompt": prompt, "max_tokens": 4, "temperature": 0}
    plain = ask(model_client, COMPLETIONS, asked, echo=True)
    assert plain["choices"][0]["text"] == "once éone "
    found = chunks(model_client, COMPLETIONS, asked, echo=True)
    assert [shown(chunk["choices"][0]) for chunk in found] == ["once éo", "n", "e", " "]
    assert plain["usage"]["completion_tokens"] == 4


def test_an_interval_groups_tokens_but_the_first_and_the_last(model_client: httpx.Client) -> None:
    asked = {"stream_interval": 4, "return_token_ids": True, "max_tokens": 8}
    found = chunks(model_client, CHAT, HELLO, **asked)
    # The fourth of the second group is half a character, so it waits for the other half.
    assert [len(chunk["choices"][0]["token_ids"]) for chunk in found] == [1, 4, 3]
    assert [shown(chunk["choices"][0]) for chunk in found] == ["o", "ne ", "é t"]


def test_after_its_time_an_answer_ends_with_length() -> None:
    clock = iter((5.0, 5.5, 5.9, 6.0)).__next__
    choice = Choice(FakeTokenizer(), TextRules(max_s=1.0), clock=clock)
    reasons = []
    for _ in range(4):
        delta = choice.push(TokenEvent(request_id="r", token_id=97))
        assert delta is not None
        reasons.append(delta.finish_reason)
    assert reasons == [None, None, None, "length"]


def test_a_limit_of_time_ends_the_request_in_the_engine() -> None:
    pipeline = FakePipeline()
    with serving(pipeline) as client:
        answer = ask(client, CHAT, HELLO, max_tokens=10**6, t_max_predict_ms=1)
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] < 450
        eventually(lambda: pipeline.histories == {})
