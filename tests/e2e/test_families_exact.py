"""Every family, cut wherever it can be cut, computes what the undivided model computes alone."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from dataclasses import replace

import llama_cpp
import numpy as np
import pytest

from coordinator.launch import ray_cluster, stage_actors
from skippy_mesh.config import specs_of
from skippy_mesh.errors import InvalidBatchError, UsageError
from skippy_mesh.families import WINDOW, check_cuts, family_of, legal_cuts
from skippy_mesh.messages import Copy, StepBatch
from stages import context as stage_context
from stages import gguf_file, memory, part, worker
from stages.batch import Rows
from stages.context import StageContext
from stages.embedding import Embedding
from stages.pipeline import RayPipeline
from stages.profile import Profile
from tests.crowd import (
    CONTEXT,
    FIRST,
    SECOND,
    Company,
    Made,
    assert_exact,
    local,
    story,
    two_sequences,
)
from tests.models import FAMILIES
from tests.reference import step_of

DTYPES = ("q8_0", "f32")
HYBRIDS = ("ssm", "linear")
MIXED = [family for family in FAMILIES if family not in HYBRIDS]

ODD_CUTS = {"dense": 3, "mla": 1, "window": 3, "ssm": 5, "linear": 5}
"""One cut of each fixture with stages of unlike shape: periods start anew at an odd layer."""

# Two windows, or two periods of four, do not make three legal stages: those fixtures are deeper.
THREE_STAGES = {
    "dense": (6, (1, 4)),
    "mla": (6, (1, 4)),
    "window": (8, (3, 5)),
    "ssm": (6, (1, 4)),
    "linear": (12, (5, 9)),
}
ILLEGAL = {
    "dense": ((6,), "between 1 and 5"),
    "mla": ((4, 4), "between 1 and 5"),
    "window": ((1,), "layers 0:1 of this gemma2 model hold no attention layer"),
    "ssm": ((0,), "between 1 and 5"),
    "linear": ((3,), "layers 0:3 of this qwen3next model hold no attention layer"),
}

WINDOW_SIZE = 64


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_cut(made, shared_cache, family, dtype):
    model = made(family, dtype)
    cuts = [(cut,) for cut in legal_cuts(model.model.family, model.model.facts)]
    assert len(cuts) >= 3
    for cut in [(), *cuts]:
        with local(model, cut) as pipeline:
            assert_exact(model, pipeline)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_cut_of_three_stages(made, shared_cache, family, dtype):
    num_layers, cuts = THREE_STAGES[family]
    model = made(family, dtype, num_layers=num_layers)
    with local(model, cuts) as pipeline:
        assert_exact(model, pipeline)


@pytest.mark.parametrize("family", FAMILIES)
def test_pinned_splits(made, shared_cache, family):
    """Stages hold the layers they were told to: no other cut is put in place of a told one."""
    model = made(family, "q8_0")
    deep = made(family, "q8_0", num_layers=THREE_STAGES[family][0])
    for subject, cuts in ((model, (ODD_CUTS[family],)), (deep, THREE_STAGES[family][1])):
        rows = subject.model.family, subject.model.facts
        assert check_cuts(*rows, cuts) == cuts
        assert any(cut % 2 for cut in cuts)
        with local(subject, cuts) as pipeline:
            layers = [(info.first_layer, info.end_layer) for info in pipeline.infos]
            assert layers == list(itertools.pairwise((0, *cuts, subject.model.num_layers)))
    cuts, reason = ILLEGAL[family]
    with pytest.raises(UsageError, match=reason):
        check_cuts(model.model.family, model.model.facts, cuts)
    if "hold no" in reason:  # the stage itself refuses, too, before llama.cpp sees a slice
        first, _ = specs_of(model.path, model.model.num_layers, cuts, CONTEXT)
        with pytest.raises(UsageError, match=reason):
            worker.StageWorker(first).load()


@pytest.mark.parametrize("family", FAMILIES)
def test_activation_handoff_matches_full_model(made, shared_cache, monkeypatch, family):
    """What a stage hands over is the undivided model's own residual, bit for bit."""
    model = made(family, "f32")
    cut, count = ODD_CUTS[family], 96
    tokens = FIRST.tokens[:count]
    new_tap = stage_context._new_tap
    with local(model, (cut,)) as pipeline:
        batch = step_of(0, [(0, at) for at in range(count)], {0: tokens})
        handed_over = pipeline._workers[0].compute(batch)
    monkeypatch.setattr(
        stage_context, "_new_tap",
        lambda _, restored, **options: new_tap(f"l_out-{cut - 1}", restored, **options),
    )  # fmt: skip
    full = StageContext(
        model.path,
        CONTEXT,
        is_last=False,
        is_recurrent=model.is_recurrent,
        profile=model.profile,
    )
    inputs = Embedding(model.model)(tokens)
    residual = full.decode(Rows(batch.lanes, batch.positions, batch.samples, inputs))
    full.close()
    assert handed_over.shape == (count, model.model.width)
    assert np.array_equal(handed_over.view(np.uint32), residual.view(np.uint32))
    assert float(np.abs(residual).max()) > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_cache_state_restore_matches_recompute(made, shared_cache, family):
    """A lane that takes another's memory at a boundary goes on as if it had computed it."""
    model = made(family, "f32")
    fork = story(13, 150, begin=FIRST.tokens[:96])
    with local(model, (ODD_CUTS[family],)) as pipeline:
        company = Company(model, pipeline)
        company.seat(0, FIRST)
        company.feed((0, 96))
        company.copy(0, 3, fork, 96)
        chunks = dict.fromkeys(range(CONTEXT.num_lanes), 32)
        while len(company.stories) == 2 and not company.is_done(3):
            company.turn(chunks)
        company.leave(0)  # the source goes, what was taken from it stays
        company.seat(1, SECOND)
        while not company.is_done(1):
            company.turn(chunks)
        assert not company.different, company.different[:9]


