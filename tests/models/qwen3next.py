"""Gated delta nets in three layers of four, gated attention in the fourth, experts in all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from tests.models.recurrent import decay_rates, step_biases
from tests.models.shape import QUERY_GAIN, ExpertShape
from tests.models.writer import ModelWriter

_ATTENTION_INTERVAL = 4


@dataclass(frozen=True, kw_only=True)
class Qwen3Next(ExpertShape):
    """``num_state`` is the head size of the linear attention, of keys and values alike."""

    architecture: ClassVar[str] = "qwen3next"

    num_layers: int = 8
    width: int = 256
    num_key_heads: int = 4
    num_value_heads: int = 8
    num_state: int = 32
    conv_kernel: int = 4

    def metadata(self) -> dict[str, Any]:
        return super().metadata() | {
            "rope.dimension_count": self.head_dim // 4,
            "ssm.conv_kernel": self.conv_kernel,
            "ssm.inner_size": self.num_value_heads * self.num_state,
            "ssm.state_size": self.num_state,
            "ssm.time_step_rank": self.num_value_heads,
            "ssm.group_count": self.num_key_heads,
            "expert_shared_feed_forward_length": self.num_expert_ff,
        }

    def write_layer(self, model: ModelWriter, layer: int) -> None:
        block = f"blk.{layer}"
        model.vector(f"{block}.attn_norm.weight", self.width)
        if (layer + 1) % _ATTENTION_INTERVAL:
            self._write_linear_attention(model, block)
        else:
            self._write_gated_attention(model, block)
        model.vector(f"{block}.post_attention_norm.weight", self.width)
        self.write_experts(model, block)
        shared_gate = f"{block}.ffn_gate_inp_shexp.weight"
        model.exact(shared_gate, model.normal(shared_gate, self.width) / self.width**0.5)

    def _write_gated_attention(self, model: ModelWriter, block: str) -> None:
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        model.matrix(f"{block}.attn_q.weight", self.width, 2 * query)  # each with its gate
        model.matrix(f"{block}.attn_k.weight", self.width, key)
        model.matrix(f"{block}.attn_v.weight", self.width, key)
        model.vector(f"{block}.attn_q_norm.weight", self.head_dim, mean=QUERY_GAIN)
        model.vector(f"{block}.attn_k_norm.weight", self.head_dim)
        model.matrix(f"{block}.attn_output.weight", query, self.width)

    def _write_linear_attention(self, model: ModelWriter, block: str) -> None:
        heads, value = self.num_value_heads, self.num_value_heads * self.num_state
        conv = 2 * self.num_key_heads * self.num_state + value
        model.matrix(f"{block}.attn_qkv.weight", self.width, conv)
        model.matrix(f"{block}.attn_gate.weight", self.width, value)
        kernel = f"{block}.ssm_conv1d.weight"
        model.exact(kernel, model.normal(kernel, self.conv_kernel, conv) / self.conv_kernel**0.5)
        model.exact(f"{block}.ssm_dt.bias", step_biases(model, f"{block}.ssm_dt.bias", heads))
        model.exact(f"{block}.ssm_a", decay_rates(model, f"{block}.ssm_a", heads))
        model.matrix(f"{block}.ssm_ba.weight", self.width, 2 * heads)
        model.vector(f"{block}.ssm_norm.weight", self.num_state)
        model.matrix(f"{block}.ssm_out.weight", value, self.width)


TINY = Qwen3Next()
BENCH = Qwen3Next(width=512, num_experts=12, num_used_experts=4)
