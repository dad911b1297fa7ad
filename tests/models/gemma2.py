"""Sliding windows in the even layers, whole attention in the odd ones, capped scores and logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from tests.models.shape import Shape
from tests.models.writer import ModelWriter


@dataclass(frozen=True, kw_only=True)
class Gemma2(Shape):
    """``window`` counts positions. llama.cpp knows the period of two by the architecture."""

    architecture: ClassVar[str] = "gemma2"
    # The family is always tied and multiplies its input by the root of the width. With a gain of 1
    # the input would then stand out in the last layer, and the head would repeat it for ever.
    embedding_gain: ClassVar[float] = 0.05

    tied: bool = True
    num_kv_heads: int = 4
    window: int = 64

    def metadata(self) -> dict[str, Any]:
        return super().metadata() | {
            "attention.sliding_window": self.window,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        }

    def write_layer(self, model: ModelWriter, layer: int) -> None:
        block = f"blk.{layer}"
        model.vector(f"{block}.attn_norm.weight", self.width)
        self.write_attention(model, block)
        model.vector(f"{block}.post_attention_norm.weight", self.width)
        model.vector(f"{block}.ffn_norm.weight", self.width)
        self.write_ffn(model, block)
        model.vector(f"{block}.post_ffw_norm.weight", self.width)


TINY = Gemma2()
BENCH = Gemma2(num_layers=8, width=768, num_ff=1536, head_dim=64, window=256)
