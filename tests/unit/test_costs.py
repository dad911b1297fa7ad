"""What a model costs, from its header alone: five public models, one of each class. Their numbers
are worked out by hand from the published configurations."""

from __future__ import annotations

from math import prod

import pytest

from coordinator.costs import ModelCosts, StageSizes, costs_of
from skippy_mesh.config import NUM_SPARE_LANES
from skippy_mesh.families import legal_cuts
from stages.gguf_file import ModelFile
from tests.real_models import REAL_MODELS, write_header


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, ModelFile]:
    folder = tmp_path_factory.mktemp("real")
    return {name: ModelFile.open(write_header(name, folder)) for name in REAL_MODELS}


def costs(model: ModelFile, kv_type: str = "q8_0") -> ModelCosts:
    tensors = {tensor.name: tensor.num_bytes for tensor in model.tensors.values()}
    return costs_of(model.family, model.facts, tensors, width=model.width, kv_type=kv_type)


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("Llama-3.1-70B", 70_554),
        ("DeepSeek-V2-Lite", 15_706),
        ("Gemma-2-9B", 9_242),
        ("Falcon-H1-1.5B", 1_555),
        ("Qwen3-Next-80B-A3B", 79_674),
    ],
)
def test_the_fixtures_have_the_published_number_of_parameters(models, name, millions):
    count = sum(prod(tensor.shape) for tensor in models[name].tensors.values())
    assert round(count / 10**6) == millions


