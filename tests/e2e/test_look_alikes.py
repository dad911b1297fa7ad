"""Architectures that share a family's kind of memory: the same proof at every cut, in less breadth.

They confirm that a family's rules are its kind of memory's and not one architecture's.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from skippy_mesh.errors import ModelFileError
from skippy_mesh.families import FAMILIES, legal_cuts
from stages import gguf_file
from tests.crowd import CONTEXT, FIRST, Company, assert_exact, local, story
from tests.models import LOOK_ALIKES

# As many layers as make three legal stages, and a cut for them: no period begins at a border.
THREE_STAGES = {
    "glm4": (6, (1, 4)),
    "olmo": (6, (1, 4)),
    "olmo2": (6, (1, 4)),
    "gemma3": (18, (7, 13)),
    "gemma4": (18, (7, 13)),
}
CONFIRMED = {family.architectures[0]: family for family in FAMILIES if family.confirms}


@pytest.mark.parametrize("dtype", ["q8_0", "f32"])
@pytest.mark.parametrize("architecture", CONFIRMED)
def test_every_cut(made, shared_cache, architecture, dtype):
    model = made(architecture, dtype)
    cuts = legal_cuts(model.model.family, model.model.facts)
    assert len(cuts) >= 5
    some = cuts if dtype == "q8_0" else cuts[1:2]  # the rest is the breadth of the families' tests
    for cut in [(), *((cut,) for cut in some)]:
        with local(model, cut) as pipeline:
            assert [info.why_inexact for info in pipeline.infos] == [None] * (len(cut) + 1)
            assert_exact(model, pipeline)


@pytest.mark.parametrize("architecture", CONFIRMED)
def test_three_stages(made, shared_cache, architecture):
    num_layers, cuts = THREE_STAGES[architecture]
    model = made(architecture, "q8_0", num_layers=num_layers)
    with local(model, cuts) as pipeline:
        assert_exact(model, pipeline)


@pytest.mark.parametrize("architecture", CONFIRMED)
def test_in_company_that_comes_and_goes(made, shared_cache, architecture):
    """Chunks of any length beside rows that decode; a copy of a prefix; freed cells taken again."""
    model = made(architecture, "q8_0")
    cut = legal_cuts(model.model.family, model.model.facts)[1]
    fork = story(13, 150, begin=FIRST.tokens[:96])
    chunks = dict.fromkeys(range(CONTEXT.num_lanes), 33)
    with local(model, (cut,)) as pipeline:
        company = Company(model, pipeline)
        company.seat(0, FIRST)
        company.seat(1, story(14, 40, 8))
        while not company.is_done(1):
            company.turn(chunks)
        company.copy(0, 2, fork, 96)
        company.leave(1)
        company.seat(1, story(15, 101))
        while not all(company.is_done(lane) for lane in company.stories):
            company.turn(chunks)
        assert not company.different, f"of {company.num_compared}: {company.different[:9]}"
        assert company.num_compared > 60


def test_every_row_has_a_look_alike_here_and_windows_are_passed():
    assert {"qwen2", *CONFIRMED} == set(LOOK_ALIKES)
    for architecture, family in CONFIRMED.items():
        window = getattr(LOOK_ALIKES[architecture], "window", None)
        assert (window is not None) == (family.confirms == "window")
        assert window is None or FIRST.num_prompt > 3 * window


# Planted faults: what llama.cpp does otherwise for these, each left out once.


@pytest.mark.parametrize(
    ("architecture", "left_out"),
    [
        ("gemma3", {"scales_tokens": False}),
        ("gemma3", {"slice_keys": lambda facts, lo, hi: {}}),
        ("gemma4", {"scales_tokens": False}),
    ],
)
def test_what_is_left_out_is_seen(made, probed_cache, monkeypatch, architecture, left_out):
    model = made(architecture, "f32")
    changed = replace(model.model.family, **left_out)
    monkeypatch.setattr(gguf_file, "family_of", lambda *_, **__: changed)
    with local(model, (7,)) as pipeline, pytest.raises(AssertionError, match="by "):
        assert_exact(model, pipeline)


def test_a_head_that_llama_cpp_misses_is_seen(made, probed_cache, monkeypatch):
    model = made("olmo2", "q8_0")
    changed = replace(model.model.family, needs_head=False)
    monkeypatch.setattr(gguf_file, "family_of", lambda *_, **__: changed)
    with pytest.raises(ModelFileError, match="cannot load"), local(model, (3,)):
        pass
