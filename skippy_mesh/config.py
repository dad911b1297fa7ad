"""Settings, frozen once built. Each constructor takes its own part; unknown keys are errors."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from skippy_mesh.errors import UsageError
from skippy_mesh.messages import MAX_LANES

PrefixRule = Literal["any", "boundary", "none"]
MAX_THREADS = 512  # GGML_MAX_N_THREADS; more is a native assert
METRICS_ALIASES = ("vllm", "llamacpp")
EXACT_KV_TYPES = ("q8_0", "bf16")
NUM_SPARE_LANES = 4  # a context keeps one for freed cells, up to three for rows that pad
MAX_RESIDENTS = 64  # of the ids there are, for cached prefixes
_MAX_STATE_RESIDENTS = 8
MAX_PAD = 4  # rows a profile may pad a step to
_BYTES_PER_32_VALUES = {"q8_0": 34, "bf16": 64, "f16": 64, "f32": 128}
KV_TYPES = tuple(_BYTES_PER_32_VALUES)
LOAD_MODES = ("auto", "none", "mmap", "mlock", "mmap+mlock", "dio")
"""How llama.cpp reads weights, by its own names; ``auto`` maps the file."""
BYTES_PER_CELL = 48  # llama.cpp's own record of a cell: position, shift, 256 sequence bits
_CELL_STEP = 256  # llama.cpp makes pools of multiples of it
_SLACK = 8
_KV_PERCENT = 85
MAX_CELLS = 2**31 - 1
"""llama.cpp counts positions in 32 bits; more would wrap around to a small pool."""


def num_residents(num_lanes: int, *, is_recurrent: bool) -> int:
    """Ids for cached prefixes. They cost nothing, except where each brings recurrent states."""
    return min(num_lanes // 4, _MAX_STATE_RESIDENTS) if is_recurrent else MAX_RESIDENTS


def kv_bytes(kv_type: str, num_values: int) -> int:
    """What a cell takes for ``num_values`` of K or of V, in whole blocks of 32."""
    return -(-num_values // 32) * _BYTES_PER_32_VALUES[kv_type]


def priced(kv_bytes: int) -> int:
    """What a plan charges for cells: as if they filled so much of their part."""
    return -(-kv_bytes * 100 // _KV_PERCENT)


def whole_cells(num_cells: int) -> int:
    """What llama.cpp rounds a pool up to."""
    return num_cells + -num_cells % _CELL_STEP


def pool_size(num_cells: int, *, pad: int = 1) -> int:
    """Cells to ask llama.cpp for: those that can be used, those of padding rows, and an eighth more
    for freed cells, so that the pool is compacted once in so many rows and not at every step."""
    usable = whole_cells(num_cells)
    return whole_cells(usable + usable // _SLACK + pad - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextConfig:
    """The settings of one llama.cpp context. All stages of a mesh share them.

    ``num_cells`` is one pool for all sequences, never divided by ``num_lanes``. ``num_residents``
    more ids keep computed prefixes. ``max_rows`` is both n_batch and n_ubatch: one step is one
    micro-batch, which exactness on CPU needs.
    ``kv_type`` q8_0 and flash attention (always on) make a row's attention independent of its
    company; f16, every peer's default, does not. ``exact`` False leaves llama.cpp alone: faster for
    some files, and a row's bits may then depend on the rows beside it. ``load_mode`` is how weights
    are read.
    """

    num_cells: int = 4096
    num_lanes: int = 8
    num_residents: int = 0
    max_rows: int = 512
    kv_type: str = "q8_0"
    num_threads: int = 1
    exact: bool = True
    load_mode: str = "auto"

    def __post_init__(self) -> None:
        if not 1 <= self.num_cells <= MAX_CELLS:
            raise UsageError(f"the context takes from 1 to {MAX_CELLS} cells, got {self.num_cells}")
        most = MAX_LANES - NUM_SPARE_LANES - self.num_residents
        if not 1 <= self.num_lanes <= most:
            raise UsageError(f"lanes must be from 1 to {most}, got {self.num_lanes}")
        if self.max_rows < 1:
            raise UsageError(f"a step needs at least 1 row, got {self.max_rows}")
        if not 1 <= self.num_threads <= MAX_THREADS:
            raise UsageError(
                f"threads per stage must be from 1 to {MAX_THREADS}, got {self.num_threads}"
            )
        if self.kv_type not in KV_TYPES:
            raise UsageError(f"KV type {self.kv_type!r} is not one of {', '.join(KV_TYPES)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """What a stage is charged for: ``weights`` and ``buffers`` whatever its context, ``per_cell``
    and the ``kv_per_cell`` of its layers for each cell that is allocated, ``per_id`` for each
    sequence id. Of all that, ``cell_bytes`` is what a cell of each store takes in the layers."""

    weights: int
    buffers: int
    per_cell: int
    kv_per_cell: int
    per_id: int
    cell_bytes: Mapping[str, int] = field(default_factory=dict)

    def of(self, num_cells: int, num_lanes: int, num_residents: int = 0) -> int:
        """Bytes in all."""
        pool = pool_size(num_cells, pad=MAX_PAD)
        num_bytes = self.weights + self.buffers + pool * self.per_cell
        num_ids = num_lanes + num_residents + NUM_SPARE_LANES
        return num_bytes + priced(pool * self.kv_per_cell) + num_ids * self.per_id

    def fit(self, context: ContextConfig, free_bytes: int) -> ContextConfig | None:
        """``context``, or the most of it that ``free_bytes`` hold: no cached prefixes and fewer
        lanes where each brings states, then fewer cells. None if nothing does."""
        num_lanes, kept = context.num_lanes, context.num_residents
        if self.of(context.num_cells, num_lanes, kept) <= free_bytes:
            return context
        if self.per_id:
            context = replace(context, num_residents=0)
            short = max(self.of(context.num_cells, num_lanes) - free_bytes, 0)
            num_lanes = max(num_lanes - -(-short // self.per_id), 1)
        sizes = [*range(_CELL_STEP, context.num_cells, _CELL_STEP), context.num_cells]
        at = bisect_right(sizes, free_bytes, key=lambda cells: self.of(cells, num_lanes))
        return replace(context, num_cells=sizes[at - 1], num_lanes=num_lanes) if at else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRules:
    """What a step of this model may hold.

    A *mixed* step takes rows of any sequences. A *homogeneous* one, for recurrent memory, one row
    each of many or one chunk of one: llama.cpp splits a step into runs of equal length, and a
    neighbour would tear a chunk apart. Chunks are then multiples of ``chunk_multiple`` and the rest
    of a prompt goes row by row. Where ``replays_in_chunks`` is false, a generated token computed in
    a chunk would differ from the same token decoded, so it is recomputed as a single row, too.
    ``prefix_rule`` says what may be shared: any common prefix, only a snapshot's, or none.
    """

    max_rows: int
    is_homogeneous: bool = False
    chunk_multiple: int = 1
    replays_in_chunks: bool = True
    prefix_rule: PrefixRule = "any"

    def __post_init__(self) -> None:
        if not 1 <= self.chunk_multiple <= self.max_rows:
            raise UsageError(
                f"chunks of a multiple of {self.chunk_multiple} do not fit a step of "
                f"{self.max_rows} rows"
            )

    @property
    def max_chunk(self) -> int:
        return self.max_rows - self.max_rows % self.chunk_multiple


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How the engine schedules. ``prefill_rows`` and ``running`` pin what pacing would choose:
    rows of prefill beside live decodes, and sequences that run at once. A request has no more than
    ``max_model_len`` tokens, prompt and answer."""

    scheduling_policy: str = "fcfs"
    preemption_policy: str = "newest"
    inter_token_s: float = 0.2
    prefill_rows: int | None = None
    running: int | None = None
    prefix_cache: bool = True
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        if self.max_model_len is not None and self.max_model_len < 2:
            raise UsageError(
                f"--max-model-len must hold a prompt and an answer, 2 tokens at least, got "
                f"{self.max_model_len}"
            )
        for name, value in (("prefill rows", self.prefill_rows), ("running", self.running)):
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, got {value}")
        if not self.inter_token_s > 0:
            raise UsageError(f"the time between tokens must be positive, got {self.inter_token_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """One stage of a mesh: which layers of which file, and how to run them.

    ``model_path`` must exist on the stage's own machine, or is a URL that it fetches; the stage
    cuts its slice from it. With ``need``, from its plan, a stage that finds less memory than that
    takes a smaller context; it runs on the Ray node ``node_id``, wherever there is room without.
    """

    index: int
    num_stages: int
    model_path: str
    first_layer: int
    end_layer: int
    context: ContextConfig
    allow_unproven: bool = False
    need: MemoryNeed | None = None
    node_id: str = ""

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.num_stages - 1


def specs_of(
    model_path: str | Path,
    num_layers: int,
    cuts: Sequence[int],
    context: ContextConfig,
    *,
    allow_unproven: bool = False,
) -> list[StageSpec]:
    """One stage for each run of layers between the inner borders ``cuts``."""
    borders = (0, *cuts, num_layers)
    return [
        StageSpec(
            index=index,
            num_stages=len(borders) - 1,
            model_path=str(model_path),
            first_layer=lo,
            end_layer=hi,
            context=context,
            allow_unproven=allow_unproven,
        )
        for index, (lo, hi) in enumerate(itertools.pairwise(borders))
    ]
