"""The words of the GGUF container: metadata values, the tensor table, and how both are encoded.

Values stay encoded until asked for, so that a slice repeats what it does not change bit for bit.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

MAGIC = b"GGUF"
ALIGNMENT = 32
VERSION = 3

U32 = struct.Struct("<I")
U64 = struct.Struct("<Q")
SCALARS = {
    GGUFValueType.UINT8: struct.Struct("<B"),
    GGUFValueType.INT8: struct.Struct("<b"),
    GGUFValueType.UINT16: struct.Struct("<H"),
    GGUFValueType.INT16: struct.Struct("<h"),
    GGUFValueType.UINT32: struct.Struct("<I"),
    GGUFValueType.INT32: struct.Struct("<i"),
    GGUFValueType.FLOAT32: struct.Struct("<f"),
    GGUFValueType.BOOL: struct.Struct("<?"),
    GGUFValueType.UINT64: struct.Struct("<Q"),
    GGUFValueType.INT64: struct.Struct("<q"),
    GGUFValueType.FLOAT64: struct.Struct("<d"),
}
_ARRAY = struct.Struct("<IQ")


@dataclass(frozen=True, slots=True)
class Value:
    """One metadata value. ``payload`` is its encoding in the file, without the type."""

    type: GGUFValueType
    payload: bytes

    @classmethod
    def u32(cls, number: int) -> Value:
        return cls(GGUFValueType.UINT32, U32.pack(number))

    @classmethod
    def bools(cls, items: Sequence[bool]) -> Value:
        return cls(GGUFValueType.ARRAY, _ARRAY.pack(GGUFValueType.BOOL, len(items)) + bytes(items))

    @classmethod
    def text(cls, text: str) -> Value:
        return cls(GGUFValueType.STRING, _string(text))

    @property
    def num_items(self) -> int | None:
        """Length of an array of numbers, None for anything else."""
        if self.type != GGUFValueType.ARRAY:
            return None
        kind, count = _ARRAY.unpack_from(self.payload)
        return int(count) if kind in SCALARS else None

    def decode(self) -> Any:
        """A number, bool or str, or a list of numbers. An array of strings stays undecoded."""
        if self.type == GGUFValueType.STRING:
            return self.payload[U64.size :].decode(errors="replace")
        if self.type != GGUFValueType.ARRAY:
            return SCALARS[self.type].unpack(self.payload)[0]
        if self.num_items is None:
            return self.payload
        item = SCALARS[GGUFValueType(_ARRAY.unpack_from(self.payload)[0])]
        return [number for (number,) in item.iter_unpack(self.payload[_ARRAY.size :])]

    def items(self, lo: int, hi: int) -> Value:
        """Items [lo, hi) of an array of numbers."""
        kind = _ARRAY.unpack_from(self.payload)[0]
        size = SCALARS[GGUFValueType(kind)].size
        body = self.payload[_ARRAY.size + lo * size : _ARRAY.size + hi * size]
        return Value(self.type, _ARRAY.pack(kind, hi - lo) + body)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A row of the tensor table. ``shape`` is in ggml's order, the contiguous dimension first.

    The bytes are at ``offset`` of part ``part`` of the model; without a part they are zeros.
    """

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    part: int | None = None
    offset: int = 0

    @property
    def num_bytes(self) -> int:
        block_items, block_bytes = GGML_QUANT_SIZES[self.type]
        return prod(self.shape) // int(block_items) * int(block_bytes)


def aligned(num_bytes: int, alignment: int = ALIGNMENT) -> int:
    return -(-num_bytes // alignment) * alignment


def encode_header(metadata: Mapping[str, Value], tensors: Iterable[Tensor]) -> bytes:
    """Everything before the tensor data, padded so that the data may follow at once."""
    rows, offset = [], 0
    for tensor in tensors:
        dims = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
        rows.append(_string(tensor.name) + dims + struct.pack("<IQ", tensor.type, offset))
        offset += aligned(tensor.num_bytes)
    keys = (_string(key) + U32.pack(value.type) + value.payload for key, value in metadata.items())
    start = MAGIC + struct.pack("<IQQ", VERSION, len(rows), len(metadata))
    header = b"".join((start, *keys, *rows))
    return header.ljust(aligned(len(header)), b"\0")


def _string(text: str) -> bytes:
    data = text.encode()
    return U64.pack(len(data)) + data
