"""The loop around the scheduler. Without these a failed step, a flood or a bug of ours leaves
clients waiting for ever."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from dataclasses import replace

import pytest

from skippy_mesh.config import EngineSettings, StepRules
from skippy_mesh.engine import MAX_COMMANDS_A_STEP, Engine, EnginePlan
from skippy_mesh.errors import NoRoomError, StageError, StageLostError, UsageError
from skippy_mesh.health import RestartLimit
from skippy_mesh.messages import StageLoss
from skippy_mesh.scheduler.memory import Capacity
from stages.fake import FakeClock, FakePipeline
from tests.scheduling import answer_alone, request


class Served:
    """An engine stepped by hand, and what it reported."""

    def __init__(
        self, pipeline=None, *, clock=None, in_flight=1, cells=512, restarts=None, **settings
    ):
        self.plan = EnginePlan(
            capacity=Capacity(lanes=32, attention=cells),
            rules=StepRules(max_rows=16),
            max_model_len=cells,
            max_in_flight=in_flight,
            ceiling=32,
            settings=EngineSettings(**settings),
        )
        self.reports = []
        self.scheduler = self.plan.scheduler()
        self.pipeline = pipeline or FakePipeline()
        clock = clock or FakeClock()
        self.engine = Engine(
            self.scheduler, self.pipeline, self.reports.append, clock=clock, restarts=restarts
        )

    def ask(self, *requests):
        for asked in requests:
            self.engine.submit(asked)
        return self

    def run(self):
        """Until everything asked so far has ended; closing must abort nothing."""
        self.take()
        while self.scheduler.has_work:
            self.engine.step()
        self.close()
        return self

    def take(self):
        self.engine._take_commands(wait=False)
        return self

    def close(self):
        self.engine.close()
        thread = threading.Thread(target=self.engine.run)
        thread.start()
        thread.join(20)
        assert not thread.is_alive()

    @property
    def records(self):
        return [report.record for report in self.reports if report.record]

    @property
    def events(self):
        found = defaultdict(list)
        for report in self.reports:
            for event in report.events:
                found[event.request_id].append(event)
        return found

    def tokens(self, name):
        return [event.token_id for event in self.events[name] if event.token_id is not None]

    def ends(self):
        return {
            name: [event.finish_reason for event in events if event.finish_reason]
            for name, events in self.events.items()
        }


def crowd(count=4, num_prompt=20, max_tokens=12):
    return [request(f"r{number}", num_prompt, max_tokens) for number in range(count)]


def assert_answers(served, asked):
    for one in asked:
        assert served.tokens(one.request_id) == answer_alone(one, one.max_tokens)
        assert served.ends()[one.request_id] == ["length"]


@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_everybody_gets_the_answer_they_get_alone(in_flight):
    served = Served(FakePipeline(capacities=[None] * in_flight), in_flight=in_flight)
    asked = crowd(6)
    served.ask(*asked).run()
    assert_answers(served, asked)
    assert served.pipeline.lane_ends() == [{}] * in_flight


def test_a_token_is_reported_in_the_step_that_sampled_it():
    served = Served().ask(request("a", 5, 3)).take()
    served.engine.step()
    assert [len(report.events) for report in served.reports] == [1]
    assert len(served.reports) == len(served.records) == 1


def test_two_equal_stages_are_both_busy():
    clock = FakeClock()
    pipeline = FakePipeline(capacities=[None] * 2, clock=clock, cost_s=lambda _batch: 0.01)
    served = Served(pipeline, clock=clock, in_flight=2, cells=2048)
    served.ask(*crowd(8, 5, 60)).run()
    assert all(busy_s > 0.8 * clock.now_s for busy_s in pipeline.busy_s)


def test_records_add_up_to_what_was_computed():
    rows = []
    served = Served(FakePipeline(on_step=lambda batch: rows.append(batch.num_rows)))
    served.ask(*crowd(5)).run()
    assert sum(rows) == sum(record.num_rows for record in served.records)
    assert sum(record.prefill_tokens for record in served.records) == 5 * 20
    assert sum(record.decode_tokens for record in served.records) == 5 * 11
    assert sum(record.admitted for record in served.records) == 5
    assert served.records[-1].state.running == 0


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize(
    "error", [StageError("stumbled"), ValueError("a bug"), NoRoomError("no cells")], ids=str
)
def test_a_failed_step_is_computed_again(stage, error):
    steps = iter(range(10**6))

    def on_stage(index, _batch):
        if index == stage and next(steps) == 7:
            raise error

    pipeline = FakePipeline(capacities=[None] * 2, on_stage=on_stage)
    served = Served(pipeline, in_flight=2)
    asked = crowd()
    served.ask(*asked).run()
    assert_answers(served, asked)
    assert served.records[-1].epoch == 1


class Mortal:
    """Three stages; ``kill`` one and the next batch that reaches it finds it gone. It is back,
    empty, when the engine has asked ``after`` times."""

    def __init__(self, after=1):
        self.after = after
        self.dead = None
        self.num_asked = 0
        self.pipeline = FakePipeline(
            capacities=[None] * 3, on_stage=self.on_stage, on_restore=self.on_restore
        )

    def kill(self, stage):
        self.dead, self.num_asked = stage, 0

    def on_stage(self, index, _batch):
        if index == self.dead:
            raise StageLostError(f"stage {index} does not answer", index)

    def on_restore(self):
        self.num_asked += 1
        if self.num_asked < self.after:
            return False
        self.pipeline.replace_stage(self.dead)
        self.dead = None
        return True


def losses(served):
    return [report.loss for report in served.reports if report.loss]


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("num_steps", [1, 4, 17])
def test_who_ran_when_a_stage_was_lost_waits_and_goes_on_as_if_nothing_had_been(stage, num_steps):
    mortal = Mortal(after=5)
    served = Served(mortal.pipeline, in_flight=3)
    asked = crowd()
    served.ask(*asked).take()
    for _ in range(num_steps):
        served.engine.step()
    before = {one.request_id: served.tokens(one.request_id) for one in asked}
    mortal.kill(stage)
    for _ in range(20):
        if mortal.dead is None:
            break
        served.engine.step()
        if served.engine._is_restoring:
            assert {one.request_id: served.tokens(one.request_id) for one in asked} == before
        else:
            before = {one.request_id: served.tokens(one.request_id) for one in asked}
    assert mortal.num_asked == 5
    served.run()
    assert_answers(served, asked)
    assert served.records[-1].epoch == 1
    assert losses(served) == [StageLoss(stage, len(asked))]


def test_a_stage_lost_again_while_it_is_loaded_counts_again():
    mortal, errors = Mortal(), [StageLostError("stage 1 died while it was loaded again", 1)] * 2

    def restore():
        if errors:
            raise errors.pop()
        return mortal.on_restore()

    mortal.pipeline._on_restore = restore
    served = Served(mortal.pipeline, in_flight=3)
    served.ask(*crowd()).take()
    mortal.kill(1)
    served.run()
    assert_answers(served, crowd())
    assert [loss.num_sequences for loss in losses(served)] == [4, 0, 0]


def test_a_stage_lost_once_too_often_ends_everything_and_refuses_what_comes_later():
    mortal = Mortal()
    served = Served(mortal.pipeline, in_flight=3, restarts=RestartLimit(1))
    served.ask(*crowd()).take()
    for _ in range(2):
        mortal.kill(1)
        while mortal.dead is not None and served.engine.problem is None:
            served.engine.step()
        for _ in range(12):  # they are tried one by one, and pass
            served.engine.step()
    assert served.ends() == {one.request_id: ["error"] for one in crowd()}
    said = "stage 1 does not answer; it had 1 restarts in 600 s, and no more are made"
    assert served.engine.problem == said
    assert {events[-1].error for events in served.events.values()} == {said}
    assert all(events[-1].is_unavailable for events in served.events.values())
    served.ask(request("late")).take()
    assert served.events["late"][0].error == said
    served.close()


def test_a_stage_that_cannot_be_had_back_ends_everything_with_the_reason():
    def restore():
        raise StageError("stage 1 cannot be loaded again: the file is gone")

    mortal = Mortal()
    mortal.pipeline._on_restore = restore
    served = Served(mortal.pipeline, in_flight=3).ask(*crowd()).take()
    mortal.kill(1)
    while served.engine.problem is None:
        served.engine.step()
    assert set(map(tuple, served.ends().values())) == {("error",)}
    assert {events[-1].error for events in served.events.values()} == {served.engine.problem}
    served.close()


def test_a_request_that_kills_a_stage_whenever_it_runs_is_the_one_that_ends():
    """One restart in company and one alone: the limit must leave room for both."""
    mortal = Mortal()

    def on_stage(index, batch):
        if index == 1 and 250 in batch.tokens:
            mortal.kill(1)
        mortal.on_stage(index, batch)

    mortal.pipeline._on_stage = on_stage
    served = Served(mortal.pipeline, in_flight=3)
    poison = replace(request("poison"), token_ids=(1, 2, 250, 3))
    served.ask(*crowd(), poison).run()
    assert_answers(served, crowd())
    assert served.ends()["poison"] == ["error"]
    assert [loss.stage for loss in losses(served)] == [1, 1]


def test_while_a_stage_is_down_aborts_are_heard_and_closing_does_not_wait():
    mortal = Mortal(after=10**9)
    served = Served(mortal.pipeline, in_flight=3).ask(*crowd()).take()
    mortal.kill(2)
    while not served.engine._is_restoring:
        served.engine.step()
    served.engine.abort("r1")
    served.take()
    served.engine.step()
    assert served.ends() == {"r1": ["abort"]}
    served.close()
    assert served.ends() == {one.request_id: ["abort"] for one in crowd()}


def test_a_stage_lost_while_nothing_runs_is_found_when_somebody_says_so(monkeypatch):
    mortal = Mortal()
    served = Served(mortal.pipeline, in_flight=3).ask(request("a")).run()
    monkeypatch.setattr(served.pipeline, "lane_ends", lambda: mortal.on_stage(2, None))
    mortal.kill(2)
    served.engine._is_closing = False
    served.engine.check()
    served.take()
    assert served.engine._is_restoring
    served.engine.check()  # told twice, restored once
    served.take()
    while served.engine._is_restoring:
        served.engine.step()
    assert len(losses(served)) == 1


def test_a_bug_of_ours_ends_everything_and_keeps_its_text_to_itself(monkeypatch):
    served = Served().ask(*crowd())

    def broken():
        raise KeyError("secret")

    monkeypatch.setattr(served.scheduler, "schedule", broken)
    served.take()
    served.close()
    errors = {event.error for events in served.events.values() for event in events}
    assert errors <= {"internal engine error: KeyError", None}
    assert all(len(ends) == 1 for ends in served.ends().values())
    assert len(served.ends()) == 4


def test_a_refusal_is_the_only_event_and_stops_nobody():
    served = Served(cells=64)
    served.ask(request("a", 5, 4), request("big", 64, 1), request("a", 5, 4)).run()
    assert "64 tokens" in served.events["big"][0].error
    reasons = [event.finish_reason for event in served.events["a"]]
    assert sorted(map(str, reasons)) == ["None", "None", "None", "error", "length"]


def test_a_flood_of_cancels_does_not_hold_up_tokens():
    served = Served().ask(request("a", 5, 100)).take()
    for number in range(10 * MAX_COMMANDS_A_STEP):
        served.engine.abort(f"nobody-{number}")
    served.take()
    served.engine.step()
    assert len(served.tokens("a")) == 1
    assert served.engine._commands.qsize() == 9 * MAX_COMMANDS_A_STEP
    served.ask().close()


def test_closing_aborts_what_is_open_and_frees_it():
    served = Served(FakePipeline(capacities=[None] * 2), in_flight=2)
    served.ask(*crowd(5, 20, 400)).take()
    for _ in range(10):
        served.engine.step()
    served.close()
    assert set(map(tuple, served.ends().values())) == {("abort",)}
    assert served.pipeline.lane_ends() == [{}, {}]
    served.ask(request("late")).take()
    assert served.events["late"][0].error == "the engine is shutting down"


def test_lanes_left_behind_on_a_stage_are_found_when_idle_and_cleared(caplog):
    served = Served(FakePipeline(capacities=[None] * 2))
    served.pipeline._stages[1].histories[7] = [1, 2, 3]
    with caplog.at_level(logging.ERROR):
        served.ask(request("a")).take()
        while served.scheduler.has_work:
            served.engine.step()
    assert "stages hold [{}, {7: 3}], the ledger says [{}, {}]" in caplog.text
    served.ask(request("b")).run()
    assert served.pipeline.lane_ends() == [{}, {}]
    assert_answers(served, [request("a"), request("b")])


def test_a_stage_that_cannot_say_what_it_holds_is_no_end_of_the_engine(monkeypatch):
    served = Served().ask(request("a")).take()

    def broken():
        monkeypatch.undo()
        raise StageError("busy with something else")

    monkeypatch.setattr(served.pipeline, "lane_ends", broken)
    while served.scheduler.has_work:
        served.engine.step()
    served.ask(request("b")).run()
    assert_answers(served, [request("a"), request("b")])


def test_settings_reach_the_scheduler():
    served = Served(running=2, prefill_rows=3, inter_token_s=0.5)
    assert served.scheduler._run_limit.limit == 2
    assert served.scheduler._pacer.num_rows == 3
    with pytest.raises(UsageError, match="swap needs a disk tier"):
        Served(preemption_policy="swap")
    for wrong in ({"running": 0}, {"prefill_rows": 0}, {"inter_token_s": 0.0}):
        with pytest.raises(UsageError):
            Served(**wrong)
