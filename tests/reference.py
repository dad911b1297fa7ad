"""The undivided model, run by llama-cpp-python alone: what every proof of exactness compares with.

Shares no code with the product: token ids go in (not embeddings), through ``llama_batch_init``, and
logits come out by batch index. Only the settings are the same: q8_0 KV, flash attention, one pool.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import llama_cpp
import numpy as np

from skippy_mesh.messages import StepBatch


class Reference:
    def __init__(self, path: Path, *, num_cells=2048, num_lanes=8, max_rows=512, num_threads=2):
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            str(path).encode(), llama_cpp.llama_model_default_params()
        )
        assert self._model
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max = num_cells, num_lanes
        params.n_batch = params.n_ubatch = max_rows
        params.n_threads = params.n_threads_batch = num_threads
        params.kv_unified, params.flash_attn_type = True, 1
        params.type_k = params.type_v = llama_cpp.GGML_TYPE_Q8_0
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        assert self._context
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._num_vocab = llama_cpp.llama_vocab_n_tokens(vocab)
        self._batch = llama_cpp.llama_batch_init(max_rows, 0, 1)

    def logits(self, batch: StepBatch) -> np.ndarray:
        """float32 ``[n_sampled, n_vocab]`` for the rows of ``batch`` (operations are not run)."""
        native = self._batch
        native.n_tokens = batch.num_rows
        for row in range(batch.num_rows):
            native.token[row] = batch.tokens[row]
            native.pos[row] = batch.positions[row]
            native.n_seq_id[row] = 1
            native.seq_id[row][0] = batch.lanes[row]
            native.logits[row] = batch.samples[row]
        assert llama_cpp.llama_decode(self._context, native) == 0
        found = [
            np.ctypeslib.as_array(
                ctypes.cast(
                    llama_cpp.llama_get_logits_ith(self._context, row),
                    ctypes.POINTER(ctypes.c_float),
                ),
                (self._num_vocab,),
            ).copy()
            for row in range(batch.num_rows)
            if batch.samples[row]
        ]
        return np.array(found)

    def close(self) -> None:
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)


def mixed_steps(num_vocab: int, *, num_prompt: int, num_decodes: int = 16) -> list[StepBatch]:
    """Two sequences sharing steps: a long prompt, a second one fed in while the first decodes,
    then both decoding. Tokens are given beforehand, so every step's logits can be compared."""
    rng = np.random.default_rng(11)
    first = rng.integers(3, num_vocab, num_prompt + num_decodes + 3).tolist()
    second = rng.integers(3, num_vocab, 150 + num_decodes).tolist()
    cut = num_prompt * 2 // 3
    rows = [
        [(0, at) for at in range(cut)],
        [(0, at) for at in range(cut, num_prompt)],
        [(1, at) for at in range(101)] + [(0, num_prompt)],
        [(1, 101), (0, num_prompt + 1)] + [(1, at) for at in range(102, 150)],
    ]
    rows += [
        [(1, 150 + step), (0, num_prompt + 2 + step)][:: 1 if step % 2 else -1]
        for step in range(num_decodes)
    ]
    tokens = {0: first, 1: second}
    return [step_of(index, step, tokens) for index, step in enumerate(rows)]


def step_of(
    step_id: int, rows: Sequence[tuple[int, int]], tokens: dict[int, list[int]]
) -> StepBatch:
    """A step over (lane, position) rows that samples each lane's last row."""
    last = {lane: row for row, (lane, _) in enumerate(rows)}
    return StepBatch(
        epoch=0,
        step_id=step_id,
        lanes=tuple(lane for lane, _ in rows),
        positions=tuple(position for _, position in rows),
        tokens=tuple(tokens[lane][position] for lane, position in rows),
        samples=tuple(last[lane] == row for row, (lane, _) in enumerate(rows)),
    )


def assert_same_bits(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.shape == expected.shape
    different = np.flatnonzero((found.view(np.uint32) != expected.view(np.uint32)).any(axis=1))
    worst = float(np.abs(found - expected).max()) if different.size else 0.0
    assert not different.size, f"rows {different.tolist()} differ, by at most {worst:g}"
