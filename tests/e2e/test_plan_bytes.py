"""What a plan charges against what llama.cpp says it allocates, for five public models.

llama.cpp can go through the motions with a file's header alone (``no_alloc``). Without this test a
change of its caches would make plans that fail on the first token.
"""

from __future__ import annotations

import logging
import re

import llama_cpp
import pytest

from coordinator.costs import PROCESS_BYTES, StageSizes, costs_of
from skippy_mesh.config import BYTES_PER_CELL
from stages.gguf_file import ModelFile
from stages.native import load_library
from tests.real_models import REAL_MODELS, write_header

NUM_CELLS, NUM_IDS, NUM_ROWS = 65_536, 4, 512
MIB = 2**20
TABLE_ONLY = {"token_embd.weight": 0}


@pytest.fixture
def said(caplog):
    """MiB that llama.cpp names for a kind of buffer, in bytes."""
    caplog.set_level(logging.DEBUG, logger="llama.cpp")

    def said(who: str) -> float:
        sizes = re.findall(rf"{who} *= +([\d.]+) MiB", caplog.text)
        return sum(map(float, sizes)) * MIB

    return said


def create_context_without_memory(path, num_cells: int, *, num_ids: int = NUM_IDS) -> None:
    load_library()
    model_params = llama_cpp.llama_model_default_params()
    model_params.no_alloc, model_params.use_extra_bufts = True, False
    model_params.load_mode = 0
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
    assert model
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_seq_max = num_cells, num_ids
    params.n_batch = params.n_ubatch = NUM_ROWS
    params.swa_full = params.kv_unified = True
    params.flash_attn_type = 1
    params.type_k = params.type_v = 8
    context = llama_cpp.llama_init_from_model(model, params)
    assert context
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)


@pytest.mark.parametrize("is_last", [True, False])
@pytest.mark.parametrize("name", REAL_MODELS)
def test_a_plan_charges_what_llama_cpp_allocates(name, is_last, tmp_path, said):
    """A slice before the last has one entry in its vocabulary, and so hardly any logits."""
    path = write_header(name, tmp_path, num_vocab=None if is_last else 32)
    model = ModelFile.open(path)
    tensors = {tensor.name: tensor.num_bytes for tensor in model.tensors.values()}
    costs = costs_of(model.family, model.facts, tensors, width=model.width, kv_type="q8_0")
    sizes = StageSizes(costs, num_cells=NUM_CELLS, num_ids=NUM_IDS)
    create_context_without_memory(path, sizes.pool)
    layers, rounding = costs.layers, 0.01 * MIB
    per_cell = sum(layer.attention_per_cell + layer.window_per_cell for layer in layers)
    assert said("llama_kv_cache: size") == pytest.approx(per_cell * sizes.pool, abs=rounding)
    states = sum(layer.recurrent_per_id for layer in layers) * NUM_IDS
    assert said("llama_memory_recurrent: size") == pytest.approx(states, abs=rounding)
    step = said("compute buffer size") + said("output buffer size")
    charged = sizes.parts(0, sizes.num_layers)
    charged_for_step = charged.buffers - PROCESS_BYTES + charged.recurrent - states
    records = BYTES_PER_CELL * sizes.pool  # not in a buffer
    assert step <= charged_for_step - records <= 3 * step


def test_states_that_a_step_gathers_are_charged_per_id(tmp_path, caplog):
    """They are no part of the cache, and with many sessions more than all else of a step."""
    caplog.set_level(logging.DEBUG, logger="llama.cpp")
    for name in ("Falcon-H1-1.5B", "Qwen3-Next-80B-A3B"):
        path = write_header(name, tmp_path, num_vocab=32)
        model = ModelFile.open(path)
        steps = []
        for num_ids in (6, 12):
            caplog.clear()
            create_context_without_memory(path, 1024, num_ids=num_ids)
            found = re.search(r"compute buffer size = +([\d.]+) MiB", caplog.text)
            steps.append(float(found[1]) * MIB)
        costs = costs_of(model.family, model.facts, TABLE_ONLY, width=model.width, kv_type="q8_0")
        assert 0 < (steps[1] - steps[0]) / 6 <= costs.per_id
