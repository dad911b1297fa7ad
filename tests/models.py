"""Tiny seeded models, made on the spot: random weights in the shape of the real thing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize

DType = Literal["f32", "f16", "q8_0"]

HEAD_DIM = 32
_NUM_BYTES = 256


def make_llama(
    path: Path,
    *,
    num_layers: int = 6,
    width: int = 192,
    num_vocab: int = 320,
    tied: bool = False,
    dtype: DType = "f32",
    seed: int = 0,
    split_max_tensors: int | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Write a llama model and return its path, the first part's with ``split_max_tensors``.

    The default width has no whole square root, so nothing that scales by it is exact by luck.
    ``extra`` adds metadata by full key: ints, floats or lists of them.
    """
    writer = GGUFWriter(path, "llama", split_max_tensors=split_max_tensors or 0)
    writer.add_name("tiny llama")
    writer.add_block_count(num_layers)
    writer.add_context_length(4096)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(2 * width)
    num_heads = width // HEAD_DIM
    num_kv_heads = 2 if num_heads % 2 == 0 else 1
    writer.add_head_count(num_heads)
    # An item per layer is as legal as one number, and has to be cut like the layers.
    writer.add_head_count_kv([num_kv_heads] * num_layers)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(num_vocab)
    _add_tokenizer(writer, num_vocab)
    add_by_type = {int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
    for key, value in (extra or {}).items():
        add_by_type[type(value)](key, value)
    weights = _Weights(writer, dtype, seed)
    weights.matrix("token_embd", width, num_vocab)
    weights.vector("output_norm", width)
    weights.vector("rope_freqs", HEAD_DIM // 2)
    if not tied:
        weights.matrix("output", width, num_vocab)
    for layer in range(num_layers):
        block = f"blk.{layer}"
        weights.vector(f"{block}.attn_norm", width)
        weights.matrix(f"{block}.attn_q", width, width)
        weights.matrix(f"{block}.attn_k", width, num_kv_heads * HEAD_DIM)
        weights.matrix(f"{block}.attn_v", width, num_kv_heads * HEAD_DIM)
        weights.matrix(f"{block}.attn_output", width, width)
        weights.vector(f"{block}.ffn_norm", width)
        weights.matrix(f"{block}.ffn_gate", width, 2 * width)
        weights.matrix(f"{block}.ffn_up", width, 2 * width)
        weights.matrix(f"{block}.ffn_down", 2 * width, width)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    parts = len(writer.fout or ())
    writer.close()
    return path if parts == 1 else path.with_name(f"{path.stem}-00001-of-{parts:05d}.gguf")


def _add_tokenizer(writer: GGUFWriter, num_vocab: int) -> None:
    """A token for every byte, so any text can be said, and filler up to ``num_vocab``."""
    special = ["<unk>", "<s>", "</s>"]
    single = [f"<0x{byte:02X}>" for byte in range(_NUM_BYTES)]
    filler = [f"t{token}" for token in range(len(special) + _NUM_BYTES, num_vocab)]
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL]
    kinds += [TokenType.BYTE] * _NUM_BYTES + [TokenType.NORMAL] * len(filler)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(special + single + filler)
    writer.add_token_scores([0.0] * num_vocab)
    writer.add_token_types(kinds)


class _Weights:
    """Adds random tensors to a file. Sizes are in ggml's order: columns, then rows."""

    def __init__(self, writer: GGUFWriter, dtype: DType, seed: int):
        self.writer, self.dtype, self.rng = writer, dtype, np.random.default_rng(seed)

    def vector(self, name: str, size: int) -> None:
        values = 1 + 0.1 * self.rng.standard_normal(size)
        self.writer.add_tensor(f"{name}.weight", values.astype(np.float32))

    def matrix(self, name: str, columns: int, rows: int) -> None:
        values = self.rng.standard_normal((rows, columns)).astype(np.float32) / columns**0.5
        if self.dtype == "q8_0":
            data = quantize(values, GGMLQuantizationType.Q8_0)
            self.writer.add_tensor(f"{name}.weight", data, raw_dtype=GGMLQuantizationType.Q8_0)
        else:
            dtype = np.float16 if self.dtype == "f16" else np.float32
            self.writer.add_tensor(f"{name}.weight", values.astype(dtype))
