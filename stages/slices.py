"""Cut layers [lo, hi) of a model into a GGUF that stock llama.cpp loads as a model of its own.

The bytes of the weights stay what they are: a slice runs the same kernels on the same numbers.
Every stage is fed rows of floats, never token ids, so a slice needs no tokenizer, and no table
of embeddings either. llama.cpp insists on ``token_embd.weight`` with a row per vocabulary entry:

- a slice before the last says its vocabulary has 1 entry and gets a table of one row of zeros,
  which is also its output head (never run: the stage is read before it);
- the last slice stores the output head under that name. A model without ``output.weight`` uses its
  ``token_embd.weight`` as head, and an unused second table would cost as much as the head itself.

Architectures that insist on ``output.weight``, too, get both: a second row of zeros, or the table.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from gguf import GGMLQuantizationType

from skippy_mesh.errors import ModelFileError, UsageError
from skippy_mesh.families import check_slice
from stages.disk import Progress, cache_dir, write_whole
from stages.gguf_file import TOKEN_EMBD, ModelFile, reading, split_block_name
from stages.gguf_format import Tensor, Value, aligned, encode_header

CUTTER_VERSION = 2
"""Part of a cached slice's name: raise it whenever the same cut would give other bytes."""

_CHUNK_BYTES = 4 << 20
_HEAD = "output."
# A slice is one file, without a tokenizer, aligned as usual whatever its source did.
_DROPPED = ("split.", "tokenizer.", "general.alignment")
# Arrays whose length may equal the number of layers by chance.
_NOT_PER_LAYER = ("rope.dimension_sections",)


def cut(model: ModelFile, lo: int, hi: int, out: Path, progress: Progress | None = None) -> None:
    """Write the slice of layers [lo, hi) to ``out``, which appears whole or not at all."""
    plan = _Plan.of(model, lo, hi)
    if out.is_dir():
        raise UsageError(f"{out} is a folder: give the name of the file to write")
    if any(out.exists() and out.samefile(path) for path in model.paths):
        raise UsageError(f"{out} is the model itself: choose another name")
    write_whole(out, plan.num_bytes, lambda file: plan.write(file, progress))


def cached_slice(model: ModelFile, lo: int, hi: int, progress: Progress | None = None) -> Path:
    """The slice of layers [lo, hi), cut once per machine. For all layers, the model as it is."""
    plan = _Plan.of(model, lo, hi)
    if hi - lo == model.num_layers:
        return model.paths[0]  # llama.cpp finds the other parts by itself
    name = f"{model.digest[:16]}-{lo}-{hi}-v{CUTTER_VERSION}.gguf"
    out = cache_dir() / "slices" / name
    write_whole(out, plan.num_bytes, lambda file: plan.write(file, progress), reuse=True)
    return out


def kept_slices() -> list[Path]:
    """What :func:`cached_slice` has cut on this machine, the one used last at the end."""
    return sorted((cache_dir() / "slices").glob("*.gguf"), key=lambda path: path.stat().st_atime)


def prune_slices(kept: Iterable[Path]) -> int:
    """Delete them; the bytes freed. A stage that runs one keeps it until it ends, and who needs one
    again cuts it again."""
    freed = 0
    for path in kept:
        freed += path.stat().st_size
        path.unlink(missing_ok=True)
    return freed


def slice_bytes(model: ModelFile, lo: int, hi: int) -> int:
    """How large the slice of layers [lo, hi) is."""
    return _Plan.of(model, lo, hi).num_bytes


@contextmanager
def temporary_slice(
    model: ModelFile, lo: int, hi: int, *, max_vocab: int, max_bytes: int | None = None
) -> Iterator[Path | None]:
    """The slice of layers [lo, hi) in memory; None where it would take more than ``max_bytes``.

    It is gone with its last user, however that ends, and no disk is busy with it. The path holds
    inside the block only, but whoever has mapped the file by then keeps it. Of the head it has the
    rows of the first ``max_vocab`` tokens.
    """
    plan = _Plan.of(model, lo, hi, max_vocab)
    is_small = max_bytes is None or plan.num_bytes <= max_bytes
    if not is_small or not hasattr(os, "memfd_create"):
        yield None
        return
    with open(os.memfd_create("skippy-slice"), "wb") as file:
        plan.write(file, None)
        file.flush()
        yield Path(f"/proc/self/fd/{file.fileno()}")


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a slice consists of. ``tensors`` have their new names and their source's places."""

    model: ModelFile
    header: bytes
    tensors: tuple[Tensor, ...]

    @classmethod
    def of(cls, model: ModelFile, lo: int, hi: int, max_vocab: int | None = None) -> _Plan:
        check_slice(model.family, model.facts, lo, hi)
        num_vocab = _num_vocab(model, hi, max_vocab)
        tensors = tuple(_tensors(model, lo, hi, num_vocab))
        return cls(model, encode_header(_metadata(model, lo, hi, num_vocab), tensors), tensors)

    @property
    def num_bytes(self) -> int:
        return len(self.header) + sum(aligned(tensor.num_bytes) for tensor in self.tensors)

    def write(self, file: BinaryIO, progress: Progress | None) -> None:
        file.write(self.header)
        for tensor in self.tensors:
            for chunk in _chunks(self.model, tensor):
                file.write(chunk)
                if progress:
                    progress(file.tell(), self.num_bytes)
            file.write(bytes(aligned(tensor.num_bytes) - tensor.num_bytes))
        self.model.check_unchanged()


