"""The rows of one step, checked and laid out as llama.cpp wants them.

llama_decode accepts some wrong batches without a word (two rows of one lane at the same position)
and dies on others (more rows than n_batch), so nothing reaches it unchecked.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import llama_cpp
import numpy as np
import numpy.typing as npt

from skippy_mesh.errors import InvalidBatchError
from stages.profile import Padding

Floats = npt.NDArray[np.float32]
_FLOAT_POINTER = ctypes.POINTER(ctypes.c_float)


@dataclass(frozen=True, slots=True)
class Rows:
    """Columns of equal length; ``inputs`` are float32 ``[n_rows, n_embd]`` hidden states."""

    lanes: Sequence[int]
    positions: Sequence[int]
    outputs: Sequence[bool]
    inputs: Floats

    @property
    def num_rows(self) -> int:
        return len(self.lanes)


def check_rows(
    rows: Rows,
    next_position: Callable[[int], int],
    *,
    num_lanes: int,
    max_rows: int,
    num_embd: int,
) -> dict[int, int]:
    """The next position of every lane in ``rows`` once they are computed.

    ``next_position`` is one past a lane's last computed position. Raises
    :class:`InvalidBatchError` unless every lane exists and continues without gap or repeat.
    """
    num_rows = rows.num_rows
    if not 1 <= num_rows <= max_rows:
        raise InvalidBatchError(f"a step takes 1 to {max_rows} rows, got {num_rows}")
    if not len(rows.positions) == len(rows.outputs) == num_rows:
        raise InvalidBatchError(
            f"columns differ: {num_rows} lanes, {len(rows.positions)} positions, "
            f"{len(rows.outputs)} output flags"
        )
    if rows.inputs.shape != (num_rows, num_embd):
        raise InvalidBatchError(
            f"inputs have shape {rows.inputs.shape}, expected ({num_rows}, {num_embd})"
        )
    if not np.isfinite(rows.inputs).all():
        raise InvalidBatchError("inputs hold a value that is not finite")
    reached: dict[int, int] = {}
    for lane, position in zip(rows.lanes, rows.positions, strict=True):
        if not 0 <= lane < num_lanes:
            raise InvalidBatchError(f"lane {lane} is not in [0, {num_lanes})")
        expected = reached[lane] if lane in reached else next_position(lane)
        if position != expected:
            raise InvalidBatchError(
                f"lane {lane} continues at position {expected}, the batch says {position}"
            )
        reached[lane] = position + 1
    return reached


class BatchBuffer:
    """A llama_batch over arrays that live as long as this object, refilled each step.

    Unless the graph ``takes_rows``, it gets token 0 for each, which every vocabulary has.
    """

    def __init__(self, max_rows: int, *, takes_rows: bool = True):
        self._takes_rows = takes_rows
        self._tokens = np.zeros(max_rows, np.int32)
        self._positions = np.zeros(max_rows, np.int32)
        self._lanes = np.zeros(max_rows, np.int32)
        self._outputs = np.zeros(max_rows, np.int8)
        self._counts = np.ones(max_rows, np.int32)  # every row belongs to one sequence
        int32_pointer = ctypes.POINTER(ctypes.c_int32)
        start, stride = self._lanes.ctypes.data, self._lanes.strides[0]
        self._lane_pointers = (int32_pointer * max_rows)(
            *(ctypes.cast(start + stride * row, int32_pointer) for row in range(max_rows))
        )
        self._inputs: Floats | None = None
        self.native = llama_cpp.llama_batch()
        if not takes_rows:
            self.native.token = self._tokens.ctypes.data_as(int32_pointer)
        self.native.pos = self._positions.ctypes.data_as(int32_pointer)
        self.native.n_seq_id = self._counts.ctypes.data_as(int32_pointer)
        self.native.seq_id = self._lane_pointers
        self.native.logits = self._outputs.ctypes.data_as(ctypes.POINTER(ctypes.c_int8))

    def fill(self, rows: Rows, padding: Padding, *, all_outputs: bool) -> Floats:
        """Load ``rows`` and the padding behind them; returns the input array that is to be read,
        kept alive here."""
        count = rows.num_rows
        total = count + len(padding.lanes)
        self._positions[:count] = rows.positions
        self._lanes[:count] = rows.lanes
        self._outputs[:count] = True if all_outputs else rows.outputs
        if padding.outputs or padding.lanes:
            self._positions[count:total] = 0
            self._lanes[count:total] = padding.lanes
            self._outputs[count:total] = all_outputs
            self._outputs[list(padding.outputs)] = True
        # Arrays that arrive over Ray are read-only views that may be freed; own what C reads.
        inputs = np.zeros((total, rows.inputs.shape[1]), np.float32)
        inputs[:count] = rows.inputs
        self._inputs = inputs
        self.native.n_tokens = total
        if self._takes_rows:
            self.native.embd = ctypes.cast(inputs.ctypes.data, _FLOAT_POINTER)
        return inputs
