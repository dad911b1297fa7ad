"""llama with a norm behind each part of a layer, too, and gate and up projection in one matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from tests.models.shape import Shape
from tests.models.writer import ModelWriter


@dataclass(frozen=True, kw_only=True)
class Glm4(Shape):
    architecture: ClassVar[str] = "glm4"

    def metadata(self) -> dict[str, Any]:
        # Half a head has positions, as in the real models.
        return super().metadata() | {"rope.dimension_count": self.head_dim // 2}

    def write_layer(self, model: ModelWriter, layer: int) -> None:
        block = f"blk.{layer}"
        model.vector(f"{block}.attn_norm.weight", self.width)
        self.write_attention(model, block)
        model.bias(f"{block}.attn_q.bias", self.num_heads * self.head_dim)
        model.vector(f"{block}.post_attention_norm.weight", self.width)
        model.vector(f"{block}.ffn_norm.weight", self.width)
        model.matrix(f"{block}.ffn_up.weight", self.width, 2 * self.num_ff)
        model.matrix(f"{block}.ffn_down.weight", self.num_ff, self.width)
        model.vector(f"{block}.post_ffw_norm.weight", self.width)


TINY = Glm4()
