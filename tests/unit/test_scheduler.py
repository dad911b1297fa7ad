"""The scheduler's rules, each on plain numbers.

Without these a session starves, is computed twice, gets somebody else's token, or never ends.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from skippy_mesh.errors import RequestError, StageError
from skippy_mesh.messages import SamplingParams, StepResult
from skippy_mesh.scheduler import sequence as sequence_module
from stages.fake import FakePipeline
from tests.scheduling import Run, answer_alone, request, scheduler_of

RECURRENT = {"is_homogeneous": True, "chunk_multiple": 4}
STATES = {"is_homogeneous": True}


@pytest.fixture
def small_promises(monkeypatch):
    """Sequences are promised so little that pools of a few cells fill up and preempt."""
    monkeypatch.setattr(sequence_module, "MAX_RESERVED_OUTPUT", 4)
    monkeypatch.setattr(sequence_module, "RESUME_MARGIN", 2)


def rows_of(plan):
    return {part.sequence.request.request_id: part.num_rows for part in plan.parts}


# -- admission -------------------------------------------------------------------------------------


def test_a_long_and_many_short_requests_run_together():
    # One pool in worst-case shares holds three: 1024 / 320.
    run = Run(cells=1024, max_rows=512)
    run.ask(request("long", 300, 20), *(request(f"s{n}", 10, 20) for n in range(20)))
    run.step()
    assert len(run.names()) == 21
    run.finish()
    run.assert_answers()
    assert not sum(plan.num_preempted for plan in run.plans)


def test_only_what_has_room_in_every_component_is_admitted():
    for bound in ({"lanes": 2}, {"window": 30, "cells": 999}, {"cells": 30}, {"recurrent": 2}):
        run = Run(**{"cells": 64, **bound})
        run.ask(*(request(f"r{n}", 7, 8) for n in range(4)))
        run.step()
        assert len(run.names()) == 2, bound
        run.finish()
        run.assert_answers()


def test_a_request_that_can_never_fit_is_refused_and_one_that_just_fits_runs():
    run = Run(cells=64)
    with pytest.raises(RequestError, match="64 tokens and the context holds 64"):
        run.ask(request("never", 64))
    run.ask(request("just", 63, 10**6))
    run.finish()
    assert len(run.tokens["just"]) == 1


def test_a_huge_limit_is_no_reservation():
    run = Run(cells=16_384, max_rows=512)
    run.ask(request("first", 9, 65_536), request("second", 9, 65_536))
    run.step()
    assert len(run.names()) == 2


def test_an_id_that_is_open_cannot_be_used_twice():
    run = Run()
    run.ask(request("a"))
    with pytest.raises(RequestError, match="already open"):
        run.ask(request("a"))
    run.finish()
    run.ends.clear()
    run.ask(request("a"))


def test_a_large_request_is_overtaken_at_most_32_times():
    run = Run(cells=100, max_rows=64)
    run.ask(*(request(f"s{n}", 5, 2 + n) for n in range(5)))
    run.step()
    run.ask(request("large", 70, 10))
    for number in range(5, 200):
        run.ask(request(f"s{number}", 5, 4 + number % 5))
        run.step()
        if "large" in run.admitted:
            break
    overtakers = run.admitted[: run.admitted.index("large")]
    assert 20 < len(overtakers) - 5 <= 32
    run.finish()
    run.assert_answers()


@pytest.mark.parametrize("cells", [64, 100, 256, 1000, 4096])
def test_whatever_fits_the_pool_is_served(cells):
    run = Run(cells=cells, max_rows=512)
    sizes = [(1, cells), (cells - 1, 1), (cells // 2, cells // 2), (cells // 2, 10**6), (1, 1)]
    run.ask(*(request(f"r{n}", *size) for n, size in enumerate(sizes)))
    run.finish()
    run.assert_answers()
    assert set(run.reasons().values()) == {"length"}


def test_a_step_that_preempts_admits_nobody(small_promises):
    run = Run(cells=40)
    run.ask(*(request(f"r{n}", 8, 30) for n in range(4)))
    run.finish()
    preempting = [plan for plan in run.plans if plan.num_preempted]
    assert preempting
    assert not any(plan.num_admitted or plan.num_resumed for plan in preempting)


def test_waiting_for_a_lane_is_told_from_waiting_for_memory():
    run = Run(lanes=1)
    run.ask(request("a", 40, 10), request("b", 40, 10))
    run.step()
    assert run.scheduler.snapshot().waiting["lane"] == 1
    run = Run(lanes=2)
    run.ask(request("a", 40, 10), request("b", 40, 10))
    run.step()
    assert run.scheduler.snapshot().waiting["memory"] == 1


# -- composition -----------------------------------------------------------------------------------


def test_decode_rows_come_first_and_a_prompt_fills_the_rest():
    run = Run(cells=512, max_rows=16)
    run.ask(*(request(f"d{n}", 1, 20) for n in range(6)))
    run.step()
    run.ask(request("p", 100, 2))
    (plan,) = run.step()
    assert rows_of(plan) == {**{f"d{n}": 1 for n in range(6)}, "p": 10}


def test_no_step_is_longer_than_the_limit_or_than_the_pace_allows():
    run = Run(cells=2000, max_rows=32, prefill_rows=5)
    run.ask(*(request(f"r{n}", 10 + 13 * n, 9) for n in range(12)))
    run.finish()
    assert max(plan.count().rows for plan in run.plans) == 32
    chunks = [
        sum(part.num_rows for part in plan.parts if part.num_rows > 1)
        for plan in run.plans
        if plan.count().decode
    ]
    assert max(chunks) == 5
    run.assert_answers()


@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_many_decoders_in_a_small_step_take_turns(in_flight):
    run = Run(cells=16_384, lanes=64, max_rows=16, in_flight=in_flight)
    run.ask(*(request(f"r{n}", 1, 200) for n in range(64)))
    for _ in range(100):
        run.step()
    counts = [len(run.tokens[f"r{n}"]) for n in range(64)]
    assert min(counts) > 15
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("in_flight", [2, 3, 4])
def test_batches_in_flight_share_the_decodes_evenly(in_flight):
    run = Run(cells=4096, max_rows=64, in_flight=in_flight)
    run.ask(*(request(f"r{n}", 1, 60) for n in range(13)))
    for _ in range(40):
        for plan in run.step():
            assert len(plan.parts) <= -(-13 // in_flight)
        # One was answered; the others are on their way with everybody's rows but its own.
        assert len(run.pending) == in_flight - 1
    run.finish()
    run.assert_answers()


def test_the_share_of_a_batch_caps_decodes_and_not_prompts():
    run = Run(cells=4096, max_rows=64, in_flight=4)
    run.ask(*(request(f"r{n}", 1, 60) for n in range(4)))
    run.step()
    run.ask(request("p", 200, 2))
    run.step()
    assert max(plan.count().rows - plan.count().decode for plan in run.plans) >= 32


def test_chunks_of_one_prompt_follow_each_other_without_waiting():
    run = Run(cells=512, max_rows=16, in_flight=3)
    run.ask(request("p", 60, 3))
    sent = [run.send() for _ in range(3)]
    assert [(plan.parts[0].start, plan.parts[0].end) for plan in sent] == [(0, 16), (16, 32),
                                                                          (32, 48)]  # fmt: skip
    run.finish()
    run.assert_answers()


@pytest.mark.parametrize(
    ("num_tokens", "chunks"),
    [(45, [45]), (63, [63]), (64, [32, 32]), (100, [32, 32, 36]), (300, [75, 57, 42, 32, 32, 62])],
)
def test_no_chunk_of_a_pipelined_prompt_is_too_small_for_a_step(num_tokens, chunks):
    # A step of few rows costs nearly what one of 32 does: 45 rows as 32 and 13 came later.
    run = Run(cells=512, max_rows=512, in_flight=2)
    run.ask(request("p", num_tokens, 1))
    run.finish()
    assert [plan.count().rows for plan in run.plans if plan.parts] == chunks


def test_a_step_runs_lanes_in_order():
    run = Run(cells=512, max_rows=64)
    run.ask(*(request(f"r{n}", 3, 20) for n in range(9)))
    run.finish()
    assert all(list(batch.lanes) == sorted(batch.lanes) for batch in run.batches)


# -- recurrent memory ------------------------------------------------------------------------------


@pytest.mark.parametrize("in_flight", [1, 2, 4])
def test_a_recurrent_step_is_one_chunk_or_decodes(in_flight):
    run = Run(cells=4096, recurrent=32, max_rows=32, in_flight=in_flight, rules=RECURRENT)
    run.ask(*(request(f"r{n}", 3 + 11 * n, 20) for n in range(10)))
    run.finish()
    run.assert_answers()
    for plan in run.plans:
        sizes = [part.num_rows for part in plan.parts]
        assert set(sizes) <= {1} or len(sizes) == 1
        assert all(size == 1 or size % 4 == 0 for size in sizes)
        for part in plan.parts:
            if part.num_rows > 1:
                assert part.end <= part.sequence.num_prompt // 4 * 4
    rest = [part for plan in run.plans for part in plan.parts if part.sequence.num_prompt == 14]
    assert [part.num_rows for part in rest][:3] == [12, 1, 1]


@pytest.mark.parametrize("rules", [RECURRENT, STATES], ids=["multiples", "any length"])
def test_recurrent_sequences_decode_together(rules):
    run = Run(cells=4096, recurrent=32, rules=rules)
    run.ask(*(request(f"r{n}", 8, 20) for n in range(5)))
    for _ in range(15):
        run.step()
    assert [len(plan.parts) for plan in run.plans[-4:]] == [5] * 4
    run.finish()
    run.assert_answers()


@pytest.mark.parametrize("in_flight", [1, 2])
def test_no_two_chunks_in_a_row_while_others_decode(in_flight):
    run = Run(cells=8192, recurrent=32, max_rows=16, in_flight=in_flight, rules=RECURRENT)
    run.ask(*(request(f"d{n}", 4, 90) for n in range(3)))
    for _ in range(8):
        run.step()
    run.ask(request("p", 400, 2), request("q", 400, 2))
    first = len(run.plans)
    while len(run.tokens["d0"]) < 60:
        run.step()
    chunks = [any(part.num_rows > 1 for part in plan.parts) for plan in run.plans[first:]]
    assert chunks.count(True) > 20
    assert not any(a and b for a, b in itertools.pairwise(chunks))
    run.finish()
    run.assert_answers()


@pytest.mark.parametrize("in_chunks", [True, False])
def test_outputs_are_replayed_row_by_row_where_a_chunk_would_differ(in_chunks, small_promises):
    rules = {**RECURRENT, "replays_in_chunks": in_chunks}
    run = Run(cells=64, recurrent=8, max_rows=16, rules=rules)
    run.ask(*(request(f"r{n}", 8, 40) for n in range(3)))
    run.finish()
    run.assert_answers()
    replays = [part for plan in run.plans for part in plan.parts if part.num_again_output]
    assert replays
    assert any(part.num_rows > 1 for part in replays) == in_chunks


# -- preemption ------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["newest", "cheapest-recompute"])
@pytest.mark.parametrize("in_flight", [1, 2, 4])
def test_two_that_cannot_coexist_both_finish(policy, in_flight, small_promises):
    run = Run(cells=150, max_rows=32, in_flight=in_flight, preemption=policy)
    run.ask(request("a", 20, 120), request("b", 20, 120))
    run.finish()
    run.assert_answers()
    assert 1 <= sum(plan.num_preempted for plan in run.plans) <= 4


def test_combined_growth_ends_nobody(small_promises):
    run = Run(cells=200, max_rows=64)
    run.ask(*(request(f"r{n}", 40, 80) for n in range(4)))
    run.finish()
    run.assert_answers()
    assert set(run.reasons().values()) == {"length"}


def test_a_lone_sequence_that_outgrows_the_pool_ends_with_length():
    run = Run(cells=64)
    run.ask(request("a", 54, 10**6))
    run.finish(200)
    assert run.reasons() == {"a": "length"}
    assert len(run.tokens["a"]) == 10


def test_a_victim_keeps_its_tokens_and_is_computed_again_without_sampling(small_promises):
    run = Run(cells=48, max_rows=8)
    run.ask(request("a", 10, 30), request("b", 10, 30))
    run.finish()
    run.assert_answers()
    again = sum(plan.count().recompute for plan in run.plans)
    again_output = sum(plan.count().recompute_output for plan in run.plans)
    assert again - again_output == 10 * sum(plan.num_preempted for plan in run.plans)
    assert again_output
    sampled = sum(part.samples for plan in run.plans for part in plan.parts)
    assert sampled == 2 * 30, "one sample for each token, however often its row was computed"


def test_who_begins_again_is_told_its_past(small_promises):
    """The fake stage holds every past against the rows it gets, before each draw."""
    sampling = SamplingParams(repetition_penalty=2.0, repeat_last_n=3)
    run = Run(cells=48, max_rows=8)
    run.ask(*(request(name, 10, 30, sampling=sampling) for name in "ab"), request("c", 5, 5))
    run.finish()
    run.assert_answers()
    pasts = [past for batch in run.batches for past in batch.histories.values()]
    resumed = [past for past in pasts if past.outputs]
    assert resumed and len(resumed) == sum(plan.num_preempted for plan in run.plans)
    assert {past.num_prompt for past in pasts} == {10}, "c needs no past"
    assert {len(past.recent_prompt) for past in pasts} == {3}


@pytest.mark.parametrize("in_flight", [1, 2, 3, 4])
def test_nobody_in_flight_is_preempted(in_flight, small_promises):
    run = Run(cells=60, max_rows=16, in_flight=in_flight, num_stages=2)
    run.ask(*(request(f"r{n}", 6, 40) for n in range(6)))
    while run.scheduler.has_work:
        flying = {p.sequence for plan in run.scheduler.in_flight for p in plan.parts}
        before = {s: s.num_preemptions for s in flying}
        sent = run.send()
        assert all(s.num_preemptions == before[s] for s in flying)
        if sent is None:
            run.answer()
    run.assert_answers()
    assert set(run.reasons().values()) == {"length"}


def test_preemptions_reach_the_record_of_a_step(small_promises):
    """A step whose only decode gave way is empty; what it did must not be forgotten with it."""
    for in_flight in (1, 2, 3):
        run = Run(cells=60, max_rows=16, in_flight=in_flight)
        run.ask(*(request(f"r{n}", 6, 40) for n in range(6)))
        sequences = [run.sequence(name) for name in run.asked]
        run.finish()
        total = sum(sequence.num_preemptions for sequence in sequences)
        assert total > 0
        assert sum(plan.num_preempted for plan in run.plans) == total
        assert sum(plan.num_resumed for plan in run.plans) == total
        assert sum(plan.num_admitted for plan in run.plans) == 6


def test_recompute_stays_bounded_under_pressure(small_promises):
    run = Run(cells=150, max_rows=32)
    run.ask(*(request(f"r{n}", 10, 40) for n in range(5)))  # 250 cells wanted of 150
    run.finish()
    run.assert_answers()
    assert sum(plan.num_preempted for plan in run.plans) <= 10


# -- cancel ----------------------------------------------------------------------------------------


def test_a_waiting_request_ends_at_once():
    run = Run(lanes=1)
    run.ask(request("a"), request("b"))
    run.step()
    assert run.abort("b")
    assert run.reasons() == {"b": "abort"}
    assert not run.abort("b")
    run.finish()
    run.assert_answers()


def test_a_request_in_the_middle_of_its_prompt_ends_between_two_chunks():
    run = Run(cells=512)
    run.ask(request("a", 300), request("b", 20))
    for _ in range(3):
        run.step()
    assert run.abort("a")
    assert run.reasons() == {"a": "abort"}
    run.step()
    assert run.scheduler._ledger.num_free_cells >= 512 - 20
    run.finish()
    run.assert_answers()


def test_a_request_in_flight_ends_when_its_rows_are_back_and_keeps_its_id_until_then():
    run = Run(cells=512, lanes=2, in_flight=3, num_stages=2)
    run.ask(request("a", 100), request("b", 5))
    run.send()
    run.send()
    assert run.abort("a")
    assert run.abort("a"), "it is still open"
    assert run.reasons() == {}
    run.ask(request("c", 5))
    run.answer()
    assert run.reasons() == {}
    run.answer()
    assert run.reasons() == {"a": "abort"}
    run.finish()
    run.assert_answers()


def test_an_id_comes_back_only_when_all_stages_have_confirmed():
    run = Run(cells=512, lanes=1, in_flight=3)
    run.ask(request("a", 5, 1), request("b", 5, 1))
    run.step()
    assert run.reasons() == {"a": "length"}
    assert run.send() is not None, "the removal travels, with no rows"
    assert run.send() is None, "the only id is not back"
    run.answer()
    assert rows_of(run.send()) == {"b": 5}
    run.finish()


def test_cancelling_everything_leaves_nothing(small_promises):
    run = Run(cells=60, in_flight=2)
    run.ask(*(request(f"r{n}", 6, 40) for n in range(12)))
    for _ in range(60):
        run.step()
    run.scheduler.abort_all()
    run.finish(10)
    run.assert_answers()
    assert set(run.reasons().values()) <= {"abort", "length"}


# -- answers ---------------------------------------------------------------------------------------


def tampered(change):
    pipeline = FakePipeline()

    def on_answer(result):
        if len(result.tokens) == 3:
            pipeline._on_answer = lambda other: other
            return dataclasses.replace(result, tokens=change(dict(result.tokens)))
        return result

    pipeline._on_answer = on_answer
    return pipeline


def test_a_missing_result_ends_its_request_alone():
    run = Run(pipeline=tampered(lambda tokens: {k: v for k, v in tokens.items() if k != 1}))
    run.ask(*(request(f"r{n}") for n in range(3)))
    run.finish()
    run.assert_answers()
    assert run.reasons() == {"r0": "length", "r1": "error", "r2": "length"}
    assert run.ends["r1"].error == "the last stage did not answer for it"


def test_a_lane_that_could_not_sample_ends_with_the_stages_reason():
    run = Run()
    run.ask(*(request(f"r{n}") for n in range(3)))
    run.send()
    good = run.pending.popleft().result()
    failed = {1: "not finite"}
    tokens = {lane: token for lane, token in good.tokens.items() if lane != 1}
    run.scheduler.commit(dataclasses.replace(good, tokens=tokens, failed=failed))
    run._take_events()
    assert run.ends["r1"].error == "not finite"
    run.finish()
    run.assert_answers()


@pytest.mark.parametrize("lane", [3, 31, -1, 10**6])
def test_a_strangers_result_is_refused_before_anything_changes(lane):
    run = Run()
    run.ask(*(request(f"r{n}") for n in range(3)))
    run.send()
    good = run.pending.popleft().result()
    with pytest.raises(StageError, match="did not sample"):
        run.scheduler.commit(dataclasses.replace(good, tokens={**good.tokens, lane: 1}))
    assert not run.tokens
    run.scheduler.commit(good)
    run._take_events()
    run.finish()
    run.assert_answers()


def test_a_result_of_another_step_is_refused():
    run = Run()
    run.ask(request("a"))
    run.send()
    for epoch, step_id in ((0, 1), (1, 0)):
        with pytest.raises(StageError, match=f"step {epoch}/{step_id}, expected 0/0"):
            run.scheduler.commit(StepResult(epoch=epoch, step_id=step_id, tokens={}))
    run.finish()
    run.assert_answers()


# -- failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("in_flight", [1, 3])
def test_a_step_that_fails_once_costs_nobody_a_token(stage, in_flight):
    steps = iter(range(10**6))

    def on_stage(index, _batch):
        if index == stage and next(steps) == 9:
            raise StageError("stumbled")

    pipeline = FakePipeline(capacities=[None] * 3, on_stage=on_stage)
    run = Run(pipeline=pipeline, cells=512, in_flight=in_flight)
    run.ask(*(request(f"r{n}", 20, 20) for n in range(5)))
    run.finish()
    assert run.batches[-1].epoch == 1
    run.assert_answers()
    assert set(run.reasons().values()) == {"length"}


@pytest.mark.parametrize("in_flight", [1, 2, 4])
@pytest.mark.parametrize("rules", [{}, RECURRENT], ids=["mixed", "recurrent"])
def test_who_fails_every_step_is_found_and_ends_alone(in_flight, rules):
    """Any step that holds the tenth token of one answer fails; which lane it has changes."""
    asked = [request(f"r{n}", 20, 20) for n in range(6)]
    poison = (29, answer_alone(asked[3], 10)[-1], asked[3])

    def on_stage(index, batch):
        for lane, position, token in zip(batch.lanes, batch.positions, batch.tokens, strict=True):
            known = pipeline._stages[1].histories.get(lane, [0])
            first = known[0] if known else 0
            if index == 1 and (position, token) == poison[:2] and first == asked[3].token_ids[0]:
                raise StageError("poisoned")

    pipeline = FakePipeline(capacities=[None] * 2, on_stage=on_stage)
    run = Run(pipeline=pipeline, cells=512, in_flight=in_flight, rules=rules,
              recurrent=32 if rules else None)  # fmt: skip
    run.ask(*asked)
    run.finish()
    run.assert_answers()
    assert run.ends["r3"].error == "poisoned"
    assert {name for name, why in run.reasons().items() if why == "error"} == {"r3"}
    assert len(run.tokens["r3"]) == 10
    assert run.batches[-1].epoch <= 4


def test_who_has_passed_a_trial_is_not_on_trial_again():
    """Two failures of the mesh far apart, and a preemption between them, are nobody's fault."""
    failing = []

    def on_step(_batch):
        if failing:
            raise StageError(failing.pop())

    run = Run(pipeline=FakePipeline(on_step=on_step))
    run.ask(request("a", 10, 20))
    for step in range(12):
        failing += ["stumbled"] if step == 4 else []
        run.step()
    sequence = run.sequence("a")
    assert len(sequence.outputs) > 5
    run.scheduler._preempt(sequence)
    failing.append("stumbled again")
    run.finish()
    run.assert_answers()
    assert run.reasons() == {"a": "length"}


