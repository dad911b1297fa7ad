"""Opening a model file: what it says of itself, and one clear line for what cannot be used."""

from __future__ import annotations

import os
import pickle
import random
import struct
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from skippy_mesh.errors import ModelFileError, UnsupportedModelError
from stages.gguf_file import ModelFile
from stages.gguf_reader import read_header
from tests.models import make_llama, make_model

make_small = partial(make_llama, width=64, num_vocab=272)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return make_small(tmp_path / "small.gguf", num_layers=2)


def tensors_of(path: Path) -> dict[str, tuple[bytes, int, tuple[int, ...]]]:
    """Read by the gguf package, so that our own reader does not vouch for our own writer."""
    return {
        tensor.name: (tensor.data.tobytes(), tensor.tensor_type, tuple(tensor.shape.tolist()))
        for tensor in GGUFReader(path).tensors
    }


def test_model_file_tells_what_planners_and_lookups_need(tmp_path: Path) -> None:
    source = make_llama(tmp_path / "m.gguf", dtype="q8_0")
    model = pickle.loads(pickle.dumps(ModelFile.open(source)))
    assert (model.architecture, model.family.name) == ("llama", "dense")
    assert (model.num_layers, model.width, model.num_vocab) == (6, 192, 320)
    assert model.max_trained_tokens == 4096
    assert model.tensor_types == {"F32", "Q8_0"}
    whole = tensors_of(source)
    data, kind, shape = model.tensor("token_embd.weight")
    assert (data.tobytes(), kind, shape) == whole["token_embd.weight"]
    assert data.dtype == np.uint8 and not data.flags.writeable
    assert model.layer_bytes(1) == sum(len(whole[n][0]) for n in whole if n.startswith("blk.1."))
    with pytest.raises(ModelFileError, match=r"no tensor blk\.99"):
        model.tensor("blk.99")


def test_large_vocabulary_opens_quickly(tmp_path: Path) -> None:
    tokens = struct.pack("<IQ", STRING, 150_000) + (struct.pack("<Q", 5) + b"token") * 150_000
    body = key(b"tokenizer.ggml.tokens", ARRAY, tokens) + key(b"k", STRING, struct.pack("<Q", 0))
    (tmp_path / "m.gguf").write_bytes(header(0, 2, body))
    started = time.monotonic()
    metadata, _ = read_header(tmp_path / "m.gguf")
    assert time.monotonic() - started < 1
    assert metadata["k"].decode() == ""


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    first = make_llama(tmp_path / "p.gguf", dtype="q8_0", split_max_tensors=20)
    return sorted(first.parent.glob("p-*-of-*.gguf"))


def test_parts_that_do_not_belong_together_are_refused(parts: list[Path]) -> None:
    renamed = parts[0].with_name("first.gguf")
    os.link(parts[0], renamed)
    with pytest.raises(ModelFileError, match=r"calls itself part 1 of 3, expected part 1 of 1"):
        ModelFile.open(renamed)
    parts[2].replace(parts[2].with_name("x"))
    parts[1].replace(parts[2])
    with pytest.raises(ModelFileError, match=r"in 3 parts and 1 of them cannot be found.*00002"):
        ModelFile.open(parts[0])
    os.link(parts[2], parts[1])
    with pytest.raises(ModelFileError, match=r"00003.*calls itself part 2 of 3"):
        ModelFile.open(parts[0])


