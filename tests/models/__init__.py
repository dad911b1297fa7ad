"""Tiny seeded models, made on the spot: random weights in the shape of the real thing.

One module per family, one family per kind of memory a model can have, and one for each look-alike.
Nothing is cached: a model is made in a second, and the same arguments give the same file.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from tests.models import (
    deepseek2,
    falcon_h1,
    gemma2,
    gemma3,
    gemma4,
    glm4,
    llama,
    olmo,
    olmo2,
    qwen2,
    qwen3next,
)
from tests.models.llama import Llama
from tests.models.quantizer import quantize_file
from tests.models.shape import Shape
from tests.models.writer import DIRECT_TYPES, ModelWriter

DType = Literal["f32", "f16", "bf16", "q8_0", "q4_0", "q4_K_M", "q6_K"]
"""The usual ones; any other file type of llama.cpp's quantiser works too, as far as it fits."""

Size = Literal["tiny", "bench"]

_MODULES = {
    "dense": llama,
    "mla": deepseek2,
    "window": gemma2,
    "ssm": falcon_h1,
    "linear": qwen3next,
}

FAMILIES = {family: module.TINY.architecture for family, module in _MODULES.items()}
"""The architecture that stands for each family."""

ARCHITECTURES = {
    module.TINY.architecture: {"tiny": module.TINY, "bench": module.BENCH}
    for module in _MODULES.values()
}

LOOK_ALIKES: Mapping[str, Shape] = {
    module.TINY.architecture: module.TINY for module in (glm4, olmo, olmo2, gemma3, gemma4, qwen2)
}
"""Tiny ones of architectures that share a family's kind of memory; no family has ``qwen2``."""

_HEAD_DIM = 32


def make_model(
    family: str,
    path: Path,
    *,
    dtype: str = "f32",
    size: Size = "tiny",
    seed: int = 0,
    split_max_tensors: int | None = None,
    extra: Mapping[str, Any] | None = None,
    **knobs: Any,
) -> Path:
    """Write a model and return its path, the first part's with ``split_max_tensors``.

    ``family`` is a key of :data:`FAMILIES` or an architecture, also one of the :data:`LOOK_ALIKES`,
    which are all tiny. ``knobs`` are fields of its :class:`Shape`. ``extra`` sets metadata by full
    key, None leaves a key out. ``bench`` models have 20 to 60 MB as q8_0, tiny ones a tenth of it.
    """
    shapes: Mapping[str, Shape] | None = ARCHITECTURES.get(FAMILIES.get(family, family))
    if family in LOOK_ALIKES:
        shapes = {"tiny": LOOK_ALIKES[family]}
    if shapes is None or size not in shapes:
        raise ValueError(f"family {family!r} is none of {', '.join((*FAMILIES, *ARCHITECTURES))}")
    shape = replace(shapes[size], **knobs)
    return _make(shape, path, dtype, seed, split_max_tensors, extra)


def make_llama(
    path: Path,
    *,
    num_layers: int = 6,
    width: int = 192,
    num_vocab: int = 320,
    tied: bool = False,
    dtype: DType = "f32",
    seed: int = 0,
    split_max_tensors: int | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """A llama model smaller than ``make_model``'s, too narrow for K-quants."""
    num_heads = width // _HEAD_DIM
    shape = Llama(
        num_layers=num_layers,
        width=width,
        num_ff=2 * width,
        num_heads=num_heads,
        num_kv_heads=2 if num_heads % 2 == 0 else 1,
        num_vocab=num_vocab,
        tied=tied,
    )
    return _make(shape, path, dtype, seed, split_max_tensors, extra)


def _make(
    shape: Shape,
    path: Path,
    dtype: str,
    seed: int,
    split_max_tensors: int | None,
    extra: Mapping[str, Any] | None,
) -> Path:
    if dtype not in DIRECT_TYPES:
        if split_max_tensors:
            raise ValueError(f"a model in parts can be {', '.join(DIRECT_TYPES)}, not {dtype}")
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            source = _make(shape, Path(folder) / "f32.gguf", "f32", seed, None, extra)
            quantize_file(source, Path(folder) / "whole.gguf", dtype)
            return (Path(folder) / "whole.gguf").replace(path)
    model = ModelWriter(
        path, shape.architecture, dtype=dtype, seed=seed, split_max_tensors=split_max_tensors or 0
    )
    shape.write(model)
    model.metadata |= extra or {}
    return model.close()
