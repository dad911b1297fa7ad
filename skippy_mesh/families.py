"""The model families that can be cut: one row per KV class, and the rules of each.

A family is proven, not assumed: a row is here because tests show its slices bit-equal to the
undivided model at every legal cut. Everything else is refused. What a row says about llama.cpp was
read in llama.cpp's ``src/models/<architecture>.cpp`` and measured; the tests hold it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from skippy_mesh.errors import UnsupportedModelError, UsageError

Component = Literal["attention", "window", "recurrent"]
"""A kind of memory a layer keeps: cells of the pool, cells of a sliding window, or one state row
per sequence. MLA's compressed cells are attention memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the rules need of a model file. ``keys`` are its metadata without the architecture's
    prefix, decoded; arrays are lists."""

    architecture: str
    num_layers: int
    num_vocab: int
    keys: Mapping[str, Any]


LayerKinds = Callable[[ModelFacts], list[frozenset[Component]]]
SliceKeys = Callable[[ModelFacts, int, int], dict[str, int | list[bool]]]
SliceProblem = Callable[[ModelFacts, int, int], str | None]


def _attention_everywhere(facts: ModelFacts) -> list[frozenset[Component]]:
    return [frozenset({"attention"})] * facts.num_layers


def _no_keys(_facts: ModelFacts, _lo: int, _hi: int) -> dict[str, int | list[bool]]:
    return {}


def _no_problem(_facts: ModelFacts, _lo: int, _hi: int) -> str | None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One KV class.

    ``architectures`` are GGUF ``general.architecture`` names. ``step_rule`` says whether a step may
    mix prefill and decode rows of several sequences, or holds decode rows only or one sequence's
    chunk. ``prefix_rule`` says which prefixes can be copied: any, those whose window is whole, or
    exact snapshot boundaries. ``refused_keys``, when a file has them, mean layers this row has no
    rule for. ``slice_keys`` are the metadata a slice needs beside the plainly sliced ones, and
    ``slice_problem`` why a slice cannot be made. ``scaled_input`` names the graph node by which a
    family multiplies whatever it is fed, once too often on later stages. ``pinned_cuts`` are the
    cuts of the real models that are served and tested by name.
    """

    name: str
    architectures: tuple[str, ...]
    components: tuple[Component, ...]
    step_rule: Literal["mixed", "homogeneous"]
    prefix_rule: Literal["any", "window", "boundary"]
    pinned_cuts: tuple[int, ...]
    refused_keys: tuple[str, ...] = ()
    layer_kinds: LayerKinds = field(default=_attention_everywhere)
    slice_keys: SliceKeys = field(default=_no_keys)
    slice_problem: SliceProblem = field(default=_no_problem)
    scaled_input: str = ""

    @property
    def is_proven(self) -> bool:
        return self.name != "unproven"

    @property
    def is_recurrent(self) -> bool:
        return "recurrent" in self.components


def _window_layers(facts: ModelFacts) -> list[bool]:
    """gemma2 windows every other layer, the first one included, unless the file says otherwise."""
    pattern = facts.keys.get("attention.sliding_window_pattern", 2)
    if isinstance(pattern, list):
        return [bool(is_window) for is_window in pattern[: facts.num_layers]]
    return [pattern == 0 or layer % pattern < pattern - 1 for layer in range(facts.num_layers)]


def _window_kinds(facts: ModelFacts) -> list[frozenset[Component]]:
    return [
        frozenset({"window"}) if is_window else frozenset({"attention"})
        for is_window in _window_layers(facts)
    ]


def _window_keys(facts: ModelFacts, lo: int, hi: int) -> dict[str, int | list[bool]]:
    # llama.cpp counts the period from a file's own first layer: after an odd cut it would flip.
    return {"attention.sliding_window_pattern": _window_layers(facts)[lo:hi]}


def _window_problem(facts: ModelFacts, _lo: int, _hi: int) -> str | None:
    if facts.num_layers == 46:
        return (
            "gemma2 with 46 layers (27B) takes its attention scale from the number of layers, "
            "which a slice cannot keep: serve it with --stages 1, or use the 2B or 9B"
        )
    return None


