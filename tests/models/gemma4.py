"""gemma3 whose layers that see everything have larger heads, fewer of them, and keys for values.

The variants that can be cut: without rows for each layer, shared memory or experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from tests.models.gemma3 import Gemma3
from tests.models.writer import ModelWriter

_PERIOD = 6


@dataclass(frozen=True, kw_only=True)
class Gemma4(Gemma3):
    """``head_dim`` is the windows'."""

    architecture: ClassVar[str] = "gemma4"

    @property
    def windows(self) -> list[bool]:
        return [(layer + 1) % _PERIOD != 0 for layer in range(self.num_layers)]

    @property
    def _seeing_all(self) -> Gemma4:
        """The shape of a layer that sees everything."""
        return replace(self, head_dim=2 * self.head_dim, num_kv_heads=self.num_kv_heads // 2)

    def metadata(self) -> dict[str, Any]:
        large = self._seeing_all
        kv_heads = (large.num_kv_heads, self.num_kv_heads)
        return super().metadata() | {
            "final_logit_softcapping": 30.0,
            "attention.sliding_window_pattern": self.windows,
            "attention.head_count_kv": [kv_heads[is_window] for is_window in self.windows],
            "attention.key_length": large.head_dim,
            "attention.value_length": large.head_dim,
            "attention.key_length_swa": self.head_dim,
            "attention.value_length_swa": self.head_dim,
            "rope.dimension_count": large.head_dim,
            "rope.dimension_count_swa": self.head_dim,
            "embedding_length_per_layer_input": 0,
            "attention.shared_kv_layers": 0,
        }

    def write(self, model: ModelWriter) -> None:
        super().write(model)
        model.vector("rope_freqs.weight", self._seeing_all.head_dim // 2)

    def write_layer(self, model: ModelWriter, layer: int) -> None:
        shape = self if self.windows[layer] else self._seeing_all
        super(Gemma4, shape).write_layer(model, layer)
        model.vector(f"blk.{layer}.layer_output_scale.weight", 1)

    def write_attention(self, model: ModelWriter, block: str, *, gain: float = 1.0) -> None:
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        model.matrix(f"{block}.attn_q.weight", self.width, query)
        model.matrix(f"{block}.attn_k.weight", self.width, key)
        if self.head_dim == TINY.head_dim:
            model.matrix(f"{block}.attn_v.weight", self.width, key)
        model.matrix(f"{block}.attn_output.weight", query, self.width)


TINY = Gemma4()
