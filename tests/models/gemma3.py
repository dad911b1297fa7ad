"""gemma2 with normed queries and keys and no caps; five windows, then one layer that sees all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from tests.models.gemma2 import Gemma2
from tests.models.shape import QUERY_GAIN
from tests.models.writer import ModelWriter


@dataclass(frozen=True, kw_only=True)
class Gemma3(Gemma2):
    """llama.cpp knows the period of six by the architecture. The windows turn faster."""

    architecture: ClassVar[str] = "gemma3"

    num_layers: int = 12

    def metadata(self) -> dict[str, Any]:
        return super().metadata() | {
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "rope.freq_base": 1e6,
            "rope.freq_base_swa": 1e4,
        }

    def write_layer(self, model: ModelWriter, layer: int) -> None:
        super().write_layer(model, layer)
        self.write_head_norms(model, f"blk.{layer}", self.head_dim)

    def write_head_norms(self, model: ModelWriter, block: str, head_dim: int) -> None:
        model.vector(f"{block}.attn_q_norm.weight", head_dim, mean=QUERY_GAIN)
        model.vector(f"{block}.attn_k_norm.weight", head_dim)


TINY = Gemma3()
