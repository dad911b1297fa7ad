"""The fake model keeps the rules of a real stage, or tests that lean on it would prove nothing."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from bench.baseline import Baseline
from skippy_mesh.errors import InvalidBatchError, StepOrderError
from skippy_mesh.messages import Copy, Remove, Request, SamplingParams, StepBatch
from stages.fake import IM_END, FakePipeline, FakeTokenizer, recite

GREEDY = SamplingParams()


def batch(
    step: int, tokens: Iterable[int] = (), *, start: int = 0, lane: int = 0, epoch: int = 0,
    operations: tuple[Copy | Remove, ...] = (),
) -> StepBatch:  # fmt: skip
    rows = tuple(tokens)
    return StepBatch(
        epoch=epoch,
        step_id=step,
        operations=operations,
        lanes=(lane,) * len(rows),
        positions=tuple(range(start, start + len(rows))),
        tokens=rows,
        samples=tuple(place == len(rows) - 1 for place in range(len(rows))),
        new_lanes={lane: GREEDY} if rows and start == 0 else {},
    )


def generate(pipeline: FakePipeline, prompt: bytes, *, max_rows: int, **params: float) -> list[int]:
    engine = Baseline(pipeline, max_model_len=200, max_rows=max_rows)
    request = Request(
        request_id="r",
        token_ids=tuple(prompt),
        max_tokens=20,
        sampling=SamplingParams(**params),  # type: ignore[arg-type]
        stop_token_ids=FakeTokenizer.eog_ids,
    )
    return [event.token_id for event in engine.generate(request) if event.token_id is not None]


def test_the_answer_depends_on_the_prompt_and_not_on_its_chunks() -> None:
    answers = [generate(FakePipeline(), b"hello there", max_rows=rows) for rows in (1, 3, 64)]
    assert answers[0] == answers[1] == answers[2]
    assert answers[0] != generate(FakePipeline(), b"hello therE", max_rows=64)


def test_the_seed_counts_only_when_sampling() -> None:
    def answer(temperature: float, seed: int) -> list[int]:
        return generate(FakePipeline(), b"hi", max_rows=64, temperature=temperature, seed=seed)

    assert answer(0.0, 1) == answer(0.0, 2)
    assert answer(1.0, 1) != answer(1.0, 2)
    assert answer(1.0, 1) == answer(1.0, 1)


def test_a_recited_answer_ends_itself_and_its_cells_are_freed() -> None:
    pipeline = FakePipeline(recite(b"abab abc"))
    assert generate(pipeline, b"say it", max_rows=64) == [*b"abab abc", IM_END]
    assert pipeline.histories == {}


def test_suppressed_tokens_are_never_drawn() -> None:
    pipeline = FakePipeline(recite(b""))
    eog = tuple(FakeTokenizer.eog_ids)
    tokens = generate(pipeline, b"x", max_rows=64, suppressed_ids=eog)  # type: ignore[arg-type]
    assert len(tokens) == 20
    assert not FakeTokenizer.eog_ids & set(tokens)


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(batch(1, [1], start=4), id="hole"),
        pytest.param(batch(1, [1], start=2), id="overwrite"),
        pytest.param(batch(1, [1], start=3, lane=5), id="wrong lane"),
        pytest.param(batch(1, operations=(Remove(0, 0, 2),)), id="hole by removal"),
        pytest.param(batch(1, operations=(Copy(0, 1, 0, 9),)), id="copy past the end"),
    ],
)
def test_a_bad_batch_is_refused_and_changes_nothing(bad: StepBatch) -> None:
    pipeline = FakePipeline()
    pipeline.forward(batch(0, [1, 2, 3]))
    with pytest.raises(InvalidBatchError):
        pipeline.forward(bad)
    assert pipeline.histories == {0: [1, 2, 3]}
    pipeline.forward(batch(1, [4], start=3))


@pytest.mark.parametrize("step", [0, 2])
def test_a_repeated_or_skipped_step_is_refused(step: int) -> None:
    pipeline = FakePipeline()
    pipeline.forward(batch(0, [1]))
    with pytest.raises(StepOrderError):
        pipeline.forward(batch(step, [2], start=1))


def test_a_new_epoch_empties_the_memory_and_an_old_one_is_refused() -> None:
    pipeline = FakePipeline()
    pipeline.forward(batch(0, [1, 2]))
    pipeline.forward(batch(0, [7], epoch=1))
    assert pipeline.histories == {0: [7]}
    with pytest.raises(StepOrderError):
        pipeline.forward(batch(1, [3], start=2, epoch=0))


def test_a_copy_shares_a_prefix_and_a_removal_frees_it() -> None:
    pipeline = FakePipeline()
    pipeline.forward(batch(0, [1, 2, 3]))
    pipeline.forward(batch(1, operations=(Copy(0, 1, 0, 2), Remove(0, 1))))
    assert pipeline.histories == {0: [1], 1: [1, 2]}
    pipeline.forward(batch(2, operations=(Remove(0), Remove(1))))
    assert pipeline.histories == {}