def test_what_was_cancelled_before_a_failure_is_not_computed_again():
    run = Run(cells=512, in_flight=2)
    run.ask(request("a", 100), request("b", 5))
    run.send()
    run.abort("a")
    run.pending.clear()
    run.scheduler.recover("lost")
    run._take_events()
    assert run.reasons() == {"a": "abort"}
    run.finish()
    run.assert_answers()


def test_losing_the_stages_ends_everything_once():
    run = Run(lanes=2, in_flight=2)
    run.ask(*(request(f"r{n}") for n in range(4)))
    run.send()
    run.send()
    run.pending.clear()
    run.scheduler.fail_all("stage 1 is lost")
    run._take_events()
    assert {event.error for event in run.ends.values()} == {"stage 1 is lost"}
    assert not run.scheduler.has_work


# -- limits ----------------------------------------------------------------------------------------


def test_what_is_worth_running_bounds_admission_and_not_the_ceiling():
    run = Run(limit=2)
    run.ask(*(request(f"r{n}") for n in range(4)))
    run.step()
    assert run.names() == {"r0", "r1"}
    assert run.scheduler.snapshot().waiting["lane"] == 2
    run.finish()


def test_only_steps_without_a_prompts_end_teach_the_pace(monkeypatch):
    seen = []
    scheduler = scheduler_of()
    monkeypatch.setattr(scheduler._pacer, "observe", lambda **step: seen.append(step))
    run = Run(cells=512)
    run.scheduler = scheduler
    run.ask(request("a", 20, 4))
    while run.scheduler.has_work:
        plan = run.send()
        run.answer()
        run.scheduler.observe(plan, plan.count(), step_s=0.1, now_s=0.0)
    learnt = [(step["num_prefill"], step["num_decode"]) for step in seen if any(step.values())]
    assert learnt[0] == (16, 0)
    assert (4, 0) not in learnt
    assert learnt.count((0, 1)) == 3


@pytest.mark.parametrize(
    ("in_flight", "rules", "sizes"),
    [
        (1, {}, [128]),
        (2, {}, [32, 32, 32, 32]),
        (4, {}, [32, 32, 32, 32]),
        (1, RECURRENT, [128]),
        (2, RECURRENT, [32, 32, 32, 32]),
    ],
)
def test_where_stages_take_turns_a_lone_prompt_is_shared_out_among_them(in_flight, rules, sizes):
    """In one piece it is on one stage at a time, and the others wait."""
    run = Run(
        cells=4096, max_rows=512, in_flight=in_flight, rules=rules,
        recurrent=32 if rules else None,
    )  # fmt: skip
    run.ask(request("a", 128, 1))
    run.finish()
    assert [plan.count().rows for plan in run.plans if plan.parts] == sizes


def test_a_batch_holds_no_more_of_the_prompts_than_its_share():
    run = Run(cells=8192, max_rows=512, in_flight=2)
    run.ask(request("a", 600, 1), request("b", 424, 1))
    assert [run.send().count().rows, run.send().count().rows] == [256, 192]
    run.finish()
    run.assert_answers()
