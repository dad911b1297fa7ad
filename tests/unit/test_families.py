"""Which models can be cut, and where."""

from __future__ import annotations

import pytest

from skippy_mesh.errors import UnsupportedModelError, UsageError
from skippy_mesh.families import (
    FAMILIES,
    GEMMA3,
    GEMMA4,
    LINEAR,
    MLA,
    WINDOW,
    Family,
    ModelFacts,
    check_cuts,
    check_slice,
    family_of,
    gate_families,
    legal_cuts,
)

# Layers of the real models whose cuts are pinned: llama-3.2-1B, gemma-2-2B, DeepSeek-V2-Lite,
# Falcon-H1-1.5B, Qwen3-Next-80B-A3B; GLM-4-9B, OLMo-7B, OLMo-2-7B, gemma-3-4B, gemma-4-31B.
REAL_LAYERS = {"dense": 16, "window": 26, "mla": 27, "ssm": 24, "linear": 48}
CONFIRMATION_LAYERS = {"glm4": 40, "olmo": 32, "olmo2": 32, "gemma3": 34, "gemma4": 60}

# What a file says of its windows, where the architecture does not.
WINDOW_KEYS = {
    "gemma3": {"attention__sliding_window": 1024},
    "gemma4": {"attention__sliding_window_pattern": ([True] * 5 + [False]) * 10},
}


def facts(family: Family, num_layers: int, num_vocab: int = 1000, **keys: object) -> ModelFacts:
    return ModelFacts(
        architecture=family.architectures[0],
        num_layers=num_layers,
        num_vocab=num_vocab,
        keys={key.replace("__", "."): value for key, value in keys.items()},
    )


@pytest.mark.parametrize("cuts", [(), (1,), (29,), (10, 20), tuple(range(1, 30))])
def test_legal_cuts_pass(cuts):
    dense = family_of("llama")
    assert check_cuts(dense, facts(dense, 30), cuts) == cuts


@pytest.mark.parametrize("cuts", [(0,), (30,), (31,), (-1,), (4, 4), (5, 2), (5, 40)])
def test_cuts_out_of_order_or_range_are_refused_with_the_range(cuts):
    dense = family_of("llama")
    with pytest.raises(UsageError, match="between 1 and 29"):
        check_cuts(dense, facts(dense, 30), cuts)


def test_an_unknown_architecture_is_refused_by_name():
    with pytest.raises(UnsupportedModelError, match=r"'mamba'.*supported: llama, deepseek2"):
        family_of("mamba")


def test_an_unproven_architecture_is_taken_for_a_dense_one_only_when_asked():
    family = family_of("qwen2", allow_unproven=True)
    assert not family.is_proven
    assert family.components == ("attention",)
    assert {"expert_count", "ssm.conv_kernel"} <= set(family.refused_keys)
    assert family_of("gemma", allow_unproven=True).scaled_input == "inp_scaled"
    assert family_of("llama", allow_unproven=True) is family_of("llama")
    assert all(family.is_proven for family in FAMILIES)


@pytest.mark.parametrize("allow_unproven", [False, True])
def test_gemma3n_is_refused_with_the_reason_whatever_is_allowed(allow_unproven):
    with pytest.raises(UnsupportedModelError, match=r"'gemma3n' .*late layers read early layers'"):
        family_of("gemma3n", allow_unproven=allow_unproven)


def test_manifest_row_is_complete_for_five_gate_rows_and_no_other():
    gates = {family.name: family for family in gate_families()}
    assert set(gates) == set(REAL_LAYERS) and len(gates) == 5
    confirmations = [family for family in FAMILIES if family.confirms]
    assert {family.name for family in confirmations} == set(CONFIRMATION_LAYERS)
    assert not {family.name for family in confirmations} & set(gates)
    for family in confirmations:
        gate = gates[family.confirms]
        assert family.components == gate.components
        assert (family.step_rule, family.prefix_rule) == (gate.step_rule, gate.prefix_rule)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_manifest_row_is_complete(family):
    """What each row says fits together, and its pinned cuts are legal on the real model."""
    num_layers = (REAL_LAYERS | CONFIRMATION_LAYERS)[family.name]
    keys = WINDOW_KEYS.get(family.name, {})
    assert family_of(family.architectures[0]) is family
    assert set(family.components) <= {"attention", "window", "recurrent"}
    kinds = family.layer_kinds(facts(family, num_layers, **keys))
    assert len(kinds) == num_layers
    assert frozenset().union(*kinds) == set(family.components)
    assert (family.step_rule == "homogeneous") == ("recurrent" in family.components)
    assert (family.prefix_rule == "boundary") == ("recurrent" in family.components)
    assert (family.prefix_rule == "window") == ("window" in family.components)
    assert len(family.pinned_cuts) == 2
    assert check_cuts(family, facts(family, num_layers, **keys), family.pinned_cuts)


