"""The single-lane baseline: every request ends once, and leaves nothing behind.

Without these every number would be compared with an engine that may be wrong.
"""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.baseline import Baseline, chunk_lengths
from skippy_mesh.client import EngineClient
from skippy_mesh.errors import RequestError, SkippyError, StageError
from skippy_mesh.messages import Request, SamplingParams, TokenEvent
from stages.fake import FakePipeline, babble


def request(num_prompt=5, max_tokens=8, request_id="r", **fields):
    ids = tuple((7 * at) % 200 + 1 for at in range(num_prompt))
    return Request(request_id=request_id, token_ids=ids, max_tokens=max_tokens, **fields)


def engine_of(pipeline, **limits):
    return Baseline(pipeline, **{"max_model_len": 100, "max_rows": 8, **limits})


def expected_tokens(asked, count):
    history = list(asked.token_ids)
    for _ in range(count):
        history.append(babble(history, asked.sampling))
    return history[len(asked.token_ids) :]


@pytest.mark.parametrize("num_prompt", [1, 7, 8, 9, 16, 17, 60])
@pytest.mark.parametrize("chunk_multiple", [1, 2, 4])
def test_the_answer_is_the_models_whatever_the_chunks(num_prompt, chunk_multiple):
    pipeline, asked = FakePipeline(), request(num_prompt)
    events = list(engine_of(pipeline, chunk_multiple=chunk_multiple).generate(asked))
    assert [event.token_id for event in events] == expected_tokens(asked, 8)
    assert [event.finish_reason for event in events] == [None] * 7 + ["length"]
    assert not any(pipeline.histories.values())


def test_no_step_is_longer_than_the_limit():
    sizes = []
    pipeline = FakePipeline(on_step=lambda batch: sizes.append(batch.num_rows))
    list(engine_of(pipeline, max_rows=8).generate(request(30, 3)))
    assert sizes == [8, 8, 8, 6, 1, 1, 0]


def test_a_stop_token_ends_and_counts():
    asked = request(5, 50)
    third = expected_tokens(asked, 3)[2]
    stopped = request(5, 50, stop_token_ids=frozenset([third]))
    events = list(engine_of(FakePipeline()).generate(stopped))
    assert events[-1].finish_reason == "stop"
    assert events[-1].token_id == third
    assert len(events) == 1 + expected_tokens(asked, 50).index(third)


def test_max_tokens_ends_at_the_context():
    events = list(engine_of(FakePipeline(), max_model_len=12).generate(request(9, 1000)))
    assert len(events) == 3
    assert events[-1].finish_reason == "length"


def test_a_prompt_that_leaves_no_room_is_refused_with_the_numbers():
    engine = engine_of(FakePipeline(), max_model_len=12)
    with pytest.raises(RequestError, match=r"12 tokens .* holds 12: at most 11") as caught:
        next(engine.generate(request(12)))
    assert caught.value.code == "context_length_exceeded"
    assert next(engine.generate(request(11))).finish_reason == "length"


def test_closing_the_iterator_frees_the_lane():
    pipeline = FakePipeline()
    events = engine_of(pipeline).generate(request(20, 50))
    next(events)
    assert any(pipeline.histories.values())
    events.close()
    assert not any(pipeline.histories.values())


class Served:
    """A baseline on a thread of its own behind its client, and what it told each request."""

    def __init__(self, pipeline):
        engine = engine_of(pipeline)
        self._thread = threading.Thread(target=engine.run)
        self._thread.start()
        self.client = EngineClient(engine, max_model_len=100)
        self.events: dict[str, list[TokenEvent]] = {}
        self._ended: dict[str, threading.Event] = {}

    def __enter__(self):
        return self

    def __exit__(self, *_exc):
        self.client.close()
        self._thread.join(10)
        assert not self._thread.is_alive()

    def submit(self, asked, sink=None):
        self.events[asked.request_id] = []
        self._ended[asked.request_id] = threading.Event()
        self.client.submit(asked, sink or self._on_event)

    def _on_event(self, event):
        self.events[event.request_id].append(event)
        if event.finish_reason:
            self._ended[event.request_id].set()

    def wait(self, request_id):
        assert self._ended[request_id].wait(10), request_id
        return self.events[request_id]


