"""Multi-head latent attention, and experts in all layers but the first.

As V2-Lite by default. With ``q_lora_rank`` the other variant: queries through a low rank too, and
experts chosen by sigmoid and bias as in V3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from gguf import ExpertGatingFuncType

from tests.models.shape import QUERY_GAIN, ExpertShape
from tests.models.writer import ModelWriter

# llama.cpp takes files of so many layers for V2-Lite and reads no rank of the queries from them.
_LITE_NUM_LAYERS = (26, 27)


@dataclass(frozen=True, kw_only=True)
class Deepseek2(ExpertShape):
    """``head_dim`` is the part of a head without positions; ``rope_dim`` is the part with."""

    architecture: ClassVar[str] = "deepseek2"

    width: int = 256
    num_kv_heads: int = 1
    num_dense_layers: int = 1
    q_lora_rank: int = 0
    kv_lora_rank: int = 256
    rope_dim: int = 32

    def metadata(self) -> dict[str, Any]:
        gating = ExpertGatingFuncType.SIGMOID if self.q_lora_rank else ExpertGatingFuncType.SOFTMAX
        is_lite = self.num_layers in _LITE_NUM_LAYERS
        return super().metadata() | {
            "leading_dense_block_count": self.num_dense_layers,
            "attention.q_lora_rank": None if is_lite else self.q_lora_rank,
            "attention.kv_lora_rank": self.kv_lora_rank,
            # The cache holds the latent and the rotated part, one of each for all heads.
            "attention.key_length": self.kv_lora_rank + self.rope_dim,
            "attention.value_length": self.kv_lora_rank,
            "attention.key_length_mla": self.head_dim + self.rope_dim,
            "attention.value_length_mla": self.head_dim,
            "rope.dimension_count": self.rope_dim,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": self.max_trained_tokens // 4,
            "rope.scaling.yarn_log_multiplier": 0.0707,
            "expert_shared_count": 1,
            "expert_weights_scale": 1.0,
            "expert_weights_norm": bool(self.q_lora_rank),
            "expert_gating_func": int(gating),
        }

    def write_layer(self, model: ModelWriter, layer: int) -> None:
        block = f"blk.{layer}"
        model.vector(f"{block}.attn_norm.weight", self.width)
        self._write_latent_attention(model, block)
        model.vector(f"{block}.ffn_norm.weight", self.width)
        if layer < self.num_dense_layers:
            self.write_ffn(model, block)
            return
        self.write_experts(model, block)
        if self.q_lora_rank:
            model.bias(f"{block}.exp_probs_b.bias", self.num_experts)

    def _write_latent_attention(self, model: ModelWriter, block: str) -> None:
        heads, rank, latent = self.num_heads, self.q_lora_rank, self.kv_lora_rank
        query = heads * (self.head_dim + self.rope_dim)
        if rank:
            model.matrix(f"{block}.attn_q_a.weight", self.width, rank)
            model.vector(f"{block}.attn_q_a_norm.weight", rank)
            model.matrix(f"{block}.attn_q_b.weight", rank, query, gain=QUERY_GAIN)
        else:
            model.matrix(f"{block}.attn_q.weight", self.width, query, gain=QUERY_GAIN)
        model.matrix(f"{block}.attn_kv_a_mqa.weight", self.width, latent + self.rope_dim)
        model.vector(f"{block}.attn_kv_a_norm.weight", latent)
        # Stored transposed: the scores are as large as if it mapped from the latent, as it should.
        gain = (self.head_dim / latent) ** 0.5
        model.matrix(f"{block}.attn_k_b.weight", self.head_dim, latent, heads, gain=gain)
        model.matrix(f"{block}.attn_v_b.weight", latent, self.head_dim, heads)
        model.matrix(f"{block}.attn_output.weight", heads * self.head_dim, self.width)


TINY = Deepseek2()
BENCH = Deepseek2(width=512, num_ff=1024, num_experts=16, num_used_experts=4)
