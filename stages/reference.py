"""The undivided model, run by llama-cpp-python alone: what the bench and every proof compare with.

Shares no code with the runtime, so no fault with it: token ids go in (not embeddings), through
``llama_batch_init``, and logits come out by batch index. Only the settings are the same: flash
attention, one pool for all sequences, one micro-batch a step.
"""

from __future__ import annotations

import ctypes
import time
from pathlib import Path

import llama_cpp
import numpy as np

from skippy_mesh.config import ContextConfig
from skippy_mesh.messages import StepBatch
from stages.batch import Floats
from stages.native import GGML_KV_TYPES, load_library


class Reference:
    """One context over the whole of ``path``. Runs the rows of a batch, not its operations.

    ``pad`` is that of the file's profile (``stages/profile.py``): steps are filled up to a multiple
    of it with rows on lanes of their own, and every row is an output.
    """

    def __init__(self, path: Path, config: ContextConfig | None = None, *, pad: int = 1):
        config = config or ContextConfig(num_cells=2048, num_threads=2)
        load_library()  # for its silence; the library is the same
        self._model = llama_cpp.llama_model_load_from_file(
            str(path).encode(), llama_cpp.llama_model_default_params()
        )
        assert self._model
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max = config.num_cells, config.num_lanes + pad
        params.n_batch = params.n_ubatch = config.max_rows + pad
        params.swa_full = True
        params.n_threads = params.n_threads_batch = config.num_threads
        params.kv_unified, params.flash_attn_type = True, 1
        params.type_k = params.type_v = GGML_KV_TYPES[config.kv_type]
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        assert self._context
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._num_vocab: int = llama_cpp.llama_vocab_n_tokens(vocab)
        self._batch = llama_cpp.llama_batch_init(config.max_rows + pad, 0, 1)
        self._pad, self._first_spare = pad, config.num_lanes

    def decode(self, batch: StepBatch) -> float:
        """Compute ``batch``; returns the seconds that ``llama_decode`` itself took."""
        native = self._batch
        spare = range(self._first_spare, self._first_spare + -batch.num_rows % self._pad)
        native.n_tokens = batch.num_rows + len(spare)
        for row, lane in enumerate((*batch.lanes, *spare)):
            is_own = row < batch.num_rows
            native.token[row] = batch.tokens[row] if is_own else 1
            native.pos[row] = batch.positions[row] if is_own else 0
            native.n_seq_id[row] = 1
            native.seq_id[row][0] = lane
            native.logits[row] = self._pad > 1 or batch.samples[row]
        started = time.perf_counter()
        code = llama_cpp.llama_decode(self._context, native)
        seconds = time.perf_counter() - started
        assert code == 0, f"llama_decode returned {code}"
        for lane in spare:
            memory = llama_cpp.llama_get_memory(self._context)
            assert llama_cpp.llama_memory_seq_rm(memory, lane, -1, -1)
        return seconds

    def logits(self, batch: StepBatch) -> Floats:
        """float32 ``[n_sampled, n_vocab]``, in batch order."""
        self.decode(batch)
        sampled = [row for row in range(batch.num_rows) if batch.samples[row]]
        found = np.empty((len(sampled), self._num_vocab), np.float32)
        for index, row in enumerate(sampled):
            source = llama_cpp.llama_get_logits_ith(self._context, row)
            ctypes.memmove(found[index].ctypes.data, source, found.strides[0])
        return found

    def close(self) -> None:
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)
