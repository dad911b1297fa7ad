"""What the self-test looks at: the fewest layers in which every kind of layer of a stage appears.

Which kernel multiplies a matrix is a matter of its type and shape, so a layer says nothing that
another one with the same tensors and the same memory has not said. There are two views:

* logits, on the last stage: the head cannot be reached without the layers before it, so a slice of
  the last layers and the head. The head's height enters the choice of a kernel by what divides it
  and by each thread's having a share, so some of its rows stand for all. The hidden states before
  the head are looked at, too: a quantised head rounds away most of what differs, until one day it
  does not;
* hidden states, for the kinds of layers that the logits have not seen: the loaded stage itself, its
  graph stopped as soon as every kind has been. Nothing is copied, and the weights are the very ones
  that will serve. Where a run of layers further on is shorter than that beginning, a slice of the
  run instead.

Slices are cut for the occasion. A view is a function from the self-test's configuration to a
context that closes itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from skippy_mesh.config import ContextConfig, PrefixRule, StageSpec, StepRules
from skippy_mesh.errors import UsageError
from skippy_mesh.families import Family, check_slice
from stages.context import StageContext
from stages.gguf_file import ModelFile, split_block_name
from stages.profile import Profile, replays_in_chunks
from stages.slices import temporary_slice

View = Callable[[ContextConfig], AbstractContextManager[StageContext]]

_HEAD_ROWS = 4096


def shortest_run(
    signatures: Sequence[Hashable],
    is_legal: Callable[[int, int], bool],
    *,
    seen: Collection[Hashable] = (),
) -> tuple[int, int]:
    """The shortest [lo, hi) that holds every one of ``signatures`` but those ``seen``, and of such
    runs the first; (0, 0) if all were seen.

    The beginning needs no slice of its own; any other run must be legal.
    """
    needed, total = set(signatures).difference(seen), len(signatures)
    if not needed:
        return 0, 0
    for length in range(len(needed), total):
        for lo in range(total - length + 1):
            if needed <= set(signatures[lo : lo + length]) and (
                lo == 0 or is_legal(lo, lo + length)
            ):
                return lo, lo + length
    return 0, total


def first_layer_of_head(num_layers: int, first: int, is_legal: Callable[[int, int], bool]) -> int:
    """Where the shortest legal slice begins that ends with the model's ``num_layers``; the stage's
    own ``first`` layer where no later one is legal."""
    later = range(num_layers - 1, first, -1)
    return next((layer for layer in later if is_legal(layer, num_layers)), first)


def rows_of_head(num_vocab: int, num_threads: int) -> int:
    """How many rows of a head of ``num_vocab`` stand for all of them.

    The least with the same remainder by every power of two up to :data:`_HEAD_ROWS`, and with
    enough tiles of 16 rows for four a thread: of these llama.cpp makes its choice.
    """
    unit = _HEAD_ROWS
    while unit < 64 * num_threads:
        unit *= 2
    return num_vocab if num_vocab < 2 * unit else unit + num_vocab % unit


def layer_signatures(model: ModelFile, lo: int, hi: int) -> list[Hashable]:
    """For each of layers [lo, hi) what decides its kernels: its kinds of memory, its tensors with
    their types and shapes, and what the metadata says of this layer alone."""
    tensors: dict[int, set[Hashable]] = {layer: set() for layer in range(lo, hi)}
    for tensor in model.tensors.values():
        block = split_block_name(tensor.name)
        if block and block[0] in tensors:
            tensors[block[0]].add((block[1], tensor.type.name, tensor.shape))
    kinds = model.family.layer_kinds(model.facts)
    per_layer = [
        value
        for value in model.facts.keys.values()
        if isinstance(value, list) and len(value) == model.num_blocks
    ]
    return [
        (kinds[layer], frozenset(tensors[layer]), tuple(value[layer] for value in per_layer))
        for layer in range(lo, hi)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A stage that has been loaded, and from what."""

    model: ModelFile
    spec: StageSpec
    profile: Profile
    path: Path
    context: StageContext

    def can_cut(self, lo: int, hi: int) -> bool:
        """Whether layers [lo, hi) can be a slice of their own."""
        try:
            check_slice(self.model.family, self.model.facts, lo, hi)
        except UsageError:
            return False
        return True


