"""Dense attention over normed queries and keys, and norms behind the parts of a layer only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tests.models.shape import QUERY_GAIN, Shape
from tests.models.writer import ModelWriter


@dataclass(frozen=True, kw_only=True)
class Olmo2(Shape):
    architecture: ClassVar[str] = "olmo2"

    width: int = 256  # the heads', side by side

    def write_layer(self, model: ModelWriter, layer: int) -> None:
        block = f"blk.{layer}"
        self.write_attention(model, block)
        model.vector(f"{block}.attn_q_norm.weight", self.width, mean=QUERY_GAIN)
        model.vector(f"{block}.attn_k_norm.weight", self.num_kv_heads * self.head_dim)
        model.vector(f"{block}.post_attention_norm.weight", self.width)
        self.write_ffn(model, block)
        model.vector(f"{block}.post_ffw_norm.weight", self.width)


TINY = Olmo2()