_LITE_LAYERS = (26, 27)
_SOFTMAX, _SIGMOID = 1, 2  # enum llama_expert_gating_func_type


def _mla_keys(facts: ModelFacts, _lo: int, _hi: int) -> dict[str, int | list[bool]]:
    # llama.cpp knows the lite models, and which gate an old file means, by counts of layers and
    # vocabulary that a slice no longer has.
    gate = facts.keys.get("expert_gating_func", 0)
    if not gate:
        is_glm_lite = facts.num_layers in (47, 48) and facts.num_vocab == 154880
        gate = _SIGMOID if is_glm_lite else _SOFTMAX
    return {
        "attention.q_lora_rank": int(facts.keys.get("attention.q_lora_rank", 0)),
        "expert_gating_func": int(gate),
    }


def _mla_problem(facts: ModelFacts, lo: int, hi: int) -> str | None:
    if facts.keys.get("attention.q_lora_rank", 0) and hi - lo in _LITE_LAYERS:
        return (
            f"llama.cpp takes any deepseek2 file of {hi - lo} layers for a lite model, which this "
            f"one is not: choose a cut that leaves no stage with 26 or 27 layers"
        )
    return None


def _hybrid_everywhere(facts: ModelFacts) -> list[frozenset[Component]]:
    return [frozenset({"attention", "recurrent"})] * facts.num_layers


def _recurrent_layers(facts: ModelFacts) -> list[bool]:
    """qwen3next: three linear-attention layers, then one of full attention, unless told."""
    told = facts.keys.get("attention.recurrent_layers")
    if isinstance(told, list):
        return [bool(is_recurrent) for is_recurrent in told[: facts.num_layers]]
    period = int(facts.keys.get("full_attention_interval", 4))
    return [(layer + 1) % period != 0 for layer in range(facts.num_layers)]


def _recurrent_kinds(facts: ModelFacts) -> list[frozenset[Component]]:
    return [
        frozenset({"recurrent"}) if is_recurrent else frozenset({"attention"})
        for is_recurrent in _recurrent_layers(facts)
    ]


def _recurrent_keys(facts: ModelFacts, lo: int, hi: int) -> dict[str, int | list[bool]]:
    return {"attention.recurrent_layers": _recurrent_layers(facts)[lo:hi]}


DENSE = Family(
    name="dense",
    architectures=("llama",),
    components=("attention",),
    step_rule="mixed",
    prefix_rule="any",
    pinned_cuts=(5, 11),
    refused_keys=("attention.sliding_window", "interleave_moe_layer_step", "expert_count"),
)
MLA = Family(
    name="mla",
    architectures=("deepseek2",),
    components=("attention",),
    step_rule="mixed",
    prefix_rule="any",
    pinned_cuts=(9, 18),
    slice_keys=_mla_keys,
    slice_problem=_mla_problem,
)
WINDOW = Family(
    name="window",
    architectures=("gemma2",),
    components=("attention", "window"),
    step_rule="mixed",
    prefix_rule="window",
    pinned_cuts=(9, 17),
    layer_kinds=_window_kinds,
    slice_keys=_window_keys,
    slice_problem=_window_problem,
    scaled_input="inp_scaled",
)
SSM = Family(
    name="ssm",
    architectures=("falcon-h1",),
    components=("attention", "recurrent"),
    step_rule="homogeneous",
    prefix_rule="boundary",
    pinned_cuts=(8, 16),
    layer_kinds=_hybrid_everywhere,
)
LINEAR = Family(
    name="linear",
    architectures=("qwen3next",),
    components=("attention", "recurrent"),
    step_rule="homogeneous",
    prefix_rule="boundary",
    pinned_cuts=(16, 32),
    layer_kinds=_recurrent_kinds,
    slice_keys=_recurrent_keys,
)