def views_of(stage: Loaded) -> list[View]:
    """The logits of the last stage, and of every stage the hidden states these do not show."""
    own, end = stage.spec.first_layer, stage.spec.end_layer
    signatures = layer_signatures(stage.model, own, end)
    views: list[View] = []
    seen: Sequence[Hashable] = ()
    if stage.spec.is_last:
        first = first_layer_of_head(end, own, stage.can_cut)
        views.append(functools.partial(_logits, stage, first))
        seen = signatures[first - own :]
    lo, hi = shortest_run(signatures, lambda lo, hi: stage.can_cut(own + lo, own + hi), seen=seen)
    if hi:
        views.append(functools.partial(_hidden_states, stage, lo, hi))
    return views


@contextmanager
def _hidden_states(
    stage: Loaded, lo: int, hi: int, config: ContextConfig
) -> Iterator[StageContext]:
    own = stage.spec.first_layer
    context = _of_slice(stage, config, own + lo, own + hi, is_last=False) if lo else None
    if context is None:
        # With no room for a file, all layers up to that run's end: they hold it.
        context = _of_stage(stage, config, is_last=False, num_layers=hi)
    try:
        yield context
    finally:
        context.close()


@contextmanager
def _logits(stage: Loaded, first: int, config: ContextConfig) -> Iterator[StageContext]:
    """Of the layers from ``first`` on."""
    own, end = stage.spec.first_layer, stage.spec.end_layer
    context = _of_slice(stage, config, first, end, is_last=True) if first > own else None
    if context is None:
        context = _of_stage(stage, config, is_last=True)
    try:
        yield context
    finally:
        context.close()


def _of_stage(
    stage: Loaded, config: ContextConfig, *, is_last: bool, num_layers: int | None = None
) -> StageContext:
    """All layers as loaded, or the first of them."""
    return new_context(
        stage.model, stage.path, config, first_layer=stage.spec.first_layer, is_last=is_last,
        profile=stage.profile, weights_of=stage.context, stop_after_layers=num_layers,
        keeps_hidden=is_last,
    )  # fmt: skip


def _of_slice(
    stage: Loaded, config: ContextConfig, lo: int, hi: int, *, is_last: bool
) -> StageContext | None:
    """Layers [lo, hi) by themselves; None where there is no room for a file."""
    max_vocab = rows_of_head(stage.model.num_vocab, config.num_threads)
    with temporary_slice(stage.model, lo, hi, max_vocab=max_vocab) as path:
        if path is None:
            return None
        return new_context(
            stage.model, path, config, first_layer=lo, is_last=is_last, profile=stage.profile,
            keeps_hidden=is_last,
        )  # fmt: skip


def new_context(
    model: ModelFile,
    path: Path,
    config: ContextConfig,
    *,
    first_layer: int,
    is_last: bool,
    profile: Profile,
    weights_of: StageContext | None = None,
    stop_after_layers: int | None = None,
    keeps_hidden: bool = False,
) -> StageContext:
    """A context over ``path``, the slice of ``model`` that begins at ``first_layer``."""
    return StageContext(
        path,
        config,
        is_last=is_last,
        is_recurrent=model.family.is_recurrent,
        scaled_input=model.family.scaled_input if first_layer else "",
        takes_rows=model.family.takes_rows,
        profile=profile,
        weights_of=weights_of,
        stop_after_layers=stop_after_layers,
        keeps_hidden=keeps_hidden,
    )


def _prefix_rule(family: Family) -> PrefixRule:
    """Windows are kept whole (context.py), so their prefixes are like any other's. Of an unproven
    architecture nobody knows what a copy copies."""
    if not family.is_proven:
        return "none"
    return "boundary" if family.prefix_rule == "boundary" else "any"


def rules_of(stage: Loaded) -> StepRules:
    """What a step of this stage may hold."""
    family = stage.model.family
    return StepRules(
        max_rows=stage.context.max_rows,
        is_homogeneous=family.step_rule == "homogeneous",
        chunk_multiple=stage.profile.pad if family.is_recurrent else 1,
        replays_in_chunks=replays_in_chunks(family, stage.model.tensors),
        prefix_rule=_prefix_rule(family),
    )
