"""Each field does what llama.cpp's own sampler does, and what a lane knew can be told to another.

Without these a field is parsed and not applied, or a preempted request goes on differently.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import replace

import llama_cpp
import numpy as np
import pytest

from skippy_mesh.errors import StageError
from skippy_mesh.messages import SamplingParams
from stages.candidates import Candidates
from stages.grammar import Grammar
from stages.sampling import LaneSampler, Sampler, logprobs_of
from stages.tokenizer import Tokenizer

VOCAB = 512
PROMPT = tuple(range(40, 80)) * 3
SEEDED = SamplingParams(temperature=1.0, seed=11)
WORDS = "root ::= [a-z ]{2,30} [.!]"


@pytest.fixture(scope="module")
def tokenizer(made) -> Tokenizer:
    return Tokenizer(str(made("dense", "q8_0").path))


def rows(count):
    """Alike enough for a model that repeats itself."""
    draw = np.random.default_rng(5)
    base = 3 * draw.standard_normal(VOCAB)
    return (base + draw.standard_normal((count, VOCAB)) / 2).astype(np.float32)


def sampler_of(params, prompt=PROMPT, outputs=(), tokenizer=None):
    return LaneSampler(params, params.history(prompt, outputs), tokenizer=lambda: tokenizer)


def generate(params, count, *, outputs=(), tokenizer=None):
    """What follows ``outputs``, up to the end of a grammar."""
    sampler = sampler_of(params, outputs=outputs, tokenizer=tokenizer)
    found = list(outputs)
    for row in rows(count)[len(outputs) :]:
        found.append(sampler(row, len(PROMPT) + len(found)))
        if params.grammar and found[-1] in tokenizer.eog_ids:
            break
    sampler.close()
    return found


def native(logits, *samplers, tokens=()):
    """All of ``logits`` after llama.cpp's ``samplers``, by token; those that were dropped are NaN.

    ``tokens`` are accepted first.
    """
    data = (llama_cpp.llama_token_data * len(logits))()
    for token, logit in enumerate(logits):
        data[token] = llama_cpp.llama_token_data(token, float(logit), 0.0)
    array = llama_cpp.llama_token_data_array(data, len(logits), -1, False)
    for sampler in samplers:
        for token in tokens:
            llama_cpp.llama_sampler_accept(sampler, token)
        llama_cpp.llama_sampler_apply(sampler, ctypes.byref(array))
        llama_cpp.llama_sampler_free(sampler)
    found = np.full(len(logits), np.nan, np.float32)
    for index in range(array.size):
        found[array.data[index].id] = array.data[index].logit
    return found


def changed(params, logits, outputs=()):
    sampler = sampler_of(params, outputs=outputs)
    found = sampler._changed(logits, len(PROMPT) + len(outputs))
    sampler.close()
    return found


def candidates(params, logits):
    """What the filters leave to draw from."""
    sampler = sampler_of(params)
    found = Candidates(np.arange(len(logits), dtype=np.int32), logits)
    found.apply(sampler._chain)
    sampler.close()
    return set(found.rows["id"].tolist())


def finite(logits):
    return set(np.flatnonzero(np.isfinite(logits)).tolist())


OUTPUTS = (7, 7, 7, 45, 300, 45, 511)


@pytest.mark.parametrize("last_n", [1, 5, 64, 10_000])
@pytest.mark.parametrize("penalty", [0.7, 1.3])
def test_repetition_is_the_native_penalty_over_prompt_and_output(penalty, last_n):
    (row,) = rows(1)
    expected = native(
        row,
        llama_cpp.llama_sampler_init_penalties(VOCAB, last_n, penalty, 0.0, 0.0),
        tokens=(*PROMPT, *OUTPUTS),
    )
    params = SamplingParams(repetition_penalty=penalty, repeat_last_n=last_n)
    assert np.array_equal(changed(params, row, OUTPUTS), expected)
    if last_n == 10_000:
        assert np.array_equal(changed(replace(params, repeat_last_n=-1), row, OUTPUTS), expected)
    assert not np.array_equal(row, expected)


@pytest.mark.parametrize(("presence", "frequency"), [(1.5, 0), (0, -0.25), (2, 1)])
def test_presence_and_frequency_are_the_native_penalties_over_the_output(presence, frequency):
    (row,) = rows(1)
    expected = native(
        row,
        llama_cpp.llama_sampler_init_penalties(VOCAB, 10_000, 1.0, frequency, presence),
        tokens=OUTPUTS,
    )
    params = SamplingParams(presence_penalty=presence, frequency_penalty=frequency)
    assert np.array_equal(changed(params, row, OUTPUTS), expected)
    assert np.flatnonzero(row != expected).tolist() == sorted(set(OUTPUTS))


def test_a_window_forgets_what_leaves_it():
    (row,) = rows(1)
    params = SamplingParams(repetition_penalty=2.0, repeat_last_n=2)
    sampler = sampler_of(params, prompt=(1, 2, 3))
    assert sampler(np.where(np.arange(VOCAB) == 9, 50, row), 3) == 9
    found = sampler._changed(row, 4)
    assert np.flatnonzero(found != row).tolist() == [3, 9]
    sampler.close()


def test_a_bias_is_the_native_bias():
    (row,) = rows(1)
    bias = ((5, 4.5), (6, -3.0), (7, -math.inf))
    array = (llama_cpp.llama_logit_bias * 3)(*(llama_cpp.llama_logit_bias(*pair) for pair in bias))
    expected = native(row, llama_cpp.llama_sampler_init_logit_bias(VOCAB, 3, array))
    assert np.array_equal(changed(SamplingParams(logit_bias=bias), row), expected)


@pytest.mark.parametrize("p", [0.05, 0.5, 0.95])
def test_typical_p_keeps_the_native_candidates(p):
    (row,) = rows(1)
    expected = native(row, llama_cpp.llama_sampler_init_typical(p, 1))
    assert candidates(replace(SEEDED, typical_p=p), row) == finite(expected)


def test_the_whole_chain_keeps_the_native_order():
    (row,) = rows(1)
    expected = native(
        row,
        llama_cpp.llama_sampler_init_penalties(VOCAB, 64, 1.2, 0.0, 0.0),
        llama_cpp.llama_sampler_init_top_k(80),
        llama_cpp.llama_sampler_init_typical(0.9, 1),
        llama_cpp.llama_sampler_init_top_p(0.9, 1),
        llama_cpp.llama_sampler_init_min_p(0.02, 1),
        tokens=(*PROMPT, *OUTPUTS),
    )
    params = SamplingParams(
        temperature=2.0, seed=1, repetition_penalty=1.2, top_k=80, typical_p=0.9, top_p=0.9,
        min_p=0.02,
    )  # fmt: skip
    assert candidates(params, changed(params, row, OUTPUTS)) == finite(expected)
    assert 5 < len(finite(expected)) < 80


def test_only_allowed_tokens_are_drawn_and_never_suppressed_ones():
    params = replace(SEEDED, allowed_ids=(3, 4, 5), suppressed_ids=(4,), logit_bias=((5, 2.0),))
    assert set(generate(params, 60)) == {3, 5}
    with pytest.raises(StageError, match="every token is forbidden"):
        generate(replace(SEEDED, allowed_ids=(4,), suppressed_ids=(4,)), 1)
    greedy = replace(params, temperature=0.0)
    (row,) = rows(1)
    assert generate(greedy, 1) == [max((3, 5), key=lambda t: row[t] + 2.0 * (t == 5))]


def test_ends_are_held_back_until_min_tokens():
    most = tuple(range(500))
    found = generate(replace(SEEDED, min_tokens=5, ending_ids=most), 40)
    assert all(token >= 500 for token in found[:5])
    assert sum(token < 500 for token in found[5:]) > 20


def test_a_lane_without_the_history_it_needs_fails_alone():
    sampler = Sampler()
    needing = replace(SEEDED, presence_penalty=1.0)
    sampler.configure({0: needing, 1: SEEDED}, (), {})
    drawn = sampler.sample((0, 1), rows(2), (9, 9))
    assert "history" in drawn.failed[0]
    assert list(drawn.tokens) == [1]
    sampler.configure({0: needing}, (), {0: needing.history((1, 2), ())})
    assert list(sampler.sample((0,), rows(1), (9,)).tokens) == [0]
    sampler.clear()


FIELDS = {
    "repetition": {"repetition_penalty": 1.4},
    "repetition over all": {"repetition_penalty": 1.2, "repeat_last_n": -1},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.8},
    "greedy frequency": {"frequency_penalty": 0.8, "temperature": 0.0},
    "min_tokens": {"min_tokens": 12, "ending_ids": tuple(range(250))},
    "grammar": {"grammar": WORDS},
    "grammar and penalties": {"grammar": WORDS, "repetition_penalty": 1.5, "top_k": 30},
}


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
def test_a_sampler_that_begins_anywhere_goes_on_as_the_first(fields, tokenizer):
    params = replace(SEEDED, **fields)
    whole = generate(params, 36, tokenizer=tokenizer)
    assert whole != generate(replace(SEEDED, temperature=params.temperature), 36)
    for known in range(len(whole)):
        assert generate(params, 36, outputs=whole[:known], tokenizer=tokenizer) == whole


def test_a_grammar_is_kept_and_complete_it_ends(tokenizer):
    found = generate(replace(SEEDED, grammar='root ::= "yes" | "no"'), 40, tokenizer=tokenizer)
    *text, end = found
    assert b"".join(map(tokenizer.piece, text)) in (b"yes", b"no")
    assert end in tokenizer.eog_ids


def test_a_complete_grammar_ends_even_before_min_tokens(tokenizer):
    ends = tuple(tokenizer.eog_ids)
    params = replace(SEEDED, grammar='root ::= "yes"', min_tokens=30, ending_ids=ends)
    assert generate(params, 40, tokenizer=tokenizer)[-1] in tokenizer.eog_ids


def test_drawing_first_and_asking_the_grammar_later_is_drawing_from_what_it_allows(tokenizer):
    """The shortcut must not favour anybody: the frequencies are those of the masked softmax."""
    (row,) = rows(1)
    gbnf = "root ::= [a-f]*"  # allows the same tokens wherever it is
    grammar = Grammar(tokenizer, gbnf)
    masked = grammar.masked(row).astype(np.float64)
    grammar.close()
    allowed = np.flatnonzero(np.isfinite(masked))
    weights = np.exp(masked[allowed] - masked[allowed].max())
    likely = weights / weights.sum() > 0.004  # the others are too rare to count
    sampler = sampler_of(replace(SEEDED, grammar=gbnf), prompt=(1,), tokenizer=tokenizer)
    drawn = np.bincount([sampler(row, place) for place in range(1, 2001)], minlength=VOCAB)
    sampler.close()
    assert drawn.sum() == drawn[allowed].sum()
    expected = (2000 * weights / weights.sum())[likely]
    chi_square = ((drawn[allowed][likely] - expected) ** 2 / expected).sum()
    degrees = len(expected) - 1
    assert degrees >= 5
    assert chi_square < degrees + 4.5 * np.sqrt(2 * degrees)


def test_logprobs_are_those_of_the_raw_softmax_best_first():
    (row,) = rows(1)
    wide = row.astype(np.float64)
    expected = wide - np.log(np.exp(wide).sum())
    found = logprobs_of(row, 17, 20)
    assert found.logprob == pytest.approx(expected[17], abs=1e-9)
    assert [token for token, _ in found.top] == np.argsort(-wide, kind="stable")[:20].tolist()
    assert [score for _, score in found.top] == pytest.approx(sorted(expected)[::-1][:20])
    assert sum(math.exp(score) for _, score in found.top) <= 1
    assert logprobs_of(row, 17, 0).top == ()
    assert len(logprobs_of(row[:5], 1, 20).top) == 5


def test_logprobs_see_nothing_of_what_was_done_to_the_logits():
    sampler = Sampler()
    params = SamplingParams(num_logprobs=1, logit_bias=((9, 90.0),))
    sampler.configure({0: params, 1: SamplingParams()}, ())
    pair = np.stack(list(rows(1)) * 2)
    drawn = sampler.sample((0, 1), pair, (3, 3))
    assert drawn.tokens[0] == 9
    assert drawn.logprobs == {0: logprobs_of(pair[0], 9, 1)}
    sampler.clear()