@pytest.mark.parametrize("family", HYBRIDS)
def test_cache_state_restore_matches_recompute_or_is_refused(made, shared_cache, family):
    """A recurrent lane has the state of its last position and no other."""
    model = made(family, "f32")
    with local(model, (ODD_CUTS[family],)) as pipeline:
        company = Company(model, pipeline)
        company.seat(0, FIRST)
        company.feed((0, 96))
        contexts = [stage._context for stage in pipeline._workers]
        before = [[each.positions(lane) for lane in (0, 3)] for each in contexts]
        assert before == [[(95, 95), (-1, -1)]] * 2
        for end in (1, 50, 95):
            partial = StepBatch(epoch=0, step_id=1, operations=(Copy(0, 3, 0, end),))
            with pytest.raises(InvalidBatchError, match="its recurrent state is that of"):
                pipeline.logits(partial)
        assert before == [[each.positions(lane) for lane in (0, 3)] for each in contexts]
        company.seat(3, SECOND)  # the lane is as free as before
        while not (company.is_done(0) and company.is_done(3)):
            company.turn({0: 32, 3: 32})
        assert not company.different, company.different[:9]


@pytest.mark.parametrize("family", MIXED)
def test_cache_state_restore_matches_recompute_of_any_prefix(made, shared_cache, family):
    """Also of one that the source has long passed, beyond a window."""
    model = made(family, "f32")
    with local(model, (ODD_CUTS[family],)) as pipeline:
        company = Company(model, pipeline)
        company.seat(0, FIRST)
        company.feed((0, 230))
        ends = (1, 63, 130, 229)
        for lane, end in enumerate(ends, 1):
            company.copy(0, lane, story(20 + lane, end + 20, begin=FIRST.tokens[:end]), end)
        while not all(company.is_done(lane) for lane in company.stories):
            company.turn(dict.fromkeys(range(CONTEXT.num_lanes), 33))
        assert not company.different, company.different[:9]
        assert company.num_compared > 16 * len(ends)