# What files of architectures with other memory than plain attention carry.
_OTHER_MEMORY_KEYS = (
    "ssm.conv_kernel", "ssm.state_size", "wkv.head_size", "shortconv.l_cache",
    "attention.kv_lora_rank", "full_attention_interval", "attention.recurrent_layers",
    "attention.shared_kv_layers", "attention.chunk_size",
)  # fmt: skip
FAMILIES = (DENSE, MLA, WINDOW, SSM, LINEAR)


_SCALES_INPUT = ("gemma", "minicpm3")


def family_of(architecture: str, *, allow_unproven: bool = False) -> Family:
    """The family of an architecture, or :class:`UnsupportedModelError` naming those that work.

    With ``allow_unproven`` an unknown architecture is taken for a dense one: nothing shows that its
    slices compute what the whole does, and a file with any other kind of memory is still refused.
    """
    for family in FAMILIES:
        if architecture in family.architectures:
            return family
    if allow_unproven:
        return replace(
            DENSE,
            name="unproven",
            architectures=(architecture,),
            pinned_cuts=(),
            refused_keys=(*DENSE.refused_keys, *_OTHER_MEMORY_KEYS),
            scaled_input="inp_scaled" if architecture.startswith(_SCALES_INPUT) else "",
        )
    known = ", ".join(name for family in FAMILIES for name in family.architectures)
    raise UnsupportedModelError(
        f"architecture {architecture!r} is not supported: no proven way to cut it "
        f"(supported: {known}); --allow-unproven takes it for a dense model"
    )


def check_slice(family: Family, facts: ModelFacts, lo: int, hi: int) -> None:
    """:class:`UsageError` unless layers [lo, hi) can be a stage of their own.

    A stage without a layer of some memory kind makes llama.cpp abort the process, so this comes
    before it sees the slice. The undivided model is always legal.
    """
    if not 0 <= lo < hi <= facts.num_layers:
        raise UsageError(
            f"layers {lo}:{hi} cannot be cut from a model of {facts.num_layers} layers: "
            f"choose LO:HI with 0 <= LO < HI <= {facts.num_layers}"
        )
    if hi - lo == facts.num_layers:
        return
    present = frozenset[Component]().union(*family.layer_kinds(facts)[lo:hi])
    missing = [kind for kind in family.components if kind not in present]
    if missing:
        raise UsageError(
            f"layers {lo}:{hi} of this {facts.architecture} model hold no {missing[0]} layer, and "
            f"a stage needs one of each kind ({', '.join(family.components)}): move the cut"
        )
    problem = family.slice_problem(facts, lo, hi)
    if problem:
        raise UsageError(problem)


def check_cuts(family: Family, facts: ModelFacts, cuts: Sequence[int]) -> tuple[int, ...]:
    """The given inner borders; :class:`UsageError` unless every stage between them is legal."""
    borders = (0, *cuts, facts.num_layers)
    if any(lo >= hi for lo, hi in itertools.pairwise(borders)):
        raise UsageError(
            f"cuts {','.join(map(str, cuts))} are not legal for a model of {facts.num_layers} "
            f"layers: they must rise and lie between 1 and {facts.num_layers - 1}"
        )
    for lo, hi in itertools.pairwise(borders):
        check_slice(family, facts, lo, hi)
    return tuple(cuts)


def legal_cuts(family: Family, facts: ModelFacts) -> list[int]:
    """Every border that alone cuts the model into two legal stages."""
    found = []
    for cut in range(1, facts.num_layers):
        try:
            check_cuts(family, facts, (cut,))
        except UsageError:
            continue
        found.append(cut)
    return found


def even_cuts(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Cut ``num_layers`` into ``num_stages`` runs whose lengths differ by at most one.

    Returns the ``num_stages - 1`` inner borders. The earlier stages are the longer ones: the last
    stage also computes the output head.
    """
    if not 1 <= num_stages <= num_layers:
        raise UsageError(
            f"cannot cut {num_layers} layers into {num_stages} stages: "
            f"choose from 1 to {num_layers}"
        )
    base, longer = divmod(num_layers, num_stages)
    borders, at = [], 0
    for stage in range(num_stages - 1):
        at += base + (stage < longer)
        borders.append(at)
    return tuple(borders)
