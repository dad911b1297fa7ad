"""Several answers to a prompt, and several prompts in a request, in front of a fake model.

Without these a choice is another one than the lone request would have got, tokens are counted
twice, or a member of the group outlives its client.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from skippy_mesh.messages import StepBatch
from stages.fake import BOS, FakePipeline, recite
from tests.engines import RunningEngine, places_of
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

WARM = {"temperature": 1.0, "seed": 40}
LONG = {"prompt": "x" * 200, "max_tokens": 12}


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with serving() as served:
        yield served


def texts(found: list[dict[str, Any]], num_choices: int) -> list[str]:
    """What each choice of a stream said, in the order of their numbers."""
    joined = [""] * num_choices
    for chunk in found:
        for choice in chunk["choices"]:
            joined[choice["index"]] += shown(choice)
    return joined


@BOTH
def test_each_choice_is_the_lone_request_of_its_seed(
    client: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    alone = [ask(client, path, body, temperature=1.0, seed=40 + i) for i in range(3)]
    group = ask(client, path, body, n=3, **WARM)
    assert [choice["index"] for choice in group["choices"]] == [0, 1, 2]
    expected = [shown(each["choices"][0]) for each in alone]
    assert list(map(shown, group["choices"])) == expected
    assert len(set(expected)) == 3
    usage = group["usage"]
    assert usage["prompt_tokens"] == alone[0]["usage"]["prompt_tokens"], "once, not for each"
    assert usage["completion_tokens"] == 3 * 12
    assert group["skippy"]["seed"] == 40
    found = chunks(client, path, body, n=3, stream_options={"include_usage": True}, **WARM)
    assert texts(found, 3) == expected
    assert found[-1]["usage"] == usage
    ends = [c["index"] for chunk in found for c in chunk["choices"] if c["finish_reason"]]
    assert sorted(ends) == [0, 1, 2]


def test_without_randomness_all_choices_are_equal(client: httpx.Client) -> None:
    group = ask(client, CHAT, HELLO, n=2)
    assert shown(group["choices"][0]) == shown(group["choices"][1])
    assert group["metrics"] is None, "of several choices there is no one time"


def test_the_role_is_said_once_for_each_choice(client: httpx.Client) -> None:
    found = chunks(client, CHAT, HELLO, n=3)
    roles = [c["index"] for chunk in found for c in chunk["choices"] if "role" in c["delta"]]
    assert sorted(roles) == [0, 1, 2]


@pytest.mark.parametrize(
    "prompts", [["a b", "c"], [[BOS, *b"a b"], [BOS, *b"c"]], ["a b", [BOS, 99]]]
)
def test_prompts_are_answered_in_their_order(client: httpx.Client, prompts: Any) -> None:
    alone = [
        ask(client, COMPLETIONS, ONCE, prompt=prompt, temperature=1.0, seed=40 + i)
        for prompt in ("a b", "c") for i in range(2)
    ]  # fmt: skip
    group = ask(client, COMPLETIONS, ONCE, prompt=prompts, n=2, return_token_ids=True, **WARM)
    assert list(map(shown, group["choices"])) == [shown(each["choices"][0]) for each in alone]
    assert group["usage"]["prompt_tokens"] == (1 + 3) + (1 + 1)
    ids = [choice["prompt_token_ids"] for choice in group["choices"]]
    assert ids == [[BOS, *b"a b"]] * 2 + [[BOS, *b"c"]] * 2
    echoed = ask(client, COMPLETIONS, ONCE, prompt=prompts, echo=True, **WARM)
    assert [shown(choice)[:1] for choice in echoed["choices"]] == ["a", "c"]


def test_the_last_seeds_go_round(client: httpx.Client) -> None:
    group = ask(client, CHAT, HELLO, n=2, temperature=1.0, seed=2**63 - 1)
    after = ask(client, CHAT, HELLO, temperature=1.0, seed=-(2**63))
    assert shown(group["choices"][1]) == shown(after["choices"][0])


def test_a_long_prompt_is_computed_once_and_shared() -> None:
    seen: list[int] = []
    pipeline = FakePipeline(recite(b"yes"), on_step=lambda batch: seen.extend(batch.tokens))
    engine = RunningEngine(pipeline, num_residents=4)
    with serving(engine=engine) as client:
        group = ask(client, COMPLETIONS, LONG, n=4)
        # Who waits comes in when what is still to come is not worth waiting for.
        assert 200 + 3 <= seen.count(ord("x")) < 200 + 3 * 64
        assert {shown(choice) for choice in group["choices"]} == {"yes"}
        assert group["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_group_takes_one_place() -> None:
    gate, places = Gate(), places_of(ceiling=1, max_queue=0)
    engine = RunningEngine(FakePipeline(on_step=gate))
    with serving(engine=engine, places=places) as client, ThreadPoolExecutor() as pool:
        running = pool.submit(client.post, CHAT, json={**HELLO, "n": 4})
        assert gate.reached.wait(60)
        assert places.num_open == 1
        assert client.post(CHAT, json=HELLO).status_code == 429
        gate.opened.set()
        assert running.result().status_code == 200
        eventually(lambda: places.num_open == 0)


def test_a_client_that_leaves_takes_all_its_choices_along() -> None:
    gate = Gate()
    engine = RunningEngine(FakePipeline(on_step=gate))
    with serving(engine=engine) as client:
        with pytest.raises(httpx.ReadTimeout):
            client.post(CHAT, json={**HELLO, "n": 3}, timeout=0.2,
                        headers={"X-Request-Id": "gone"})  # fmt: skip
        eventually(lambda: sorted(engine.aborted) == ["gone#0", "gone#1", "gone#2"])
        gate.opened.set()
        eventually(lambda: engine.client.num_open == 0)


def test_a_choice_that_stops_early_is_freed_while_the_others_run() -> None:
    """Each choice stops at its own place, where its text says so."""
    steps: list[StepBatch] = []
    is_stopping = threading.Event()

    def wait_for_the_stop(batch: StepBatch) -> None:
        """The engine is not to be through before the gateway has read as far as the stop."""
        steps.append(batch)
        if is_stopping.is_set() and len(steps) > 35:
            eventually(lambda: bool(engine.aborted))

    engine = RunningEngine(FakePipeline(on_step=wait_for_the_stop))
    with serving(engine=engine) as client:
        long = {**HELLO, "max_tokens": 40, "temperature": 1.0}
        whole = [shown(ask(client, CHAT, long, seed=40 + i)["choices"][0]) for i in range(2)]
        stop = next(char for char in whole[0] if char not in whole[1])
        engine.aborted.clear()
        steps.clear()
        is_stopping.set()
        group = ask(client, CHAT, HELLO, max_tokens=40, n=2, stop=stop, **WARM)
        first, second = group["choices"]
        assert (first["finish_reason"], second["finish_reason"]) == ("stop", "length")
        assert shown(first) == whole[0].split(stop)[0]
        assert shown(second) == whole[1]
        assert [name[-2:] for name in engine.aborted] == ["#0"]


class BrokenFor:
    """Fails every step that holds a row of ``lane`` at a position behind the prompt."""

    def __init__(self, lane: int):
        self._lane = lane

    def __call__(self, batch: StepBatch) -> None:
        for lane, position in zip(batch.lanes, batch.positions, strict=True):
            if lane == self._lane and position > 30:
                raise RuntimeError("broken")


def test_a_group_fails_as_one() -> None:
    engine = RunningEngine(FakePipeline(on_step=BrokenFor(1)))
    with serving(engine=engine) as client:
        reply = client.post(CHAT, json={**HELLO, "n": 2, "max_tokens": 40})
        assert (reply.status_code, reply.json()["error"]["code"]) == (500, "engine_error")
        eventually(lambda: engine.client.num_open == 0)
