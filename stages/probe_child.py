"""The child of :mod:`stages.probe`: decodes tiny quantised models; dies if the CPU cannot."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np

from skippy_mesh.config import ContextConfig
from stages.batch import Rows
from stages.context import StageContext
from stages.profile import Profile

# One type per group of kernels: block-quantised, repacked, and the K-quants' super-blocks.
_TYPES = ("Q8_0", "Q4_0", "Q4_1")
_WIDTH, _HEADS, _VOCAB, _ROWS = 256, 4, 64, 8


def _write_model(path: Path, quantisation: str) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(_VOCAB)
    writer.add_context_length(512)
    writer.add_embedding_length(_WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(_WIDTH)
    writer.add_head_count(_HEADS)
    writer.add_rope_dimension_count(_WIDTH // _HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    rng = np.random.default_rng(0)
    qtype = gguf.GGMLQuantizationType[quantisation]
    matrices = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    for name, num_rows in (
        ("token_embd", _VOCAB), ("output", _VOCAB), *((f"blk.0.{m}", _WIDTH) for m in matrices),
    ):  # fmt: skip
        data = rng.standard_normal((num_rows, _WIDTH)).astype(np.float32) / 16
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(data, qtype), raw_dtype=qtype)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(_WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main(mode: str) -> int:
    rows = np.random.default_rng(1).standard_normal((_ROWS, _WIDTH)).astype(np.float32)
    config = ContextConfig(num_cells=256, num_lanes=2, max_rows=_ROWS)
    with tempfile.TemporaryDirectory() as folder:
        for quantisation in _TYPES:
            path = Path(folder) / f"{quantisation}.gguf"
            _write_model(path, quantisation)
            profile = Profile(pad=1, tiled=True, repack=mode == "repack")
            context = StageContext(path, config, is_last=True, profile=profile)
            flags = [True] * _ROWS
            context.decode(Rows([0] * _ROWS, range(_ROWS), flags, rows))
            logits = context.decode(Rows([0], [_ROWS], [True], rows[:1]))
            is_finite = np.isfinite(logits).all()
            context.close()  # the logits are the context's own
            if not is_finite:
                print(f"{quantisation} weights gave values that are not finite", file=sys.stderr)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
