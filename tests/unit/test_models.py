"""The seeded models have what tests rely on, and nothing in them hides a fault."""

from __future__ import annotations

import subprocess
import sys
from math import prod
from pathlib import Path

import pytest
from gguf import GGUFReader, ReaderTensor

from tests.models import ARCHITECTURES, FAMILIES, make_llama, make_model
from tests.models.__main__ import main
from tests.models.writer import ModelWriter

ROOT = Path(__file__).parents[2]
NARROW = {"width": 64, "num_ff": 64, "num_layers": 4, "num_vocab": 272}


def metadata_of(path: Path) -> dict[str, object]:
    return {key: field.contents() for key, field in GGUFReader(path).fields.items()}


def tensors_of(path: Path) -> dict[str, ReaderTensor]:
    return {tensor.name: tensor for tensor in GGUFReader(path).tensors}


@pytest.mark.parametrize("family", FAMILIES)
def test_same_arguments_give_the_same_file(tmp_path: Path, family: str) -> None:
    knobs = {**NARROW, "dtype": "q8_0"}
    first = make_model(family, tmp_path / "a.gguf", **knobs).read_bytes()
    assert make_model(FAMILIES[family], tmp_path / "b.gguf", **knobs).read_bytes() == first
    assert make_model(family, tmp_path / "b.gguf", **knobs, seed=1).read_bytes() != first


