"""Stages as Ray actors: the same bits as one context, and a typed error for whatever goes wrong."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading

import numpy as np
import pytest
import ray

from coordinator.launch import stage_actors
from skippy_mesh.config import ContextConfig, specs_of
from skippy_mesh.errors import (
    InvalidBatchError,
    ModelFileError,
    NoRoomError,
    StageError,
    StepOrderError,
    UsageError,
)
from skippy_mesh.messages import Copy, Remove, SamplingParams, StepBatch
from skippy_mesh.wire import Hidden, encode_activations, encode_step
from stages.pipeline import RayPipeline, silent_stages
from tests.reference import Reference, assert_same_bits, mixed_steps, step_of

CONTEXT = ContextConfig(num_cells=1024, num_lanes=4, num_threads=1)
ENDS_WITHIN_S = 60  # a second or two in truth
GREEDY = SamplingParams()
TOKENS = {lane: [3 + (7 * at + 31 * lane) % 300 for at in range(200)] for lane in range(3)}


@pytest.fixture(scope="module")
def pipeline(cluster, model):
    with start(model) as pipeline:
        yield pipeline


pytestmark = pytest.mark.usefixtures("cluster")
names = (f"mesh{number}" for number in itertools.count())


def start(model, cuts=(2,), num_layers=6):
    specs = specs_of(model, num_layers, cuts, CONTEXT)
    return pipeline_of(specs)


@contextlib.contextmanager
def pipeline_of(specs):
    with stage_actors(specs, mesh_name=next(names)) as (actors, infos):
        yield RayPipeline(actors, infos)


epochs = itertools.count(1)


def numbered(steps):
    """``steps`` in an epoch of their own, from step 0."""
    epoch = next(epochs)
    return [
        StepBatch(
            epoch=epoch,
            step_id=index,
            lanes=step.lanes,
            positions=step.positions,
            tokens=step.tokens,
            samples=step.samples,
            operations=step.operations,
        )
        for index, step in enumerate(steps)
    ]


def rows(lane, first, end):
    return step_of(0, [(lane, at) for at in range(first, end)], TOKENS)


def changed(step, **fields):
    return StepBatch(**{name: getattr(step, name) for name in StepBatch.__slots__} | fields)


def expected_logits(model, steps):
    reference = Reference(model)
    try:
        return [reference.logits(step).copy() for step in steps]
    finally:
        reference.close()


def test_two_actors_compute_the_logits_of_one_context(pipeline, model):
    steps = numbered(mixed_steps(320, num_prompt=200, num_decodes=6))
    expected = expected_logits(model, steps)
    for step, logits in zip(steps, expected, strict=True):
        assert_same_bits(np.array(pipeline.logits(step)), logits)


def test_forward_samples_from_these_logits(pipeline, model):
    (step,) = numbered([rows(1, 0, 20)])
    (logits,) = expected_logits(model, [step])
    result = pipeline.forward(changed(step, new_lanes={1: GREEDY}))
    assert (result.epoch, result.step_id) == (step.epoch, step.step_id)
    assert result.tokens == {1: int(logits[0].argmax())}


@pytest.mark.parametrize("wrong", ["gap", "repeat", "old epoch"])
def test_a_step_out_of_order_is_refused_and_changes_nothing(pipeline, model, wrong):
    first, second, third = numbered([rows(0, 0, 30), rows(0, 30, 40), rows(0, 40, 41)])
    expected = expected_logits(model, [first, second, third])
    assert_same_bits(np.array(pipeline.logits(first)), expected[0])
    assert_same_bits(np.array(pipeline.logits(second)), expected[1])
    refused = {
        "gap": changed(third, step_id=3),
        "repeat": second,
        "old epoch": changed(third, epoch=third.epoch - 1),
    }
    with pytest.raises(StepOrderError, match=r"stage 0/2 .*expects step"):
        pipeline.logits(refused[wrong])
    assert_same_bits(np.array(pipeline.logits(third)), expected[2])


def test_activations_of_another_step_are_refused(pipeline):
    first, second = numbered([rows(0, 0, 5), rows(0, 5, 6)])
    pipeline.logits(first)
    foreign = encode_activations(second.epoch, 9, Hidden(np.zeros((1, 192), np.float32)))
    with pytest.raises(StepOrderError) as caught:
        ray.get(pipeline.actors[1].step_logits.remote(encode_step(second), foreign))
    assert isinstance(caught.value, ray.exceptions.RayTaskError)
    assert pipeline.logits(second).shape == (1, 320)


def test_a_bad_batch_is_refused_by_type_and_a_new_epoch_starts_clean(pipeline, model):
    (bad,) = numbered([rows(0, 3, 5)])
    with pytest.raises(InvalidBatchError, match="lane 0 continues at position 0"):
        pipeline.logits(bad)
    steps = numbered([rows(0, 0, 5), rows(0, 5, 6)])
    for step, logits in zip(steps, expected_logits(model, steps), strict=True):
        assert_same_bits(np.array(pipeline.logits(step)), logits)


def test_a_higher_epoch_clears_every_lane_of_every_stage(pipeline, model):
    for step in numbered([rows(0, 0, 30), rows(1, 0, 12), rows(2, 0, 7)]):
        pipeline.logits(step)
    steps = numbered([rows(2, 0, 9), rows(0, 0, 3), rows(1, 0, 40)])
    for step, logits in zip(steps, expected_logits(model, steps), strict=True):
        assert_same_bits(np.array(pipeline.logits(step)), logits)


def test_memory_operations_reach_every_stage(pipeline, model):
    """Lane 2 shares a prefix of lane 0, loses its tail and goes on: as if computed alone."""
    shared = {0: TOKENS[0], 2: TOKENS[0][:20] + TOKENS[2]}
    prompt = rows(0, 0, 30)
    branch = step_of(0, [(2, at) for at in range(20, 26)], shared)
    again = step_of(0, [(2, at) for at in range(22, 26)], shared)
    steps = numbered(
        [
            prompt,
            changed(branch, operations=(Copy(0, 2, 0, 20),)),
            changed(again, operations=(Remove(2, 22),)),
            StepBatch(epoch=0, step_id=0, operations=(Remove(0), Remove(2))),
            rows(0, 0, 4),
        ]
    )
    alone = step_of(0, [(2, at) for at in range(26)], shared)
    (expected,) = expected_logits(model, [alone])
    pipeline.logits(steps[0])
    for step in steps[1:3]:
        assert_same_bits(np.array(pipeline.logits(step)), expected)
    assert pipeline.logits(steps[3]) is None
    (expected,) = expected_logits(model, [rows(0, 0, 4)])
    assert_same_bits(np.array(pipeline.logits(steps[4])), expected)


def test_a_step_that_finds_no_room_changes_nothing_on_any_stage(pipeline, model):
    """Not even the memory operations that come with it."""
    held = [rows(lane, at, at + 170) for lane in range(3) for at in (0,)]
    too_many = [(3, at) for at in range(700)]
    steps = numbered([*held, step_of(0, too_many, {3: TOKENS[0] * 4}), rows(0, 170, 171)])
    expected = expected_logits(model, [*steps[:3], steps[4]])
    for step, logits in zip(steps[:3], expected, strict=False):
        assert_same_bits(np.array(pipeline.logits(step)), logits)
    refused = changed(steps[3], operations=(Remove(1),), samples=(False,) * 700)
    with pytest.raises(NoRoomError, match="340 of 1024"):
        pipeline.logits(refused)
    again = changed(steps[4], step_id=3)
    assert_same_bits(np.array(pipeline.logits(again)), expected[3])
    onward = changed(numbered([rows(1, 170, 171)])[0], epoch=again.epoch, step_id=4)
    assert pipeline.logits(onward).shape == (1, 320), "lane 1 is still there"


def test_live_stages_say_so_and_what_they_are(pipeline, model):
    assert silent_stages(pipeline.actors) == {}
    assert [(info.first_layer, info.end_layer) for info in pipeline.infos] == [(0, 2), (2, 6)]
    assert len({info.process_id for info in pipeline.infos} | {os.getpid()}) == 3


@pytest.mark.parametrize("victim", [0, 1])
def test_a_stage_killed_midway_is_an_error_that_names_it(model, victim):
    with start(model) as pipeline:
        steps = numbered([rows(0, at, at + 1) for at in range(200)])
        ended: list[Exception] = []
        computing = threading.Event()

        def run():
            try:
                for step in steps:
                    pipeline.logits(step)
                    computing.set()
            except Exception as error:
                ended.append(error)
            computing.set()

        thread = threading.Thread(target=run)
        thread.start()
        assert computing.wait(ENDS_WITHIN_S)
        os.kill(pipeline.infos[victim].process_id, signal.SIGKILL)
        thread.join(ENDS_WITHIN_S)
        assert not thread.is_alive()
        # It may have been faster than the signal: the next step meets the dead one for certain.
        if not ended:
            with pytest.raises(StageError) as caught:
                pipeline.logits(numbered([rows(0, 0, 1)])[0])
            ended.append(caught.value)
        (error,) = ended
        assert isinstance(error, StageError)
        assert f"stage {victim}" in str(error)
        assert "\n" not in str(error)
        # Ray starts the process again, but nobody has it loaded.
        assert f"stage {victim} " in silent_stages(pipeline.actors)[victim]
        with pytest.raises(StageError, match=f"stage {victim}"):
            pipeline.logits(numbered([rows(0, 0, 1)])[0])


def test_a_model_that_is_not_there_is_one_typed_error(tmp_path):
    missing = pytest.raises(ModelFileError, match=r"none\.gguf does not exist")
    with missing, start(tmp_path / "none.gguf"):
        raise AssertionError("loaded")


def test_a_cut_beyond_the_model_is_one_typed_error(model):
    with pytest.raises(UsageError, match="layers"), start(model, cuts=(7,), num_layers=9):
        raise AssertionError("loaded")


def test_a_failed_start_leaves_the_cluster_free_for_the_next(tmp_path, model):
    for _ in range(2):
        with pytest.raises(ModelFileError), start(tmp_path / "none.gguf"):
            raise AssertionError("loaded")
    with start(model, cuts=()) as single:
        assert single.logits(numbered([rows(0, 0, 3)])[0]).shape == (1, 320)