def test_truncated_anywhere_is_one_clear_error(small: Path) -> None:
    data = small.read_bytes()
    header_bytes = ModelFile.open(small).tensors["token_embd.weight"].offset
    points = {*range(0, header_bytes, 61), *range(1, 40), header_bytes - 1, header_bytes}
    points |= {*range(header_bytes, len(data), len(data) // 40), len(data) - 1}
    for point in sorted(points, reverse=True):
        os.truncate(small, point)
        with pytest.raises(ModelFileError) as caught:
            ModelFile.open(small)
        assert str(small) in str(caught.value) and "\n" not in str(caught.value)
        if point >= header_bytes:
            assert f"need {len(data)} bytes, the file has {point}" in str(caught.value)


def test_damaged_header_never_escapes_as_another_error(small: Path) -> None:
    data = small.read_bytes()
    header_bytes = ModelFile.open(small).tensors["token_embd.weight"].offset
    rng = random.Random(0)
    refused = 0
    for _ in range(150):
        damaged = bytearray(data)
        for _ in range(rng.choice((1, 1, 8))):
            damaged[rng.randrange(4, header_bytes)] = rng.randrange(256)
        small.write_bytes(damaged)
        try:
            ModelFile.open(small)
        except ModelFileError as error:
            refused += 1
            assert "\n" not in str(error) and len(str(error)) < 500
    assert refused > 20


HUGE = 1 << 60
ARRAY, STRING, U8 = 9, 8, 0


def header(num_tensors: int = 0, num_keys: int = 0, body: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys) + body


def key(name: bytes, kind: int, body: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + body


def row(shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return struct.pack("<Q", 1) + b"t" + dims + struct.pack("<IQ", kind, offset)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a GGUF file: it is empty"),
        (b"<html>no such model</html>", "not a GGUF file: it starts with b'<htm'"),
        (header(version=1), r"GGUF version 1 is not one of \(2, 3\)"),
        (header(version=3 << 24), "big-endian"),
        (header(num_keys=HUGE), f"{HUGE} metadata keys, more than"),
        (header(num_tensors=HUGE), f"{HUGE} tensors, more than"),
        (header(0, 1, struct.pack("<Q", HUGE)), f"a name of {HUGE} bytes"),
        (header(0, 1, key(b"\xff", U8, b"1")), "not UTF-8"),
        (header(0, 1, key(b"k", 99, b"")), "unknown metadata type 99"),
        (header(0, 1, key(b"k", STRING, struct.pack("<Q", HUGE))), "header wants"),
        (header(0, 1, key(b"k", ARRAY, struct.pack("<IQ", U8, HUGE))), "header wants"),
        (header(0, 1, key(b"k", ARRAY, struct.pack("<IQ", STRING, HUGE))), "header wants"),
        (header(0, 1, key(b"k", ARRAY, struct.pack("<IQ", ARRAY, 1))), "arrays of arrays"),
        (header(0, 2, key(b"k", U8, b"1") * 2), "'k' appears twice"),
        (header(0, 1, key(b"general.alignment", U8, b"\3")), "alignment is 3, no power of two"),
        (header(1, 0, row(())), "0 dimensions"),
        (header(1, 0, row((2, 0))), r"shape \(2, 0\)"),
        (header(1, 0, row((32,), kind=4)), "unknown tensor type 4"),
        (header(1, 0, row((33,), kind=8)), "rows of 33 cannot be Q8_0"),
        (header(1, 0, row((32,), offset=64)), "at offset 64, expected 0"),
        (header(1, 0, row((HUGE, HUGE))), "truncated"),
        (header(), "not a language model: its general.architecture is None"),
    ],
)
def test_bad_file_is_refused_at_once(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    started = time.monotonic()
    with pytest.raises(ModelFileError, match=message):
        ModelFile.open(path)
    assert time.monotonic() - started < 1


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"none\.gguf does not exist"):
        ModelFile.open(tmp_path / "none.gguf")
    with pytest.raises(ModelFileError, match="is a folder: give the"):
        ModelFile.open(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelFileError, match="not a regular file"):
        ModelFile.open(tmp_path / "pipe")
    with pytest.raises(ModelFileError, match="File name too long"):
        ModelFile.open(tmp_path / ("x" * 300))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"llama.attention.sliding_window": 512}, "sliding_window = 512: no proven way"),
        ({"llama.attention.sliding_window": [0, 512]}, "no proven way"),
        ({"llama.interleave_moe_layer_step": 2}, "interleave_moe_layer_step = 2"),
        ({"llama.expert_count": 8}, "expert_count = 8"),
    ],
)
def test_layers_that_are_not_alike_are_refused(
    tmp_path: Path, extra: dict[str, object], message: str
) -> None:
    path = make_small(tmp_path / "m.gguf", num_layers=2, extra=extra)
    with pytest.raises(UnsupportedModelError, match=message):
        ModelFile.open(path)


@pytest.mark.parametrize(
    ("architecture", "key", "value", "reason"),
    [
        ("gemma4", "embedding_length_per_layer_input", 256, "a row of its own for every token"),
        ("gemma4", "attention.shared_kv_layers", 18, "late layers read early layers' memory"),
        ("gemma4", "expert_count", 128, "no proven way"),
        ("olmo2", "attention.sliding_window", 4096, "no proven way"),
        ("glm4", "rope.dimension_sections", [8, 12, 12, 0], "no proven way"),
    ],
)
def test_variants_that_no_cut_can_be_right_for_are_refused_with_the_reason(
    tmp_path: Path, architecture: str, key: str, value: object, reason: str
) -> None:
    extra = {f"{architecture}.{key}": value}
    path = make_model(architecture, tmp_path / "m.gguf", num_layers=1, extra=extra)
    for allow_unproven in (False, True):
        with pytest.raises(UnsupportedModelError, match=rf"{key} = .*: .*{reason}") as error:
            ModelFile.open(path, allow_unproven=allow_unproven)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba", "'mamba' is not supported"),
        (b"llama.block_count", b"llama.block_kount", "llama.block_count is None, expected a num"),
        (b"blk.1.", b"blk.7.", "of 2 layers, layer 1 has no tensors"),
        (b"token_embd.weight", b"token_umbd.weight", "token_embd.weight is missing"),
        (b"blk.0.attn_q.w", b"blk.0.attn_k.w", "'blk.0.attn_k.weight' for a second time"),
    ],
)
def test_incomplete_model_is_refused(small: Path, old: bytes, new: bytes, message: str) -> None:
    data = small.read_bytes()
    assert old in data
    small.write_bytes(data.replace(old, new))
    with pytest.raises(ModelFileError, match=message):
        ModelFile.open(small)
