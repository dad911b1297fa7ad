"""Dense attention in every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from tests.models.shape import Shape
from tests.models.writer import ModelWriter


@dataclass(frozen=True, kw_only=True)
class Llama(Shape):
    architecture: ClassVar[str] = "llama"

    def metadata(self) -> dict[str, Any]:
        # An item per layer is as legal as one number, and has to be cut like the layers.
        per_layer = [self.num_kv_heads] * self.num_layers
        return super().metadata() | {
            "attention.head_count_kv": per_layer,
            "rope.dimension_count": self.head_dim,
        }

    def write(self, model: ModelWriter) -> None:
        super().write(model)
        model.vector("rope_freqs.weight", self.head_dim // 2)

    def write_layer(self, model: ModelWriter, layer: int) -> None:
        block = f"blk.{layer}"
        model.vector(f"{block}.attn_norm.weight", self.width)
        self.write_attention(model, block)
        model.vector(f"{block}.ffn_norm.weight", self.width)
        self.write_ffn(model, block)


TINY = Llama()
BENCH = Llama(width=768, num_ff=2048, num_heads=12, num_kv_heads=4, head_dim=64)
