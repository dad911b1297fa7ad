"""Five public models, one of each class, as files without weights.

Sizes are those of each model's published ``config.json``; tensors are those of this project's own
small models of the architecture, matrices as Q8_0 and vectors as F32. The file has the size of the
real one and takes no space: behind the header it is a hole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from tests.models.deepseek2 import Deepseek2
from tests.models.falcon_h1 import FalconH1
from tests.models.gemma2 import Gemma2
from tests.models.llama import Llama
from tests.models.qwen3next import Qwen3Next
from tests.models.shape import Shape
from tests.models.writer import Floats, ModelWriter, add_metadata

_ALIGNMENT = 32


@dataclass(frozen=True, kw_only=True)
class _V2Lite(Deepseek2):
    """Two shared experts, stored as one of twice the width."""

    def metadata(self) -> dict[str, Any]:
        return super().metadata() | {"expert_shared_count": 2}

    def write_experts(self, model: ModelWriter, block: str) -> None:
        super().write_experts(model, block)
        for part in ("gate", "up", "down"):
            columns, rows = self.width, 2 * self.num_expert_ff
            sizes = (rows, columns) if part == "down" else (columns, rows)
            model.matrix(f"{block}.ffn_{part}_shexp.weight", *sizes)


REAL_MODELS: dict[str, Shape] = {
    "Llama-3.1-70B": Llama(
        num_layers=80,
        width=8192,
        num_ff=28_672,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        num_vocab=128_256,
        max_trained_tokens=131_072,
    ),
    "DeepSeek-V2-Lite": _V2Lite(
        num_layers=27,
        width=2048,
        num_ff=10_944,
        num_heads=16,
        head_dim=128,
        num_vocab=102_400,
        max_trained_tokens=163_840,
        kv_lora_rank=512,
        rope_dim=64,
        num_experts=64,
        num_used_experts=6,
        num_expert_ff=1408,
    ),
    "Gemma-2-9B": Gemma2(
        num_layers=42,
        width=3584,
        num_ff=14_336,
        num_heads=16,
        num_kv_heads=8,
        head_dim=256,
        num_vocab=256_000,
        max_trained_tokens=8192,
        window=4096,
    ),
    "Falcon-H1-1.5B": FalconH1(
        num_layers=24,
        width=2048,
        num_ff=4608,
        num_heads=8,
        num_kv_heads=2,
        head_dim=128,
        num_vocab=65_537,
        max_trained_tokens=131_072,
        num_ssm_heads=48,
        ssm_head_dim=64,
        num_state=256,
    ),
    "Qwen3-Next-80B-A3B": Qwen3Next(
        num_layers=48,
        width=2048,
        num_heads=16,
        num_kv_heads=2,
        head_dim=256,
        num_vocab=151_936,
        max_trained_tokens=262_144,
        num_key_heads=16,
        num_value_heads=32,
        num_state=128,
        num_experts=512,
        num_used_experts=10,
        num_expert_ff=512,
    ),
}


def write_header(name: str, folder: Path, *, num_vocab: int | None = None) -> Path:
    """The file of a real model, without weights; with another vocabulary if so told."""
    shape = REAL_MODELS[name]
    shape = replace(shape, num_vocab=num_vocab or shape.num_vocab)
    writer = _HeaderWriter(folder / f"{name}.gguf", shape.architecture)
    shape.write(writer)
    return writer.close()


class _HeaderWriter(ModelWriter):
    """Takes sizes and makes no numbers."""

    def __init__(self, path: Path, architecture: str):
        super().__init__(path, architecture, dtype="q8_0", seed=0, split_max_tensors=0)
        self._sizes: dict[str, tuple[GGMLQuantizationType, tuple[int, ...]]] = {}

    def vocabulary(self, num_vocab: int) -> None:
        self.metadata["tokenizer.ggml.model"] = "no_vocab"

    def normal(self, name: str, *sizes: int) -> Floats:
        return np.zeros(sizes[::-1], np.float32)

    def matrix(self, name: str, columns: int, *rows: int, gain: float = 1.0) -> None:
        self._sizes[name] = (GGMLQuantizationType.Q8_0, (columns, *rows))

    def exact(self, name: str, values: Floats) -> None:
        self._sizes[name] = (GGMLQuantizationType.F32, values.shape[::-1])

    def close(self) -> Path:
        gguf = self._gguf
        data_bytes = 0
        for name, (kind, sizes) in self._sizes.items():
            items, block_bytes = GGML_QUANT_SIZES[kind]
            num_bytes = prod(sizes) // items * block_bytes
            gguf.add_tensor_info(name, sizes[::-1], np.dtype(np.float32), num_bytes, kind)
            data_bytes += num_bytes + -num_bytes % _ALIGNMENT
        add_metadata(gguf, self.metadata.items())
        gguf.write_header_to_file()
        gguf.write_kv_data_to_file()
        gguf.write_ti_data_to_file()
        gguf.close()
        with self._path.open("r+b") as file:
            end = file.seek(0, 2)
            file.truncate(end + -end % _ALIGNMENT + data_bytes)
        return self._path