def test_the_source_is_stock():
    """No fork, no patch, the build that the figures were measured on."""
    assert llama_cpp.__version__ == "0.3.36"
    facts = dict(
        part.strip().split(" = ")
        for part in llama_cpp.llama_print_system_info().decode().replace("CPU :", "").split("|")
        if " = " in part
    )
    assert facts["LLAMAFILE"] == "1"
    assert facts["REPACK"] == "1"
    assert not any("AMX" in name and value != "0" for name, value in facts.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_fixtures_have_what_hides_faults_if_missing(made, family):
    model = made(family, "f32").model
    assert not float(np.sqrt(model.width)).is_integer() or family in ("mla", "linear")
    assert len(FIRST.tokens) - FIRST.num_prompt >= 16
    assert FIRST.num_prompt > 3 * WINDOW_SIZE
    if family == "window":
        assert model.facts.keys["attention.sliding_window"] == WINDOW_SIZE


@pytest.fixture(scope="module")
def cluster(session_cache):
    """One cluster for all tests here, in a short folder: Unix socket names end at 107 bytes."""
    folder = tempfile.mkdtemp(prefix="skippy-")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("SKIPPY_CACHE_DIR", str(session_cache))
        patch.delenv("RAY_ADDRESS", raising=False)
        with ray_cluster(address=None, num_cpus=2, namespace="families"):
            yield
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_cut_over_ray(cluster, made, family):
    """Frames of f32 between actors, not arrays handed over in one process."""
    model = made(family, "f32")
    specs = specs_of(model.path, model.model.num_layers, (ODD_CUTS[family],), CONTEXT)
    with stage_actors(specs, mesh_name=f"exact_{family}") as (actors, infos):
        pipeline = RayPipeline(actors, infos)
        assert [info.why_inexact for info in pipeline.infos] == [None, None]
        assert_exact(model, pipeline)


# Planted faults: each must be seen by the comparison that the tests above rest on.


def differences(made: Made, cuts=None) -> list[str]:
    with local(made, (ODD_CUTS[made.model.family.name],) if cuts is None else cuts) as pipeline:
        company = Company(made, pipeline)
        two_sequences(company)
        return company.different


def mutate_family(monkeypatch, model: Made, **fields: object) -> None:
    changed = replace(model.model.family, **fields)
    monkeypatch.setattr(gguf_file, "family_of", lambda *_, **__: changed)


def test_a_flipped_window_pattern_is_seen(made, probed_cache, monkeypatch):
    model = made("window", "f32")

    def flipped(facts, lo, hi):
        keys = WINDOW.slice_keys(facts, lo, hi)
        return {key: [not is_window for is_window in value] for key, value in keys.items()}

    mutate_family(monkeypatch, model, slice_keys=flipped)
    assert differences(model)


def test_a_period_that_starts_anew_is_seen(made, probed_cache, monkeypatch):
    """The fault itself: llama.cpp's own pattern, on a slice that starts at an odd layer."""
    model = made("window", "f32")
    mutate_family(monkeypatch, model, slice_keys=lambda facts, lo, hi: {})
    assert differences(model)


def test_an_input_scaled_twice_is_seen(made, probed_cache, monkeypatch):
    model = made("window", "f32")
    assert model.model.family is family_of("gemma2")
    mutate_family(monkeypatch, model, scaled_input="")
    assert differences(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tap_one_layer_early_is_seen(made, probed_cache, monkeypatch, family):
    new_tap = stage_context._new_tap

    def early(last, restored, **options):
        # The self-test may stop at layer 0, which has none before it; the stages here go further.
        if last and last != "l_out-0":
            last = f"l_out-{int(last.removeprefix('l_out-')) - 1}"
        return new_tap(last, restored, **options)

    monkeypatch.setattr(stage_context, "_new_tap", early)
    model = made(family, "q8_0")
    assert differences(model, (legal_cuts(model.model.family, model.model.facts)[1],))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_without_padding_is_seen(made, probed_cache, monkeypatch, family):
    model = made(family, "f32")
    monkeypatch.setattr(part, "choose_profile", lambda types, **_: Profile(1, True, True))
    assert differences(model)


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_stranger_beside_a_chunk_is_seen(made, probed_cache, monkeypatch, family):
    model = made(family, "f32")
    monkeypatch.setattr(
        StageContext,
        "_padding",
        lambda self, rows, _: stage_context.pad_plan(
            rows.lanes, rows.outputs, pad=self._profile.pad, scratch_lanes=self._scratch_lanes
        ),
    )
    with local(model) as pipeline:
        company = Company(model, pipeline)
        company.seat(0, FIRST)
        company.seat(1, SECOND)
        company.feed((1, 100))
        for _ in range(4):
            company.feed((0, 33), (1, 1))
        assert company.different


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_partial_copy_of_a_recurrent_lane_is_seen(made, probed_cache, monkeypatch, family):
    model = made(family, "f32")

    def copy(self, operation):
        native = memory.llama_cpp.llama_memory_seq_cp
        native(self._memory, operation.src, operation.dst, operation.p0, operation.p1)
        self._holdings.share(operation.src, operation.dst, operation.p1)

    monkeypatch.setattr(memory.LaneMemory, "_copy", copy)
    with local(model, (ODD_CUTS[family],)) as pipeline:
        company = Company(model, pipeline)
        company.seat(0, FIRST)
        company.feed((0, 128))
        company.copy(0, 1, story(13, 150, begin=FIRST.tokens[:96]), 96)
        company.turn({0: 32, 1: 32})
        assert company.different
