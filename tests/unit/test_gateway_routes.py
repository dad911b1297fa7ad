"""The routes that do not generate, and what a reply says besides its text.

Without these a client's tokenizer, readiness probe, abort or time axis tells it something wrong.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from skippy_mesh import __version__
from skippy_mesh.gateway.errors import digests_of
from skippy_mesh.gateway.readiness import DRAINING, LOADING, Problem
from skippy_mesh.gateway.rules import ApiRules
from skippy_mesh.gateway.token_stream import Limits
from skippy_mesh.messages import StepBatch
from stages.fake import BOS, IM_END, FakePipeline, FakeTokenizer, recite
from tests.engines import RunningEngine
from tests.unit.test_gateway import (
    BOTH,
    CHAT,
    COMPLETIONS,
    HELLO,
    ONCE,
    Gate,
    ask,
    chunks,
    eventually,
    serving,
    shown,
)

MESSAGES = {"messages": HELLO["messages"]}
RULES = ApiRules(
    aliases=("other",), tokenizer_id="lab/model", facts={"n_params": 7, "file": "a.gguf"},
    defaults={"temperature": 0.0, "top_k": 3}, max_chat_tokens=5, max_n=2,
    is_strict_field=True, is_strict_model=True, knows_priority=True,
)  # fmt: skip


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with serving() as served:
        yield served


@pytest.fixture(scope="module")
def strict_client() -> Iterator[httpx.Client]:
    with serving(rules=RULES) as served:
        yield served


def post(client: httpx.Client, path: str, body: Any) -> Any:
    reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


# -- text and tokens -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"prompt": "né"}, [BOS, *"né".encode()]),
        ({"prompt": "né", "add_special_tokens": False}, [*"né".encode()]),
        ({"content": "né"}, [*"né".encode()]),
        ({"content": "né", "add_special": True}, [BOS, *"né".encode()]),
        ({"content": "a<|im_end|>"}, [97, IM_END]),
        ({"content": "a<|im_end|>", "parse_special": False}, [97, *b"<|im_end|>"]),
        ({"content": ""}, []),
    ],
    ids=str,
)
def test_every_form_is_tokenised_as_its_server_does(
    client: httpx.Client, body: dict[str, Any], tokens: list[int]
) -> None:
    found = post(client, "/tokenize", body)
    assert (found["tokens"], found["count"]) == (tokens, len(tokens))
    assert found["max_model_len"] == 512


def test_pieces_are_text_or_bytes(client: httpx.Client) -> None:
    found = post(client, "/tokenize", {"content": "aé", "with_pieces": True})
    assert [each["piece"] for each in found["tokens"]] == ["a", [0xC3], [0xA9]]
    found = post(client, "/tokenize", {"prompt": "a", "return_token_strs": True})
    assert found["token_strs"] == ["<s>", "a"]


def test_a_chat_is_tokenised_as_it_is_generated_from(client: httpx.Client) -> None:
    reply = ask(client, CHAT, HELLO, return_token_ids=True, add_special_tokens=False)
    found = post(client, "/tokenize", MESSAGES)
    assert found["tokens"] == reply["prompt_token_ids"]
    applied = post(client, "/apply-template", MESSAGES)
    assert applied["count"] == found["count"]
    assert applied["prompt"] == ("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
    again = post(client, "/tokenize", {"content": applied["prompt"]})
    assert again["tokens"] == found["tokens"]


def test_tokens_become_text_again(client: httpx.Client) -> None:
    ids = [BOS, *"né".encode(), IM_END]
    assert post(client, "/detokenize", {"tokens": ids}) == {
        "prompt": "<s>né<|im_end|>", "content": "<s>né<|im_end|>",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "content": "b"}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"messages": [3]}, "messages[0]"),
        ("/detokenize", {"tokens": [260]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/apply-template", {}, "messages"),
        ("/v1/abort", {"request_ids": "a"}, "request_ids"),
    ],
)
def test_what_cannot_be_done_names_the_field(
    client: httpx.Client, path: str, body: Any, param: str
) -> None:
    error = client.post(path, json=body).json()["error"]
    assert (error["code"], error["param"]) == ("invalid_value", param)


def test_the_last_message_can_be_continued() -> None:
    with serving(FakePipeline(recite(b"lo there"))) as client:
        messages = [*HELLO["messages"], {"role": "assistant", "content": " Hel "}]
        open_end = {"messages": messages, "add_generation_prompt": False,
                    "continue_final_message": True}  # fmt: skip
        prompt = post(client, "/apply-template", open_end)["prompt"]
        assert prompt.endswith("<|im_start|>assistant\n Hel ")
        reply = ask(client, CHAT, {**HELLO, **open_end}, return_token_ids=True)
        assert bytes(reply["prompt_token_ids"][-5:]) == b" Hel "
        nothing = {**open_end, "messages": [{"role": "user", "content": " "}]}
        error = client.post(CHAT, json=nothing).json()["error"]
        assert (error["code"], error["param"]) == ("template_error", "messages")


# -- what is told of the server --------------------------------------------------------------------


def test_the_server_says_what_it_is(client: httpx.Client) -> None:
    assert client.get("/version").json() == {"version": __version__}
    home = client.get("/")
    assert (home.status_code, home.headers["content-type"][:9]) == (200, "text/html")
    (card,) = client.get("/v1/models").json()["data"]
    assert (card["id"], card["root"], card["max_model_len"]) == ("fake/one", "fake/one", 512)
    props = client.get("/props").json()
    assert props["total_slots"] == 16
    assert props["default_generation_settings"]["n_ctx"] == 512
    assert props["default_generation_settings"]["params"]["temperature"] == 1.0
    assert client.post("/props", json={}).status_code == 405


def test_names_and_defaults_are_the_operators(strict_client: httpx.Client) -> None:
    cards = strict_client.get("/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["fake/one", "other"]
    assert {card["root"] for card in cards} == {"lab/model"}
    assert cards[0]["meta"]["n_params"] == 7
    assert strict_client.get("/v1/models/other").status_code == 200
    props = strict_client.get("/props").json()
    assert props["model_path"] == "a.gguf"
    assert props["default_generation_settings"]["params"]["top_k"] == 3
    reply = ask(strict_client, CHAT, MESSAGES, model="other")
    assert reply["usage"]["completion_tokens"] == 5
    assert reply["model"] == "fake/one"
    again = ask(strict_client, CHAT, MESSAGES)
    assert shown(again["choices"][0]) == shown(reply["choices"][0]), "temperature 0 by default"
    assert ask(strict_client, CHAT, MESSAGES, max_tokens=7)["usage"]["completion_tokens"] == 7
    assert ask(strict_client, CHAT, MESSAGES, priority=3)["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model": "third"}, 404, "model"),
        ({"temperatur": 1}, 400, "temperatur"),
        ({"n": 3}, 400, "n"),
    ],
)
def test_a_strict_server_refuses_what_others_ignore(
    strict_client: httpx.Client, fields: dict[str, Any], status: int, param: str
) -> None:
    reply = strict_client.post(CHAT, json={**MESSAGES, **fields})
    assert (reply.status_code, reply.json()["error"]["param"]) == (status, param)
    for known in ({"user": "me"}, {"repeat_penalty": 1.0}, {"guided_json": None}, {"suffix": None}):
        ask(strict_client, CHAT, {**MESSAGES, **known})


def test_an_unknown_model_is_no_fault_where_nobody_is_strict(client: httpx.Client) -> None:
    assert ask(client, CHAT, HELLO, model="gpt-99", unheard_of=1)["model"] == "fake/one"


# -- readiness -------------------------------------------------------------------------------------


def test_ready_means_that_a_token_has_come_through() -> None:
    engine = RunningEngine(FakePipeline())
    with serving(engine=engine) as client:
        assert client.get("/ready").json() == {"status": "ready"}
        assert engine.submitted == ["probe#0"]
        assert client.get("/ready").status_code == 200
        ask(client, CHAT, HELLO)
        assert len(engine.submitted) == 2, "the last token is young enough"
    with serving(engine=RunningEngine(FakePipeline()), limits=Limits(ready_window_s=0)) as client:
        for _ in range(2):
            assert client.get("/ready").status_code == 200


def test_many_who_ask_send_one_probe() -> None:
    gate = Gate()
    engine = RunningEngine(FakePipeline(on_step=gate))
    with serving(engine=engine) as client, ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(client.get, "/ready") for _ in range(4)]
        assert gate.reached.wait(60)
        gate.opened.set()
        assert {each.result().status_code for each in asked} == {200}
        assert engine.submitted == ["probe#0"]


def test_a_probe_that_fails_says_so() -> None:
    def broken(_batch: StepBatch) -> None:
        raise RuntimeError("broken")

    with serving(FakePipeline(on_step=broken)) as client:
        reply = client.get("/ready")
        assert (reply.status_code, reply.json()["reason"]) == (503, "probe_failed")


@pytest.mark.parametrize(
    ("problem", "reason", "stage"),
    [
        (LOADING, "loading", None),
        (DRAINING, "draining", None),
        (Problem("stage_unavailable", "stage 1 is down", 1), "stage_down", 1),
        (Problem("stalled", "stuck"), "stage_down", None),
    ],
)
def test_not_ready_says_why(problem: Problem, reason: str, stage: int | None) -> None:
    with serving(health=lambda: problem) as client:
        reply = client.get("/ready")
        body = {"status": "not_ready", "reason": reason}
        assert reply.json() == (body if stage is None else {**body, "stage": stage})
        assert reply.status_code == 503


# -- aborts ----------------------------------------------------------------------------------------


class Endless:
    """Lets steps pass one by one until it is stopped."""

    def __init__(self) -> None:
        self.passed = threading.Event()

    def __call__(self, batch: StepBatch) -> None:
        if max(batch.positions) > 30:
            self.passed.set()


@pytest.mark.parametrize("name", ["mine", "chatcmpl-mine"])
@pytest.mark.parametrize("n", [1, 2])
def test_an_aborted_request_ends_with_what_it_has(name: str, n: int) -> None:
    endless = Endless()
    engine = RunningEngine(FakePipeline(on_step=endless))
    body = {**HELLO, "max_tokens": 450, "ignore_eos": True, "n": n}
    with serving(engine=engine) as client, ThreadPoolExecutor() as pool:
        gate_open = pool.submit(client.post, CHAT, json=body, headers={"X-Request-Id": "mine"})
        assert endless.passed.wait(60)
        found = post(client, "/v1/abort", {"request_ids": [name, "never"]})
        assert found == {"aborted": [name], "unknown": ["never"]}
        reply = gate_open.result()
        assert reply.status_code == 200
        answer = reply.json()
        assert {choice["finish_reason"] for choice in answer["choices"]} == {"abort"}
        assert all(shown(choice) for choice in answer["choices"])
        assert 0 < answer["usage"]["completion_tokens"] < 450 * n
        again = post(client, "/abort_requests", {"request_ids": [name]})
        assert again == {"aborted": [], "unknown": [name]}


def test_a_request_of_another_key_is_unknown() -> None:
    gate = Gate()
    engine = RunningEngine(FakePipeline(on_step=gate))
    with (
        serving(engine=engine, key_digests=digests_of("a", "b")) as client,
        ThreadPoolExecutor() as pool,
    ):
        mine = {"X-Api-Key": "a", "X-Request-Id": "mine"}
        running = pool.submit(client.post, CHAT, json=HELLO, headers=mine)
        assert gate.reached.wait(60)
        reply = client.post("/v1/abort", json={"request_ids": ["mine"]}, headers={"X-Api-Key": "b"})
        assert reply.json() == {"aborted": [], "unknown": ["mine"]}
        gate.opened.set()
        assert running.result().json()["choices"][0]["finish_reason"] == "length"


# -- what a reply says of time ---------------------------------------------------------------------


@BOTH
def test_times_are_told_once_and_agree(
    client: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    reply = ask(client, path, body)
    metrics, timings = reply["metrics"], reply["timings"]
    assert 0 <= metrics["queue_time_ms"] <= metrics["time_to_first_token_ms"]
    assert metrics["generation_time_ms"] == pytest.approx(11 * metrics["mean_itl_ms"])
    assert timings["prompt_n"] + timings["cache_n"] == reply["usage"]["prompt_tokens"]
    assert timings["predicted_n"] == 12
    assert timings["predicted_ms"] == pytest.approx(metrics["generation_time_ms"])
    assert timings["predicted_per_second"] == pytest.approx(
        1000 * timings["predicted_n"] / timings["predicted_ms"]
    )
    found = chunks(client, path, body)
    assert ["timings" in chunk for chunk in found] == [False] * 11 + [True]
    found = chunks(client, path, body, stream_options={"include_usage": True})
    assert ["timings" in chunk for chunk in found] == [False] * 12 + [True]
    found = chunks(client, path, body, timings_per_token=True)
    assert [chunk["timings"]["predicted_n"] for chunk in found] == list(range(1, 13))


def test_one_token_has_no_rate(client: httpx.Client) -> None:
    reply = ask(client, COMPLETIONS, ONCE, max_tokens=1)
    assert "mean_itl_ms" not in reply["metrics"]
    assert "predicted_per_second" not in reply["timings"]
    assert reply["timings"]["predicted_n"] == 1


def test_a_reply_says_what_memory_pressure_cost() -> None:
    """Two that are promised 512 tokens each and write 700: one gives way and is computed again."""
    gate = Gate()
    gate.opened.set()
    pipeline = FakePipeline(on_step=gate)
    engine = RunningEngine(pipeline, num_lanes=2, num_cells=1100, max_model_len=1000)
    body = {**ONCE, "max_tokens": 700, "ignore_eos": True}
    with serving(engine=engine) as client, ThreadPoolExecutor() as pool:
        alone = ask(client, COMPLETIONS, body)
        assert alone["skippy"]["preemptions"] == alone["skippy"]["recomputed_tokens"] == 0
        gate.opened.clear()  # or the first would be far ahead when the second comes
        posts = [pool.submit(ask, client, COMPLETIONS, body) for _ in range(2)]
        eventually(lambda: len(engine.submitted) == 3)
        gate.opened.set()
        found = [post.result() for post in posts]
        assert {shown(each["choices"][0]) for each in found} == {shown(alone["choices"][0])}
        (victim,) = [each["skippy"] for each in found if each["skippy"]["preemptions"]]
        assert victim["recomputed_tokens"] > 500
        assert all(each["usage"] == alone["usage"] for each in found), "work done again is no usage"


def test_pages_of_other_origins_may_ask_only_if_they_are_named() -> None:
    asking = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
    allowed = "access-control-allow-origin"
    for origins, may in ((("https://app.example",), True), ((), False)):
        with serving(rules=ApiRules(cors_origins=origins), key_digests=digests_of("key")) as client:
            reply = client.options(CHAT, headers=asking)
            assert (reply.headers.get(allowed) == "https://app.example") == may
            answer = client.get("/health", headers={"Origin": "https://app.example"})
            assert (allowed in answer.headers) == may


def test_a_named_parser_reads_calls_in_its_own_form() -> None:
    call = b'{"name": "look", "parameters": {"at": 1}}'
    tools = [{"type": "function", "function": {"name": "look"}}]
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools or 0 }}"
    options: dict[str, Any] = {"tokenizer": FakeTokenizer(chat_template=template)}
    for parser, calls in ((None, None), ("llama3_json", "look")):
        rules = ApiRules(tool_parser=parser)
        with serving(FakePipeline(recite(call)), rules=rules, **options) as client:
            message = ask(client, CHAT, HELLO, tools=tools, max_tokens=60)["choices"][0]["message"]
            found = message.get("tool_calls")
            assert (found and found[0]["function"]["name"]) == calls
