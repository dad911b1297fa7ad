"""Any order of arrivals, cancels, failures and answers. Whatever happens, every request ends once,
with the tokens it gets alone, and nothing is left behind.

:meth:`Run.check` holds after each move: nobody in two places, no lane owned twice, no decode before
its token is known, and the ledger equal to what the sequences hold.
"""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from skippy_mesh.errors import RequestError, StageError
from skippy_mesh.messages import SamplingParams, StepBatch, StepResult
from skippy_mesh.scheduler import prefix_cache
from skippy_mesh.scheduler import sequence as sequence_module
from skippy_mesh.scheduler.memory import Capacity
from stages.fake import FakePipeline
from tests.scheduling import Run, request

RECURRENT = {"is_homogeneous": True, "prefix_rule": "boundary"}
RULES = [
    {},
    RECURRENT,
    RECURRENT | {"chunk_multiple": 4},
    RECURRENT | {"chunk_multiple": 4, "replays_in_chunks": False},
]


class Traffic(RuleBasedStateMachine):
    @initialize(
        cells=st.integers(16, 80),
        lanes=st.integers(1, 6),
        residents=st.integers(0, 3),
        num_stages=st.integers(1, 3),
        in_flight=st.integers(1, 4),
        max_rows=st.integers(4, 16),
        rules=st.sampled_from(RULES),
        preemption=st.sampled_from(["newest", "cheapest-recompute"]),
        ordering=st.sampled_from(["fcfs", "priority"]),
        promise=st.sampled_from([1, 4, 512]),
    )
    def start(self, *, cells, lanes, residents, num_stages, rules, promise, **knobs):
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(sequence_module, "MAX_RESERVED_OUTPUT", promise)
        self.patch.setattr(sequence_module, "RESUME_MARGIN", min(promise, 8))
        self.patch.setattr(prefix_cache, "MIN_SHARED", 3)
        self.patch.setattr(prefix_cache, "MIN_AWAITED", 6)
        states = lanes + residents if rules else None
        self.faults: list[int] = []
        self.is_forgetful = self.has_fault = False
        self.refused_for_room: list[str] = []
        pipeline = FakePipeline(
            capacities=[
                Capacity(lanes=lanes, residents=residents, attention=cells, recurrent=states)
            ]
            * num_stages,
            on_stage=self._on_stage,
            on_answer=self._on_answer,
        )
        self.num_stages = num_stages
        self.run = Run(
            pipeline=pipeline,
            cells=cells,
            lanes=lanes,
            residents=residents,
            recurrent=states,
            rules=rules,
            **knobs,
        )
        recover = self.run.scheduler.recover

        def watched(reason: str) -> None:
            self.refused_for_room += [reason] if "are needed and there are" in reason else []
            recover(reason)

        self.patch.setattr(self.run.scheduler, "recover", watched)

    def _on_stage(self, stage: int, _batch: StepBatch) -> None:
        if self.faults and self.faults[0] == stage:
            self.faults.pop(0)
            raise StageError("stumbled")

    def _on_answer(self, result: StepResult) -> StepResult:
        if not (self.is_forgetful and result.tokens):
            return result
        self.is_forgetful = False
        lost = min(result.tokens)
        kept = {lane: token for lane, token in result.tokens.items() if lane != lost}
        return dataclasses.replace(result, tokens=kept)

    @rule(
        num_prompt=st.integers(1, 60),
        max_tokens=st.one_of(st.integers(1, 40), st.just(10**6)),
        priority=st.integers(0, 2),
        seed=st.integers(0, 3),
        at_once=st.integers(1, 4),
        story=st.integers(0, 2),
        num_common=st.integers(0, 40),
        history_end=st.integers(0, 60),
    )
    def arrive(self, num_prompt, at_once, story, num_common, history_end, seed, **fields):
        """Prompts that begin alike for a while, each then goes on by itself. Half of the samplers
        must be told their past."""
        fields["sampling"] = SamplingParams(
            temperature=1.0, seed=seed, repetition_penalty=1.0 + seed % 2, repeat_last_n=-1
        )
        for _ in range(at_once):
            name = f"r{len(self.run.asked)}"
            asked = request(name, num_prompt, **fields)
            begin = tuple(range(300 + 100 * story, 300 + 100 * story + num_common))
            asked = dataclasses.replace(
                asked,
                token_ids=(*begin, *asked.token_ids)[:num_prompt],
                history_end=min(history_end, num_prompt),
            )
            try:
                self.run.ask(asked)
            except RequestError:
                assert num_prompt >= self.run.scheduler.max_model_len
                return

    @rule(number=st.integers(0, 20), twice=st.booleans())
    def cancel(self, number, twice):
        name = f"r{number}"
        is_open = name in self.run.asked and name not in self.run.ends
        assert self.run.abort(name) == is_open
        if twice:
            assert self.run.abort(name) == (is_open and name not in self.run.ends)

    @rule()
    def send(self):
        self.run.send()

    @precondition(lambda self: self.run.pending)
    @rule()
    def answer(self):
        self.run.answer()

    @rule(count=st.integers(1, 30))
    def step(self, count):
        for _ in range(count):
            self.run.step()

    @rule(stage=st.integers(0, 2))
    def stumble(self, stage):
        if stage < self.num_stages:
            self.has_fault = True
            self.faults.append(stage)

    @rule()
    def forget_a_result(self):
        self.has_fault = self.is_forgetful = True

    def teardown(self):
        if not hasattr(self, "run"):
            return
        try:
            self.run.finish()
            self.run.assert_answers()
            assert not self.refused_for_room, "the ledger gave away what a stage does not have"
            allowed = {"length", "abort"} | ({"error"} if self.has_fault else set())
            assert set(self.run.reasons().values()) <= allowed
        finally:
            self.patch.undo()


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(
    max_examples=40,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.long
def test_a_great_deal_of_traffic():
    run_state_machine_as_test(
        Traffic,
        settings=settings(TestTraffic.settings, max_examples=5000, stateful_step_count=80),
    )
