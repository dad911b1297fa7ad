"""On how little of a stage the self-test may run, and still see every kind of layer."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType, GGUFReader
from hypothesis import given
from hypothesis import strategies as st

from stages.gguf_file import ModelFile
from stages.gguf_format import Tensor
from stages.slices import slice_bytes, temporary_slice
from stages.views import first_layer_of_head, layer_signatures, rows_of_head, shortest_run
from tests.models import make_llama, make_model


def anything(_lo: int, _hi: int) -> bool:
    return True


def nothing(_lo: int, _hi: int) -> bool:
    return False


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SKIPPY_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ("a", (0, 1)),
        ("aaaa", (0, 1)),
        ("abab", (0, 2)),
        ("dmmm", (0, 2)),  # a dense layer, then experts
        ("hhhhllhl", (3, 5)),  # llama.cpp's mixes: an eighth of high ones comes first
        ("abca", (0, 3)),
        ("aabbc", (1, 5)),
    ],
)
def test_the_shortest_run_holds_every_kind(kinds: str, expected: tuple[int, int]) -> None:
    assert shortest_run(kinds, anything) == expected


@pytest.mark.parametrize(
    ("kinds", "seen", "expected"),
    [
        ("aaaa", "a", (0, 0)),
        ("hhhhllhl", "l", (0, 1)),
        ("hhhhllhl", "h", (4, 5)),
        ("hhhhllhl", "lh", (0, 0)),
        ("abca", "a", (1, 3)),
    ],
)
def test_what_the_logits_have_shown_is_not_looked_at_again(
    kinds: str, seen: str, expected: tuple[int, int]
) -> None:
    assert shortest_run(kinds, anything, seen=seen) == expected


def test_what_cannot_be_cut_is_not_chosen() -> None:
    # The beginning is no slice of its own: it is the loaded stage, stopped early.
    assert shortest_run("hhhhll", nothing) == (0, 5)
    assert shortest_run("hhhhll", lambda lo, hi: hi - lo > 2) == (2, 5)


@given(st.text("abc", min_size=1, max_size=12), st.sets(st.tuples(*[st.integers(0, 12)] * 2)))
def test_no_legal_run_is_shorter(kinds: str, legal: set[tuple[int, int]]) -> None:
    lo, hi = shortest_run(kinds, lambda lo, hi: (lo, hi) in legal)
    assert set(kinds[lo:hi]) == set(kinds)
    assert lo == 0 or (lo, hi) in legal
    for other in itertools.combinations(range(len(kinds) + 1), 2):
        if (other[0] == 0 or other in legal) and set(kinds[slice(*other)]) == set(kinds):
            assert hi - lo <= other[1] - other[0]


def test_the_head_comes_with_the_fewest_layers_that_are_legal() -> None:
    assert first_layer_of_head(30, 15, anything) == 29
    assert first_layer_of_head(30, 15, lambda lo, hi: hi - lo > 3) == 26
    assert first_layer_of_head(30, 15, nothing) == 15
    assert first_layer_of_head(30, 29, nothing) == 29


@given(st.integers(1, 300_000), st.integers(1, 512))
def test_rows_of_a_head_divide_as_all_of_them_do(num_vocab: int, num_threads: int) -> None:
    rows = rows_of_head(num_vocab, num_threads)
    assert rows <= num_vocab
    assert all((num_vocab - rows) % 2**power == 0 for power in range(13))
    # Every thread has a share of tiles where it would have one of the whole head.
    assert rows == num_vocab or rows >= 64 * num_threads


def test_a_large_head_is_cut_to_few_rows() -> None:
    assert rows_of_head(128_256, 8) == 4096 + 128_256 % 4096
    assert rows_of_head(512, 8) == 512


def test_a_signature_is_the_memory_the_types_and_the_shapes(tmp_path: Path) -> None:
    model = ModelFile.open(make_llama(tmp_path / "m.gguf", width=64, num_vocab=272, num_layers=4))
    assert len(set(layer_signatures(model, 0, 4))) == 1
    down = model.tensors["blk.2.ffn_down.weight"]
    for other in (
        replace(down, type=GGMLQuantizationType.F16),
        replace(down, shape=(down.shape[0], 2 * down.shape[1])),
    ):
        changed = replace(model, tensors={**model.tensors, down.name: other})
        first, second, third, fourth = layer_signatures(changed, 0, 4)
        assert first == second == fourth != third
        assert layer_signatures(changed, 2, 4) == [third, fourth]


def test_layers_differ_by_what_only_the_metadata_says(tmp_path: Path) -> None:
    for family, path in (("window", "w.gguf"), ("linear", "l.gguf")):
        model = ModelFile.open(make_model(family, tmp_path / path))
        assert len(set(layer_signatures(model, 0, model.num_layers))) == 2, family
    extra = {"llama.test.per_layer": [1, 1, 2, 1]}
    path = make_llama(tmp_path / "m.gguf", width=64, num_vocab=272, num_layers=4, extra=extra)
    first, second, third, fourth = layer_signatures(ModelFile.open(path), 0, 4)
    assert first == second == fourth != third


@pytest.mark.parametrize("tied", [True, False])
def test_a_temporary_slice_has_part_of_the_head_and_leaves_nothing(
    tmp_path: Path, cache: Path, tied: bool
) -> None:
    path = make_llama(
        tmp_path / "m.gguf", width=64, num_vocab=272, num_layers=2, dtype="q8_0", tied=tied
    )
    whole = {tensor.name: tensor.data for tensor in GGUFReader(path).tensors}
    with temporary_slice(ModelFile.open(path), 1, 2, max_vocab=40) as slice_path:
        assert slice_path is not None
        found = {tensor.name: tensor.data for tensor in GGUFReader(slice_path).tensors}
        assert not cache.exists()  # not even now: a killed process leaves nothing either
    head = whole["token_embd.weight" if tied else "output.weight"]
    assert found["token_embd.weight"].tobytes() == head[:40].tobytes()
    assert found["blk.0.attn_q.weight"].tobytes() == whole["blk.1.attn_q.weight"].tobytes()
    assert not slice_path.exists()


def test_a_head_with_scales_is_left_whole(tmp_path: Path) -> None:
    model = ModelFile.open(make_llama(tmp_path / "m.gguf", width=64, num_vocab=272, num_layers=2))
    scale = Tensor("output.scale", GGMLQuantizationType.F32, (1,), 0, 0)
    model = replace(model, tensors={**model.tensors, scale.name: scale})
    with temporary_slice(model, 1, 2, max_vocab=40) as path:
        shapes = {tensor.name: tuple(tensor.shape) for tensor in GGUFReader(path).tensors}
    assert shapes["output.weight"] == shapes["token_embd.weight"] == (64, 272)


def test_without_room_there_is_no_temporary_slice(tmp_path: Path) -> None:
    """Memory that the stage itself will need must not go to its test."""
    model = ModelFile.open(make_llama(tmp_path / "m.gguf", width=64, num_vocab=272, num_layers=2))
    num_bytes = slice_bytes(model, 1, 2)
    for max_bytes, is_there in ((num_bytes - 1, False), (num_bytes, True), (None, True)):
        with temporary_slice(model, 1, 2, max_vocab=272, max_bytes=max_bytes) as path:
            assert (path is not None) == is_there
