"""The draw is a pure function of logits, parameters, seed and position; filters are llama.cpp's."""

from __future__ import annotations

import ctypes

import llama_cpp
import numpy as np
import pytest

from skippy_mesh.errors import StageError
from skippy_mesh.messages import SamplingParams
from stages.sampling import LaneSampler, Sampler, uniform

VOCAB = 500


@pytest.fixture
def logits():
    return (3 * np.random.default_rng(5).standard_normal(VOCAB)).astype(np.float32)


def draws(logits, count=400, **params):
    sampler = LaneSampler(SamplingParams(**params))
    try:
        return [sampler(logits, position) for position in range(count)]
    finally:
        sampler.close()


def softmax(logits, temperature):
    scaled = logits.astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    return weights / weights.sum()


def test_temperature_zero_is_argmax_and_the_lowest_id_wins_a_tie(logits):
    logits[[17, 400]] = logits.max() + 1
    assert draws(logits, 3, temperature=0.0, seed=1) == [17, 17, 17]


def test_a_draw_repeats_for_the_same_seed_and_position_only(logits):
    first = draws(logits, temperature=1.0, seed=3)
    assert draws(logits, temperature=1.0, seed=3) == first
    assert draws(logits, temperature=1.0, seed=4) != first
    assert len(set(first)) > 20


def test_a_draw_does_not_depend_on_what_was_drawn_before(logits):
    forward = draws(logits, 50, temperature=0.8, seed=9, top_k=50)
    sampler = LaneSampler(SamplingParams(temperature=0.8, seed=9, top_k=50))
    assert [sampler(logits, position) for position in reversed(range(50))] == forward[::-1]
    sampler.close()


def test_the_numbers_are_uniform_and_differ_by_seed():
    numbers = np.array([uniform(7, position) for position in range(4000)])
    assert numbers.min() >= 0 and numbers.max() < 1
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    assert ((counts - 200) ** 2 / 200).sum() < 43.8  # chi-square, 19 degrees, p = 0.001
    assert uniform(-1, 5) != uniform(1, 5)


def test_plain_temperature_follows_the_softmax():
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125], np.float32))
    counts = np.bincount(draws(logits, 4000, temperature=1.0, seed=2), minlength=4)
    assert np.abs(counts / 4000 - [0.5, 0.25, 0.125, 0.125]).max() < 0.03


@pytest.mark.parametrize("k", [1, 2, 40])
def test_top_k_keeps_the_k_best(logits, k):
    best = set(np.argsort(-logits)[:k].tolist())
    assert set(draws(logits, temperature=1.5, seed=1, top_k=k)) <= best


@pytest.mark.parametrize("p", [0.05, 0.5, 0.95])
def test_top_p_keeps_the_smallest_set_that_reaches_p(logits, p):
    probabilities = softmax(logits, 1.0)
    order = np.argsort(-probabilities)
    kept = order[: int(np.searchsorted(np.cumsum(probabilities[order]), p)) + 1]
    assert set(draws(logits, temperature=1.5, seed=1, top_p=p)) <= set(kept.tolist())


@pytest.mark.parametrize("p", [0.02, 0.2, 1.0])
def test_min_p_keeps_what_reaches_p_of_the_best(logits, p):
    probabilities = softmax(logits, 1.0)
    kept = np.flatnonzero(probabilities >= p * probabilities.max() * 0.9999)
    assert set(draws(logits, temperature=1.5, seed=1, min_p=p)) <= set(kept.tolist())


def native_candidates(logits, *samplers):
    data = (llama_cpp.llama_token_data * len(logits))()
    for token, logit in enumerate(logits):
        data[token] = llama_cpp.llama_token_data(token, float(logit), 0.0)
    array = llama_cpp.llama_token_data_array(data, len(logits), -1, False)
    for sampler in samplers:
        llama_cpp.llama_sampler_apply(sampler, ctypes.byref(array))
        llama_cpp.llama_sampler_free(sampler)
    return {array.data[index].id for index in range(array.size)}


def test_all_filters_together_reach_exactly_the_native_chains_candidates(logits):
    native = native_candidates(
        logits,
        llama_cpp.llama_sampler_init_top_k(60),
        llama_cpp.llama_sampler_init_top_p(0.9, 1),
        llama_cpp.llama_sampler_init_min_p(0.05, 1),
        llama_cpp.llama_sampler_init_temp(2.0),
    )
    ours = draws(logits, 3000, temperature=2.0, seed=1, top_k=60, top_p=0.9, min_p=0.05)
    assert set(ours) == native
    assert len(native) > 5


def test_suppressed_tokens_are_never_drawn_and_the_row_is_left_alone(logits):
    before = logits.copy()
    best = int(logits.argmax())
    assert draws(logits, 1, suppressed_ids=(best,)) != [best]
    assert best not in draws(logits, temperature=0.5, seed=1, suppressed_ids=(best,))
    assert np.array_equal(before, logits)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_is_an_error_not_a_token(logits, bad, temperature):
    logits[100] = bad
    with pytest.raises(StageError, match="position 0"):
        draws(logits, 1, temperature=temperature)


def test_a_lane_keeps_its_own_parameters_until_forgotten(logits):
    sampler = Sampler()
    sampler.configure({0: SamplingParams(), 1: SamplingParams(temperature=1.0, seed=8)}, ())
    alone = draws(logits, 30, temperature=1.0, seed=8)
    rows = np.stack([logits, logits])
    for position in range(30):
        drawn = sampler.sample((1, 0), rows, (position, position))
        assert drawn.tokens == {0: int(logits.argmax()), 1: alone[position]}
        assert not drawn.failed
    sampler.configure({}, (1,))
    drawn = sampler.sample((0, 1), rows, (31, 31))
    assert list(drawn.tokens) == [0]
    assert "lane 1" in drawn.failed[1]
    sampler.clear()


def test_a_row_that_is_not_finite_fails_its_own_lane_alone(logits):
    sampler = Sampler()
    sampler.configure({lane: SamplingParams(temperature=lane / 2) for lane in range(4)}, ())
    rows = np.stack([logits] * 4)
    rows[1, 7] = rows[2, 7] = np.nan
    drawn = sampler.sample((0, 1, 2, 3), rows, (9, 9, 9, 9))
    assert sorted(drawn.tokens) == [0, 3]
    assert sorted(drawn.failed) == [1, 2]
    rows[0, 7] = np.nan
    drawn = sampler.sample((0, 3), rows[[0, 3]], (9, 9))
    assert sorted(drawn.failed) == [0], "the greedy path must see it, too"
    sampler.clear()
