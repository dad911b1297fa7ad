"""The HTTP contract in front of a fake model: a real engine thread, web server and sockets.

Without these, a client sees a broken stream, a wrong status, or an answer its settings never had.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import uvicorn

from skippy_mesh.gateway.app import create_app
from skippy_mesh.messages import SamplingParams, StepBatch
from stages.fake import BOS, FakeGrammars, FakePipeline, FakeTokenizer, babble, recite
from tests.engines import BOUNDS, RunningEngine, places_of

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0, "max_tokens": 12}
ONCE = {"prompt": "once", "temperature": 0, "max_tokens": 12}
BOTH = pytest.mark.parametrize(("path", "body"), [(CHAT, HELLO), (COMPLETIONS, ONCE)])


class Gate:
    """Lets no step pass until it is opened; remembers the tokens of every step."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()
        self.seen: list[int] = []

    def __call__(self, batch: StepBatch) -> None:
        self.reached.set()
        assert self.opened.wait(60), "nobody opened the gate"
        self.seen.extend(batch.tokens)


@contextmanager
def serving(
    pipeline: FakePipeline | None = None, *, engine: RunningEngine | None = None, **options: Any
) -> Iterator[httpx.Client]:
    engine = engine or RunningEngine(pipeline or FakePipeline())
    settings = {
        "model_name": "fake/one", "health": lambda: None, "exact": True,
        "places": places_of(), "bounds": BOUNDS, **options,
    }  # fmt: skip
    tokenizer = settings.pop("tokenizer", FakeTokenizer())
    grammars = settings.pop("grammars", FakeGrammars())
    app = create_app(engine.client, tokenizer, grammars, **settings)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
    # The protocol by name: asyncio sets TCP_NODELAY only on sockets that say they are TCP, and
    # without it every reply waits 40 ms for the client's delayed acknowledgement.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        eventually(lambda: server.started)
        with httpx.Client(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}") as client:
            yield client
    finally:
        engine.stop()
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with serving() as served:
        yield served


def eventually(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not is_so():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.002)


def ask(client: httpx.Client, path: str, body: dict[str, Any], **changes: Any) -> dict[str, Any]:
    response = client.post(path, json={**body, **changes})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def chunks(
    client: httpx.Client, path: str, body: dict[str, Any], **changes: Any
) -> list[dict[str, Any]]:
    response = client.post(path, json={**body, "stream": True, **changes})
    assert response.status_code == 200, response.text
    frames = response.text.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]


def shown(choice: dict[str, Any]) -> str:
    part = choice.get("message") or choice.get("delta") or choice
    text: str = part.get("content", part.get("text", ""))
    return text


def joined(found: list[dict[str, Any]]) -> str:
    return "".join(shown(choice) for chunk in found for choice in chunk["choices"])


