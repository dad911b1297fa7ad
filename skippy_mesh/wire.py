"""Frames between machines: versioned msgpack, every length checked before it is used.

A frame is one msgpack array ``[version, kind, epoch, step_id, *body]``. Columns travel as raw
little-endian bytes, so a 512-row step costs a few memory copies and no per-row objects. Nothing is
ever unpickled, and no count read from a frame is trusted: each column's byte length must match the
number of rows, and rows and width are bounded.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from skippy_mesh.errors import InvalidBatchError
from skippy_mesh.messages import (
    MAX_LANES,
    Copy,
    Remove,
    StageTime,
    StepBatch,
)
from skippy_mesh.sampling import History, SamplingParams

VERSION = 4
MAX_ROWS = 65_536
MAX_WIDTH = 131_072
MAX_OPERATIONS = 4 * MAX_LANES
MAX_STAGES = 256
KIND_STEP, KIND_ACTIVATIONS = 1, 2
_MAX_FRAME_BYTES = 2**31 - 1
_OPERATIONS: dict[str, type[Copy] | type[Remove]] = {"c": Copy, "r": Remove}
Activations = npt.NDArray[np.float32]


def encode_step(batch: StepBatch) -> bytes:
    return _pack(
        KIND_STEP,
        batch.epoch,
        batch.step_id,
        [
            ("c", op.src, op.dst, op.p0, op.p1)
            if isinstance(op, Copy)
            else ("r", op.lane, op.p0, op.p1)
            for op in batch.operations
        ],
        _int_column(batch.lanes),
        _int_column(batch.positions),
        _int_column(batch.tokens),
        bytes(batch.samples),
        [(lane, *astuple(params)) for lane, params in batch.new_lanes.items()],
        [
            (lane, past.num_prompt, _int_column(past.recent_prompt), _int_column(past.outputs))
            for lane, past in batch.histories.items()
        ],
        list(batch.forgotten_lanes),
    )


def decode_step(frame: bytes) -> StepBatch:
    """The batch in ``frame``; :class:`InvalidBatchError` if it is not exactly one valid frame."""
    epoch, step_id, body = _unpack(frame, KIND_STEP, 8)
    try:
        operations, lanes, positions, tokens, samples, new_lanes, pasts, forgotten = body
        num_rows = _bounded("rows", len(samples), MAX_ROWS)
        _bounded("operations", len(operations), MAX_OPERATIONS)
        if samples.translate(None, b"\x00\x01"):
            raise InvalidBatchError("frame refused: a sample flag is neither 0 nor 1")
        return StepBatch(
            epoch=epoch,
            step_id=step_id,
            operations=tuple(_operation(op) for op in operations),
            lanes=_ints_of(lanes, num_rows),
            positions=_ints_of(positions, num_rows),
            tokens=_ints_of(tokens, num_rows),
            samples=tuple(map(bool, samples)),
            new_lanes=dict(_lane_sampling(entry) for entry in new_lanes),
            histories=dict(_lane_history(entry) for entry in pasts),
            forgotten_lanes=tuple(_integer(lane) for lane in forgotten),
        )
    except InvalidBatchError:
        raise
    except Exception as error:  # untrusted input: whatever is wrong with it, the frame is refused
        raise InvalidBatchError(f"frame refused: malformed step ({error})") from error


@dataclass(frozen=True, slots=True)
class Hidden:
    """What one stage hands to the next: ``rows``, float32 ``[n_rows, n_embd]``, and the times of
    the stages they have come through."""

    rows: Activations
    stages: tuple[StageTime, ...] = ()


def encode_activations(epoch: int, step_id: int, hidden: Hidden) -> bytes:
    """One frame of hidden states. Never narrowed: f16 or q8 frames would be exact for some
    families only."""
    contiguous = np.ascontiguousarray(hidden.rows, dtype="<f4")
    num_rows, width = contiguous.shape
    times = [(s.compute_s, s.wait_s, s.num_decodes, s.sent_bytes) for s in hidden.stages]
    payload = contiguous.data.cast("B")
    return _pack(KIND_ACTIVATIONS, epoch, step_id, times, num_rows, width, payload)


def decode_activations(frame: bytes) -> tuple[int, int, Hidden]:
    """``(epoch, step_id, hidden)``. The rows are a read-only view into the frame."""
    epoch, step_id, (times, num_rows, width, payload) = _unpack(frame, KIND_ACTIVATIONS, 4)
    num_rows = _bounded("rows", num_rows, MAX_ROWS)
    width = _bounded("width", width, MAX_WIDTH)
    if not isinstance(payload, bytes) or len(payload) != num_rows * width * 4:
        raise InvalidBatchError(
            f"frame refused: {num_rows} rows of {width} floats do not match its payload"
        )
    rows = np.frombuffer(payload, dtype="<f4").reshape(num_rows, width)
    return epoch, step_id, Hidden(rows, _stage_times(times))


def _stage_times(times: object) -> tuple[StageTime, ...]:
    if not isinstance(times, list) or len(times) > MAX_STAGES:
        raise InvalidBatchError("frame refused: malformed stage times")
    try:
        return tuple(
            StageTime(float(compute_s), float(wait_s), _integer(num_decodes), _integer(sent_bytes))
            for compute_s, wait_s, num_decodes, sent_bytes in times
        )
    except (TypeError, ValueError) as error:
        raise InvalidBatchError(f"frame refused: malformed stage times ({error})") from error


def _pack(kind: int, epoch: int, step_id: int, *body: object) -> bytes:
    packed: bytes = msgpack.packb([VERSION, kind, epoch, step_id, *body], use_bin_type=True)
    return packed


def _unpack(frame: bytes, kind: int, num_fields: int) -> tuple[int, int, list[Any]]:
    try:
        fields = msgpack.unpackb(
            frame, raw=False, strict_map_key=True, max_bin_len=_MAX_FRAME_BYTES
        )
    except Exception as error:
        raise InvalidBatchError(f"frame refused: not a msgpack frame ({error})") from error
    if not isinstance(fields, list) or len(fields) < 4:
        raise InvalidBatchError("frame refused: not a skippy_mesh frame")
    version, found_kind, epoch, step_id, *body = fields
    if version != VERSION:
        raise InvalidBatchError(
            f"frame refused: version {version}, this stage speaks {VERSION}: "
            f"run one skippy_mesh version on all machines"
        )
    if found_kind != kind or len(body) != num_fields:
        raise InvalidBatchError(f"frame refused: kind {found_kind}, expected {kind}")
    return _integer(epoch), _integer(step_id), body


def _bounded(name: str, value: object, limit: int) -> int:
    number = _integer(value)
    if not 0 <= number <= limit:
        raise InvalidBatchError(f"frame refused: {number} {name}, at most {limit}")
    return number


def _integer(value: object) -> int:
    if type(value) is not int:
        raise InvalidBatchError(f"frame refused: expected an integer, got {type(value).__name__}")
    return value


def _operation(fields: Sequence[Any]) -> Copy | Remove:
    kind, *numbers = fields
    values = [_integer(number) for number in numbers]
    return _OPERATIONS[kind](*values)


def _lane_sampling(entry: Sequence[Any]) -> tuple[int, SamplingParams]:
    lane, *values = entry
    names = [field.name for field in fields(SamplingParams)]
    return _integer(lane), SamplingParams(
        **{name: _CHECKED[name](value) for name, value in zip(names, values, strict=True)}
    )


def _lane_history(entry: Sequence[Any]) -> tuple[int, History]:
    lane, num_prompt, recent, outputs = entry
    past = History(_integer(num_prompt), _ints_in(recent), _ints_in(outputs))
    return _integer(lane), past


def _text(value: object) -> str:
    if type(value) is not str:
        raise InvalidBatchError(f"frame refused: expected a text, got {type(value).__name__}")
    return value


def _token_ids(values: Sequence[Any]) -> tuple[int, ...]:
    return tuple(map(_integer, values))


_CHECKED: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("temperature", "typical_p", "top_p", "min_p"), float),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "repetition_penalty"), float),
    **dict.fromkeys(("top_k", "repeat_last_n", "seed", "min_tokens"), _integer),
    **dict.fromkeys(("allowed_ids", "suppressed_ids", "ending_ids"), _token_ids),
    "logit_bias": lambda pairs: tuple((_integer(token), float(bias)) for token, bias in pairs),
    "grammar": _text,
    "num_logprobs": lambda value: None if value is None else _integer(value),
}


def _int_column(values: Sequence[int]) -> bytes:
    column = array("i", values)
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()


def _ints_of(column: bytes, num_rows: int) -> tuple[int, ...]:
    values = _ints_in(column)
    if len(values) != num_rows:
        raise InvalidBatchError(f"frame refused: a column of {len(values)} for {num_rows} rows")
    return values


def _ints_in(column: bytes) -> tuple[int, ...]:
    values = array("i")
    values.frombytes(column)
    if sys.byteorder == "big":
        values.byteswap()
    return tuple(values)