def test_no_architecture_has_two_rows():
    names = [name for family in FAMILIES for name in family.architectures]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("family", "num_layers", "legal"),
    [
        (WINDOW, 6, [2, 3, 4]),  # stage 0 needs layer 1 (full), stage 1 layer 4 (windowed)
        (LINEAR, 8, [4, 5, 6]),  # both halves need one of layers 3 and 7, and a recurrent one
        (MLA, 6, [1, 2, 3, 4, 5]),
        (family_of("falcon-h1"), 4, [1, 2, 3]),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_every_stage_keeps_a_layer_of_each_memory_kind(family, num_layers, legal):
    assert legal_cuts(family, facts(family, num_layers)) == legal


def test_the_missing_memory_kind_is_named():
    with pytest.raises(UsageError, match="layers 5:6 of this gemma2 model hold no window layer"):
        check_slice(WINDOW, facts(WINDOW, 6), 5, 6)
    with pytest.raises(UsageError, match=r"layers 0:3 .* no attention layer"):
        check_slice(LINEAR, facts(LINEAR, 8), 0, 3)


def test_layer_patterns_do_not_restart_at_a_cut():
    key = "attention.sliding_window_pattern"
    assert WINDOW.slice_keys(facts(WINDOW, 6), 3, 6)[key] == [False, True, False]
    told = facts(WINDOW, 6, attention__sliding_window_pattern=3)
    assert WINDOW.slice_keys(told, 1, 5)[key] == [True, False, True, True]
    listed = facts(WINDOW, 4, attention__sliding_window_pattern=[True, True, False, False])
    assert WINDOW.slice_keys(listed, 1, 4)[key] == [True, False, False]
    key = "attention.recurrent_layers"
    assert LINEAR.slice_keys(facts(LINEAR, 8), 2, 5)[key] == [True, False, True]
    told = facts(LINEAR, 6, full_attention_interval=2)
    assert LINEAR.slice_keys(told, 1, 4)[key] == [False, True, False]
    listed = facts(LINEAR, 4, attention__recurrent_layers=[0, 1, 1, 0])
    assert LINEAR.slice_keys(listed, 1, 4)[key] == [True, True, False]


def test_gemma2_27b_slices_are_refused_with_the_reason():
    with pytest.raises(UsageError, match=r"46 layers .*attention scale"):
        check_cuts(WINDOW, facts(WINDOW, 46), (23,))
    assert check_cuts(WINDOW, facts(WINDOW, 46), ()) == ()


def test_gemma3_windows_five_layers_of_six_and_is_cut_where_that_leaves_both():
    window = {"attention__sliding_window": 512}
    kept = GEMMA3.slice_keys(facts(GEMMA3, 26, **window), 4, 13)["attention.sliding_window_pattern"]
    assert kept == [True, False, True, True, True, True, True, False, True]
    assert legal_cuts(GEMMA3, facts(GEMMA3, 12, **window)) == [6, 7, 8, 9, 10]
    with pytest.raises(UsageError, match=r"62 layers .*attention scale"):
        check_cuts(GEMMA3, facts(GEMMA3, 62, **window), (31,))
    with pytest.raises(UsageError, match="without a sliding window"):
        check_cuts(GEMMA3, facts(GEMMA3, 32), (16,))


def test_gemma4_is_cut_by_the_windows_that_its_file_lists():
    told = facts(GEMMA4, 4, attention__sliding_window_pattern=[True, False, True, False])
    assert legal_cuts(GEMMA4, told) == [2]
    assert GEMMA4.slice_keys(told, 1, 3) == {"attention.sliding_window_pattern": [False, True]}


def test_what_deepseek2_reads_off_layer_counts_is_written_down():
    lite = facts(MLA, 27)
    assert MLA.slice_keys(lite, 0, 9) == {
        "attention.q_lora_rank": 0, "expert_gating_func": 1,
    }  # fmt: skip
    glm = facts(MLA, 47, 154880, attention__q_lora_rank=768)
    assert MLA.slice_keys(glm, 0, 9) == {"attention.q_lora_rank": 768, "expert_gating_func": 2}
    told = facts(MLA, 61, expert_gating_func=2, attention__q_lora_rank=1536)
    assert MLA.slice_keys(told, 0, 30)["expert_gating_func"] == 2
    with pytest.raises(UsageError, match="no stage with 26 or 27 layers"):
        check_cuts(MLA, told, (27,))
    assert check_cuts(MLA, told, (28,)) == (28,)


def test_the_undivided_model_is_always_legal():
    windows_only = facts(WINDOW, 1)
    check_slice(WINDOW, windows_only, 0, 1)