@pytest.mark.parametrize(
    ("name", "kv_type", "attention", "window", "recurrent"),
    [
        # 8 heads x 128 values, of K and of V; q8_0 stores 32 values in 34 bytes.
        ("Llama-3.1-70B", "q8_0", 80 * 2 * 8 * 128 * 34 // 32, 0, 0),
        ("Llama-3.1-70B", "f16", 80 * 2 * 8 * 128 * 2, 0, 0),
        # 512 latent and 64 rotated values for all heads, and no V.
        ("DeepSeek-V2-Lite", "q8_0", 27 * 576 * 34 // 32, 0, 0),
        # Every other layer has a window, which is kept whole.
        ("Gemma-2-9B", "q8_0", 21 * 2 * 8 * 256 * 34 // 32, 21 * 2 * 8 * 256 * 34 // 32, 0),
        # Every layer has both: 2 heads x 128, and (3 x (3072 + 2 x 256) + 256 x 3072) floats.
        ("Falcon-H1-1.5B", "q8_0", 24 * 2 * 2 * 128 * 34 // 32, 0, 24 * 4 * (10_752 + 786_432)),
        # 12 of 48 layers attend; the others have (3 x (4096 + 2 x 16 x 128) + 128 x 4096) floats.
        (
            "Qwen3-Next-80B-A3B", "bf16", 12 * 2 * 2 * 256 * 2, 0,
            36 * 4 * (3 * 8192 + 128 * 4096),
        ),
    ],
)  # fmt: skip
def test_bytes_of_a_cell_and_of_an_id(models, name, kv_type, attention, window, recurrent):
    layers = costs(models[name], kv_type).layers
    assert sum(layer.attention_per_cell for layer in layers) == attention
    assert sum(layer.window_per_cell for layer in layers) == window
    assert sum(layer.recurrent_per_id for layer in layers) == recurrent


def test_every_byte_of_a_file_is_charged_once_and_a_tied_table_twice(models):
    for name, model in models.items():
        found = costs(model)
        in_file = sum(tensor.num_bytes for tensor in model.tensors.values())
        charged = sum(layer.weights for layer in found.layers) + found.embedding + found.head
        of_no_layer = found.common - 256 * 2**20 - 24 * model.width * 4 * 512
        is_tied = name == "Gemma-2-9B"
        assert charged + of_no_layer == in_file + (found.embedding if is_tied else 0)


def test_bytes_of_a_stage_are_the_sum_of_its_parts(models):
    for model in models.values():
        sizes = StageSizes(costs(model), num_cells=5000, num_ids=7)
        last = sizes.num_layers
        for lo, hi in [(0, 2), (3, 9), (last - 4, last), (0, last)]:
            parts = sizes.parts(lo, hi)
            assert sizes.total(lo, hi) == parts.total
            assert sum(bool(size) for size in (parts.embedding, parts.head)) == (lo == 0) + (
                hi == last
            )


def test_the_pool_is_what_a_context_allocates_and_cells_are_priced_at_85_percent(models):
    """4,096 cells, an eighth more, room to pad a step to 4 rows, in steps of 256."""
    sizes = StageSizes(costs(models["Llama-3.1-70B"]), num_cells=4096, num_ids=8)
    assert sizes.pool == 4864
    assert sizes.parts(0, 1).attention == -(-4864 * 2176 * 100 // 85)


def test_a_run_of_layers_that_fits_is_as_long_as_can_be(models):
    for model in models.values():
        sizes = StageSizes(costs(model), num_cells=4096, num_ids=8)
        for lo in (0, 5, sizes.num_layers - 1):
            exact = sizes.total(lo, lo + 1)
            assert sizes.reach(exact, lo) == lo + 1
            assert sizes.reach(exact - 1, lo) == lo
        assert sizes.reach(2**60, 3) == sizes.num_layers


def test_cuts_are_legal_where_the_family_says_so(models):
    for name, model in models.items():
        found = costs(model)
        ends = len(found.layers)
        by_costs = [
            cut
            for cut in range(1, ends)
            if not found.why_illegal(0, cut) and not found.why_illegal(cut, ends)
        ]
        assert by_costs == legal_cuts(model.family, model.facts)
        assert found.min_legal_layers == {"Gemma-2-9B": 2, "Qwen3-Next-80B-A3B": 4}.get(name, 1)


def test_layers_that_predict_further_tokens_are_not_charged(models):
    """A stage does not run them, so its slice does not have them."""
    model = models["Llama-3.1-70B"]
    tensors = {tensor.name: tensor.num_bytes for tensor in model.tensors.values()}
    more = tensors | {"blk.80.nextn.eh_proj.weight": 10**9}
    base, found = (
        costs_of(model.family, model.facts, sizes, width=8192, kv_type="q8_0")
        for sizes in (tensors, more)
    )
    assert (found.layers, found.common) == (base.layers, base.common)


@pytest.mark.parametrize("name", REAL_MODELS)
def test_a_stage_is_told_what_its_plan_charges(models, name):
    """Else it would find itself short of memory it was planned for, or take more."""
    of_model = costs(models[name])
    for num_cells, num_lanes in [(131_072, 100), (8192, 1)]:
        sizes = StageSizes(of_model, num_cells=num_cells, num_ids=num_lanes + NUM_SPARE_LANES)
        for lo, hi in [(0, 12), (12, 24), (12, sizes.num_layers)]:
            charged, told = sizes.total(lo, hi), sizes.need(lo, hi).of(num_cells, num_lanes)
            assert charged - 1 <= told <= charged  # two pools are rounded up each by itself


def test_cells_of_a_stage_are_told_by_store(models):
    """kv_bytes on the page is made of it."""
    found = {
        name: StageSizes(costs(models[name]), num_cells=8192, num_ids=8).need(0, 12).cell_bytes
        for name in ("Llama-3.1-70B", "Gemma-2-9B", "Falcon-H1-1.5B")
    }
    # 12 layers of K and V, 8 heads of 128, in q8_0.
    assert found["Llama-3.1-70B"] == {"attention": 26_112, "window": 0, "recurrent": 0}
    # Every other layer has a window, else they are alike.
    assert found["Gemma-2-9B"]["attention"] == found["Gemma-2-9B"]["window"] > 0
    assert found["Falcon-H1-1.5B"]["recurrent"] > found["Falcon-H1-1.5B"]["attention"] > 0
