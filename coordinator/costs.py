"""What a stage costs: bytes per layer, per cell and per sequence id, as a file's header tells.

Integers throughout, rounded up: a float flips exactly the plans that just fit. Read of llama.cpp:
which layers get cells and how wide (``llama_kv_cache``), what a state row holds
(``llama_hparams::n_embd_r`` and ``n_embd_s``, float32), and that MLA's cache has no V. What a step
takes for its graph was measured with llama.cpp's dry run (tests/e2e/test_plan_bytes.py).
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from skippy_mesh.config import BYTES_PER_CELL, MAX_PAD, MemoryNeed, kv_bytes, pool_size, priced
from skippy_mesh.errors import UsageError
from skippy_mesh.families import Family, ModelFacts, check_slice
from skippy_mesh.messages import MAX_LANES

STEP_ROWS = 512
PROCESS_BYTES = 256 * 2**20
"""Of a stage, before it loads anything: Python, Ray's worker, llama.cpp's own."""

_BLOCK = re.compile(r"blk\.(\d+)\.")
_TABLE, _HEAD = "token_embd.weight", "output."
_MASK_VALUE_BYTES = 2  # f16 with flash attention
_FLOAT_BYTES = 4
_STEP_WIDTHS = 24  # of a row, alive at once in a layer: 15 to 22 measured in the five classes
_STEP_STATES = 2  # rows per id that a step gathers and writes back, one layer at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCosts:
    """Bytes of one layer: its weights, each cell of the pools it has, each sequence id."""

    weights: int
    attention_per_cell: int = 0
    window_per_cell: int = 0
    recurrent_per_id: int = 0


def _any_slice(_lo: int, _hi: int) -> str | None:
    return None


def _no_spare(num_cells: int) -> int:
    return num_cells


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCosts:
    """Bytes of a model, in stages to be made.

    The first stage holds ``embedding``, the last ``head`` and ``logits``, every one ``common`` (the
    process, a step's rows, tensors of no layer) and ``per_cell`` for each cell of its pool,
    whatever its layers; where there are states, ``per_id`` for each id. ``pool_of`` makes the cells
    sessions may use into those that are allocated. ``why_illegal`` says why layers [lo, hi) cannot
    be a stage, None if they can. ``min_legal_layers`` are enough, wherever they begin, for a stage
    to hold each kind of layer.
    """

    layers: tuple[LayerCosts, ...]
    native_context: int
    embedding: int = 0
    head: int = 0
    logits: int = 0
    common: int = 0
    per_cell: int = 0
    per_id: int = 0
    frame: int = 0
    pool_of: Callable[[int], int] = _no_spare
    why_illegal: Callable[[int, int], str | None] = _any_slice
    min_legal_layers: int = 1

    @property
    def components(self) -> tuple[str, ...]:
        names = {
            "attention": any(layer.attention_per_cell for layer in self.layers),
            "window": any(layer.window_per_cell for layer in self.layers),
            "recurrent": any(layer.recurrent_per_id for layer in self.layers),
        }
        return tuple(name for name, is_present in names.items() if is_present)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBytes:
    """What one stage takes. ``attention`` and ``window`` are priced at 100/85."""

    weights: int
    embedding: int
    head: int
    recurrent: int
    attention: int
    window: int
    buffers: int

    @property
    def total(self) -> int:
        return sum(self.by_term().values())

    def by_term(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in self.__slots__}


class StageSizes:
    """Bytes of any run of layers [lo, hi), for pools of ``num_cells`` and ``num_ids`` ids."""

    def __init__(self, costs: ModelCosts, *, num_cells: int, num_ids: int):
        self.costs, self.num_ids = costs, num_ids
        self.num_layers = len(costs.layers)
        self.pool = costs.pool_of(num_cells)
        self._every_stage = costs.common + costs.per_cell * self.pool
        self._reaches: dict[tuple[int, int], int] = {}
        self._weights = _sums(layer.weights for layer in costs.layers)
        self._attention = _sums(layer.attention_per_cell for layer in costs.layers)
        self._window = _sums(layer.window_per_cell for layer in costs.layers)
        self._recurrent = _sums(layer.recurrent_per_id for layer in costs.layers)

    def parts(self, lo: int, hi: int) -> StageBytes:
        is_first, is_last = lo == 0, hi == self.num_layers
        costs = self.costs
        return StageBytes(
            weights=self._weights[hi] - self._weights[lo],
            embedding=costs.embedding if is_first else 0,
            head=costs.head if is_last else 0,
            recurrent=self.recurrent_per_id(lo, hi) * self.num_ids,
            attention=priced(self.pool * (self._attention[hi] - self._attention[lo])),
            window=priced(self.pool * (self._window[hi] - self._window[lo])),
            buffers=self._every_stage + (costs.logits if is_last else 0),
        )

    def need(self, lo: int, hi: int) -> MemoryNeed:
        """The same as what the stage itself has to go by."""
        parts, costs = self.parts(lo, hi), self.costs
        cell_bytes = {
            "attention": self._attention[hi] - self._attention[lo],
            "window": self._window[hi] - self._window[lo],
            "recurrent": self._recurrent[hi] - self._recurrent[lo],
        }
        return MemoryNeed(
            weights=parts.weights + parts.embedding + parts.head,
            buffers=costs.common + (costs.logits if hi == self.num_layers else 0),
            per_cell=costs.per_cell,
            kv_per_cell=cell_bytes["attention"] + cell_bytes["window"],
            per_id=self.recurrent_per_id(lo, hi),
            cell_bytes=cell_bytes,
        )

    def total(self, lo: int, hi: int) -> int:
        """What :meth:`parts` come to, without making them: a plan asks some thousand times."""
        costs = self.costs
        num_bytes = self._every_stage + self._weights[hi] - self._weights[lo]
        num_bytes += self.recurrent_per_id(lo, hi) * self.num_ids
        num_bytes += priced(self.pool * (self._attention[hi] - self._attention[lo]))
        num_bytes += priced(self.pool * (self._window[hi] - self._window[lo]))
        if lo == 0:
            num_bytes += costs.embedding
        if hi == self.num_layers:
            num_bytes += costs.head + costs.logits
        return num_bytes

    def recurrent_per_id(self, lo: int, hi: int) -> int:
        return self._recurrent[hi] - self._recurrent[lo] + self.costs.per_id

    def work(self, lo: int, hi: int) -> int:
        """Bytes of weights a step of one row reads: the table of embeddings is only looked up."""
        head = self.costs.head if hi == self.num_layers else 0
        return self._weights[hi] - self._weights[lo] + head

    def crowd_work(self, lo: int, hi: int) -> int:
        """What many sessions' rows cost, up to a factor: only those that sample need the head, one
        row in three where prompts are twice as long as answers."""
        layers = self._weights[hi] - self._weights[lo]
        return 2 * layers + self.work(lo, hi)

    def reach(self, usable_bytes: int, lo: int) -> int:
        """The furthest ``hi`` for which layers [lo, hi) fit; ``lo`` if not even one does."""
        asked = (usable_bytes, lo)
        if asked not in self._reaches:
            ends = range(lo + 1, self.num_layers + 1)
            num_layers = bisect_right(ends, usable_bytes, key=lambda hi: self.total(lo, hi))
            self._reaches[asked] = lo + num_layers
        return self._reaches[asked]


def _sums(numbers: Any) -> list[int]:
    return list(itertools.accumulate(numbers, initial=0))


def costs_of(
    family: Family, facts: ModelFacts, tensors: Mapping[str, int], *, width: int, kv_type: str
) -> ModelCosts:
    """The costs of a model file, from its metadata and the bytes of each of its tensors."""
    kinds = family.layer_kinds(facts)
    weights = [0] * facts.num_layers
    common = PROCESS_BYTES
    for name, num_bytes in tensors.items():
        block = _BLOCK.match(name)
        if block and int(block[1]) < facts.num_layers:
            weights[int(block[1])] += num_bytes
        elif not block and name != _TABLE and not name.startswith(_HEAD):
            common += num_bytes
    num_pools = len({"attention", "window"} & set(family.components))
    step_rows = _FLOAT_BYTES * STEP_ROWS * _STEP_WIDTHS * width
    logits = _FLOAT_BYTES * STEP_ROWS * facts.num_vocab  # in the same place, when those are done
    return ModelCosts(
        layers=tuple(
            _layer_costs(facts, layer, kinds[layer], weights[layer], kv_type)
            for layer in range(facts.num_layers)
        ),
        native_context=int(facts.keys["context_length"]),
        embedding=tensors[_TABLE],
        head=_head_bytes(family, tensors),
        logits=max(logits - step_rows, 0) + _FLOAT_BYTES * MAX_LANES * facts.num_vocab,
        common=common + step_rows,
        per_cell=num_pools * (BYTES_PER_CELL + _MASK_VALUE_BYTES * STEP_ROWS),
        per_id=_STEP_STATES * _state_bytes(facts) if family.is_recurrent else 0,
        frame=_FLOAT_BYTES * width,
        pool_of=lambda num_cells: pool_size(num_cells, pad=MAX_PAD),
        why_illegal=_legality(family, facts),
        min_legal_layers=_min_legal_layers(family, facts),
    )


def _head_bytes(family: Family, tensors: Mapping[str, int]) -> int:
    """As stages/slices.py cuts it: a tied table is the head, too, and is there twice."""
    head = {name: size for name, size in tensors.items() if name.startswith(_HEAD)}
    is_alone = list(head) == [f"{_HEAD}weight"] and not family.needs_head
    return sum(head.values()) + (0 if is_alone else tensors[_TABLE])


def _layer_costs(
    facts: ModelFacts, layer: int, kinds: frozenset[str], weights: int, kv_type: str
) -> LayerCosts:
    def cells(kind: str) -> int:
        return _cell_bytes(facts, layer, kv_type, kind == "window") if kind in kinds else 0

    return LayerCosts(
        weights=weights,
        attention_per_cell=cells("attention"),
        window_per_cell=cells("window"),
        recurrent_per_id=_state_bytes(facts) if "recurrent" in kinds else 0,
    )


def _cell_bytes(facts: ModelFacts, layer: int, kv_type: str, is_window: bool) -> int:
    """K and V of one token in one layer."""

    def of_layer(key: str, default: int) -> int:
        found = facts.keys.get(key, default)
        return int(found[layer] if isinstance(found, list) else found)

    num_heads = of_layer("attention.head_count", 1)
    num_kv_heads = of_layer("attention.head_count_kv", num_heads)
    head_width = int(facts.keys["embedding_length"]) // max(num_heads, 1)
    lengths = {}
    for part in ("key", "value"):
        length = of_layer(f"attention.{part}_length", head_width)
        lengths[part] = of_layer(f"attention.{part}_length_swa", length) if is_window else length
    key = kv_bytes(kv_type, num_kv_heads * lengths["key"])
    if facts.keys.get("attention.key_length_mla") and facts.keys.get("attention.value_length_mla"):
        return key
    return key + kv_bytes(kv_type, num_kv_heads * lengths["value"])


def _state_bytes(facts: ModelFacts) -> int:
    """One sequence's row in one recurrent layer: the inputs its convolution looks back on, and
    its state."""
    inner, state, groups, kernel = (
        int(facts.keys.get(f"ssm.{key}", 0))
        for key in ("inner_size", "state_size", "group_count", "conv_kernel")
    )
    conv = max(kernel - 1, 0) * (inner + 2 * groups * state)
    return _FLOAT_BYTES * (conv + state * inner)


def _legality(family: Family, facts: ModelFacts) -> Callable[[int, int], str | None]:
    @cache
    def why_illegal(lo: int, hi: int) -> str | None:
        try:
            check_slice(family, facts, lo, hi)
        except UsageError as error:
            return str(error)
        return None

    return why_illegal


def _min_legal_layers(family: Family, facts: ModelFacts) -> int:
    """The longest run of layers that lacks some kind, and one more."""
    kinds = family.layer_kinds(facts)
    longest = 0
    for component in family.components:
        runs = itertools.groupby(component in present for present in kinds)
        longest = max(longest, *(len(list(run)) for has, run in runs if not has), 0)
    return longest + 1
