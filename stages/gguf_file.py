"""A model file as the mesh sees it: which layers it has, and where their bytes are.

Opening reads the header only. Every refusal of a file that cannot be served happens here, before
anything is copied or handed to llama.cpp, which ends the process over some of them.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from skippy_mesh.errors import ModelFileError, UnsupportedModelError
from skippy_mesh.families import Family, ModelFacts, family_of, why_refused
from stages.disk import content_digest, fingerprint
from stages.gguf_format import Tensor, Value
from stages.gguf_reader import read_header

TOKEN_EMBD = "token_embd.weight"
_PART_NAME = re.compile(r"(?P<prefix>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_MAX_WORD = 64
_BLOCK_NAME = re.compile(r"blk\.(\d+)\.(.+)")


@contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """What goes wrong inside is the fault of the model file ``path``."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise ModelFileError(f"cannot read {error.filename or path}: {reason}") from error


class TensorBytes(NamedTuple):
    """``data`` is a read-only view into the file; ``shape`` has the contiguous dimension first."""

    data: NDArray[np.uint8]
    type: int
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ModelFile:
    """A GGUF model, in one file or in parts. Plain data: it can be pickled and sent.

    ``metadata`` leaves out the tokenizer, which llama.cpp reads from the file itself.
    ``num_blocks`` counts the layers for multi-token prediction, too, which no stage runs.
    """

    paths: tuple[Path, ...]
    stamp: str
    metadata: Mapping[str, Value]
    tensors: Mapping[str, Tensor]
    family: Family
    architecture: str
    num_layers: int
    num_blocks: int
    width: int
    num_vocab: int
    max_trained_tokens: int

    @classmethod
    def open(cls, path: str | Path, *, allow_unproven: bool = False) -> ModelFile:
        """Describe the model that ``path`` is, or is a part of; :class:`ModelFileError` if none."""
        with reading(path):
            paths = _all_parts(Path(path))
            stamp = fingerprint(paths)
            metadata, tensors = _read_parts(paths)
        facts = _describe(paths[0], metadata, tensors, allow_unproven)
        return cls(paths=paths, stamp=stamp, metadata=metadata, tensors=tensors, **facts)

    @cached_property
    def digest(self) -> str:
        """sha256 of the content, all parts in order. Long for a large file, once per machine."""
        with reading(self.paths[0]):
            digest = content_digest(self.paths)
        self.check_unchanged()
        return digest

    @cached_property
    def facts(self) -> ModelFacts:
        """What the family's rules look at."""
        own = f"{self.architecture}."
        keys = {
            key.removeprefix(own): value.decode()
            for key, value in self.metadata.items()
            if key.startswith(own)
        }
        return ModelFacts(
            architecture=self.architecture,
            num_layers=self.num_layers,
            num_vocab=self.num_vocab,
            keys=keys,
        )

    @property
    def tensor_types(self) -> frozenset[str]:
        return frozenset(tensor.type.name for tensor in self.tensors.values())

    def layer_bytes(self, layer: int) -> int:
        """What the layer's weights take, in the file and in memory."""
        prefix = f"blk.{layer}."
        return sum(t.num_bytes for t in self.tensors.values() if t.name.startswith(prefix))

    def tensor(self, name: str) -> TensorBytes:
        """The bytes of a tensor as they lie in the file, mapped and not read."""
        tensor = self.tensors.get(name)
        if tensor is None or tensor.part is None:
            raise ModelFileError(f"{self.paths[0]} has no tensor {name}")
        self.check_unchanged()
        data = np.memmap(self.paths[tensor.part], np.uint8, "r", tensor.offset, (tensor.num_bytes,))
        return TensorBytes(data, tensor.type, tensor.shape)

    def check_unchanged(self) -> None:
        """Nothing read from a file that changed meanwhile may be kept."""
        with reading(self.paths[0]):
            stamp = fingerprint(self.paths)
        if stamp != self.stamp:
            raise ModelFileError(f"{self.paths[0]} changed while it was being read: start again")


def split_block_name(tensor_name: str) -> tuple[int, str] | None:
    """(3, "attn_q.weight") for blk.3.attn_q.weight; None for a tensor of the whole model."""
    found = _BLOCK_NAME.fullmatch(tensor_name)
    return (int(found[1]), found[2]) if found else None


def part_names(name: str) -> list[str]:
    """The names of all files of a split model whose parts are named like ``name``, else that."""
    found = _PART_NAME.fullmatch(name)
    if found is None:
        return [name]
    prefix, count = found["prefix"], int(found["count"])
    return [f"{prefix}-{part + 1:05d}-of-{count:05d}.gguf" for part in range(count)]


