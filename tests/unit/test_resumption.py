"""The engine dies and another takes its place: what was streamed is neither repeated nor lost.

Without these a client sees a token twice, misses one, or waits for an answer nobody computes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skippy_mesh.client import MAX_LOSSES_ALONE, EngineClient
from skippy_mesh.config import StepRules
from skippy_mesh.engine import Engine, EnginePlan
from skippy_mesh.errors import SkippyError, StageChangedError, StageLostError
from skippy_mesh.messages import SamplingParams, StageLoss
from skippy_mesh.scheduler.memory import Capacity
from stages.fake import FakePipeline
from tests import engines
from tests.engines import submit
from tests.scheduling import answer_alone, request

ENDS_WITHIN_S = 20
POISON = 250


class Death(BaseException):
    """Of the process the engine is in: nothing in there can catch it."""


class MortalHead:
    """An engine that runs on its reader's thread and dies when as many tokens have been reported
    as one of ``kills`` says, or at the token POISON. The stage behind it lives on. Requests of the
    k-th engine may have as many tokens as the k-th of ``contexts`` says, or the last."""

    def __init__(self, kills=(), *, max_lives=10**9, contexts=(512,), loss=StageLostError):
        self.contexts, self.loss = contexts, loss
        self.kills = deque(sorted(kills))
        self.max_lives = max_lives
        self.num_lives = self.num_tokens = 0
        self.submitted = []
        self.may_connect = threading.Event()
        self.may_connect.set()
        self.pipeline = FakePipeline(capacities=[None] * 2, on_step=self.on_step)

    def on_step(self, batch):
        if POISON in batch.tokens:
            raise Death

    def connect(self):
        assert self.may_connect.wait(ENDS_WITHIN_S)
        if self.num_lives >= self.max_lives:
            raise StageLostError("stage 0 is lost and is not started again", 0)
        self.num_lives += 1
        plan = EnginePlan(
            capacity=Capacity(lanes=8, attention=self.max_model_len()),
            rules=StepRules(max_rows=16),
            max_model_len=self.max_model_len(),
            max_in_flight=2,
            ceiling=8,
            first_epoch=1 + max(stage._epoch for stage in self.pipeline._stages),
        )
        self.pipeline.replace_stage(0)
        self.pipeline._underway.clear()
        self.said = deque()
        self.engine = Engine(plan.scheduler(), self.pipeline, self.said.append)

    def max_model_len(self):
        return self.contexts[min(self.num_lives, len(self.contexts)) - 1]

    def submit(self, asked):
        self.submitted.append(asked)
        self.engine.submit(asked)

    def abort(self, request_id):
        self.engine.abort(request_id)

    def close(self):
        self.engine.close()

    def follow(self, deliver):
        for report in self.reports():
            deliver(report)

    def reports(self):
        engine = self.engine
        while not (engine._is_closing and not engine.scheduler.has_work):
            try:
                engine.turn()
            except Death:
                raise StageLostError("stage 0 is lost", 0) from None
            while self.said:
                report = self.said.popleft()
                self.num_tokens += sum(event.token_id is not None for event in report.events)
                yield report
                if self.kills and self.num_tokens >= self.kills[0]:
                    while self.kills and self.num_tokens >= self.kills[0]:
                        self.kills.popleft()
                    raise self.loss("stage 0 is lost", 0)


@contextlib.contextmanager
def client_of(head, **options):
    client = EngineClient(head, max_model_len=512, **options)
    try:
        yield client
    finally:
        head.may_connect.set()
        client.close()


def until_end(events):
    return engines.until_end(events, within_s=ENDS_WITHIN_S)


def until(is_so):
    deadline = time.monotonic() + ENDS_WITHIN_S
    while not is_so():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.001)


def crowd(*lengths):
    return [
        request(
            f"r{number}", 20, length,
            sampling=SamplingParams(temperature=number % 2, seed=number),
        )
        for number, length in enumerate(lengths)
    ]  # fmt: skip


def test_an_engine_over_less_memory_goes_on_and_what_no_longer_fits_ends_there():
    head = MortalHead([90], contexts=(512, 50, 512), loss=StageChangedError)
    reports = []
    with client_of(
        head, on_connect=lambda: head.max_model_len(), on_report=reports.append
    ) as client:
        short, long = (submit(client, asked) for asked in crowd(29, 100))
        (tokens, event), (begun, end) = until_end(short), until_end(long)
        assert (tokens, event.finish_reason) == (answer_alone(crowd(29)[0], 29), "length")
        assert begun == answer_alone(crowd(29, 100)[1], 100)[: len(begun)]
        assert 50 - 20 <= len(begun) < 100
        assert end.finish_reason == "length"
        assert head.num_lives == 2
        with pytest.raises(SkippyError, match="the context holds 50"):
            submit(client, request("next", 60, 5))
    assert all(report.loss is None for report in reports), "nobody has died"


@pytest.mark.parametrize("num_outputs", range(26, 34))
def test_who_has_outgrown_the_pool_ends_and_takes_nobody_along(num_outputs):
    """Prompt and answer so far may be shorter than the pool, as long, or longer."""
    head = MortalHead(contexts=(50,))
    with client_of(head) as client:
        grown, bystander = crowd(100, 5)
        outputs = tuple(answer_alone(grown, num_outputs))
        streams = [submit(client, replace(grown, outputs=outputs)), submit(client, bystander)]
        (more, end), (tokens, _) = map(until_end, streams)
        assert end.finish_reason == "length"
        assert [*outputs, *more] == answer_alone(grown, max(num_outputs, 30))
        assert tokens == answer_alone(bystander, 5)
        assert head.engine.problem is None


def test_an_engine_that_dies_before_it_could_be_asked_is_followed_by_the_next():
    head = MortalHead()

    def ask():
        if head.num_lives < 3:
            raise StageLostError("stage 0 is lost", 0)
        return 100

    with client_of(head, on_connect=ask) as client:
        (asked,) = crowd(9)
        assert until_end(submit(client, asked))[0] == answer_alone(asked, 9)
        assert (client.max_model_len, head.num_lives) == (100, 3)


def assert_as_if_it_had_lived(kills, *lengths):
    head = MortalHead(kills)
    with client_of(head) as client:
        asked = crowd(*lengths)
        streams = [submit(client, one) for one in asked]
        for one, stream in zip(asked, streams, strict=True):
            tokens, last = until_end(stream)
            assert last.finish_reason == "length", last.error
            assert tokens == answer_alone(one, one.max_tokens)
    return head


@settings(max_examples=60, deadline=None)
@given(
    kills=st.sets(st.integers(1, 60), max_size=12),
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=4),
)
def test_whenever_the_engine_dies_the_joined_tokens_are_those_of_one_that_lived(kills, lengths):
    assert_as_if_it_had_lived(kills, *lengths)


@pytest.mark.parametrize("lengths", [(12,), (9, 7, 8)])
def test_an_engine_that_dies_after_every_token_gets_on_all_the_same(lengths):
    head = assert_as_if_it_had_lived(range(1, sum(lengths)), *lengths)
    assert head.num_lives >= max(lengths)


def test_what_ran_is_submitted_with_its_history_and_what_waited_as_it_came():
    head = MortalHead()
    head.kills.append(3)
    with client_of(head) as client:
        head.may_connect.clear()
        first, second = crowd(40, 5)
        events = submit(client, first)
        until(lambda: client.num_open and not client._is_connected)
        assert events.qsize() >= 3
        late = submit(client, second)
        head.may_connect.set()
        assert until_end(events)[0] == answer_alone(first, 40)
        assert until_end(late)[0] == answer_alone(second, 5)
    again, fresh = head.submitted[1:]
    assert (list(again.outputs), again.was_running) == (answer_alone(first, 3), True)
    assert (fresh.request_id, fresh.outputs, fresh.was_running) == ("r1", (), False)


def test_whoever_leaves_while_the_engine_is_down_is_ended_and_not_computed_again():
    head = MortalHead([3])
    with client_of(head) as client:
        head.may_connect.clear()
        (asked,) = crowd(40)
        events = submit(client, asked)
        until(lambda: client.num_open and not client._is_connected)
        assert client.abort("r0")
        head.may_connect.set()
        tokens, last = until_end(events)
        assert (tokens, last.finish_reason) == (answer_alone(asked, 3), "abort")
    assert len(head.submitted) == 1


def test_a_request_that_kills_the_engine_ends_alone_and_the_others_go_on():
    head = MortalHead()
    losses = []
    with client_of(head, on_report=lambda report: losses.append(report.loss)) as client:
        asked = crowd(30, 30, 30)
        streams = [submit(client, one) for one in asked[:2]]
        poison = submit(client, replace(request("poison"), token_ids=(1, 2, POISON)))
        streams.append(submit(client, asked[2]))
        tokens, last = until_end(poison)
        assert (tokens, last.finish_reason) == ([], "error")
        assert last.error == "stage 0 is lost, each time this request ran alone"
        for one, stream in zip(asked, streams, strict=True):
            assert until_end(stream)[0] == answer_alone(one, 30)
    num_losses = len([loss for loss in losses if loss is not None])
    assert num_losses == head.num_lives - 1 <= 2 + MAX_LOSSES_ALONE


def test_an_engine_lost_for_good_is_one_error_each():
    head = MortalHead([5], max_lives=1)
    with client_of(head) as client:
        streams = [submit(client, one) for one in crowd(50, 50, 50)]
        for stream in streams:
            _, last = until_end(stream)
            assert last.error == "stage 0 is lost and is not started again"
        with pytest.raises(SkippyError, match="stage 0 is lost"):
            client.submit(request("late"), print)
        assert client.problem() == "stage 0 is lost and is not started again"


def test_the_observer_hears_which_stage_was_lost_and_how_many_are_computed_again():
    heard = []
    with client_of(MortalHead([7]), on_report=heard.append) as client:
        for stream in [submit(client, one) for one in crowd(20, 20)]:
            until_end(stream)
    assert [report.loss for report in heard if report.loss] == [StageLoss(0, 2)]
    records = [report.record for report in heard if report.record]
    # Every row but those of the last tokens, once; what is beyond that was computed again.
    num_new = sum(record.prefill_tokens + record.decode_tokens for record in records)
    assert num_new == 2 * (20 + 20 - 1)
    assert sum(record.recompute_prompt_tokens for record in records) == 2 * 20
    assert (sum(r.admitted for r in records), sum(r.resumed for r in records)) == (2, 2)
