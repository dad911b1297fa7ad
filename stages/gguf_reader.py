"""Read the header of a GGUF file, trusting nothing it says.

The gguf package's own reader makes several arrays for each string: five seconds for a vocabulary
of 49,152. This one steps over the strings, in a tenth of a second, and checks every count against
the size of the file before it acts on it.
"""

from __future__ import annotations

import mmap
import os
import reprlib
import struct
from collections.abc import Mapping
from pathlib import Path

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from skippy_mesh.errors import ModelFileError
from stages.gguf_format import ALIGNMENT, MAGIC, SCALARS, U32, U64, VERSION, Tensor, Value, aligned

VERSIONS = (VERSION - 1, VERSION)

# Far above any real file, low enough that a hostile header costs neither minutes nor gigabytes.
MAX_HEADER_BYTES = 64 << 20
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_KEY_BYTES = 1 << 16
MAX_TENSOR_NAME_BYTES = 63
MAX_ALIGNMENT = 1 << 20
MAX_DIMS = 4


def read_header(path: Path, part: int = 0) -> tuple[dict[str, Value], list[Tensor]]:
    """Metadata and tensors of one file, or :class:`ModelFileError` naming what is wrong with it."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(len(MAGIC))
        if start != MAGIC:
            found = f"it starts with {start!r}" if start else "it is empty"
            raise ModelFileError(f"{path} is not a GGUF file: {found}")
        with mmap.mmap(file.fileno(), min(size, MAX_HEADER_BYTES), access=mmap.ACCESS_READ) as data:
            return _Header(path, data, size).read(part)


class _Header:
    """A cursor over the bytes of a header that trusts nothing it reads."""

    def __init__(self, path: Path, data: mmap.mmap, file_bytes: int):
        self.path, self.data, self.file_bytes = path, data, file_bytes
        self.at = len(MAGIC)

    def read(self, part: int) -> tuple[dict[str, Value], list[Tensor]]:
        version = self.number(U32)
        if version not in VERSIONS:
            big_endian = " (a big-endian file)" if version & 0xFFFF == 0 else ""
            raise self.corrupt(f"GGUF version {version}{big_endian} is not one of {VERSIONS}")
        num_tensors = self.count(MAX_TENSORS, "tensors")
        metadata: dict[str, Value] = {}
        for _ in range(self.count(MAX_KEYS, "metadata keys")):
            key = self.name(MAX_KEY_BYTES)
            if key in metadata:
                raise self.corrupt(f"the key {reprlib.repr(key)} appears twice")
            metadata[key] = self.value()
        rows = [self.tensor() for _ in range(num_tensors)]
        return metadata, self.placed(rows, self.alignment(metadata), part)

    def placed(self, rows: list[tuple[Tensor, int]], alignment: int, part: int) -> list[Tensor]:
        """Tensors with their place in the file. llama.cpp wants them packed in order, too."""
        start = aligned(self.at, alignment)
        tensors: list[Tensor] = []
        packed = end = 0
        for tensor, offset in rows:
            if offset != packed:
                raise self.corrupt(f"{tensor.name!r} is at offset {offset}, expected {packed}")
            end = start + offset + tensor.num_bytes
            packed = aligned(offset + tensor.num_bytes, alignment)
            tensors.append(Tensor(tensor.name, tensor.type, tensor.shape, part, start + offset))
        if end > self.file_bytes:
            raise ModelFileError(
                f"{self.path} is truncated: its tensors need {end} bytes, the file has "
                f"{self.file_bytes}: download or copy it again"
            )
        return tensors

    def alignment(self, metadata: Mapping[str, Value]) -> int:
        if "general.alignment" not in metadata:
            return ALIGNMENT
        found = metadata["general.alignment"].decode()
        if type(found) is not int or not 0 < found <= MAX_ALIGNMENT or found & (found - 1):
            raise self.corrupt(f"general.alignment is {reprlib.repr(found)}, no power of two")
        return found

    def tensor(self) -> tuple[Tensor, int]:
        """One row of the table and its offset from the start of the data."""
        name = self.name(MAX_TENSOR_NAME_BYTES)
        num_dims = self.number(U32)
        if not 1 <= num_dims <= MAX_DIMS:
            raise self.corrupt(f"{name!r} has {num_dims} dimensions, expected 1 to {MAX_DIMS}")
        shape = tuple(self.number(U64) for _ in range(num_dims))
        if 0 in shape:
            raise self.corrupt(f"{name!r} has the shape {shape}")
        kind, offset = self.number(U32), self.number(U64)
        try:
            tensor = Tensor(name, GGMLQuantizationType(kind), shape)
        except ValueError:
            raise self.corrupt(f"{name!r} has the unknown tensor type {kind}") from None
        if shape[0] % GGML_QUANT_SIZES[tensor.type][0]:
            raise self.corrupt(f"rows of {shape[0]} cannot be {tensor.type.name} ({name!r})")
        return tensor, offset

    def value(self) -> Value:
        kind = self.value_type()
        start = self.at
        if kind == GGUFValueType.ARRAY:
            self.skip_array()
        elif kind == GGUFValueType.STRING:
            self.skip(self.number(U64))
        else:
            self.skip(SCALARS[kind].size)
        return Value(kind, self.data[start : self.at])

    def skip_array(self) -> None:
        item, count = self.value_type(), self.number(U64)
        if item == GGUFValueType.ARRAY:
            raise self.corrupt("arrays of arrays are not supported")
        if item != GGUFValueType.STRING:
            self.skip(count * SCALARS[item].size)
            return
        # The one loop that is long in every real file, so it calls nothing of ours.
        at, last, data, length_at = self.at, len(self.data) - U64.size, self.data, U64.unpack_from
        while count and at <= last:
            at += U64.size + length_at(data, at)[0]
            count -= 1
        self.skip(at - self.at + count * U64.size)  # strings left over go beyond the end

    def value_type(self) -> GGUFValueType:
        kind = self.number(U32)
        try:
            return GGUFValueType(kind)
        except ValueError:
            raise self.corrupt(f"unknown metadata type {kind}") from None

    def name(self, max_bytes: int) -> str:
        length = self.number(U64)
        if length > max_bytes:
            raise self.corrupt(f"a name of {length} bytes, more than {max_bytes}")
        self.skip(length)
        try:
            return self.data[self.at - length : self.at].decode()
        except UnicodeDecodeError:
            raise self.corrupt("a name is not UTF-8") from None

    def count(self, limit: int, what: str) -> int:
        found = self.number(U64)
        if found > limit:
            raise self.corrupt(f"{found} {what}, more than {limit}")
        return found

    def number(self, form: struct.Struct) -> int:
        self.skip(form.size)
        return int(form.unpack_from(self.data, self.at - form.size)[0])

    def skip(self, num_bytes: int) -> None:
        if self.at + num_bytes > len(self.data):
            raise ModelFileError(
                f"{self.path} is truncated or corrupt: its header wants "
                f"{self.at + num_bytes} bytes and there are {len(self.data)}"
            )
        self.at += num_bytes

    def corrupt(self, what: str) -> ModelFileError:
        return ModelFileError(f"{self.path} has a corrupt header near byte {self.at}: {what}")
