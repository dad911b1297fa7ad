"""The seeded models are models: stock llama.cpp runs them, in every type, and text works."""

from __future__ import annotations

import itertools
from pathlib import Path

import jinja2
import numpy as np
import pytest
from gguf import GGUFReader
from hypothesis import example, given, settings
from hypothesis import strategies as st

from skippy_mesh.config import ContextConfig
from skippy_mesh.messages import StepBatch
from stages.native import load_library
from stages.tokenizer import Tokenizer
from tests.models import FAMILIES, make_model
from tests.models.quantizer import quantize_file
from tests.reference import Reference, step_of

MODELS = {family: (family, {}) for family in FAMILIES}
MODELS["mla with q_lora"] = ("mla", {"q_lora_rank": 256})

NUM_VOCAB = 512
NUM_PROMPT = 220  # more than three windows
NUM_TAIL = 50
CONTEXT = ContextConfig(num_cells=512, num_lanes=2, num_threads=1)


@pytest.fixture(scope="module")
def f32_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    load_library()
    folder = tmp_path_factory.mktemp("models")
    return {
        name: make_model(family, folder / f"{index}.gguf", **knobs)
        for index, (name, (family, knobs)) in enumerate(MODELS.items())
    }


# --- types ---

EXPECTED = {
    "f16": {"F16"},
    "bf16": {"BF16"},
    "q8_0": {"Q8_0"},
    "q6_K": {"Q6_K"},
    "q4_0": {"Q4_0", "Q6_K"},
    "q4_K_M": {"Q4_K", "Q6_K"},
}
HEAD = {"token_embd.weight", "output.weight"}
ALWAYS_EXACT = ("ffn_gate_inp.", "ssm_conv1d.", "ssm_a", "ssm_d")


def matrix_types(path: Path) -> dict[str, str]:
    tensors = GGUFReader(path).tensors
    return {tensor.name: tensor.tensor_type.name for tensor in tensors if len(tensor.shape) > 1}


def check_types(path: Path, dtype: str) -> None:
    """The file is what its name says, and no other type took a wanted one's place."""
    found = matrix_types(path)
    if dtype == "f32":
        assert set(found.values()) == {"F32"}
        return
    exact = {name for name in found if any(word in name for word in ALWAYS_EXACT)}
    assert all(found.pop(name) == "F32" for name in exact)
    if dtype in ("q4_K_M", "q6_K"):  # MLA's rows of 32, too short as in the real models
        found = {name: kind for name, kind in found.items() if "attn_k_b" not in name}
    assert set(found.values()) == EXPECTED[dtype]
    if dtype == "q4_0":
        assert {name for name, kind in found.items() if kind == "Q6_K"} <= HEAD
    if dtype == "q4_K_M":
        assert sum(kind == "Q4_K" for kind in found.values()) > 0.8 * len(found)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [*((family, "q8_0") for family in FAMILIES), ("mla", "f16"), ("ssm", "bf16")],
)
def test_types_written_directly_are_what_llama_cpp_writes(
    f32_models: dict[str, Path], tmp_path: Path, family: str, dtype: str
) -> None:
    ours = make_model(family, tmp_path / "ours.gguf", dtype=dtype)
    quantize_file(f32_models[family], tmp_path / "theirs.gguf", dtype)
    expected = {tensor.name: tensor for tensor in GGUFReader(tmp_path / "theirs.gguf").tensors}
    found = {tensor.name: tensor for tensor in GGUFReader(ours).tensors}
    assert set(found) == set(expected)
    for name, tensor in found.items():
        assert tensor.tensor_type == expected[name].tensor_type, name
        assert tensor.data.tobytes() == expected[name].data.tobytes(), name


def test_types_that_cannot_be_had_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'q9_X' is none of f32, bf16, f16, iq1_m"):
        make_model("dense", tmp_path / "m.gguf", dtype="q9_X")
    with pytest.raises(ValueError, match=r"llama\.cpp cannot write .* as iq2_xxs: .*matrix"):
        make_model("dense", tmp_path / "m.gguf", dtype="iq2_xxs")
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == []


# --- logits ---


