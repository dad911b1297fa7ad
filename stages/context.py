"""The owner of one llama.cpp model and context: every native call of a stage goes through here.

Two threads in one context corrupt it, so the thread that builds a :class:`StageContext` is the only
one that may use it; any other gets an error. What would hit a native assert, which ends the
process, is refused before the call, and every return code of ``llama_decode`` has an answer.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import llama_cpp
import numpy as np

from skippy_mesh.config import (
    BYTES_PER_CELL,
    ContextConfig,
    kv_bytes,
    pool_size,
    whole_cells,
)
from skippy_mesh.errors import (
    DecodeError,
    InvalidBatchError,
    NoRoomError,
    RuntimeUnavailableError,
)
from skippy_mesh.messages import MAX_LANES, Copy, Remove
from skippy_mesh.sizes import allocated_bytes, available_bytes
from stages.batch import BatchBuffer, Floats, Rows, check_rows
from stages.memory import LaneMemory
from stages.native import GGML_KV_TYPES, address_of, ggml_base, last_error, tap_library
from stages.profile import PLAIN, Padding, Profile, pad_plan
from stages.weights import Weights

_FLASH_ATTENTION_ON = 1
_LOOKED_UP = "embd"  # llama.cpp's name for what build_inp_embd() gives
_NO_ROWS = np.empty((0, 0), np.float32)


@dataclass(frozen=True, slots=True)
class StageMemory:
    """``context_bytes`` is what creating the context allocated: pools and compute buffers."""

    weight_bytes: int
    context_bytes: int


class StageContext:
    """A slice of a model with its KV pool. ``source`` is its file or, shared with others and not
    closed here, its weights.

    ``is_last`` decides what :meth:`decode` returns: logits on the last stage, the last layer's
    hidden states on any other. ``scaled_input`` names the graph node over which the rows are
    written unscaled (a later stage of a family that scales its input). Without ``takes_rows`` the
    graph is fed a token id for each, over whose embedding the row is written. ``is_recurrent``
    families take decode rows or one lane's chunk in a step, never both. ``profile`` is the whole
    mesh's. With ``stop_after_layers``, not on the last stage, the hidden states are those behind so
    many layers and the rest is not computed. A last stage that ``keeps_hidden`` has those of its
    outputs in ``hidden`` after each decode.
    """

    def __init__(
        self,
        source: Path | Weights,
        config: ContextConfig,
        *,
        is_last: bool,
        is_recurrent: bool = False,
        scaled_input: str = "",
        takes_rows: bool = True,
        profile: Profile = PLAIN,
        stop_after_layers: int | None = None,
        keeps_hidden: bool = False,
    ):
        self._owner = threading.get_ident()
        self._is_last = is_last
        self._is_recurrent = is_recurrent
        self._profile = profile
        restored = scaled_input if takes_rows else _LOOKED_UP
        self._restores_input = bool(restored)
        self._owns_weights = not isinstance(source, Weights)
        weights = source if isinstance(source, Weights) else Weights(source, profile)
        self._weights = weights
        self.num_embd = weights.num_embd
        self.num_layers = weights.num_layers
        self.num_vocab = weights.num_vocab
        self.keeps_hidden = keeps_hidden
        self._taps_rows = keeps_hidden or not is_last
        self.hidden = _NO_ROWS
        last = f"l_out-{(stop_after_layers or self.num_layers) - 1}" if self._taps_rows else ""
        self._tap = _new_tap(last, restored, goes_on=is_last) if last or restored else None
        # Beside the lanes: the grave of stages/memory.py, then the lanes of padding rows.
        self.num_lanes = config.num_lanes + config.num_residents
        self._scratch_lanes = range(self.num_lanes + 1, self.num_lanes + profile.pad)
        before = allocated_bytes()
        try:
            self._context = self._new_context(config)
        except RuntimeUnavailableError:
            self._free()
            raise
        self._context_bytes = allocated_bytes() - before
        # llama.cpp rounds what was asked for; only what it reports may be relied on.
        pool: int = llama_cpp.llama_n_ctx(self._context)
        self.num_cells = min(whole_cells(config.num_cells), pool - profile.pad + 1)
        native_rows = min(
            llama_cpp.llama_n_batch(self._context), llama_cpp.llama_n_ubatch(self._context)
        )
        self.max_rows = min(config.max_rows, native_rows - native_rows % profile.pad)
        self._lanes = LaneMemory(
            self._context,
            num_lanes=self.num_lanes,
            num_cells=self.num_cells,
            pool_size=pool,
            is_recurrent=is_recurrent,
            window=weights.window,
        )
        self.native_s = 0.0  # spent inside llama_decode, in all
        self.num_decodes = 0
        self._buffer = BatchBuffer(native_rows, takes_rows=takes_rows)
        self._views: dict[tuple[int, int], Floats] = {}

    def decode(self, rows: Rows) -> Floats:
        """Compute ``rows`` in one micro-batch.

        On the last stage float32 ``[n_outputs, n_vocab]``, one row for each flagged row in batch
        order, which the next decode overwrites: copy what must last. Elsewhere a fresh
        ``[n_rows, n_embd]``. :class:`InvalidBatchError` and :class:`NoRoomError` change nothing;
        :class:`DecodeError` has dropped the lanes it names.
        """
        self._check_owner()
        reached = check_rows(
            rows, self._lanes.next_position,
            num_lanes=self.num_lanes, max_rows=self.max_rows, num_embd=self.num_embd,
        )  # fmt: skip
        padding = self._padding(rows, len(reached))
        self._lanes.reserve(rows.num_rows, len(padding.lanes))
        inputs = self._buffer.fill(rows, padding, all_outputs=not self._is_last)
        if self._tap:
            tap_library().tap_begin(self._tap, inputs.ctypes.data, inputs.nbytes)
        started = time.perf_counter()
        code = llama_cpp.llama_decode(self._context, self._buffer.native)
        self.native_s += time.perf_counter() - started
        self.num_decodes += 1
        if code == 1:
            raise NoRoomError(f"llama.cpp found no cells for {rows.num_rows} rows")
        if code == -1:
            raise InvalidBatchError(f"llama.cpp refused the batch: {last_error()}")
        self._lanes.wipe(padding.lanes)
        self._lanes.advance(reached, rows.num_rows)
        if code:
            raise self._dropped(reached, f"llama_decode returned {code}: {last_error()}")
        try:
            if self._tap:
                self._take_rows(rows, padding, len(inputs))
            return self._logits(rows) if self._is_last else self.hidden
        except RuntimeError as error:
            raise self._dropped(reached, str(error)) from error

    def _padding(self, rows: Rows, num_lanes: int) -> Padding:
        """What brings the step to the profile's shape."""
        pad = self._profile.pad
        is_chunk = self._is_recurrent and num_lanes != rows.num_rows
        if is_chunk and (num_lanes != 1 or rows.num_rows % pad):
            raise InvalidBatchError(
                f"a recurrent step holds one row of each lane, or one lane's chunk of a "
                f"multiple of {pad} rows: got {rows.num_rows} rows of {num_lanes} lanes"
            )
        return pad_plan(rows.lanes, rows.outputs, pad=pad, scratch_lanes=self._scratch_lanes)

    def check_room(self, num_rows: int, operations: Sequence[Copy | Remove]) -> None:
        """:class:`NoRoomError`, and nothing changed, unless ``operations`` and then so many rows
        fit."""
        self._check_owner()
        self._lanes.check_room(num_rows, operations)

    def apply(self, operation: Copy | Remove) -> None:
        """Run one memory operation; :class:`InvalidBatchError` if it cannot be done as asked."""
        self._check_owner()
        self._lanes.apply(operation)

    def clear(self) -> None:
        """Free all cells of all lanes."""
        self._check_owner()
        self._lanes.clear()

    def positions(self, lane: int) -> tuple[int, int]:
        """First and last position ``lane`` holds, as llama.cpp says; (-1, -1) when empty."""
        self._check_owner()
        return self._lanes.positions(lane)

    @property
    def num_compactions(self) -> int:
        return self._lanes.num_compactions

    def memory(self) -> StageMemory:
        return StageMemory(
            weight_bytes=self._weights.num_bytes,
            context_bytes=self._context_bytes,
        )

    def close(self) -> None:
        """Give everything back to the system. The context is unusable afterwards."""
        self._check_owner()
        llama_cpp.llama_free(self._context)
        self._free()
        self._owner = -1

    def _free(self) -> None:
        """What the context was built from."""
        if self._owns_weights:
            self._weights.close()
        if self._tap:
            tap_library().tap_free(self._tap)

    def _new_context(self, config: ContextConfig) -> int:
        self._check_fits(config)
        params = llama_cpp.llama_context_default_params()
        pad = self._profile.pad
        params.n_ctx = pool_size(config.num_cells, pad=pad)
        params.n_seq_max = self.num_lanes + pad  # the lanes, the grave, and padding's
        num_rows = max(config.max_rows, params.n_seq_max)  # fewer are a native assert
        params.n_batch = params.n_ubatch = num_rows + -num_rows % pad
        # A window pool that recycles cells would not keep them in order (stages/memory.py).
        params.swa_full = True
        params.n_threads = params.n_threads_batch = config.num_threads
        params.kv_unified = True
        params.flash_attn_type = _FLASH_ATTENTION_ON
        params.type_k = params.type_v = GGML_KV_TYPES[config.kv_type]
        params.no_perf = True
        if self._tap:
            params.cb_eval = ctypes.cast(
                address_of(tap_library().tap_eval), llama_cpp.ggml_backend_sched_eval_callback
            )
            params.cb_eval_user_data = self._tap
        context: int | None = llama_cpp.llama_init_from_model(self._weights.model, params)
        if not context:
            raise RuntimeUnavailableError(
                f"llama.cpp cannot create a context of {config.num_cells} cells "
                f"({config.kv_type} KV): {last_error()}; try a smaller --ctx-size"
            )
        return context

    def _check_fits(self, config: ContextConfig) -> None:
        """llama.cpp touches all of a pool when it creates it: one beyond memory would not fail but
        push every process of this machine out."""
        model = self._weights.model
        head_width = self.num_embd // max(1, llama_cpp.llama_model_n_head(model))
        num_values = 2 * self.num_layers * head_width * llama_cpp.llama_model_n_head_kv(model)
        num_bytes = kv_bytes(config.kv_type, num_values) + BYTES_PER_CELL
        need = pool_size(config.num_cells, pad=self._profile.pad) * num_bytes
        free = available_bytes()
        if free is not None and need > free:
            raise RuntimeUnavailableError(
                f"a context of {config.num_cells} cells ({config.kv_type} KV) takes "
                f"{need >> 20} MiB and {free >> 20} MiB are free; try a smaller --ctx-size"
            )

    def _logits(self, rows: Rows) -> Floats:
        # By batch index: output rows are compact and may be reordered inside.
        flagged = [row for row, is_output in enumerate(rows.outputs) if is_output]
        if not flagged:
            return np.empty((0, self.num_vocab), np.float32)
        found = [llama_cpp.llama_get_logits_ith(self._context, row) for row in flagged]
        if not all(found):
            raise RuntimeError(f"llama.cpp lacks the logits of a row: {last_error()}")
        addresses = [address_of(pointer) for pointer in found]
        row_bytes = 4 * self.num_vocab
        if addresses == [addresses[0] + row_bytes * index for index in range(len(found))]:
            # In one run, as nearly always: a view, because copying 200 KB a row is not free.
            return self._view(addresses[0], len(found))
        return np.concatenate([self._view(address, 1) for address in addresses])

    def _view(self, address: int, num_rows: int) -> Floats:
        """Rows of logits where the library keeps them. Its buffer rarely moves: kept by place."""
        view = self._views.get((address, num_rows))
        if view is None:
            if len(self._views) > MAX_LANES:
                self._views.clear()
            run = (ctypes.c_float * (num_rows * self.num_vocab)).from_address(address)
            view = np.ctypeslib.as_array(run).reshape(num_rows, self.num_vocab)
            self._views[address, num_rows] = view
        return view

    def _take_rows(self, rows: Rows, padding: Padding, num_inputs: int) -> None:
        """The last layer's rows become ``hidden``. On a last stage most graphs leave out, ahead of
        that layer's feed-forward, the rows that are no outputs; some only behind it."""
        if not self._is_last:
            self.hidden = self._tapped(num_inputs)[: rows.num_rows]
        elif not self._taps_rows:
            self._tapped(0)
        else:
            own = list(itertools.compress(itertools.count(), rows.outputs))
            flagged = sorted((*own, *padding.outputs))
            found = self._tapped(len(flagged), num_inputs)
            self.hidden = found[np.isin(flagged, own) if len(found) == len(flagged) else own]

    def _tapped(self, *num_rows: int) -> Floats:
        """The last layer's rows, as many as one of ``num_rows``. RuntimeError unless every node the
        tap waits for came by exactly once: a node that llama.cpp renamed must not pass unseen."""
        llama_cpp.llama_synchronize(self._context)
        num_bytes, failed = ctypes.c_size_t(), ctypes.c_int()
        num_fired, num_restored = ctypes.c_long(), ctypes.c_long()
        references = map(ctypes.byref, (num_bytes, num_fired, num_restored, failed))
        address = tap_library().tap_rows(self._tap, *references)
        seen = (num_fired.value, num_restored.value, failed.value)
        found, rest = divmod(num_bytes.value, 4 * self.num_embd)
        if seen != (self._taps_rows, self._restores_input, 0) or rest or found not in num_rows:
            raise RuntimeError(
                f"the tap saw (rows, inputs, errors) {seen} and {num_bytes.value} bytes"
            )
        hidden = np.empty((found, self.num_embd), np.float32)
        ctypes.memmove(hidden.ctypes.data, address, num_bytes.value)
        return hidden

    def _dropped(self, lanes: dict[int, int], reason: str) -> DecodeError:
        """Part of a failed batch may stay in memory: free all of it, so the lanes start over."""
        for lane in lanes:
            self._lanes.forget(lane)
        return DecodeError(f"{reason}; lanes {sorted(lanes)} dropped", tuple(sorted(lanes)))

    def _check_owner(self) -> None:
        if threading.get_ident() != self._owner:
            raise AssertionError("a context belongs to the thread that built it, until closed")


def _new_tap(last: str, restored: str, *, goes_on: bool) -> int:
    base = ggml_base()
    functions = (
        base.ggml_get_name,
        base.ggml_nbytes,
        base.ggml_backend_tensor_get,
        base.ggml_backend_tensor_set,
    )
    tap: int | None = tap_library().tap_new(
        *map(address_of, functions), last.encode(), restored.encode(), goes_on
    )
    if not tap:
        raise RuntimeUnavailableError(f"the tap for {last or restored} could not be created")
    return tap