def _all_parts(path: Path) -> tuple[Path, ...]:
    paths: tuple[Path, ...] = (path,)
    if path.name in (names := part_names(path.name)):
        paths = tuple(path.with_name(name) for name in names)
    missing = [part for part in paths if not part.exists()]
    if missing and len(paths) == 1:
        raise ModelFileError(f"{path} does not exist")
    if missing:
        raise ModelFileError(
            f"the model is in {len(paths)} parts and {len(missing)} of them cannot be found, "
            f"the first is {missing[0]}: put all parts into one folder"
        )
    for part in paths:
        if part.is_dir():
            raise ModelFileError(f"{part} is a folder: give the .gguf file in it")
        if not part.is_file():
            raise ModelFileError(f"{part} is not a regular file")
    return paths


def _read_parts(paths: tuple[Path, ...]) -> tuple[dict[str, Value], dict[str, Tensor]]:
    first: dict[str, Value] = {}
    tensors: dict[str, Tensor] = {}
    for part, path in enumerate(paths):
        metadata, rows = read_header(path, part)
        number, count = (_number(path, metadata, f"split.{key}", 0) for key in ("no", "count"))
        if max(count, 1) != len(paths) or number != part:
            raise ModelFileError(
                f"{path} calls itself part {number + 1} of {max(count, 1)}, expected part "
                f"{part + 1} of {len(paths)}: give the parts their original names"
            )
        first = first or metadata
        for tensor in rows:
            if tensor.name in tensors:
                raise ModelFileError(f"{path} holds the tensor {tensor.name!r} for a second time")
            tensors[tensor.name] = tensor
    return {key: v for key, v in first.items() if not key.startswith("tokenizer.")}, tensors


def _describe(
    path: Path,
    metadata: Mapping[str, Value],
    tensors: Mapping[str, Tensor],
    allow_unproven: bool,
) -> dict[str, Any]:
    """The facts of a :class:`ModelFile` that its metadata tells, checked against its tensors."""
    architecture = _text(path, metadata, "general.architecture")
    family = family_of(architecture, allow_unproven=allow_unproven)

    def number(key: str, default: int | None = None) -> int:
        return _number(path, metadata, f"{architecture}.{key}", default)

    num_blocks = number("block_count")
    num_layers = num_blocks - number("nextn_predict_layers", 0)
    width = number("embedding_length")
    blocks = {block[0] for block in map(split_block_name, tensors) if block}
    absent = next((layer for layer in range(num_layers) if layer not in blocks), None)
    if num_layers < 1 or absent is not None:
        raise ModelFileError(
            f"{path} is incomplete: of {num_layers} layers, layer {absent} has no tensors"
        )
    embedding = tensors.get(TOKEN_EMBD)
    if embedding is None or len(embedding.shape) != 2 or embedding.shape[0] != width:
        found = "is missing" if embedding is None else f"has the shape {embedding.shape}"
        raise ModelFileError(f"{path}: {TOKEN_EMBD} {found}, expected ({width}, vocabulary)")
    _check_layers_alike(path, metadata, family, architecture)
    return {
        "architecture": architecture,
        "family": family,
        "num_layers": num_layers,
        "num_blocks": num_blocks,
        "width": width,
        "num_vocab": embedding.shape[1],
        "max_trained_tokens": number("context_length"),
    }


def _check_layers_alike(
    path: Path, metadata: Mapping[str, Value], family: Family, architecture: str
) -> None:
    for key in family.refused_keys:
        found = metadata.get(f"{architecture}.{key}")
        value = found.decode() if found else 0
        if any(value) if isinstance(value, list) else value:
            raise UnsupportedModelError(
                f"{path} has {architecture}.{key} = {reprlib.repr(value)}: {why_refused(key)}"
            )


def _text(path: Path, metadata: Mapping[str, Value], key: str) -> str:
    found = metadata[key].decode() if key in metadata else None
    if not isinstance(found, str) or len(found) > _MAX_WORD:
        raise ModelFileError(f"{path} is not a language model: its {key} is {reprlib.repr(found)}")
    return found


def _number(path: Path, metadata: Mapping[str, Value], key: str, default: int | None = None) -> int:
    found = metadata[key].decode() if key in metadata else default
    if type(found) is not int or found < 0:
        raise ModelFileError(
            f"{path} is not usable: its {key} is {reprlib.repr(found)}, expected a number"
        )
    return found
