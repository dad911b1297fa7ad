"""llama with biases: no family has it, so it stands for any dense model that nobody has proven."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tests.models.shape import Shape
from tests.models.writer import ModelWriter


@dataclass(frozen=True, kw_only=True)
class Qwen2(Shape):
    architecture: ClassVar[str] = "qwen2"

    width: int = 256  # the heads', side by side

    def write_layer(self, model: ModelWriter, layer: int) -> None:
        block = f"blk.{layer}"
        model.vector(f"{block}.attn_norm.weight", self.width)
        self.write_attention(model, block)
        model.bias(f"{block}.attn_q.bias", self.num_heads * self.head_dim)
        model.bias(f"{block}.attn_k.bias", self.num_kv_heads * self.head_dim)
        model.bias(f"{block}.attn_v.bias", self.num_kv_heads * self.head_dim)
        model.vector(f"{block}.ffn_norm.weight", self.width)
        self.write_ffn(model, block)


TINY = Qwen2()
