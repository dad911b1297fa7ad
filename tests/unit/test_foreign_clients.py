"""What benchmarks of other servers send, word for word, and what they read of the answer.

From the sources of vLLM 0.33 (`vllm bench serve`), guidellm 0.8 and llama-benchy 0.4. Without these
a comparison with another server fails, or counts what is not there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from stages.fake import FakePipeline
from tests.engines import RunningEngine
from tests.unit.test_gateway import CHAT, COMPLETIONS, serving

TEXT = "once upon a time"
PARTS = [{"role": "user", "content": [{"type": "text", "text": TEXT}]}]
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "vllm completions": (COMPLETIONS, {
        "model": "any", "prompt": TEXT, "repetition_penalty": 1.0, "max_tokens": 9,
        "logprobs": None, "stream": True, "stream_options": {"include_usage": True},
        "temperature": 0.0, "ignore_eos": True, "request_id": "cmpl-7-0",
    }),
    "vllm chat": (CHAT, {
        "model": "any", "messages": PARTS, "max_completion_tokens": 9, "stream": True,
        "stream_options": {"include_usage": True}, "temperature": 0.0, "ignore_eos": True,
    }),
    "guidellm completions": (COMPLETIONS, {
        "model": "any", "prompt": TEXT, "max_tokens": 9, "stop": None, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }),
    "guidellm chat": (CHAT, {
        "model": "any", "messages": PARTS, "max_completion_tokens": 9, "stop": None,
        "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }),
    "llama-benchy": (CHAT, {
        "model": "any", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 9,
        "min_tokens": 9, "ignore_eos": True, "stream": True, "cache_prompt": False,
        "stream_options": {"include_usage": True}, "return_token_ids": True,
    }),
}  # fmt: skip


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with serving(engine=RunningEngine(FakePipeline(), num_residents=4)) as served:
        yield served


@pytest.mark.parametrize("name", SHAPES)
def test_a_benchmark_reads_as_many_tokens_as_it_asked_for(client: httpx.Client, name: str) -> None:
    path, body = SHAPES[name]
    reply = client.post(path, json=body, headers={"Authorization": "Bearer none"})
    assert reply.status_code == 200, reply.text
    frames = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert frames[-1] == "[DONE]"
    chunks = [json.loads(frame) for frame in frames[:-1]]
    # What makes a chunk a token for each of them: a choice with text; the usage chunk has none.
    texts = [choice for chunk in chunks for choice in chunk["choices"] if _text(choice)]
    assert len(texts) == 9
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk["usage"]][-1] == 9
    assert chunks[-1]["choices"] == []
    ends = [c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
    assert ends == ["length"]


def _text(choice: dict[str, Any]) -> str:
    found: str = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
    return found


def test_what_they_look_up_before_they_begin_is_there(client: httpx.Client) -> None:
    assert client.get("/health").status_code == 200
    card = client.get("/v1/models").json()["data"][0]
    assert card["root"] == card["id"]
    counted = client.post("/tokenize", json={"content": TEXT}).json()
    assert counted["count"] == len(TEXT)
    assert client.get("/metrics").status_code == 200
