"""Cutting a model file: the right bytes, and whole files or none."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType, GGUFReader

from skippy_mesh.cli import main
from skippy_mesh.errors import ModelFileError, NoSpaceError, UsageError
from stages import disk
from stages.gguf_file import ModelFile
from stages.gguf_format import Tensor
from stages.slices import cached_slice, cut, kept_slices
from tests.models import DType, make_llama

ROOT = Path(__file__).parents[2]
NUM_LAYERS = 6
RANGES = list(itertools.combinations(range(NUM_LAYERS + 1), 2))
make_small = partial(make_llama, width=64, num_vocab=272)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SKIPPY_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", dtype="q8_0")


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return make_small(tmp_path / "small.gguf", num_layers=2)


def test_kept_slices_are_shown_and_deleted_and_cut_again_when_needed(
    small: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*arguments: str) -> str:
        assert main(["slice", *arguments]) == 0
        return capsys.readouterr().out

    assert said("--list") == "" and said("--prune") == "deleted 0 slices, 0B freed\n"
    model = ModelFile.open(small)
    kept = [cached_slice(model, lo, lo + 1) for lo in range(2)]
    shown = said("--list").splitlines()
    assert sorted(Path(line.split()[1]) for line in shown) == sorted(kept)
    with kept[0].open("rb") as running:  # a stage that has one keeps it
        assert "deleted 2 slices" in said("--prune").splitlines()[-1]
        assert running.read(4) == b"GGUF"
    assert kept_slices() == []
    assert cached_slice(model, 0, 1) == kept[0] and kept[0].exists()
    assert main(["slice", str(small), "--layers", "0:1"]) == 2
    assert "--layers LO:HI -o OUT, or --list, or --prune" in capsys.readouterr().err


def tensors_of(path: Path) -> dict[str, tuple[bytes, int, tuple[int, ...]]]:
    """Read by the gguf package, so that our own reader does not vouch for our own writer."""
    return {
        tensor.name: (tensor.data.tobytes(), tensor.tensor_type, tuple(tensor.shape.tolist()))
        for tensor in GGUFReader(path).tensors
    }


def metadata_of(path: Path) -> dict[str, object]:
    fields = GGUFReader(path).fields
    return {key: f.contents() for key, f in fields.items() if not key.startswith("GGUF.")}


# --- what is in a slice ---


@pytest.mark.parametrize(
    ("dtype", "tied"), [("f32", False), ("f16", True), ("q8_0", False), ("q8_0", True)]
)
def test_every_cut_keeps_every_byte(tmp_path: Path, dtype: DType, tied: bool) -> None:
    path = make_small(tmp_path / "m.gguf", dtype=dtype, tied=tied)
    whole, model = tensors_of(path), ModelFile.open(path)
    for lo, hi in RANGES:
        cut(model, lo, hi, tmp_path / "s.gguf")
        expected = {name: whole[name] for name in ("output_norm.weight", "rope_freqs.weight")}
        for layer in range(lo, hi):
            for name in (name for name in whole if name.startswith(f"blk.{layer}.")):
                expected[name.replace(f"blk.{layer}.", f"blk.{layer - lo}.")] = whole[name]
        if hi == NUM_LAYERS:
            expected["token_embd.weight"] = whole["token_embd.weight" if tied else "output.weight"]
        else:
            expected["token_embd.weight"] = (bytes(4 * model.width), 0, (model.width, 1))
        assert tensors_of(tmp_path / "s.gguf") == expected


def test_metadata_says_what_the_slice_is(tmp_path: Path) -> None:
    per_layer, sections = [10, 11, 12, 13, 14, 15], [1, 2, 3, 4, 5, 6]
    extra = {
        "llama.test.per_layer": per_layer,
        "llama.rope.dimension_sections": sections,
        "llama.expert_count": 0,
        "general.alignment": 64,
    }
    path = make_small(tmp_path / "m.gguf", extra=extra)
    model = ModelFile.open(path)
    kept = {k: v for k, v in metadata_of(path).items() if not k.startswith("tokenizer.")}
    del kept["general.alignment"]
    for lo, hi in RANGES:
        cut(model, lo, hi, tmp_path / "s.gguf")
        expected = kept | {
            "llama.block_count": hi - lo,
            "llama.vocab_size": 272 if hi == NUM_LAYERS else 1,
            "llama.test.per_layer": per_layer[lo:hi],
            "llama.attention.head_count_kv": [2] * (hi - lo),
            "tokenizer.ggml.model": "no_vocab",
        }
        assert metadata_of(tmp_path / "s.gguf") == expected


@pytest.mark.parametrize(
    ("lo", "hi", "dense"), [(0, 2, 2), (0, 5, 3), (1, 4, 2), (2, 3, 1), (3, 5, 0), (4, 5, 0)]
)
def test_leading_dense_layers_are_counted_from_the_cut(
    tmp_path: Path, lo: int, hi: int, dense: int
) -> None:
    extra = {
        "llama.leading_dense_block_count": 3,
        "llama.nextn_predict_layers": 1,
        "llama.test.per_layer": [0, 1, 2, 3, 4, 5],
    }
    model = ModelFile.open(make_small(tmp_path / "m.gguf", extra=extra))
    assert model.num_layers == 5  # the sixth is for multi-token prediction
    cut(model, lo, hi, tmp_path / "s.gguf")
    found = metadata_of(tmp_path / "s.gguf")
    assert found["llama.leading_dense_block_count"] == dense
    assert found["llama.nextn_predict_layers"] == 0
    assert found["llama.test.per_layer"] == list(range(lo, hi))
    assert found["llama.vocab_size"] == (272 if hi == 5 else 1)


def test_other_tensors_of_the_whole_model_are_kept(small: Path, tmp_path: Path) -> None:
    model = ModelFile.open(small)
    norm = model.tensors["output_norm.weight"]
    model = replace(model, tensors={**model.tensors, "odd.bias": replace(norm, name="odd.bias")})
    for lo in (0, 1):
        cut(model, lo, lo + 1, tmp_path / "s.gguf")
        assert (
            tensors_of(tmp_path / "s.gguf")["odd.bias"] == tensors_of(small)["output_norm.weight"]
        )


def test_head_with_scales_keeps_its_name(small: Path, tmp_path: Path) -> None:
    """llama.cpp ends the process over a shared head that has scales of its own."""
    model = ModelFile.open(small)
    at = model.tensors["output_norm.weight"].offset
    scale = Tensor("output.scale", GGMLQuantizationType.F32, (1,), 0, at)
    model = replace(model, tensors={**model.tensors, scale.name: scale})
    cut(model, 0, 1, tmp_path / "s.gguf")
    assert not any(name.startswith("output.") for name in tensors_of(tmp_path / "s.gguf"))
    cut(model, 1, 2, tmp_path / "s.gguf")
    found, whole = tensors_of(tmp_path / "s.gguf"), tensors_of(small)
    assert found["output.weight"] == whole["output.weight"]
    assert found["token_embd.weight"] == whole["token_embd.weight"]
    assert "output.scale" in found


# --- parts ---


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    first = make_llama(tmp_path / "p.gguf", dtype="q8_0", split_max_tensors=20)
    return sorted(first.parent.glob("p-*-of-*.gguf"))


def test_split_source_gives_the_same_slices(
    source: Path, parts: list[Path], tmp_path: Path
) -> None:
    assert len(parts) == 3
    whole, split = ModelFile.open(source), ModelFile.open(parts[1])
    assert split.paths == tuple(parts)
    for lo, hi in RANGES[::3]:
        cut(whole, lo, hi, tmp_path / "a.gguf")
        cut(split, lo, hi, tmp_path / "b.gguf")
        assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


@pytest.mark.parametrize(("lo", "hi"), [(-1, 2), (2, 2), (3, 2), (0, 7), (6, 7), (7, 9)])
def test_impossible_cut_is_refused(source: Path, tmp_path: Path, lo: int, hi: int) -> None:
    model = ModelFile.open(source)
    for act in (lambda: cut(model, lo, hi, tmp_path / "s"), lambda: cached_slice(model, lo, hi)):
        with pytest.raises(UsageError, match=rf"layers {lo}:{hi} .* 6 layers"):
            act()
    assert list(tmp_path.iterdir()) == []


def test_output_may_not_be_the_model(small: Path, tmp_path: Path) -> None:
    before = small.read_bytes()
    (tmp_path / "link.gguf").symlink_to(small)
    for out, message in (
        (small, "itself"),
        (tmp_path / "link.gguf", "itself"),
        (tmp_path, "folder"),
    ):
        with pytest.raises(UsageError, match=message):
            cut(ModelFile.open(small), 0, 1, out)
    assert small.read_bytes() == before


# --- the cache ---


def test_slice_is_cut_once_per_content(small: Path, cache: Path) -> None:
    model = ModelFile.open(small)
    first = cached_slice(model, 0, 1)
    assert first == cache / "slices" / f"{model.digest[:16]}-0-1-v2.gguf"
    before = first.stat()
    assert cached_slice(ModelFile.open(small), 0, 1) == first
    assert (first.stat().st_mtime_ns, first.stat().st_ino) == (before.st_mtime_ns, before.st_ino)
    assert cached_slice(model, 0, 2) == small

    data = bytearray(small.read_bytes())
    data[-1] ^= 1
    small.write_bytes(data)
    assert cached_slice(ModelFile.open(small), 0, 1) != first


def test_damaged_slice_is_cut_again(small: Path) -> None:
    out = cached_slice(ModelFile.open(small), 1, 2)
    whole = out.read_bytes()
    os.truncate(out, len(whole) // 2)
    assert cached_slice(ModelFile.open(small), 1, 2).read_bytes() == whole


def test_digest_is_remembered_until_the_file_changes(small: Path, cache: Path) -> None:
    digest = ModelFile.open(small).digest
    (memo,) = (cache / "digests").iterdir()
    memo.write_text("r" * 64)
    assert ModelFile.open(small).digest == "r" * 64
    memo.write_text("cut short")
    assert ModelFile.open(small).digest == digest
    os.utime(small, ns=(0, 0))
    assert ModelFile.open(small).digest == digest


def test_who_asks_for_a_digest_meanwhile_does_not_read_the_file_again(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages of one machine load at once: each would read all of the model."""
    num_read, read = 0, disk._digest
    model = ModelFile.open(small)

    def slowly(paths: Sequence[Path]) -> bytes:
        nonlocal num_read
        num_read += 1
        time.sleep(0.1)
        return read(paths)

    monkeypatch.setattr(disk, "_digest", slowly)
    with ThreadPoolExecutor(4) as pool:
        digests = set(pool.map(lambda _: disk.content_digest(model.paths), range(4)))
    assert len(digests) == num_read == 1


