"""A Mamba-2 layer and attention side by side in every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from tests.models.recurrent import decay_rates, step_biases
from tests.models.shape import Shape
from tests.models.writer import ModelWriter


@dataclass(frozen=True, kw_only=True)
class FalconH1(Shape):
    architecture: ClassVar[str] = "falcon-h1"

    num_ssm_heads: int = 8
    ssm_head_dim: int = 32
    num_state: int = 32
    num_groups: int = 1
    conv_kernel: int = 4

    @property
    def num_inner(self) -> int:
        return self.num_ssm_heads * self.ssm_head_dim

    def metadata(self) -> dict[str, Any]:
        return super().metadata() | {
            "rope.dimension_count": self.head_dim,
            "ssm.conv_kernel": self.conv_kernel,
            "ssm.inner_size": self.num_inner,
            "ssm.state_size": self.num_state,
            "ssm.time_step_rank": self.num_ssm_heads,
            "ssm.group_count": self.num_groups,
        }

    def write_layer(self, model: ModelWriter, layer: int) -> None:
        block = f"blk.{layer}"
        model.vector(f"{block}.attn_norm.weight", self.width)
        self._write_ssm(model, block)
        self.write_attention(model, block)
        model.vector(f"{block}.ffn_norm", self.width)
        self.write_ffn(model, block)

    def _write_ssm(self, model: ModelWriter, block: str) -> None:
        heads, inner = self.num_ssm_heads, self.num_inner
        conv = inner + 2 * self.num_groups * self.num_state
        model.matrix(f"{block}.ssm_in.weight", self.width, inner + conv + heads)
        kernel = f"{block}.ssm_conv1d.weight"
        model.exact(kernel, model.normal(kernel, self.conv_kernel, conv) / self.conv_kernel**0.5)
        model.bias(f"{block}.ssm_conv1d.bias", conv)
        model.exact(f"{block}.ssm_dt.bias", step_biases(model, f"{block}.ssm_dt.bias", heads))
        # One number per head, as rows of one.
        model.exact(f"{block}.ssm_a", decay_rates(model, f"{block}.ssm_a", heads)[:, None])
        model.exact(f"{block}.ssm_d", np.ones((heads, 1), np.float32))
        model.matrix(f"{block}.ssm_out.weight", inner, self.width)


TINY = FalconH1()
BENCH = FalconH1(
    width=768,
    num_ff=1024,
    head_dim=64,
    num_kv_heads=4,
    num_ssm_heads=16,
    ssm_head_dim=64,
    num_state=64,
)
