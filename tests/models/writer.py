"""Seeded random tensors and metadata, written as a GGUF."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_VERSION, GGMLQuantizationType, GGUFWriter, LlamaFileType
from gguf.quants import quantize
from numpy.typing import NDArray

from tests.models.tokenizer import tokenizer_metadata

Floats = NDArray[np.float32]

# The types written here; all others are left to llama.cpp's own quantiser.
DIRECT_TYPES = {
    "f32": (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
    "f16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    "bf16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    "q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
}


class ModelWriter:
    """A model being written. Sizes are in ggml's order: columns first.

    ``metadata`` has full keys; what is None in the end is left out.
    """

    def __init__(
        self, path: Path, architecture: str, *, dtype: str, seed: int, split_max_tensors: int
    ):
        self.metadata: dict[str, Any] = {}
        self._path, self._seed = path, seed
        self._type, self._file_type = DIRECT_TYPES[dtype]
        self._gguf = GGUFWriter(path, architecture, split_max_tensors=split_max_tensors)

    def vocabulary(self, num_vocab: int) -> None:
        self.metadata |= tokenizer_metadata(num_vocab)

    def normal(self, name: str, *sizes: int) -> Floats:
        """Standard normal numbers that depend on the seed and the name, and on no other tensor."""
        rng = np.random.default_rng([self._seed, zlib.crc32(name.encode())])
        return rng.standard_normal(sizes[::-1], dtype=np.float32)

    def vector(self, name: str, size: int, *, mean: float = 1.0) -> None:
        self.exact(name, mean * (1 + 0.1 * self.normal(name, size)))

    def bias(self, name: str, size: int) -> None:
        self.exact(name, 0.1 * self.normal(name, size))

    def matrix(self, name: str, columns: int, *rows: int, gain: float = 1.0) -> None:
        """A tensor of the model's type, by default one that keeps the size of what it maps."""
        values = self.normal(name, columns, *rows) * np.float32(gain / columns**0.5)
        self._gguf.add_tensor(name, quantize(values, self._type), raw_dtype=self._type)

    def exact(self, name: str, values: Floats) -> None:
        """A tensor that is f32 in files of every type. ``values`` has rows first, as numpy does."""
        self._gguf.add_tensor(name, values.astype(np.float32))

    def close(self) -> Path:
        """Write the file; its path, or that of the first part."""
        self._gguf.add_file_type(self._file_type)
        self._gguf.add_quantization_version(GGML_QUANT_VERSION)
        add_metadata(self._gguf, self.metadata.items())
        self._gguf.write_header_to_file()
        self._gguf.write_kv_data_to_file()
        self._gguf.write_tensors_to_file()
        num_parts = len(self._gguf.fout or ())
        self._gguf.close()
        if num_parts == 1:
            return self._path
        return self._path.with_name(f"{self._path.stem}-00001-of-{num_parts:05d}.gguf")


def add_metadata(gguf: GGUFWriter, items: Iterable[tuple[str, Any]]) -> None:
    add_by_type = {
        bool: gguf.add_bool,
        int: gguf.add_uint32,
        float: gguf.add_float32,
        str: gguf.add_string,
        list: gguf.add_array,
    }
    for key, value in items:
        if value is not None:
            add_by_type[type(value)](key, value)
