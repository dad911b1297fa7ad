"""A cut model computes the undivided model's logits, bit for bit, at every legal cut."""

from __future__ import annotations

import numpy as np
import pytest

from skippy_mesh.config import ContextConfig, StageSpec, specs_of
from stages.gguf_file import ModelFile
from stages.pipeline import LocalPipeline
from stages.profile import choose_profile, matrix_types
from stages.worker import StageWorker
from tests.models import make_llama
from tests.reference import Reference, assert_same_bits, mixed_steps

# One thread: tiny models finish before a second one is awake.
CONTEXT = ContextConfig(num_cells=2048, num_lanes=8, num_threads=1)


def logits_of(path, num_layers, cuts, steps, context=CONTEXT):
    specs = specs_of(path, num_layers, cuts, context)
    pipeline = LocalPipeline([StageWorker(spec) for spec in specs])
    try:
        return [pipeline.logits(step) for step in steps]
    finally:
        pipeline.close()


def reference_logits(path, steps):
    profile = choose_profile(matrix_types(ModelFile.open(path).tensors.values()))
    reference = Reference(path, pad=profile.pad)
    try:
        return [reference.logits(step) for step in steps]
    finally:
        reference.close()


def assert_cuts_are_exact(path, cuts_to_try, steps, own_cache, context=CONTEXT):
    num_layers = ModelFile.open(path).num_layers
    expected = reference_logits(path, steps)
    for cuts in cuts_to_try:
        found = logits_of(path, num_layers, cuts, steps, context)
        for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            try:
                assert_same_bits(ours, theirs)
            except AssertionError as error:
                raise AssertionError(f"cuts {cuts}, step {step}: {error}") from None
        for file in (own_cache / "slices").glob("*.gguf"):
            file.unlink()  # 29 cuts of a real model would fill a disk


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", ["f32", "f16", "q8_0"])
def test_every_cut_of_a_tiny_llama(tmp_path, own_cache, dtype, tied):
    path = make_llama(tmp_path / "tiny.gguf", dtype=dtype, tied=tied)
    cuts = [(), *((cut,) for cut in range(1, 6)), (1, 2), (2, 3, 5), (1, 2, 3, 4, 5)]
    assert_cuts_are_exact(path, cuts, mixed_steps(320, num_prompt=200), own_cache)


@pytest.mark.timeout(1200)  # thirty loads and prefills of a real model
def test_every_cut_of_smollm2(demo, own_cache):
    cuts = [(), *((cut,) for cut in range(1, 30)), (10, 20)]
    steps = mixed_steps(49152, num_prompt=300, num_second=40, num_decodes=4)
    context = ContextConfig(num_cells=1024, num_lanes=8, num_threads=2)
    assert_cuts_are_exact(demo, cuts, steps, own_cache, context)


def test_a_split_model_is_cut_like_a_whole_one(tmp_path, own_cache):
    path = make_llama(tmp_path / "parts.gguf", split_max_tensors=10)
    whole = make_llama(tmp_path / "whole.gguf")
    assert path.name.startswith("parts-00001-of-")
    steps = mixed_steps(320, num_prompt=40, num_decodes=2)
    expected = reference_logits(whole, steps)
    for cuts in ((), (3,)):
        for ours, theirs in zip(logits_of(path, 6, cuts, steps), expected, strict=True):
            assert_same_bits(ours, theirs)


def test_the_comparison_sees_a_tap_one_layer_early(tmp_path, monkeypatch):
    """A planted fault: hidden states of the last layer but one must not pass as equal."""
    import stages.context as context

    path = make_llama(tmp_path / "tiny.gguf")
    steps = mixed_steps(320, num_prompt=20, num_decodes=1)
    real = context._new_tap
    monkeypatch.setattr(
        context,
        "_new_tap",
        lambda last, restored, **options: real(
            last and f"l_out-{max(int(last.split('-')[1]) - 1, 0)}", restored, **options
        ),
    )
    found = logits_of(path, 6, (3,), steps)
    with pytest.raises(AssertionError, match="differ"):
        assert_same_bits(found[0], reference_logits(path, steps)[0])


def test_the_comparison_sees_layers_in_the_wrong_place(tmp_path):
    """A planted fault: stage 1 runs layers 2:5 where 3:6 belong."""
    path = make_llama(tmp_path / "tiny.gguf")
    steps = mixed_steps(320, num_prompt=20, num_decodes=1)
    first, last = specs_of(path, 6, (3,), CONTEXT)
    other = make_llama(tmp_path / "other.gguf", seed=1)
    last = StageSpec(
        index=1, num_stages=2, model_path=str(other), first_layer=3, end_layer=6, context=CONTEXT
    )
    pipeline = LocalPipeline([StageWorker(first), StageWorker(last)])
    found = pipeline.logits(steps[0])
    pipeline.close()
    with pytest.raises(AssertionError, match="differ"):
        assert_same_bits(found, reference_logits(path, steps)[0])


def test_mixed_steps_have_what_hides_faults_if_missing():
    steps = mixed_steps(320, num_prompt=200)
    assert any(len(set(step.lanes)) == 2 and step.num_rows > 2 for step in steps)
    assert sum(step.num_rows == 2 for step in steps) >= 16
    assert not float(np.sqrt(192)).is_integer()
