"""The gateway's end. Without these a request is lost, or a reader waits for ever."""

from __future__ import annotations

import threading
import time

import pytest

from skippy_mesh.client import EngineClient, ReportQueue
from skippy_mesh.config import StepRules
from skippy_mesh.engine import Engine, EnginePlan
from skippy_mesh.errors import RequestError, SkippyError, StageLostError
from skippy_mesh.health import STUCK_S
from skippy_mesh.messages import TokenEvent
from skippy_mesh.scheduler.memory import Capacity
from stages.fake import FakePipeline
from tests.scheduling import answer_alone, request


class Channel:
    """An engine on a thread of its own; ``error`` is what its reports end with."""

    def __init__(self, pipeline=None):
        plan = EnginePlan(
            capacity=Capacity(lanes=8, attention=512),
            rules=StepRules(max_rows=16),
            max_model_len=512,
            max_in_flight=1,
            ceiling=8,
        )
        self._reports = ReportQueue()
        self._engine = Engine(plan.scheduler(), pipeline or FakePipeline(), self._reports.put)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self.error = None
        self.submitted = []

    def connect(self):
        if self.error is not None:
            raise self.error

    def _run(self):
        self._engine.run()
        self._reports.close()

    def submit(self, asked):
        self.submitted.append(asked.request_id)
        self._engine.submit(asked)

    def abort(self, request_id):
        self._engine.abort(request_id)

    def close(self):
        self._engine.close()

    def follow(self, deliver):
        self._reports.follow(deliver)
        self._thread.join()
        if self.error is not None:
            raise self.error


def until(is_so):
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.001)


@pytest.fixture
def client_of():
    clients = []

    def make(channel=None, **options):
        options = {"max_model_len": 512, **options}
        clients.append(EngineClient(channel or Channel(), **options))
        until(lambda: clients[-1]._is_connected)
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def held():
    """A pipeline that runs no step until the event is set."""
    gate = threading.Event()
    return FakePipeline(on_step=lambda _batch: gate.wait(20)), gate


def test_events_reach_the_sink_of_their_request(client_of):
    client = client_of()
    asked = [request(f"r{number}", 9, 7) for number in range(4)]
    streams = [client.generate(one) for one in asked]
    for one, stream in zip(asked, streams, strict=True):
        assert [event.token_id for event in stream] == answer_alone(one, 7)
    assert client.num_open == 0


def test_what_can_never_fit_or_is_open_already_is_not_opened(client_of):
    pipeline, gate = held()
    client = client_of(Channel(pipeline))
    with pytest.raises(RequestError, match="512 tokens"):
        client.submit(request("big", 512), print)
    client.submit(request("a"), lambda _event: None)
    with pytest.raises(SkippyError, match="already open"):
        client.submit(request("a"), print)
    assert client.num_open == 1
    gate.set()


def test_leaving_a_stream_early_aborts_it(client_of):
    client = client_of()
    stream = client.generate(request("a", 5, 400))
    next(stream)
    stream.close()
    for event in client.generate(request("b", 5, 300)):
        last = event
    assert last.finish_reason == "length"
    assert client.num_open == 0
    assert not client.abort("a")


def test_a_sink_or_a_listener_that_raises_stops_nobody(client_of):
    def broken(_anything):
        raise RuntimeError("nobody listens")

    client = client_of(on_report=broken)
    client.submit(request("a"), broken)
    assert len(list(client.generate(request("b")))) == 8


def test_a_channel_that_refuses_leaves_nothing_open(client_of):
    channel = Channel()
    client = client_of(channel)

    def refuse(_asked):
        del channel.submit
        raise StageLostError("the line is cut", 0)

    channel.submit = refuse
    with pytest.raises(StageLostError):
        client.submit(request("a"), print)
    assert client.num_open == 0
    assert len(list(client.generate(request("a")))) == 8


def test_an_engine_that_stands_still_with_work_open_is_a_problem_and_an_idle_one_is_not(client_of):
    pipeline, gate = held()
    now_s = [0.0]
    client = client_of(Channel(pipeline), clock=lambda: now_s[0])
    now_s[0] = 1000.0
    assert client.stalled() is None, "idle"
    stream = client.generate(request("a"))
    first = threading.Thread(target=next, args=(stream,))
    first.start()
    while client.num_open == 0:
        pass
    now_s[0] = 1000.0 + STUCK_S
    assert client.stalled() is None
    now_s[0] += 1
    assert client.stalled() == "no step has ended for 121 s, with 1 requests open"
    gate.set()
    first.join()
    assert client.stalled() is None, "it got on"
    assert len(list(stream)) == 7


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (StageLostError("stage 0 is lost", 0), "stage 0 is lost"),
        (OSError("secret"), "engine is lost"),
    ],
)
def test_a_lost_engine_ends_every_request_and_later_ones_are_refused(client_of, error, said):
    class Lost(Channel):
        def follow(self, deliver):
            assert gate.wait(20)
            self.close()
            self._thread.join()
            self.error = error
            raise error

    gate = threading.Event()
    client = client_of(Lost())
    ended, events = threading.Event(), []

    def sink(event: TokenEvent):
        events.append(event)
        ended.set()

    client.submit(request("a", 5, 400), sink)
    gate.set()
    assert ended.wait(20)
    assert events[0].finish_reason == "error"
    assert said in events[0].error
    client._thread.join()
    with pytest.raises(SkippyError, match=said):
        client.submit(request("b"), print)


def test_closing_ends_what_is_open_once(client_of):
    client = client_of()
    events = []
    for number in range(4):
        client.submit(request(f"r{number}", 5, 10**6), events.append)
    client.close()
    ends = [event for event in events if event.finish_reason]
    assert len(ends) == len({event.request_id for event in ends}) == 4
    with pytest.raises(SkippyError, match="shutting down"):
        client.submit(request("late"), print)


def test_tokens_go_ahead_of_who_counts_them_and_the_last_one_behind(client_of):
    """Or each would wait for the counting; and who has a whole reply must find it counted."""
    said = []
    client = client_of(on_report=lambda report: said.extend(("heard", e) for e in report.events))
    ended = threading.Event()

    def sink(event):
        said.append(("token", event))
        if event.finish_reason is not None:
            ended.set()

    client.submit(request("a", 5, 6), sink)
    assert ended.wait(20)
    kinds = [kind for kind, _ in said]
    assert kinds == ["token", "heard"] * 5 + ["heard", "token"]
    assert all(one == other for (_, one), (_, other) in zip(said[::2], said[1::2], strict=True))


def test_who_gives_up_before_there_is_an_engine_ends_all_the_same():
    """Else it stays open, and its place is never given back."""
    listens = threading.Event()
    channel = Channel()
    channel.connect = lambda: listens.wait(20)
    client = EngineClient(channel, max_model_len=512)
    events = []
    client.submit(request("a", 5, 400), events.append)
    client.abort("a")
    listens.set()
    until(lambda: client.num_open == 0)
    assert [event.finish_reason for event in events] == ["abort"]
    client.close()


def test_who_ends_in_the_queue_has_not_left_it_to_run(client_of):
    """Else the coordinator takes it for served, and sends others back too soon."""
    pipeline, gate = held()
    client = client_of(Channel(pipeline))
    started = []
    client.submit(request("a"), lambda _event: None, on_start=lambda: started.append("a"))
    ended = threading.Event()
    client.submit(
        request("b", 500, 4), lambda _event: ended.set(), on_start=lambda: started.append("b")
    )
    client.abort("b")
    gate.set()
    assert ended.wait(20)
    until(lambda: client.num_open == 0)
    assert started == ["a"]