def all_logits(path: Path, prompts: list[list[int]]) -> list[np.ndarray]:
    """float32 [positions, n_vocab] after every token, each prompt in an empty context."""
    reference = Reference(path, CONTEXT)
    try:
        return [
            reference.logits(
                StepBatch(
                    epoch=0,
                    step_id=lane,
                    lanes=(lane,) * len(prompt),
                    positions=tuple(range(len(prompt))),
                    tokens=tuple(prompt),
                    samples=(True,) * len(prompt),
                )
            )
            for lane, prompt in enumerate(prompts)
        ]
    finally:
        reference.close()


DTYPES = ("f32", "f16", "q8_0", "q4_K_M", "q6_K", "q4_0")


@pytest.mark.parametrize(
    ("model", "dtype"),
    [*itertools.product(FAMILIES, DTYPES), ("mla with q_lora", "f32"), ("mla with q_lora", "q8_0")],
)
def test_every_model_runs_in_every_type(
    f32_models: dict[str, Path], tmp_path: Path, model: str, dtype: str
) -> None:
    family, knobs = MODELS[model]
    path = f32_models[model]
    if dtype != "f32":
        path = make_model(family, tmp_path / "m.gguf", dtype=dtype, **knobs)
    check_types(path, dtype)

    rng = np.random.default_rng(1)
    tail = rng.integers(3, NUM_VOCAB, NUM_TAIL).tolist()
    prompts = [rng.integers(3, NUM_VOCAB, NUM_PROMPT - NUM_TAIL).tolist() + tail for _ in "ab"]
    first, second = all_logits(path, prompts)
    assert first.shape == (NUM_PROMPT, NUM_VOCAB) and np.isfinite(first).all()
    assert first.std(axis=1).min() > 1
    chosen = first.argmax(axis=1)
    assert len(set(chosen.tolist())) > 80
    assert (chosen == prompts[0]).mean() < 0.2  # a head that repeats its input needs no layers
    # What came before the last fifty tokens decides most of what follows them.
    assert (first[-NUM_TAIL:].argmax(axis=1) != second[-NUM_TAIL:].argmax(axis=1)).mean() > 0.5


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_goes_on_and_on(f32_models: dict[str, Path], family: str) -> None:
    """No two tokens for ever: steps of a loop are too alike to show which is which."""
    reference = Reference(f32_models[family], CONTEXT)
    tokens = [5, 100, 400]
    steps = [[(0, 0), (0, 1), (0, 2)], *([(0, 3 + step)] for step in range(32))]
    for index, rows in enumerate(steps):
        tokens.append(int(reference.logits(step_of(index, rows, {0: tokens}))[0].argmax()))
    reference.close()
    assert len(set(tokens)) > 20


# --- text ---


@pytest.fixture(scope="module", params=[NUM_VOCAB, 259, 3000])
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    path = tmp_path_factory.mktemp("text") / "m.gguf"
    return Tokenizer(str(make_model("dense", path, num_vocab=request.param, num_layers=1)))


@settings(deadline=None, max_examples=100)
@example("")
@example(" two  spaces \t\r\n\n")
@example("\0 \x7f ▁ Ġ é e\u0301 \u200d 👩‍👩‍👧 \ufffd \U0010ffff <|im_end|> <0x41>")
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_out_again(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special=True, parse_special=False)
    assert b"".join(map(tokenizer.piece, ids)) == text.encode()


def test_every_token_can_be_said(tokenizer: Tokenizer) -> None:
    assert tokenizer.special_texts == ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    pieces = [tokenizer.piece(token) for token in range(3, tokenizer.num_tokens)]
    assert {bytes([byte]) for byte in range(256)} <= set(pieces)
    assert len(set(pieces)) == len(pieces)
    for token, piece in enumerate(pieces[256:], start=259):
        ids = tokenizer.encode(piece.decode(), add_special=False, parse_special=False)
        assert ids == [token]


def test_chat_template_ends_turns_with_the_end_token(tokenizer: Tokenizer) -> None:
    assert 2 in tokenizer.eog_ids and tokenizer.eos_text == "<|im_end|>"
    assert tokenizer.chat_template
    text = jinja2.Template(tokenizer.chat_template).render(
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        add_generation_prompt=True,
    )
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    ids = tokenizer.encode(text, add_special=True, parse_special=True)
    assert (ids.count(1), ids.count(2)) == (3, 2) and ids[0] == 1