def test_weights_do_not_depend_on_other_weights(tmp_path: Path) -> None:
    """So a knob changes what it says: with one generator for all it would change the rest, too."""
    tied = tensors_of(make_llama(tmp_path / "a.gguf", tied=True, num_layers=1))
    untied = tensors_of(make_llama(tmp_path / "b.gguf", num_layers=2))
    assert set(untied) > set(tied)
    assert all((tensor.data == untied[name].data).all() for name, tensor in tied.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_differ(tmp_path: Path, family: str) -> None:
    """Equal layers would let a slice of the wrong ones pass."""
    tensors = tensors_of(make_model(family, tmp_path / "m.gguf", **NARROW))
    norms = [tensors[f"blk.{layer}.attn_norm.weight"].data.tobytes() for layer in range(4)]
    assert len(set(norms)) == 4


def test_widths_do_not_make_scaling_exact_by_luck() -> None:
    """gemma2 scales its input by the root of the width; a power of two would be undone exactly."""
    for size in ("tiny", "bench"):
        root = ARCHITECTURES["gemma2"][size].width ** 0.5
        assert not root.is_integer()


def test_models_have_layers_of_every_kind_on_both_sides_of_a_cut() -> None:
    tiny = {name: sizes["tiny"] for name, sizes in ARCHITECTURES.items()}
    assert tiny["gemma2"].num_layers >= 6 and tiny["qwen3next"].num_layers >= 8
    assert tiny["deepseek2"].num_dense_layers == 1
    # A prompt of more than three windows shows a window in the wrong layer, and still fits.
    assert 3 * tiny["gemma2"].window < 200 < tiny["gemma2"].max_trained_tokens


class Counter(ModelWriter):
    """Adds up what the matrices of a model take as q8_0, without making them."""

    def __init__(self) -> None:
        self.metadata, self.num_bytes, self.columns, self._seed = {}, 0, set(), 0

    def matrix(self, name: str, columns: int, *rows: int, gain: float = 1.0) -> None:
        self.num_bytes += prod((columns, *rows)) * 34 // 32
        self.columns.add((name, columns))

    def exact(self, name: str, values: object) -> None:
        pass


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("size", ["tiny", "bench"])
def test_sizes(architecture: str, size: str) -> None:
    counter = Counter()
    ARCHITECTURES[architecture][size].write(counter)
    megabytes = counter.num_bytes / 1e6
    assert 20 < megabytes < 60 if size == "bench" else megabytes < 12
    # Rows of another length would get another type than the K-quant asked for. The heads of
    # deepseek2 are as short in the real models.
    odd = {name for name, columns in counter.columns if columns % 256}
    assert {name.split(".")[-2] for name in odd} <= {"attn_k_b"}


def test_routers_and_convolutions_stay_f32(tmp_path: Path) -> None:
    for family in ("mla", "ssm", "linear"):
        for name, tensor in tensors_of(
            make_model(family, tmp_path / "m.gguf", dtype="q8_0", **NARROW)
        ).items():
            is_exact = len(tensor.shape) == 1 or any(
                word in name for word in ("gate_inp", "conv1d", "ssm_a", "ssm_d")
            )
            assert tensor.tensor_type.name == ("F32" if is_exact else "Q8_0"), name


def test_metadata_can_be_set_and_left_out(tmp_path: Path) -> None:
    extra = {
        "gemma2.attention.sliding_window": 32,
        "gemma2.attn_logit_softcapping": None,
        "gemma2.test.bools": [True, False],
        "tokenizer.ggml.add_bos_token": True,
    }
    found = metadata_of(make_model("window", tmp_path / "m.gguf", extra=extra, **NARROW))
    assert found["gemma2.attention.sliding_window"] == 32
    assert "gemma2.attn_logit_softcapping" not in found
    assert found["gemma2.test.bools"] == [True, False]
    assert found["tokenizer.ggml.add_bos_token"] is True
    assert found["gemma2.final_logit_softcapping"] == 30


def test_deepseek_variants(tmp_path: Path) -> None:
    key = "deepseek2.attention.q_lora_rank"
    small = {**NARROW, "num_expert_ff": 32}
    other = make_model("mla", tmp_path / "other.gguf", q_lora_rank=32, **small)
    assert metadata_of(other)[key] == 32
    names = set(tensors_of(other))
    assert {"blk.0.attn_q_a.weight", "blk.0.attn_q_b.weight", "blk.1.exp_probs_b.bias"} <= names
    assert {"blk.0.ffn_gate.weight", "blk.1.ffn_gate_exps.weight"} <= names
    assert not {"blk.0.attn_q.weight", "blk.1.ffn_gate.weight"} & names
    assert metadata_of(make_model("mla", tmp_path / "a.gguf", **small))[key] == 0
    lite = make_model("mla", tmp_path / "b.gguf", **{**small, "num_layers": 27})
    assert key not in metadata_of(lite)  # llama.cpp knows the lite ones by their layers


def test_parts(tmp_path: Path) -> None:
    first = make_model("ssm", tmp_path / "p.gguf", split_max_tensors=20, **NARROW)
    parts = sorted(tmp_path.iterdir())
    assert first == parts[0] and first.name == f"p-00001-of-{len(parts):05d}.gguf"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"family": "mamba"}, ValueError, "'mamba' is none of dense, mla, window, ssm, linear, l"),
        ({"num_heds": 4}, TypeError, "num_heds"),
        ({"num_vocab": 258}, ValueError, r"num_vocab is 258, not in \[259, "),
        ({"dtype": "q4_K_M", "split_max_tensors": 9}, ValueError, "in parts can be f32, f16, bf16"),
    ],
)
def test_wrong_arguments(
    tmp_path: Path, arguments: dict[str, object], error: type[Exception], message: str
) -> None:
    family = str(arguments.pop("family", "dense"))
    with pytest.raises(error, match=message):
        make_model(family, tmp_path / "m.gguf", **arguments)
    assert list(tmp_path.iterdir()) == []


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "folder"
    assert main([str(out), "--dtype", "q8_0", "dense", "gemma2"]) == 0
    names = ["gemma2-tiny-q8_0.gguf", "llama-tiny-q8_0.gguf"]
    assert sorted(path.name for path in out.iterdir()) == names
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in printed] == [str(out / name) for name in names[::-1]]
    assert main([str(out), "mamba"]) == 2
    assert capsys.readouterr().err.startswith("error: family 'mamba' is none of")


def test_command_help() -> None:
    command = [sys.executable, "-m", "tests.models", "--help"]
    text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for word in ("OUT_DIR", "--size", "bench", "--dtype", "--seed", "mla (deepseek2)"):
        assert word in text