def test_a_chat_reply_has_the_shape_clients_know(client: httpx.Client) -> None:
    answer = ask(client, CHAT, HELLO, seed=7)
    (choice,) = answer["choices"]
    assert len(choice["message"].pop("content")) == 12
    assert choice == {
        "index": 0, "message": {"role": "assistant"}, "logprobs": None,
        "finish_reason": "length", "stop_reason": None,
    }  # fmt: skip
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "fake/one"
    assert answer["id"] == "chatcmpl-" + answer["skippy"]["request_id"]
    assert answer["skippy"]["seed"] == 7
    prompt = len("@@user\nhello@\n@assistant\n")  # each @ stands for a control token
    assert answer["usage"] == {
        "prompt_tokens": prompt, "completion_tokens": 12, "total_tokens": prompt + 12,
        "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip


@pytest.mark.parametrize("prompt", ["once", ["once"], [BOS, *b"once"], [[BOS, *b"once"]]], ids=str)
def test_every_form_of_a_prompt_is_the_same_prompt(client: httpx.Client, prompt: Any) -> None:
    answer = ask(client, COMPLETIONS, ONCE, prompt=prompt)
    history = [BOS, *b"once"]
    for _ in range(12):
        history.append(babble(history, SamplingParams()))
    assert answer["choices"][0]["text"].encode() == bytes(history[5:])
    assert (answer["object"], answer["usage"]["prompt_tokens"]) == ("text_completion", 5)


@BOTH
def test_a_stream_says_what_the_plain_reply_says(
    client: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    plain = ask(client, path, body, seed=3)
    found = chunks(client, path, body, seed=3, stream_options={"include_usage": True})
    assert joined(found) == shown(plain["choices"][0])
    *content, last = found
    assert (last["choices"], last["usage"]) == ([], plain["usage"])
    assert last["skippy"]["seed"] == 3
    assert all(chunk["usage"] is None for chunk in content)
    assert [chunk["choices"][0]["finish_reason"] for chunk in content] == [None] * 11 + ["length"]
    assert len({(chunk["id"], chunk["object"], chunk["model"]) for chunk in found}) == 1


def test_the_first_chunk_carries_role_and_text_and_no_other_does(client: httpx.Client) -> None:
    first, *rest = (chunk["choices"][0]["delta"] for chunk in chunks(client, CHAT, HELLO))
    assert first["role"] == "assistant"
    assert first["content"]
    assert all(set(delta) <= {"content"} for delta in rest)


def test_stream_options_decide_where_usage_goes(client: httpx.Client) -> None:
    assert all("usage" not in chunk for chunk in chunks(client, CHAT, HELLO))
    running = chunks(client, CHAT, HELLO, stream_options={"continuous_usage_stats": True})
    counts = [chunk["usage"]["completion_tokens"] for chunk in running]
    assert counts == list(range(1, 13))


def test_characters_of_many_tokens_survive_both_modes() -> None:
    text = "é, 漢字 and 🦜"
    with serving(FakePipeline(recite(text.encode()))) as client:
        assert shown(ask(client, CHAT, HELLO, max_tokens=50)["choices"][0]) == text
        found = chunks(client, CHAT, HELLO, max_tokens=50)
        assert joined(found) == text
        # The end of the turn has no text of its own, so its chunk has an empty delta.
        assert found[-1]["choices"][0]["delta"] == {}
        assert found[-1]["choices"][0]["finish_reason"] == "stop"
        cut = ask(client, CHAT, HELLO, max_tokens=len(text.encode()) - 1)
        assert shown(cut["choices"][0]) == text[:-1] + "\ufffd"


def test_an_empty_answer_is_one_chunk_with_role_and_reason() -> None:
    with serving(FakePipeline(recite(b""))) as client:
        (chunk,) = chunks(client, CHAT, HELLO)
        assert chunk["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert chunk["choices"][0]["finish_reason"] == "stop"
        (chunk,) = chunks(client, COMPLETIONS, ONCE)
        assert chunk["choices"][0]["text"] == ""
        ignoring = ask(client, CHAT, HELLO, ignore_eos=True)
        assert ignoring["usage"]["completion_tokens"] == 12
        assert ignoring["choices"][0]["finish_reason"] == "length"


def test_a_stop_string_cuts_both_modes_and_frees_the_engine() -> None:
    pipeline = FakePipeline(recite(b"one two three four five six seven"))
    with serving(pipeline) as client:
        for changes in ({"stop": " thr"}, {"stop": ["zzz", " thr"]}):
            answer = ask(client, CHAT, HELLO, max_tokens=400, **changes)
            (choice,) = answer["choices"]
            assert (shown(choice), choice["finish_reason"]) == ("one two", "stop")
            assert choice["stop_reason"] == " thr"
            assert answer["usage"]["completion_tokens"] == len("one two thr")
            assert joined(chunks(client, CHAT, HELLO, max_tokens=400, **changes)) == "one two"
        kept = ask(client, CHAT, HELLO, stop="two", include_stop_str_in_output=True)
        assert shown(kept["choices"][0]) == "one two"
        by_id = ask(client, CHAT, HELLO, stop_token_ids=[ord("t")])["choices"][0]
        assert (shown(by_id), by_id["stop_reason"]) == ("one ", ord("t"))
        eventually(lambda: pipeline.histories == {})


@BOTH
def test_token_ids_are_returned_on_request(
    client: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    plain = ask(client, path, body, return_token_ids=True)
    found = chunks(client, path, body, return_token_ids=True)
    ids = [token for chunk in found for token in chunk["choices"][0]["token_ids"]]
    assert plain["choices"][0]["token_ids"] == ids
    assert bytes(ids).decode() == joined(found)
    holders = [each if path == CHAT else each["choices"][0] for each in (plain, *found)]
    assert holders[0]["prompt_token_ids"] == holders[1]["prompt_token_ids"]
    assert len(holders[0]["prompt_token_ids"]) == plain["usage"]["prompt_tokens"]
    assert all("prompt_token_ids" not in holder for holder in holders[2:])


def test_the_seed_decides_and_is_echoed(client: httpx.Client) -> None:
    def run(**changes: Any) -> tuple[str, int]:
        answer = ask(client, CHAT, HELLO, temperature=1, **changes)
        return shown(answer["choices"][0]), answer["skippy"]["seed"]

    first, second, third = run(), run(seed=None), run(seed=-1)
    assert len({first, second, third}) == 3
    assert run(seed=first[1]) == first
    assert chunks(client, CHAT, HELLO)[-1]["skippy"]["seed"] >= 0


def test_limits_and_their_spellings(client: httpx.Client) -> None:
    def count(path: str, body: dict[str, Any], **changes: Any) -> int:
        without = {name: value for name, value in body.items() if name != "max_tokens"}
        usage = ask(client, path, without, **changes)["usage"]
        return int(usage["completion_tokens"])

    assert count(COMPLETIONS, ONCE) == count(COMPLETIONS, ONCE, max_tokens=-1) == 16
    assert count(COMPLETIONS, ONCE, n_predict=3) == 3
    assert count(CHAT, HELLO, max_tokens=9, max_completion_tokens=4) == 4
    assert count(COMPLETIONS, ONCE, max_tokens=10**9) == 512 - len("@once")


def test_nulls_unknown_and_neutral_fields_change_nothing(client: httpx.Client) -> None:
    names = "stop seed top_p n logprobs stream_options tools response_format user max_tokens"
    answer = ask(
        client, COMPLETIONS, {"prompt": "once", **dict.fromkeys(names.split())},
        temperature=0, unheard_of={"x": 1}, n=1, presence_penalty=0.0, echo=False, logit_bias={},
        repetition_penalty=1.0, model="any/name", cache_prompt=True,
    )  # fmt: skip
    assert answer["choices"][0]["text"].startswith(
        ask(client, COMPLETIONS, ONCE)["choices"][0]["text"]
    )
    assert answer["model"] == "fake/one"


def test_the_model_is_listed_and_found_by_its_name(client: httpx.Client) -> None:
    (card,) = client.get("/v1/models").json()["data"]
    assert client.get("/v1/models/fake/one").json() == card
    assert (card["id"], card["root"], card["max_model_len"]) == ("fake/one", "fake/one", 512)


def test_request_ids_are_echoed_made_and_kept_apart() -> None:
    gate = Gate()
    engine = RunningEngine(FakePipeline(on_step=gate))
    with serving(engine=engine) as client, ThreadPoolExecutor() as pool:
        posts = [
            pool.submit(client.post, COMPLETIONS, json=ONCE, headers={"X-Request-Id": "mine"})
            for _ in range(2)
        ]
        eventually(lambda: gate.reached.is_set() and engine.client.num_open == 2)
        gate.opened.set()
        named = sorted(post.result().headers["X-Request-Id"] for post in posts)
        assert named == ["mine", "mine-2"]
        assert sorted(post.result().json()["id"] for post in posts) == ["cmpl-mine", "cmpl-mine-2"]
        again = client.post(COMPLETIONS, json=ONCE, headers={"X-Request-Id": "mine"})
        assert again.headers["X-Request-Id"] == "mine", "an ended request gives its id back"
        assert ask(client, COMPLETIONS, ONCE, request_id="body.id")["id"] == "cmpl-body.id"
        malformed = client.get("/livez", headers={"X-Request-Id": "no spaces"})
        assert len(malformed.headers["X-Request-Id"]) == 32