def test_requests_are_served_in_order_and_alone():
    lanes_in_use = []
    pipeline = FakePipeline(on_step=lambda _batch: lanes_in_use.append(len(pipeline.histories)))
    with Served(pipeline) as served:
        asked = [request(5 + number, request_id=f"r{number}") for number in range(6)]
        for one in asked:
            served.submit(one)
        for one in asked:
            tokens = [event.token_id for event in served.wait(one.request_id)]
            assert tokens == expected_tokens(one, 8)
    assert max(lanes_in_use) == 1


def test_a_failed_step_ends_its_request_only_and_the_next_starts_clean():
    failing = threading.Event()

    def on_step(batch):
        if failing.is_set() and batch.num_rows == 1:
            failing.clear()
            raise StageError("stage 1 fell over")

    with Served(FakePipeline(on_step=on_step)) as served:
        failing.set()
        served.submit(request(5, request_id="a"))
        last = served.wait("a")[-1]
        assert (last.finish_reason, last.error) == ("error", "stage 1 fell over")
        served.submit(request(6, request_id="b"))
        tokens = [event.token_id for event in served.wait("b")]
        assert tokens == expected_tokens(request(6), 8)


def test_an_unexpected_failure_is_not_told_to_the_client():
    def on_step(_batch):
        raise ValueError("secret path /srv/models")

    with Served(FakePipeline(on_step=on_step)) as served:
        served.submit(request(5, request_id="a"))
        assert served.wait("a")[-1].error == "internal engine error"


def test_a_receiver_that_raises_does_not_stop_the_engine():
    def broken_sink(_event):
        raise RuntimeError("nobody listens")

    pipeline = FakePipeline()
    with Served(pipeline) as served:
        served.submit(request(5, request_id="a"), broken_sink)
        served.submit(request(5, request_id="b"))
        assert len(served.wait("b")) == 8
        assert not any(pipeline.histories.values())


def test_abort_ends_a_running_and_a_queued_request():
    started, go_on = threading.Event(), threading.Event()

    def on_step(batch):
        if batch.num_rows == 1:
            started.set()
            assert go_on.wait(10)

    with Served(FakePipeline(on_step=on_step)) as served:
        for name in ("a", "b", "c"):
            served.submit(request(5, 40, request_id=name))
        assert started.wait(10)
        assert served.client.abort("a")
        assert served.client.abort("b")
        go_on.set()
        assert served.wait("a")[-1].finish_reason == "abort"
        assert [event.token_id for event in served.wait("b")] == [None]
        assert len(served.wait("c")) == 40
        assert not served.client.abort("a")
        assert not served.client.abort("never seen")


def test_close_ends_everything_and_later_requests_are_refused():
    with Served(FakePipeline()) as served:
        for number in range(5):
            served.submit(request(5, 90, request_id=f"r{number}"))
        served.client.close()
        for number in range(5):
            assert served.wait(f"r{number}")[-1].finish_reason in ("abort", "length")
        with pytest.raises(SkippyError, match="shutting down"):
            served.submit(request(5, request_id="late"))


def test_an_id_that_is_still_open_cannot_be_used_twice():
    go_on = threading.Event()
    with Served(FakePipeline(on_step=lambda _batch: go_on.wait(10))) as served:
        served.submit(request(5, request_id="a"))
        with pytest.raises(SkippyError, match="already open"):
            served.client.submit(request(5, request_id="a"), print)
        go_on.set()
        assert len(served.wait("a")) == 8


def test_seeds_reach_the_sampler():
    texts = {
        seed: [event.token_id for event in engine_of(FakePipeline()).generate(
            request(5, sampling=SamplingParams(temperature=1.0, seed=seed)))]
        for seed in (1, 2)
    }  # fmt: skip
    assert texts[1] != texts[2]


@given(st.integers(0, 2000), st.sampled_from([1, 2, 4, 8]), st.integers(8, 600))
def test_chunks_are_multiples_and_then_single_tokens(length, multiple, max_rows):
    chunks = chunk_lengths(length, multiple=multiple, max_rows=max_rows)
    num_single = length % multiple
    whole = chunks[: len(chunks) - num_single]
    assert sum(chunks) == length
    assert chunks[len(whole) :] == (1,) * num_single
    assert all(chunk % multiple == 0 and 0 < chunk <= max_rows for chunk in whole)
    assert len(whole) == -(-(length - num_single) // (max_rows - max_rows % multiple))


def test_a_step_too_small_for_a_chunk_is_refused():
    with pytest.raises(ValueError, match="steps of 4 to 3 rows"):
        chunk_lengths(10, multiple=4, max_rows=3)
