"""Prefixes as clients of the real server meet them, over HTTP, on real cells and states."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from coordinator.coordinator import Coordinator, DirectDoorkeeper
from coordinator.launch import mesh
from skippy_mesh.config import ContextConfig, EngineSettings, specs_of
from skippy_mesh.gateway.errors import digests_of
from skippy_mesh.gateway.server import GatewayServer, GatewaySpec
from skippy_mesh.places import AdmissionLimits
from tests.crowd import Made

CONTEXT = ContextConfig(num_cells=1024, num_lanes=4, num_residents=8, max_rows=128, num_threads=1)
KEYS = ("one", "two")
GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
TEXT = "the quick brown fox jumps over the lazy dog and back again, and again, and once more"


@contextmanager
def served(model: Made, *, api_keys: tuple[str, ...] = ()) -> Iterator[httpx.Client]:
    spec = GatewaySpec(
        host="127.0.0.1",
        port=0,
        model_path=str(model.path),
        model_name="tiny",
        key_digests=digests_of(*api_keys),
    )
    limits = AdmissionLimits(ceiling=4, max_queue=16, max_queue_tokens=8192)
    specs = specs_of(model.path, model.model.num_layers, (), CONTEXT)
    with mesh(specs, EngineSettings()) as running:
        gateway = GatewayServer(spec)
        url = gateway.start(running, DirectDoorkeeper(Coordinator(limits)))
        try:
            with httpx.Client(base_url=url, timeout=600) as client:
                yield client
        finally:
            gateway.stop()
            assert gateway.wait(60)


@pytest.mark.parametrize("family", ["dense", "window"])
def test_keys_salts_and_no_cache(family: str, made, shared_cache: Path) -> None:
    with served(made(family, "q8_0"), api_keys=KEYS) as client:
        answers = []

        def cached(key: str, **fields: Any) -> int:
            body = {"prompt": TEXT, **GREEDY, **fields}
            reply = client.post("/v1/completions", json=body, headers={"X-Api-Key": key})
            assert reply.status_code == 200, reply.text
            answers.append(reply.json()["choices"][0]["text"])
            count: int = reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            return count

        assert cached("one", cache_prompt=False) == cached("one") == cached("two") == 0
        assert cached("one") == cached("two") > 20
        assert cached("one", cache_salt="s") == cached("two", cache_salt="s") == 0
        assert cached("one", cache_salt="s") > 20
        assert cached("one", cache_prompt=False) == 0
        assert len(set(answers)) == 1, "where a prefix comes from never changes the text"


@pytest.mark.parametrize("family", ["dense", "ssm", "linear"])
def test_each_turn_of_a_chat_begins_where_the_last_one_was(
    family: str, made, shared_cache: Path
) -> None:
    model: Made = made(family, "q8_0")
    messages: list[dict[str, str]] = []
    with served(model) as client:
        for turn in range(3):
            messages.append({"role": "user", "content": f"{turn} {TEXT}"})
            body = {"messages": messages, **GREEDY}
            replies = [
                client.post("/v1/chat/completions", json={**body, **fields}).raise_for_status()
                for fields in ({}, {"cache_prompt": False})
            ]
            warm, cold = (reply.json() for reply in replies)
            num_cached = warm["usage"]["prompt_tokens_details"]["cached_tokens"]
            kind = "state" if model.is_recurrent else "seq_cp"
            if turn:
                assert num_cached > 20 * turn
                assert warm["skippy"]["prefix_kind"] == kind
            assert cold["skippy"]["prefix_kind"] == "none"
            said = warm["choices"][0]["message"]["content"]
            assert said == cold["choices"][0]["message"]["content"]
            messages.append({"role": "assistant", "content": said})
