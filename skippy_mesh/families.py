"""The model families that can be cut: one row per KV class, and the rules of each.

A family is proven, not assumed: a row is here because tests show its slices bit-equal to the
undivided model at every legal cut. Five *gate* rows stand for the KV classes; a *confirmation* row
is a look-alike of one of them, with what llama.cpp does differently for it. Everything else is
refused. What a row says about llama.cpp was read in its ``src/models/<architecture>.cpp`` and
measured; the tests hold it.
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
    """One KV class, or a look-alike: ``confirms`` names the gate row whose class it shares.

    ``architectures`` are GGUF ``general.architecture`` names. ``step_rule`` says whether a step may
    mix prefill and decode rows of several sequences, or holds decode rows only or one sequence's
    chunk. ``prefix_rule`` says which prefixes can be copied: any, those whose window is whole, or
    exact snapshot boundaries. ``refused_keys``, when a file has them, mean layers this row has no
    rule for. ``slice_keys`` are the metadata a slice needs beside the plainly sliced ones, and
    ``slice_problem`` why a slice cannot be made. ``scaled_input`` names the graph node by which a
    family multiplies whatever it is fed, once too often on later stages. ``pinned_cuts`` are the
    cuts of the real models that are served and tested by name.

    The rest is how llama.cpp takes a slice's input and head. ``scales_tokens``: it multiplies the
    embeddings of token ids by the root of the width, but not rows it is fed. ``takes_rows``:
    unless it does, it ends the process when fed rows in place of ids. ``needs_head``: it wants
    ``output.weight`` under that name and never takes ``token_embd.weight`` for it.
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
    scales_tokens: bool = False
    takes_rows: bool = True
    needs_head: bool = False
    confirms: str = ""

    @property
    def is_proven(self) -> bool:
        return self.name != "unproven"

    @property
    def is_recurrent(self) -> bool:
        return "recurrent" in self.components


_WINDOW_PERIODS = {"gemma2": 2, "gemma3": 6}


def _window_layers(facts: ModelFacts) -> list[bool]:
    """Each period ends with a layer that sees everything, unless the file says otherwise. gemma4
    files always do."""
    period = _WINDOW_PERIODS.get(facts.architecture, 1)
    pattern = facts.keys.get("attention.sliding_window_pattern", period)
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


def _gemma3_problem(facts: ModelFacts, _lo: int, _hi: int) -> str | None:
    if facts.num_layers == 62:
        return (
            "gemma3 with 62 layers (27B) takes its attention scale from the number of layers, "
            "which a slice cannot keep: serve it with --stages 1, or use the 1B, 4B or 12B"
        )
    if not facts.keys.get("attention.sliding_window", 0):
        return "a gemma3 model without a sliding window has no proven cut: serve it with --stages 1"
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


def _like(gate: Family, architecture: str, *pinned_cuts: int, **differences: Any) -> Family:
    """A confirmation row: ``gate``'s class, and no more refused than ``differences`` say."""
    own = {"confirms": gate.name, "pinned_cuts": pinned_cuts, "refused_keys": ()} | differences
    return replace(gate, name=architecture, architectures=(architecture,), **own)


_SPECIAL_LAYERS = (
    "embedding_length_per_layer_input", "attention.shared_kv_layers", "expert_count",
)  # fmt: skip
_VISION, _OLMO_3 = ("rope.dimension_sections",), ("attention.sliding_window",)

GLM4 = _like(DENSE, "glm4", 13, 27, refused_keys=_VISION, takes_rows=False)
OLMO = _like(DENSE, "olmo", 11, 21)
OLMO2 = _like(DENSE, "olmo2", 11, 21, refused_keys=_OLMO_3, needs_head=True)
_GEMMA: dict[str, Any] = {"scaled_input": "", "scales_tokens": True}
GEMMA3 = _like(WINDOW, "gemma3", 11, 23, slice_problem=_gemma3_problem, **_GEMMA)
GEMMA4 = _like(
    WINDOW, "gemma4", 21, 41, refused_keys=_SPECIAL_LAYERS, slice_problem=_no_problem, **_GEMMA
)
FAMILIES = (DENSE, MLA, WINDOW, SSM, LINEAR, GLM4, OLMO, OLMO2, GEMMA3, GEMMA4)


def gate_families() -> tuple[Family, ...]:
    """One row per KV class; the others confirm one of these."""
    return tuple(family for family in FAMILIES if not family.confirms)


# Why no stage can be right, whatever is asked.
_NEVER_CUT = {
    "gemma3n": "each layer takes a row of its own for every token, and late layers read early "
    "layers' memory, so no stage has what it needs",
}
_WHY_REFUSED = {
    "embedding_length_per_layer_input": "each layer takes a row of its own for every token, which "
    "no stage is fed",
    "attention.shared_kv_layers": "late layers read early layers' memory, on another stage",
}


def why_refused(key: str) -> str:
    """What is wrong with a file that has one of its family's ``refused_keys``."""
    return _WHY_REFUSED.get(key, "no proven way to cut such a model")


# What files of architectures with other memory or input than plain attention's carry.
_OTHER_KEYS = (
    "ssm.conv_kernel", "ssm.state_size", "wkv.head_size", "shortconv.l_cache",
    "attention.kv_lora_rank", "full_attention_interval", "attention.recurrent_layers",
    "attention.chunk_size", "embedding_scale", *_WHY_REFUSED,
)  # fmt: skip
_SCALES_INPUT = ("gemma", "minicpm3")


def family_of(architecture: str, *, allow_unproven: bool = False) -> Family:
    """The family of an architecture, or :class:`UnsupportedModelError` naming those that work.

    With ``allow_unproven`` an unknown architecture is taken for a dense one: nothing shows that its
    slices compute what the whole does, and a file with any other kind of memory is still refused.
    """
    if architecture in _NEVER_CUT:
        raise UnsupportedModelError(
            f"architecture {architecture!r} is not supported: {_NEVER_CUT[architecture]}"
        )
    for family in FAMILIES:
        if architecture in family.architectures:
            return family
    if allow_unproven:
        return replace(
            DENSE,
            name="unproven",
            architectures=(architecture,),
            pinned_cuts=(),
            refused_keys=(*DENSE.refused_keys, *_OTHER_KEYS),
            scaled_input="inp_scaled" if architecture.startswith(_SCALES_INPUT) else "",
            needs_head=True,
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
