"""What the families have in common: the trunk, plain attention, dense and expert layers.

Random weights are easily too tame to show a fault: attention that weighs all positions alike hides
a wrong one, and a head that repeats its input hides the layers between. The gains here prevent it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from tests.models.writer import ModelWriter

QUERY_GAIN = 3.0
"""Spreads attention scores, so that a few positions matter and which ones depends on the token."""

HEAD_GAIN = 4.0
"""Spreads the logits, so that sampling parameters have something to choose from."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of one model. The fields are the knobs of ``make_model``.

    Rows of K-quants have 256 items, so every width a matrix reads is a multiple of that. The root
    of 512 is no power of two: scaling by it and back is not exact by luck.
    """

    architecture: ClassVar[str]

    num_layers: int = 6
    width: int = 512
    num_ff: int = 256
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 32
    num_vocab: int = 512
    tied: bool = False
    max_trained_tokens: int = 4096

    embedding_gain: ClassVar[float] = 1.0
    has_output_norm: ClassVar[bool] = True

    def metadata(self) -> dict[str, Any]:
        """The keys of this model, without the architecture in front."""
        return {
            "block_count": self.num_layers,
            "context_length": self.max_trained_tokens,
            "embedding_length": self.width,
            "feed_forward_length": self.num_ff,
            "attention.head_count": self.num_heads,
            "attention.head_count_kv": self.num_kv_heads,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "vocab_size": self.num_vocab,
        }

    def write_layer(self, model: ModelWriter, layer: int) -> None:
        raise NotImplementedError

    def write(self, model: ModelWriter) -> None:
        """Everything but the file's end."""
        own = {f"{self.architecture}.{key}": value for key, value in self.metadata().items()}
        model.metadata |= {"general.name": f"random {self.architecture}", **own}
        model.vocabulary(self.num_vocab)
        model.matrix("token_embd.weight", self.width, self.num_vocab, gain=self.embedding_gain)
        if self.has_output_norm:
            model.vector("output_norm.weight", self.width, mean=HEAD_GAIN / self.embedding_gain)
        if not self.tied:
            model.matrix("output.weight", self.width, self.num_vocab, gain=self.embedding_gain)
        for layer in range(self.num_layers):
            self.write_layer(model, layer)

    def write_attention(self, model: ModelWriter, block: str, *, gain: float = QUERY_GAIN) -> None:
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        model.matrix(f"{block}.attn_q.weight", self.width, query, gain=gain)
        model.matrix(f"{block}.attn_k.weight", self.width, key)
        model.matrix(f"{block}.attn_v.weight", self.width, key)
        model.matrix(f"{block}.attn_output.weight", query, self.width)

    def write_ffn(self, model: ModelWriter, block: str) -> None:
        model.matrix(f"{block}.ffn_gate.weight", self.width, self.num_ff)
        model.matrix(f"{block}.ffn_up.weight", self.width, self.num_ff)
        model.matrix(f"{block}.ffn_down.weight", self.num_ff, self.width)


@dataclass(frozen=True, kw_only=True)
class ExpertShape(Shape):
    """A shape whose layers have routed experts and a shared one.

    Not 8 experts: llama.cpp's quantiser takes those for Mixtral and mixes other types.
    """

    num_experts: int = 4
    num_used_experts: int = 2
    num_expert_ff: int = 256

    def metadata(self) -> dict[str, Any]:
        return super().metadata() | {
            "expert_count": self.num_experts,
            "expert_used_count": self.num_used_experts,
            "expert_feed_forward_length": self.num_expert_ff,
        }

    def write_experts(self, model: ModelWriter, block: str) -> None:
        experts, columns, rows = self.num_experts, self.width, self.num_expert_ff
        router = f"{block}.ffn_gate_inp.weight"
        model.exact(router, model.normal(router, columns, experts) / columns**0.5)
        model.matrix(f"{block}.ffn_gate_exps.weight", columns, rows, experts)
        model.matrix(f"{block}.ffn_up_exps.weight", columns, rows, experts)
        model.matrix(f"{block}.ffn_down_exps.weight", rows, columns, experts)
        model.matrix(f"{block}.ffn_gate_shexp.weight", columns, rows)
        model.matrix(f"{block}.ffn_up_shexp.weight", columns, rows)
        model.matrix(f"{block}.ffn_down_shexp.weight", rows, columns)