def test_source_that_changes_meanwhile_gives_no_slice(small: Path, tmp_path: Path) -> None:
    def touch(done: int, total: int) -> None:
        os.utime(small, ns=(0, 0))

    with pytest.raises(ModelFileError, match="changed while it was being read"):
        cut(ModelFile.open(small), 0, 1, tmp_path / "s.gguf", touch)

    def shorten(done: int, total: int) -> None:
        os.truncate(small, 5000)

    with pytest.raises(ModelFileError, match="bytes early: was it replaced"):
        cut(ModelFile.open(small), 0, 1, tmp_path / "s.gguf", shorten)
    assert [p.name for p in tmp_path.iterdir()] == ["small.gguf"]


def test_progress_ends_at_the_size_of_the_file(source: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    out = tmp_path / "s.gguf"
    cut(ModelFile.open(source), 2, 4, out, lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen) and {total for _, total in seen} == {out.stat().st_size}
    assert out.stat().st_size - seen[-1][0] < 32


# --- other processes ---

CUT_SLOWLY = """
import sys, time
from pathlib import Path
from stages.gguf_file import ModelFile
from stages.slices import cached_slice

def slowly(done, total):
    print("writing", flush=True)
    time.sleep(float(sys.argv[2]))

model = ModelFile.open(sys.argv[1])
model.digest
print("ready", flush=True)
sys.stdin.readline()
cached_slice(model, 1, 4, slowly)
"""


def cutter(source: Path, pause_s: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CUT_SLOWLY, str(source), str(pause_s)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_two_processes_cut_once(source: Path, cache: Path, tmp_path: Path) -> None:
    both = [cutter(source, 0.01) for _ in range(2)]
    for process in both:
        assert process.stdout and process.stdout.readline() == "ready\n"
    for process in both:
        assert process.stdin
        process.stdin.write("\n")
        process.stdin.flush()
    wrote = [process.communicate(timeout=60)[0].count("writing") for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert min(wrote) == 0 < max(wrote)
    (out,) = (cache / "slices").iterdir()
    cut(ModelFile.open(source), 1, 4, tmp_path / "s.gguf")
    assert out.read_bytes() == (tmp_path / "s.gguf").read_bytes()


def test_killed_cut_leaves_nothing_that_matters(source: Path, cache: Path, tmp_path: Path) -> None:
    with cutter(source, 60) as process:
        assert process.stdin and process.stdout
        process.stdin.write("\n")
        process.stdin.flush()
        assert [process.stdout.readline() for _ in range(2)] == ["ready\n", "writing\n"]
        process.send_signal(signal.SIGKILL)
    (left,) = (cache / "slices").iterdir()
    assert left.name.endswith(".gguf.part")
    left.write_bytes(bytes(1 << 20))  # longer than the slice: none of it may stay
    out = cached_slice(ModelFile.open(source), 1, 4)
    cut(ModelFile.open(source), 1, 4, tmp_path / "s.gguf")
    assert out.read_bytes() == (tmp_path / "s.gguf").read_bytes()
    assert list((cache / "slices").iterdir()) == [out]


# --- disks ---


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A real file system of 512 KiB, with the cache on it."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount")
    monkeypatch.setenv("SKIPPY_CACHE_DIR", str(disk / "cache"))
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_full_disk_is_noticed_before_writing(source: Path, small_disk: Path) -> None:
    wrote: list[int] = []
    with pytest.raises(NoSpaceError) as caught:
        cached_slice(ModelFile.open(source), 0, 5, lambda done, total: wrote.append(done))
    assert wrote == []
    for word in ("bytes needed", "free", str(small_disk), "SKIPPY_CACHE_DIR"):
        assert word in str(caught.value)
    assert list((small_disk / "cache" / "slices").iterdir()) == []


def test_disk_that_fills_up_meanwhile_is_left_clean(source: Path, small_disk: Path) -> None:
    hog = small_disk / "hog"

    def fill(done: int, total: int) -> None:
        with hog.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))

    with pytest.raises(NoSpaceError, match="bytes needed"):
        cached_slice(ModelFile.open(source), 0, 1, fill)
    assert list((small_disk / "cache" / "slices").iterdir()) == []
    hog.unlink()
    assert cached_slice(ModelFile.open(source), 0, 1).exists()


def test_free_space_is_asked_of_the_target_folder(
    source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage(0, 0, 1000))
    with pytest.raises(NoSpaceError, match=rf"{cache}/slices: \d+ bytes needed, 1000 free"):
        cached_slice(ModelFile.open(source), 0, 3)


def test_cache_that_cannot_be_written_says_so(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SKIPPY_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelFileError, match=r"cannot write .*Not a directory.*SKIPPY_CACHE_DIR"):
        cached_slice(ModelFile.open(source), 0, 3)