def _chunks(model: ModelFile, tensor: Tensor) -> Iterator[bytes]:
    # Read, not mapped: a file that shrinks meanwhile is then an error and not the end of us.
    if tensor.part is None:
        yield bytes(tensor.num_bytes)
        return
    path, left = model.paths[tensor.part], tensor.num_bytes
    with reading(path), path.open("rb", buffering=0) as source:
        source.seek(tensor.offset)
        while left:
            chunk = source.read(min(left, _CHUNK_BYTES))
            if not chunk:
                raise ModelFileError(f"{path} ended {left} bytes early: was it replaced?")
            yield chunk
            left -= len(chunk)


def _num_vocab(model: ModelFile, hi: int, max_vocab: int | None) -> int:
    """How many rows the slice's vocabulary has."""
    if hi < model.num_layers:
        return 1
    if max_vocab is None or len(_head(model)) > 1:  # scales of a head are for all of its rows
        return model.num_vocab
    return min(max_vocab, model.num_vocab)


def _tensors(model: ModelFile, lo: int, hi: int, num_vocab: int) -> Iterator[Tensor]:
    if hi < model.num_layers:
        yield Tensor(TOKEN_EMBD, GGMLQuantizationType.F32, (model.width, 1))
        if _keeps_head(model):
            yield Tensor(f"{_HEAD}weight", GGMLQuantizationType.F32, (model.width, 1))
    elif num_vocab < model.num_vocab:
        # Rows lie one after the other, so the first of them are the beginning of its bytes.
        yield replace(_head(model)[0], shape=(model.width, num_vocab))
    else:
        yield from _head(model)
    for tensor in model.tensors.values():
        block = split_block_name(tensor.name)
        if block and lo <= block[0] < hi:
            yield replace(tensor, name=f"blk.{block[0] - lo}.{block[1]}")
        elif not block and tensor.name != TOKEN_EMBD and not tensor.name.startswith(_HEAD):
            yield tensor


def _head(model: ModelFile) -> list[Tensor]:
    head = [tensor for tensor in model.tensors.values() if tensor.name.startswith(_HEAD)]
    if [tensor.name for tensor in head] == [f"{_HEAD}weight"] and not _keeps_head(model):
        return [replace(head[0], name=TOKEN_EMBD)]
    # Tied, or a head that llama.cpp allows under its own name only, as one with scales of its own.
    return [model.tensors[TOKEN_EMBD], *head]


def _keeps_head(model: ModelFile) -> bool:
    return model.family.needs_head and f"{_HEAD}weight" in model.tensors


def _metadata(model: ModelFile, lo: int, hi: int, num_vocab: int) -> dict[str, Value]:
    metadata = {
        key: _of_layers(key, value, model, lo, hi)
        for key, value in model.metadata.items()
        if not key.startswith(_DROPPED)
    }
    own = f"{model.architecture}."
    metadata[f"{own}block_count"] = Value.u32(hi - lo)
    metadata[f"{own}vocab_size"] = Value.u32(num_vocab)
    if f"{own}nextn_predict_layers" in metadata:
        metadata[f"{own}nextn_predict_layers"] = Value.u32(0)
    dense = f"{own}leading_dense_block_count"
    if dense in metadata:
        metadata[dense] = Value.u32(min(max(metadata[dense].decode() - lo, 0), hi - lo))
    for key, value in model.family.slice_keys(model.facts, lo, hi).items():
        metadata[f"{own}{key}"] = (
            Value.bools(value) if isinstance(value, list) else Value.u32(value)
        )
    metadata["tokenizer.ggml.model"] = Value.text("no_vocab")
    return metadata


def _of_layers(key: str, value: Value, model: ModelFile, lo: int, hi: int) -> Value:
    """``value``, or the part for layers [lo, hi) where it has an item for each layer."""
    own = f"{model.architecture}."
    if not key.startswith(own) or key.removeprefix(own) in _NOT_PER_LAYER:
        return value
    return value.items(lo, hi) if value.num_items == model.num_blocks else value
