"""Every way a request can fail: a true HTTP status before output, an error event after it.

Without these a client retries what can never work, or takes a broken answer for a whole one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from skippy_mesh.gateway.errors import Edge, digests_of
from skippy_mesh.gateway.readiness import LOADING, Problem
from skippy_mesh.gateway.token_stream import Limits
from skippy_mesh.messages import StepBatch
from stages.fake import FakePipeline
from tests.engines import RunningEngine
from tests.unit.test_gateway import (
    CHAT,
    COMPLETIONS,
    HELLO,
    ONCE,
    ask,
    chunks,
    serving,
    shown,
)


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with serving() as served:
        yield served


def user(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


TOOL = {"type": "function", "function": {"name": "look"}}
BAD_TOOL = {"type": "function", "function": {"name": "bad"}}
NAMED = {"type": "function", "function": {"name": "find"}}
BAD_REQUESTS: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, {"temperature": "hot"}, "invalid_value", "temperature"),
    (CHAT, {"temperature": 2.5}, "invalid_value", "temperature"),
    (CHAT, {"temperature": True}, "invalid_value", "temperature"),
    (CHAT, {"top_p": 0}, "invalid_value", "top_p"),
    (CHAT, {"top_k": -2}, "invalid_value", "top_k"),
    (CHAT, {"top_k": 2**40}, "invalid_value", "top_k"),
    (CHAT, {"min_p": 1.5}, "invalid_value", "min_p"),
    (CHAT, {"seed": 2**70}, "invalid_value", "seed"),
    (CHAT, {"seed": 1.5}, "invalid_value", "seed"),
    (CHAT, {"max_tokens": 0}, "invalid_value", "max_tokens"),
    (CHAT, {"max_completion_tokens": -2}, "invalid_value", "max_completion_tokens"),
    (CHAT, {"stop": ""}, "invalid_value", "stop"),
    (CHAT, {"stop": ["ok", ""]}, "invalid_value", "stop"),
    (CHAT, {"stop": ["x"] * 17}, "invalid_value", "stop"),
    (CHAT, {"stop": "é" * 129}, "invalid_value", "stop"),
    (CHAT, {"stop": [1]}, "invalid_value", "stop"),
    (CHAT, {"stop_token_ids": [260]}, "invalid_value", "stop_token_ids"),
    (CHAT, {"ignore_eos": 1}, "invalid_value", "ignore_eos"),
    (CHAT, {"stream_options": {"include_usage": 3}}, "invalid_value",
     "stream_options.include_usage"),
    (CHAT, {"messages": []}, "invalid_value", "messages"),
    (CHAT, {"messages": None}, "invalid_value", "messages"),
    (CHAT, {"messages": [3]}, "invalid_value", "messages[0]"),
    (CHAT, {"messages": [{"role": "boss"}]}, "invalid_value", "messages[0].role"),
    (CHAT, user(3), "invalid_value", "messages[0].content"),
    (CHAT, user([{"type": "image_url"}]), "unsupported_content", "messages[0].content"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [1]}]}, "invalid_value",
     "messages[0].tool_calls[0]"),
    (CHAT, {"messages": [{"role": "assistant", "function_call": {"name": "f"}}]},
     "unsupported_parameter", "messages[0].function_call"),
    (CHAT, user("x" * 600), "context_length_exceeded", "messages"),
    (CHAT, {"n": 0}, "invalid_value", "n"),
    (CHAT, {"n": 9}, "invalid_value", "n"),
    (CHAT, {"n": 2, "best_of": 3}, "unsupported_parameter", "best_of"),
    (CHAT, {"priority": 1}, "unsupported_parameter", "priority"),
    (CHAT, {"priority": 2**31}, "invalid_value", "priority"),
    (CHAT, {"continue_final_message": True}, "invalid_value", "continue_final_message"),
    (CHAT, {"guided_choice": ["a"]}, "unsupported_parameter", "guided_choice"),
    (CHAT, {"tools": [{"type": "function"}]}, "invalid_value", "tools[0].function"),
    (CHAT, {"tools": [TOOL, {"type": "function", "function": {"name": "a b"}}]}, "invalid_value",
     "tools[1].function.name"),
    (CHAT, {"tools": [TOOL], "tool_choice": "some"}, "invalid_value", "tool_choice"),
    (CHAT, {"tools": [TOOL], "tool_choice": NAMED}, "invalid_value", "tool_choice"),
    (CHAT, {"tool_choice": "required"}, "invalid_value", "tool_choice"),
    (CHAT, {"tools": [TOOL], "tool_choice": "required", "grammar": "x"}, "invalid_value",
     "grammar"),
    (CHAT, {"tools": [TOOL], "tool_choice": "required", "ignore_eos": True}, "invalid_value",
     "ignore_eos"),
    (CHAT, {"tools": [BAD_TOOL], "tool_choice": "required"}, "invalid_grammar", "tools"),
    (CHAT, {"typical_p": 0}, "invalid_value", "typical_p"),
    (CHAT, {"presence_penalty": 2.5}, "invalid_value", "presence_penalty"),
    (CHAT, {"frequency_penalty": "a"}, "invalid_value", "frequency_penalty"),
    (CHAT, {"repetition_penalty": 0}, "invalid_value", "repetition_penalty"),
    (CHAT, {"repeat_penalty": -1}, "invalid_value", "repetition_penalty"),
    (CHAT, {"repeat_last_n": -2}, "invalid_value", "repeat_last_n"),
    (CHAT, {"min_tokens": -1}, "invalid_value", "min_tokens"),
    (CHAT, {"min_tokens": 13}, "invalid_value", "min_tokens"),
    (CHAT, {"logit_bias": {"x": 1}}, "invalid_value", "logit_bias"),
    (CHAT, {"logit_bias": {"1": 101}}, "invalid_value", "logit_bias"),
    (CHAT, {"logit_bias": {"1": True}}, "invalid_value", "logit_bias"),
    (CHAT, {"logit_bias": [[1]]}, "invalid_value", "logit_bias"),
    (CHAT, {"logit_bias": {"260": 1}}, "invalid_value", "logit_bias"),
    (CHAT, {"logit_bias": [[1, 1]] * 1025}, "invalid_value", "logit_bias"),
    (CHAT, {"allowed_token_ids": []}, "invalid_value", "allowed_token_ids"),
    (CHAT, {"allowed_token_ids": [-1]}, "invalid_value", "allowed_token_ids"),
    (CHAT, {"stream_interval": 0}, "invalid_value", "stream_interval"),
    (CHAT, {"t_max_predict_ms": -1}, "invalid_value", "t_max_predict_ms"),
    (CHAT, {"logprobs": 1}, "invalid_value", "logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "invalid_value", "top_logprobs"),
    (CHAT, {"top_logprobs": 1}, "invalid_value", "top_logprobs"),
    (COMPLETIONS, {"logprobs": True}, "invalid_value", "logprobs"),
    (COMPLETIONS, {"logprobs": 21}, "invalid_value", "logprobs"),
    (COMPLETIONS, {"echo": True, "logprobs": 1}, "invalid_value", "echo"),
    (COMPLETIONS, {"echo": 1}, "invalid_value", "echo"),
    (CHAT, {"response_format": {"type": "xml"}}, "invalid_value", "response_format.type"),
    (CHAT, {"response_format": {"type": "json_schema"}}, "invalid_value", "response_format"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}},
     "invalid_value", "response_format.json_schema.schema"),
    (CHAT, {"structured_outputs": {}}, "invalid_value", "structured_outputs"),
    (CHAT, {"structured_outputs": {"choice": ["a"], "grammar": "b"}}, "invalid_value",
     "structured_outputs"),
    (CHAT, {"structured_outputs": {"choice": ["a", ""]}}, "invalid_value", "structured_outputs"),
    (CHAT, {"structured_outputs": {"regex": "a+"}}, "unsupported_parameter",
     "structured_outputs.regex"),
    (CHAT, {"grammar": 3}, "invalid_value", "grammar"),
    (CHAT, {"json_schema": "{}"}, "invalid_value", "json_schema"),
    (CHAT, {"grammar": "bad"}, "invalid_grammar", "grammar"),
    (CHAT, {"response_format": {"type": "json_object", "schema": {"x": "bad"}}},
     "invalid_grammar", "response_format"),
    (CHAT, {"grammar": "x", "json_schema": {}}, "invalid_value", "json_schema"),
    (CHAT, {"grammar": "x", "ignore_eos": True}, "invalid_value", "ignore_eos"),
    (COMPLETIONS, {"prompt": None}, "invalid_value", "prompt"),
    (COMPLETIONS, {"prompt": ""}, "invalid_value", "prompt"),
    (COMPLETIONS, {"prompt": []}, "invalid_value", "prompt"),
    (COMPLETIONS, {"prompt": [""]}, "invalid_value", "prompt"),
    (COMPLETIONS, {"prompt": 5}, "invalid_value", "prompt"),
    (COMPLETIONS, {"prompt": [1, "a"]}, "invalid_value", "prompt"),
    (COMPLETIONS, {"prompt": [1, 260]}, "invalid_value", "prompt"),
    (COMPLETIONS, {"prompt": ["a", ""]}, "invalid_value", "prompt"),
    (COMPLETIONS, {"prompt": ["a"] * 65}, "invalid_value", "prompt"),
    (COMPLETIONS, {"prompt": [[97], [260]]}, "invalid_value", "prompt"),
    (COMPLETIONS, {"prompt": ["a", [97] * 512]}, "context_length_exceeded", "prompt"),
    (COMPLETIONS, {"prompt": [97] * 512}, "context_length_exceeded", "prompt"),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "fields", "code", "param"), BAD_REQUESTS)
def test_a_bad_request_is_a_400_that_names_the_field(
    client: httpx.Client, path: str, fields: dict[str, Any], code: str, param: str, stream: bool
) -> None:
    if "stream_options" in fields and not stream:
        param = "stream_options.include_usage"
    body = {**(HELLO if path == CHAT else ONCE), **fields, "stream": stream}
    response = client.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, code, param)
    assert error["type"] == "invalid_request_error"
    if code == "context_length_exceeded":
        assert (error["n_ctx"], error["n_prompt_tokens"] >= 512) == (512, True)


def test_stream_options_need_a_stream(client: httpx.Client) -> None:
    response = client.post(CHAT, json={**HELLO, "stream_options": {"include_usage": True}})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "stream_options")


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'{"temperature": NaN}', b"\xff", b'{"prompt": "\\ud800"}', b"[" * 9999],
)
def test_what_is_not_json_is_invalid_json(client: httpx.Client, body: bytes) -> None:
    response = client.post(COMPLETIONS, content=body)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json")


def test_routes_answer_in_the_error_shape(client: httpx.Client) -> None:
    for method, path, status, code in (
        ("GET", "/completion", 404, "unknown_url"),
        ("GET", CHAT + "/", 404, "unknown_url"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
    ):
        response = client.request(method, path)
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)
        assert ("Allow" in response.headers) == (status == 405)
        assert response.headers["X-Request-Id"]


def test_a_body_over_the_limit_is_refused() -> None:
    with serving(limits=Limits(max_body_bytes=1000)) as client:
        for content in (b"x" * 5_000_000, iter([b"x" * 600] * 2)):
            response = client.post(COMPLETIONS, content=content)
            assert response.status_code == 413
            assert response.json()["error"]["code"] == "request_too_large"
        ask(client, COMPLETIONS, ONCE)


def test_keys_guard_all_but_the_public_routes() -> None:
    with serving(key_digests=digests_of("one", "zwei é")) as client:
        for header in ({}, {"Authorization": "Bearer on"}, {"Authorization": "Basic one"}):
            response = client.get("/v1/models", headers=header)
            assert (response.status_code, response.headers["WWW-Authenticate"]) == (401, "Bearer")
            assert response.json()["error"]["type"] == "authentication_error"
        for good in ({"Authorization": "Bearer one"}, {"X-Api-Key": "zwei é".encode()}):
            assert client.get("/v1/models", headers=good).status_code == 200  # type: ignore[arg-type]
        for path in ("/", "/health", "/v1/health", "/livez", "/ping", "/ready", "/version"):
            assert client.get(path).status_code == 200


def test_an_unhealthy_mesh_refuses_new_requests() -> None:
    reasons: list[Problem | None] = [LOADING]
    down = Problem("stage_unavailable", "stage 1 is down", 1)
    stuck = Problem("stalled", "no step has ended for 121 s")
    with serving(health=lambda: reasons[-1]) as client:
        for reason in (LOADING, down, stuck):
            code = reason.code
            reasons.append(reason)
            for response in (client.get("/health"), client.post(CHAT, json=HELLO)):
                assert response.status_code == 503
                assert response.json()["error"]["code"] == code
                assert 1 <= int(response.headers["Retry-After"]) <= 60
            assert client.get("/livez").status_code == 200
        reasons.append(None)
        assert client.get("/health").json() == {"status": "ok", "exact": True}


class Broken:
    """Fails the step at which the lane's position ``position`` is computed, so many times: after
    the first the engine tries once more."""

    def __init__(self, position: int, *, times: int = 2):
        self.position = position
        self.times = times

    def __call__(self, batch: StepBatch) -> None:
        if self.position in batch.positions and self.times:
            self.times -= 1
            raise RuntimeError("/secret/path")


@pytest.mark.parametrize("position", [0, 8])
def test_a_step_that_fails_once_is_a_pause_and_nothing_else(position: int) -> None:
    with serving() as client:
        expected = shown(ask(client, COMPLETIONS, ONCE)["choices"][0])
    broken = Broken(position, times=1)
    with serving(FakePipeline(on_step=broken)) as client:
        assert shown(ask(client, COMPLETIONS, ONCE)["choices"][0]) == expected
    assert broken.times == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_before_any_output_is_a_500_and_the_next_request_works(stream: bool) -> None:
    with serving(FakePipeline(on_step=Broken(0))) as client:
        response = client.post(CHAT, json={**HELLO, "stream": stream})
        assert (response.status_code, response.headers["x-should-retry"]) == (500, "false")
        assert response.json()["error"]["code"] == "engine_error"
        assert "secret" not in response.text
        ask(client, CHAT, HELLO)


def test_a_failure_after_output_is_an_error_event() -> None:
    with serving(FakePipeline(on_step=Broken(8))) as client:
        *content, last = chunks(client, COMPLETIONS, ONCE, stream_options={"include_usage": True})
        assert last["error"]["code"] == "engine_error"
        assert len(content) == 4
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in content)


def test_a_closing_engine_refuses_new_requests() -> None:
    engine = RunningEngine(FakePipeline())
    with serving(engine=engine) as client:
        engine.client.close()
        response = client.post(CHAT, json=HELLO)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "draining")


def test_a_reply_that_has_begun_is_never_begun_again() -> None:
    async def breaks_midway(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError("midway")

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    scope = {"type": "http", "path": "/", "headers": []}
    with pytest.raises(RuntimeError, match="midway"):
        asyncio.run(Edge(breaks_midway)(scope, receive, send))
    assert [message["type"] for message in sent] == ["http.response.start"]


def test_a_fault_of_the_gateway_is_a_500_in_the_error_shape() -> None:
    def health() -> Problem | None:
        raise KeyError("/secret/path")

    with serving(health=health) as client:
        response = client.post(CHAT, json=HELLO, headers={"X-Request-Id": "mine"})
        assert (response.status_code, response.headers["X-Request-Id"]) == (500, "mine")
        assert response.json()["error"]["code"] == "internal_error"
        assert "secret" not in response.text
