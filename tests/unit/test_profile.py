"""Padding and profiles: a row's bits must not depend on the rows beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type
from hypothesis import given
from hypothesis import strategies as st

from skippy_mesh.errors import InvalidBatchError
from stages.gguf_file import ModelFile
from stages.gguf_format import Tensor
from stages.profile import Profile, choose_profile, matrix_types, pad_plan
from tests.models import make_llama

PADS = st.sampled_from((1, 2, 4, 8))
SCRATCH = range(100, 107)


@pytest.mark.parametrize(
    ("types", "expected"),
    [
        ({"Q8_0"}, Profile(pad=1, tiled=True, repack=True)),
        ({"Q4_0", "Q4_1", "Q5_0", "Q5_1"}, Profile(pad=1, tiled=True, repack=True)),
        ({"Q8_0", "F32"}, Profile(pad=2, tiled=True, repack=True)),
        ({"F16"}, Profile(pad=2, tiled=True, repack=True)),
        ({"BF16"}, Profile(pad=2, tiled=True, repack=True)),
        ({"IQ4_NL"}, Profile(pad=2, tiled=True, repack=True)),
        ({"Q6_K"}, Profile(pad=1, tiled=False, repack=True)),
        ({"Q5_K", "F32"}, Profile(pad=2, tiled=False, repack=True)),
        ({"Q4_K", "Q6_K"}, Profile(pad=4, tiled=False, repack=True)),
        ({"Q2_K", "Q3_K"}, Profile(pad=4, tiled=False, repack=True)),
        ({"Q4_K", "F32"}, Profile(pad=4, tiled=False, repack=True)),
    ],
)
def test_each_type_gets_the_least_that_keeps_it_exact(types: set[str], expected: Profile) -> None:
    assert choose_profile(frozenset(types)) == expected


def test_without_repacking_k_quants_need_no_fours() -> None:
    assert choose_profile(frozenset({"Q4_K"}), can_repack=False) == Profile(1, False, False)
    assert choose_profile(frozenset({"Q4_K", "F32"}), can_repack=False) == Profile(2, False, False)


def test_a_type_nobody_measured_gets_the_most_careful_profile() -> None:
    assert choose_profile(frozenset({"Q8_0", "Q9_Z"})) == Profile(pad=4, tiled=False, repack=False)


@given(*(st.frozensets(st.sampled_from([t.name for t in Type])) for _ in range(2)))
def test_more_types_never_make_a_profile_bolder(some: frozenset[str], more: frozenset[str]) -> None:
    small, large = choose_profile(some), choose_profile(some | more)
    assert large.tiled <= small.tiled
    assert large.repack <= small.repack
    assert large.pad % small.pad == 0


def test_only_what_rows_are_multiplied_with_counts(tmp_path: Path) -> None:
    # The same file without its F32 norms would be read as F32 and padded for nothing.
    model = ModelFile.open(make_llama(tmp_path / "m.gguf", dtype="q8_0"))
    assert model.tensor_types == {"Q8_0", "F32"}
    assert matrix_types(model.tensors.values()) == {"Q8_0"}


def tensor(name: str, kind: Type, *shape: int) -> Tensor:
    return Tensor(name, kind, shape)


def test_routers_and_experts_count_and_convolutions_do_not() -> None:
    block = [
        tensor("blk.0.ffn_gate_exps.weight", Type.Q4_K, 256, 64, 8),
        tensor("blk.0.ffn_gate_inp_shexp.weight", Type.F16, 256, 1),
        tensor("blk.0.ssm_conv1d.weight", Type.F16, 4, 256),
        tensor("blk.0.ssm_a", Type.F16, 8, 8),
        tensor("blk.0.attn_norm.weight", Type.F16, 256),
    ]
    assert matrix_types(block) == {"Q4_K"}
    router = tensor("blk.0.ffn_gate_inp.weight", Type.F32, 256, 8)
    assert matrix_types([*block, router]) == {"Q4_K", "F32"}


def test_the_embedding_counts_only_where_it_is_the_head() -> None:
    embedding = tensor("token_embd.weight", Type.F16, 64, 320)
    head = tensor("output.weight", Type.Q8_0, 64, 320)
    assert matrix_types([embedding]) == {"F16"}
    assert matrix_types([embedding, head]) == {"Q8_0"}


STEPS = st.lists(st.tuples(st.integers(0, 99), st.booleans()), min_size=1, max_size=40)


@given(STEPS, PADS)
def test_padded_rows_and_outputs_are_multiples(step: list[tuple[int, bool]], pad: int) -> None:
    lanes, samples = [lane for lane, _ in step], [flag for _, flag in step]
    plan = pad_plan(lanes, samples, pad=pad, scratch_lanes=SCRATCH)
    num_rows, wanted = len(lanes) + len(plan.lanes), {i for i, flag in enumerate(samples) if flag}
    flagged = wanted | set(plan.outputs)
    assert num_rows % pad == 0
    assert len(flagged) % pad == 0
    # Nothing is flagged twice or outside, and nothing at all where nobody asked.
    assert len(flagged) == len(wanted) + len(plan.outputs)
    assert all(0 <= row < num_rows for row in plan.outputs)
    assert bool(flagged) == bool(wanted)
    # No more than needed, and one scratch lane a row: two rows of a lane make a chunk.
    assert len(plan.lanes) < pad
    assert len(plan.outputs) < pad
    assert len(set(plan.lanes)) == len(plan.lanes)


def test_existing_rows_are_flagged_before_any_is_added() -> None:
    plan = pad_plan([5] * 4, [False, False, False, True], pad=4, scratch_lanes=SCRATCH)
    assert (plan.lanes, plan.outputs) == ((), (0, 1, 2))


def test_a_lone_decode_row_brings_a_full_company() -> None:
    plan = pad_plan([5], [True], pad=4, scratch_lanes=SCRATCH)
    assert (plan.lanes, plan.outputs) == ((100, 101, 102), (1, 2, 3))


@pytest.mark.parametrize("scratch_lanes", [(), (5,), (6, 6, 6)])
def test_scratch_lanes_are_enough_and_nobody_elses(scratch_lanes: tuple[int, ...]) -> None:
    with pytest.raises(InvalidBatchError, match="scratch lanes"):
        pad_plan([5], [True], pad=4, scratch_lanes=scratch_lanes)


@pytest.mark.parametrize(("lanes", "samples"), [([], []), ([1], []), ([1, 2], [True])])
def test_ragged_and_empty_steps_are_refused(lanes: list[int], samples: list[bool]) -> None:
    with pytest.raises(InvalidBatchError):
        pad_plan(lanes, samples, pad=2, scratch_lanes=SCRATCH)
