"""Dense attention, and norms that have no weights: not in the layers, and not before the head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from tests.models.shape import HEAD_GAIN, Shape
from tests.models.writer import ModelWriter


@dataclass(frozen=True, kw_only=True)
class Olmo(Shape):
    architecture: ClassVar[str] = "olmo"
    embedding_gain: ClassVar[float] = HEAD_GAIN
    has_output_norm: ClassVar[bool] = False

    width: int = 256  # the heads', side by side

    def metadata(self) -> dict[str, Any]:
        return super().metadata() | {"attention.layer_norm_epsilon": 1e-5}

    def write_layer(self, model: ModelWriter, layer: int) -> None:
        self.write_attention(model, f"blk.{layer}")
        self.write_ffn(model, f"blk.{layer}")


TINY = Olmo()
