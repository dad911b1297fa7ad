"""Who shares prefixes, and what a client is told of it, in front of a fake model.

Without these a key learns what another has asked, a client that wants no cache gets one, or the
numbers of a stream and of a plain reply differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from skippy_mesh.config import StepRules
from skippy_mesh.errors import RequestError
from skippy_mesh.gateway.errors import digests_of
from skippy_mesh.gateway.prefixes import Sharing
from skippy_mesh.gateway.prompts import Prompts
from skippy_mesh.gateway.schemas import ChatBody
from skippy_mesh.gateway.server import GatewaySpec
from skippy_mesh.messages import SamplingParams
from skippy_mesh.scheduler.memory import Capacity
from stages.fake import BOS, CHATML, FakePipeline, FakeTokenizer, babble
from tests.engines import RunningEngine
from tests.unit.test_gateway import CHAT, COMPLETIONS, ask, chunks, serving

KEYS = ("first-key", "second-key")
BOUNDARY = StepRules(max_rows=64, is_homogeneous=True, prefix_rule="boundary")
GREEDY = {"temperature": 0, "max_tokens": 4}


@pytest.fixture(scope="module")
def keyed() -> Iterator[httpx.Client]:
    engine = RunningEngine(FakePipeline(), num_residents=32)
    with serving(engine=engine, key_digests=digests_of(*KEYS)) as client:
        yield client


def prompt(name: str) -> str:
    return f"{name}, and much more that nobody else has ever asked this server for"


def cached(client: httpx.Client, text: str, *, key: str = KEYS[0], **fields: Any) -> int:
    """How many tokens of ``text`` were not computed, and that the reply is consistent about it."""
    body = {"prompt": text, **GREEDY, **fields}
    reply = client.post(COMPLETIONS, json=body, headers={"Authorization": f"Bearer {key}"})
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    count: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert answer["skippy"]["prefix_kind"] == ("seq_cp" if count else "none")
    assert answer["usage"]["prompt_tokens"] == len(text) + 1
    return count


def test_one_key_never_finds_what_another_has_asked(keyed: httpx.Client) -> None:
    text = prompt("keys")
    assert cached(keyed, text) == 0
    assert cached(keyed, text, key=KEYS[1]) == 0
    assert cached(keyed, text) == cached(keyed, text, key=KEYS[1]) == len(text)


def test_a_salt_narrows_and_does_not_name_the_namespace_of_another(keyed: httpx.Client) -> None:
    text = prompt("salts")
    assert cached(keyed, text) == cached(keyed, text, cache_salt="mine") == 0
    assert cached(keyed, text, cache_salt="mine") == len(text)
    assert cached(keyed, text, cache_salt="other") == 0
    assert cached(keyed, text, key=KEYS[1], cache_salt="mine") == 0
    assert cached(keyed, text, cache_salt=None) == len(text)


def test_without_the_cache_nothing_is_found_and_nothing_left(keyed: httpx.Client) -> None:
    text = prompt("no cache")
    assert cached(keyed, text, cache_prompt=False) == cached(keyed, text) == 0
    assert cached(keyed, text, cache_prompt=False) == 0
    assert cached(keyed, text) == len(text)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stream_and_a_plain_reply_count_the_same(path: str) -> None:
    text = prompt("streams")
    body = {**GREEDY, "messages": [{"role": "user", "content": text}], "prompt": text}
    engine = RunningEngine(FakePipeline(), num_residents=8)
    with serving(engine=engine) as client:
        cold = ask(client, path, body)
        plain = ask(client, path, body)
        stream = chunks(client, path, body, stream_options={"include_usage": True})
        running = chunks(client, path, body, stream_options={"continuous_usage_stats": True})
        bare = chunks(client, path, body)
    num_cached = plain["usage"]["prompt_tokens"] - 1
    assert cold["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert plain["usage"]["prompt_tokens_details"] == {"cached_tokens": num_cached}
    assert stream[-1]["usage"] == plain["usage"]
    assert {
        chunk["usage"]["prompt_tokens_details"]["cached_tokens"] for chunk in running
    } == {num_cached}  # fmt: skip
    for last in (plain, stream[-1], bare[-1]):
        assert last["skippy"]["prefix_kind"] == "seq_cp"
    assert plain["choices"] == cold["choices"]


@pytest.mark.parametrize("salt", ["", "a@b", "a/b", "a\\b", "a\0b", "x" * 129, 7])
def test_a_salt_that_is_none_is_named(keyed: httpx.Client, salt: object) -> None:
    body = {"prompt": "once", "cache_salt": salt}
    reply = keyed.post(COMPLETIONS, json=body, headers={"X-Api-Key": KEYS[0]})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "cache_salt")


def test_every_salt_that_is_allowed_is_taken(keyed: httpx.Client) -> None:
    for salt in ("é" * 128, "a b\nc:%"):
        assert cached(keyed, "once upon a time", cache_salt=salt) == 0


def test_an_echo_of_ids_that_are_none_is_the_clients_fault(keyed: httpx.Client) -> None:
    body = {"prompt": [7, 9999], "echo": True}
    reply = keyed.post(COMPLETIONS, json=body, headers={"X-Api-Key": KEYS[0]})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "prompt")


def test_a_namespace_tells_no_key_and_is_the_same_for_every_gateway_of_a_spec() -> None:
    spec = GatewaySpec(
        host="h", port=1, model_path="m", model_name="m", key_digests=digests_of(*KEYS)
    )
    one, other = (Sharing("any", spec.prefix_secret) for _ in range(2))
    names = [one.namespace(key, salt) for key in ("", "a", "b") for salt in (None, "a", "b")]
    assert names == [other.namespace(key, s) for key in ("", "a", "b") for s in (None, "a", "b")]
    assert len(set(names)) == len(names)
    assert set(names).isdisjoint([Sharing().namespace("a", "a")])
    for shown in (repr(spec), repr(one)):
        assert not any(key in shown for key in KEYS)
        assert repr(spec.prefix_secret) not in shown


def chat_of(*contents: str, **fields: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(contents)]
    return {"messages": messages, **GREEDY, **fields}


class Counting(FakeTokenizer):
    num_encoded = 0

    def encode(self, text: str, **options: bool) -> list[int]:
        self.num_encoded += text.endswith("<|im_end|>\n") or "assistant" in text
        return super().encode(text, **options)


def test_the_history_of_a_chat_ends_ahead_of_the_generation_prompt() -> None:
    body = ChatBody.model_validate(chat_of("hello", "yes", "what"))
    counting, asked = Counting(), Counting()
    (whole,) = Prompts(counting, needs_history=False).of_chat(body, None)
    (found,) = Prompts(asked, needs_history=True).of_chat(body, None)
    assert found.token_ids == whole.token_ids
    generation = 1 + len("assistant\n")
    assert found.history_end == len(found.token_ids) - generation
    assert whole.history_end == 0
    assert asked.num_encoded > counting.num_encoded, "the test does not see renderings"
    open_ended = ChatBody.model_validate(chat_of("hello", add_generation_prompt=False))
    (found,) = Prompts(Counting(), needs_history=True).of_chat(open_ended, None)
    assert found.history_end == 0


def test_a_template_that_insists_on_a_generation_prompt_has_no_history() -> None:
    stubborn = "{% if not add_generation_prompt %}{{ raise_exception('no') }}{% endif %}" + CHATML
    body = ChatBody.model_validate(chat_of("hello"))
    prompts = Prompts(FakeTokenizer(chat_template=stubborn), needs_history=True)
    (found,) = prompts.of_chat(body, None)
    assert found.token_ids and found.history_end == 0
    with pytest.raises(RequestError):
        prompts.of_chat(
            ChatBody.model_validate(chat_of("hello", add_generation_prompt=False)), None
        )


def test_a_chat_over_states_finds_the_history_of_its_last_turn() -> None:
    engine = RunningEngine(FakePipeline(), num_residents=8, rules=BOUNDARY)
    said: list[str] = []
    with serving(engine=engine, sharing=Sharing("boundary")) as client:
        for turn in range(3):
            said.append(f"question {turn} of somebody")
            answer = ask(client, CHAT, chat_of(*said))
            ids = FakeTokenizer().encode(
                "".join(
                    f"<|im_start|>{('user', 'assistant')[n % 2]}\n{text}<|im_end|>\n"
                    for n, text in enumerate(said[:-2])
                ),
                add_special=True,
                parse_special=True,
            )
            history = len(ids) if turn else 0
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == history
            assert answer["skippy"]["prefix_kind"] == ("state" if turn else "none")
            said.append(answer["choices"][0]["message"]["content"])


SECRETS = [f"{word} is what only {number} knows" for number, word in enumerate(
    ("amber", "birch", "cedar", "dunes", "ember", "fjord", "grove", "heath"))]  # fmt: skip
SYSTEM = "You keep what you are told to yourself. "


@pytest.mark.parametrize("rules", [None, BOUNDARY], ids=["any", "boundary"])
def test_conversations_with_secrets_never_see_each_others(rules: StepRules | None) -> None:
    """Every token depends on the whole history, so one foreign cell would change the answer."""
    capacity = Capacity(lanes=4, residents=12, attention=900, recurrent=16 if rules else None)
    engine = RunningEngine(
        FakePipeline(capacities=[capacity]), max_model_len=320, num_lanes=4, num_cells=900,
        num_residents=12, rules=rules,
    )  # fmt: skip

    def talk(client: httpx.Client, secret: str) -> int:
        text, num_cached = f"{SYSTEM}{secret}. ", 0
        for turn in range(6):
            body = {"prompt": text, "temperature": 0, "max_tokens": 8 + turn}
            answer = ask(client, COMPLETIONS, body)
            history = [BOS, *text.encode()]
            for _ in range(8 + turn):
                history.append(babble(history, SamplingParams()))
            assert answer["choices"][0]["text"].encode() == bytes(history[1 + len(text) :])
            num_cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            text += answer["choices"][0]["text"] + f" {turn}? "
        return num_cached

    reports = []
    with serving(engine=engine, sharing=Sharing(rules.prefix_rule if rules else "any")) as client:
        engine.client._on_report = reports.append
        for num_clients in (8, 3):
            with ThreadPoolExecutor(num_clients) as pool:
                num_cached = list(pool.map(lambda secret: talk(client, secret), SECRETS))
    # Of eight at once each may find its own evicted by the other seven.
    assert sum(num_cached) > 1000, "nothing was shared"
    assert any(r.record and r.record.prefix_evictions for r in reports), "there was room for all"
