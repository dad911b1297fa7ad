"""Every sampling field under the scheduler: alone, in a crowd and after preemptions, the same.

The tokens and the bits of the log-probabilities of a request must not tell who else was there, nor
how often it was computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.launch import engine_plan
from skippy_mesh.config import ContextConfig, EngineSettings, specs_of
from skippy_mesh.engine import Engine
from skippy_mesh.errors import StageError
from skippy_mesh.messages import (
    Request,
    SamplingParams,
    StepBatch,
    StepReport,
    TokenLogprobs,
)
from skippy_mesh.scheduler import sequence
from stages.batch import Floats
from stages.pipeline import LocalPipeline
from stages.sampling import Drawn
from stages.tokenizer import Tokenizer
from stages.worker import StageWorker
from tests.crowd import Made, story

CONTEXT = ContextConfig(num_cells=512, num_lanes=12, max_rows=128, num_threads=1)
NUM_OUTPUT = 40
PLAIN = SamplingParams(temperature=1.0, seed=77, num_logprobs=2)
FIELDS = {
    "plain": {},
    "bias": {"logit_bias": tuple((token, 3.0) for token in range(100, 140))},
    "allowed": {"allowed_ids": tuple(range(50, 300))},
    "typical": {"typical_p": 0.4},
    "repetition": {"repetition_penalty": 1.5, "repeat_last_n": -1},
    "window": {"repetition_penalty": 3.0, "repeat_last_n": 8},
    "presence": {"presence_penalty": 2.0},
    "frequency": {"frequency_penalty": 1.0, "temperature": 0.0},
    "min_tokens": {"min_tokens": 20, "ending_ids": tuple(range(300))},
    "grammar": {"grammar": "root ::= ([a-z]{1,9} [ ,]){12}"},
}
Answer = list[tuple[int | None, TokenLogprobs | None]]


def request(number: int, name: str, stop_ids: frozenset[int]) -> Request:
    return Request(
        request_id=name,
        token_ids=story(number, 30 + number, 0).tokens,
        max_tokens=NUM_OUTPUT,
        sampling=replace(PLAIN, **FIELDS[name]),
        stop_token_ids=stop_ids if name == "grammar" else frozenset(),
    )


class Answers:
    """An engine stepped by hand, and what it said."""

    def __init__(self, pipeline: LocalPipeline):
        plan, _ = engine_plan(pipeline.infos, EngineSettings(running=10, prefill_rows=48))
        plan = replace(plan, ceiling=10)  # at 256 cells a session it would be two
        self._engine = Engine(plan.scheduler(), pipeline, self._take, checks_integrity=True)
        self.found: dict[str, Answer] = {}
        self.num_preempted = 0
        self.num_cached: dict[str, int] = {}

    def ask(self, requests: Sequence[Request]) -> dict[str, Answer]:
        self.found = {each.request_id: [] for each in requests}
        for each in requests:
            self._engine.submit(each)
        for _ in range(4000):
            self._engine.turn()
            if not self._engine.scheduler.has_work:
                return self.found
        raise AssertionError("not done")

    @property
    def epoch(self) -> int:
        return self._engine.scheduler.epoch

    def _take(self, report: StepReport) -> None:
        for event in report.events:
            assert event.error is None, event
            if event.token_id is not None:
                answer = self.found.setdefault(event.request_id, [])
                answer.append((event.token_id, event.logprobs))
            self.num_cached[event.request_id] = event.num_cached
        if report.record is not None:
            self.num_preempted += report.record.preempted


@contextmanager
def pipeline_of(made: Made, *, num_residents: int = 0) -> Iterator[LocalPipeline]:
    context = replace(CONTEXT, num_residents=num_residents)
    specs = specs_of(made.path, made.model.num_layers, (1,), context)
    pipeline = LocalPipeline([StageWorker(spec) for spec in specs])
    try:
        yield pipeline
    finally:
        pipeline.close()


def test_every_field_alone_in_a_crowd_and_after_preemptions(
    made, shared_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Made = made("dense", "q8_0", num_layers=4)
    tokenizer = Tokenizer(str(model.path))
    requests = [request(n, name, tokenizer.eog_ids) for n, name in enumerate(FIELDS)]
    with pipeline_of(model) as pipeline:
        answers = Answers(pipeline)
        alone = {each.request_id: answers.ask([each])[each.request_id] for each in requests}
        assert answers.num_preempted == 0
        # Promises this small leave the pool overbooked.
        monkeypatch.setattr(sequence, "MAX_RESERVED_OUTPUT", 2)
        assert answers.ask(requests) == alone
        assert answers.num_preempted >= 3, "the pool was never short"
        _fail_once(pipeline, after_steps=12)
        assert answers.ask(requests[4:]) == {name: alone[name] for name in list(FIELDS)[4:]}
        assert answers.epoch == 1, "no step failed"
    _assert_each_field_shows(alone, tokenizer)


def test_every_field_behind_a_shared_prefix(made, shared_cache: Path) -> None:
    """A lane that begins in the middle of its prompt, or at its end, has never computed what its
    sampler must know."""
    model: Made = made("dense", "q8_0", num_layers=4)
    eog_ids = Tokenizer(str(model.path)).eog_ids
    with pipeline_of(model, num_residents=4) as pipeline:
        answers = Answers(pipeline)
        for number, name in enumerate(FIELDS):
            asked = request(number, name, eog_ids)
            cold = answers.ask([replace(asked, shares_prefix=False)])[name]
            assert answers.num_cached[name] == 0
            begin = (*asked.token_ids[:20], 5)
            answers.ask([Request(request_id="before", token_ids=begin, max_tokens=1)])
            for num_shared in (20, len(asked.token_ids) - 1):
                assert answers.ask([asked])[name] == cold, f"{name} behind {num_shared} tokens"
                assert answers.num_cached[name] == num_shared


def _fail_once(pipeline: LocalPipeline, *, after_steps: int) -> None:
    """The last stage fails a step, so all stages start over."""
    worker = pipeline._workers[-1]
    sample, steps_left = worker.sample, iter(range(after_steps))

    def fail(batch: StepBatch, logits: Floats | None) -> Drawn:
        if next(steps_left, None) is None:
            worker.sample = sample  # type: ignore[method-assign]
            raise StageError("planted")
        return sample(batch, logits)

    worker.sample = fail  # type: ignore[method-assign]


def _assert_each_field_shows(alone: dict[str, Answer], tokenizer: Tokenizer) -> None:
    """Or equal answers would prove nothing."""
    tokens = {name: [token for token, _ in answer] for name, answer in alone.items()}
    assert all(len(answer) == NUM_OUTPUT for name, answer in tokens.items() if name != "grammar")
    assert all(logprobs is not None and len(logprobs.top) == 2 for _, logprobs in alone["plain"])
    assert set(tokens["allowed"]) <= set(range(50, 300))
    assert min(filter(None, tokens["min_tokens"][:20])) >= 300
    assert len(set(tokens["presence"])) > len(set(tokens["plain"])) - 5
    text = b"".join(tokenizer.piece(token) for token in tokens["grammar"] if token is not None)
    assert all(letter in b"abcdefghijklmnopqrstuvwxyz ," for letter in text)
