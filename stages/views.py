"""What the self-test looks at: the fewest layers in which every kind of layer of a stage appears.

Which kernel multiplies a matrix is a matter of its type and shape, so a layer says nothing that
another one with the same tensors and the same memory has not said. There are two views:

* logits, on the last stage: the head cannot be reached without the layers before it, so a slice of
  the last layers and the head. The head's height enters the choice of a kernel by what divides it
  and by each thread's having a share, so some of its rows stand for all. The hidden states before
  the head are looked at, too: a quantised head rounds away most of what differs, until one day it
  does not;
* hidden states, for the kinds of layers that the logits have not seen: the first run of layers that
  has them all.

Each is a slice cut for the occasion, in memory, of the very bytes that will serve. So the test need
not wait for the stage, and runs while that is cut and read. Where a run cannot be cut, or there is
no room for it, the view is the loaded stage itself, its graph stopped as soon as every kind has
been. A view is a function from the self-test's configuration to a context that closes itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from skippy_mesh.config import ContextConfig
from stages.context import StageContext
from stages.gguf_file import ModelFile, split_block_name
from stages.part import Part, new_context
from stages.slices import temporary_slice
from stages.weights import Weights

View = Callable[[ContextConfig], AbstractContextManager[StageContext]]
GetWeights = Callable[[], Weights]
"""Those of the whole stage; waits until they are loaded."""

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


def views_of(part: Part, weights: GetWeights) -> list[View]:
    """The logits of the last stage, and of every stage the hidden states these do not show."""
    own, end = part.spec.first_layer, part.spec.end_layer
    signatures = layer_signatures(part.model, own, end)
    views: list[View] = []
    seen: Sequence[Hashable] = ()
    if part.spec.is_last:
        first = first_layer_of_head(end, own, part.can_cut)
        views.append(functools.partial(_logits, part, weights, first))
        seen = signatures[first - own :]
    lo, hi = shortest_run(signatures, lambda lo, hi: part.can_cut(own + lo, own + hi), seen=seen)
    if hi:
        views.append(functools.partial(_hidden_states, part, weights, lo, hi))
    return views


@contextmanager
def _hidden_states(
    part: Part, weights: GetWeights, lo: int, hi: int, config: ContextConfig
) -> Iterator[StageContext]:
    own = part.spec.first_layer
    context = None
    if hi - lo < part.num_layers and part.can_cut(own + lo, own + hi):
        context = _of_slice(part, config, own + lo, own + hi, is_last=False)
    if context is None:
        # All layers up to that run's end hold it.
        context = new_context(part, weights(), config, is_last=False, stop_after_layers=hi)
    try:
        yield context
    finally:
        context.close()


@contextmanager
def _logits(
    part: Part, weights: GetWeights, first: int, config: ContextConfig
) -> Iterator[StageContext]:
    """Of the layers from ``first`` on."""
    context = None
    if first > part.spec.first_layer:
        context = _of_slice(part, config, first, part.spec.end_layer, is_last=True)
    if context is None:
        context = new_context(part, weights(), config, is_last=True, keeps_hidden=True)
    try:
        yield context
    finally:
        context.close()


def _of_slice(
    part: Part, config: ContextConfig, lo: int, hi: int, *, is_last: bool
) -> StageContext | None:
    """Layers [lo, hi) by themselves; None where there is no room for them."""
    # Repacked, they are there twice for a moment.
    max_bytes = None if part.spare_bytes is None else part.spare_bytes // 2
    max_vocab = rows_of_head(part.model.num_vocab, config.num_threads)
    with temporary_slice(part.model, lo, hi, max_vocab=max_vocab, max_bytes=max_bytes) as path:
        if path is None:
            return None
        return new_context(
            part, path, config, is_last=is_last, first_layer=lo, keeps_hidden=is_last
        )
