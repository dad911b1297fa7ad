"""Token embeddings on the host: every stage takes hidden states, so stage 0 looks its rows up here.

The rows are dequantised by ggml's own ``to_float``, the function llama.cpp's graph uses: a
conversion of our own could differ in the last bit (ggml may fuse multiply and add). Some graphs
scale the embeddings of token ids but not rows they are fed: those are scaled here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skippy_mesh.errors import InvalidBatchError, ModelFileError
from stages.batch import Floats
from stages.gguf_file import ModelFile
from stages.native import ggml_base


class _TypeTraits(ctypes.Structure):
    """The head of ggml's ``struct ggml_type_traits`` (ggml.h)."""

    _fields_ = (
        ("type_name", ctypes.c_char_p),
        ("block_size", ctypes.c_int64),
        ("interleave", ctypes.c_int64),
        ("type_bytes", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
    )


def _traits_of(ggml_type: int) -> Any:
    lookup = ggml_base().ggml_get_type_traits
    lookup.restype = ctypes.POINTER(_TypeTraits)
    lookup.argtypes = [ctypes.c_int]
    return lookup(ggml_type).contents


class Embedding:
    """The rows of ``token_embd.weight``, read from the model file as they are asked for."""

    def __init__(self, model: ModelFile):
        table = model.tensor("token_embd.weight")
        self.num_tokens, self.num_embd = model.num_vocab, model.width
        # A plain view: numpy.memmap makes a new mapping object of every row taken.
        self._rows = np.asarray(table.data).reshape(self.num_tokens, -1)
        self._is_f32 = table.type == 0
        traits = _traits_of(table.type)
        # A changed struct layout must not become a jump into nowhere.
        row_bytes = self.num_embd // max(1, traits.block_size) * traits.type_bytes
        if row_bytes != self._rows.shape[1] or not (self._is_f32 or traits.to_float):
            raise ModelFileError(
                f"token embeddings of ggml type {table.type}: this llama.cpp cannot read them"
            )
        self._to_float = traits.to_float
        # sqrtf(n_embd), as the graph has it: the root in float32, then one product per value.
        scales = model.family.scales_tokens
        self._scale = np.sqrt(np.float32(self.num_embd)) if scales else None

    def __call__(self, tokens: Sequence[int]) -> Floats:
        """float32 ``[len(tokens), n_embd]``."""
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.num_tokens:
            raise InvalidBatchError(f"a token id is not in [0, {self.num_tokens})")
        packed = self._rows[np.array(tokens, np.intp)]
        rows = packed.view(np.float32) if self._is_f32 else self._dequantised(packed)
        if self._scale is not None:
            rows *= self._scale
        return rows

    def _dequantised(self, packed: NDArray[np.uint8]) -> Floats:
        rows = np.empty((len(packed), self.num_embd), np.float32)
        self._to_float(packed.ctypes.data, rows.ctypes.data, rows.size)
        return rows
