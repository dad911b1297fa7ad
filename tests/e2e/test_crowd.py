"""A sequence has the same bits alone and in a crowd that comes, goes and crowds it out."""

from __future__ import annotations

from collections import deque

import llama_cpp
import numpy as np
import pytest

from stages.memory import LaneMemory
from tests.crowd import CONTEXT, Company, Made, local, num_compactions, story
from tests.models import FAMILIES

TYPES = [(family, dtype) for family in FAMILIES for dtype in ("q8_0", "q4_K_M")]
TYPES += [("dense", dtype) for dtype in ("q6_K", "q4_0", "f16")]

# As few layers as leave two legal stages: company and order are a matter of each layer alone.
LAYERS_AND_CUT = {"dense": (3, 1), "mla": (3, 2), "window": (4, 2), "ssm": (3, 1), "linear": (8, 5)}

NOT_IN_CHUNKS = [("linear", "q4_K_M"), ("linear", "f32")]

CHUNKS = {0: 512, 1: 33, 2: 16, 3: 33, 4: 16, 5: 512}
LONG = story(1, 540, 20)
MID = story(2, 230)
SHORT = story(3, 101)
TALK = story(4, 64, 30)
BRIEF = story(5, 37, 12)
BIG_STEPS = range(511, 517)


@pytest.mark.parametrize(("family", "dtype"), TYPES)
def test_alone_or_in_a_crowd(made, shared_cache, family, dtype):
    num_layers, cut = LAYERS_AND_CUT[family]
    model = made(family, dtype, num_layers=num_layers)
    with local(model, (cut,)) as pipeline:
        assert [info.why_inexact for info in pipeline.infos] == [None, None]
        company = Company(model, pipeline)
        come_and_go(company, model)
        big_steps(company, model)
        assert not company.different, f"of {company.num_compared}: {company.different[:9]}"
        # What hides faults if it did not happen.
        assert company.num_compared > 200
        assert min(num_compactions(pipeline)) >= 3
        sizes = [size for size in BIG_STEPS if size % model.chunk_multiple == 0]
        assert company.step_sizes.issuperset(sizes)


@pytest.mark.parametrize("dtype", ["q8_0", "q4_K_M", "f32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_is_the_same_in_a_chunk_and_decoded(made, family, dtype):
    """What recomputing an answer in chunks rests on, and the one family where it cannot."""
    model = made(family, dtype, num_layers=LAYERS_AND_CUT[family][0])
    decoded = model.alone(story(7, 64, 16))
    chunk = model.alone(story(7, 80, 0))
    is_same = np.array_equal(decoded.view(np.uint32), chunk.view(np.uint32))
    assert is_same == model.can_replay_in_chunks == ((family, dtype) not in NOT_IN_CHUNKS)


def come_and_go(company: Company, model: Made) -> None:
    """Six sequences at chunks of their own; one is copied, one drops, guests take free lanes."""
    num_shared = 3 * (33 - 33 % model.chunk_multiple)
    fork = story(6, 150, begin=MID.tokens[:num_shared])
    guests = deque([BRIEF, TALK, BRIEF, SHORT, BRIEF, TALK])
    for lane, first in enumerate((LONG, MID, SHORT, TALK, BRIEF)):
        company.seat(lane, first)
    is_copied = has_dropped = False
    while company.stories:
        company.turn(CHUNKS)
        if not is_copied and company.at[1] >= num_shared:
            company.copy(1, 5, fork, num_shared)
            is_copied = True
        if not has_dropped and company.at[2] > SHORT.num_prompt + 4:
            company.drop(2)
            has_dropped = True
        for lane in [lane for lane in company.stories if company.is_done(lane)]:
            company.leave(lane)
            if guests:
                company.seat(lane, guests.popleft())
    assert is_copied
    assert has_dropped


def big_steps(company: Company, model: Made) -> None:
    """Steps around the library's own limit of 512 rows, beside four sequences that decode."""
    for lane in range(1, 5):
        company.seat(lane, TALK)
    while min(company.at.values()) < TALK.num_prompt:
        company.turn(CHUNKS)
    for size in BIG_STEPS:
        company.seat(0, LONG)
        if model.is_recurrent:
            company.feed((0, size - size % model.chunk_multiple))
            company.feed((1, 1), (2, 1), (3, 1), (4, 1))
        else:
            company.feed((1, 1), (2, 1), (0, size - 4), (3, 1), (4, 1))
        company.leave(0)


def test_cells_reused_too_early_are_seen(made, probed_cache, monkeypatch):
    """A planted fault: freed cells go back to llama.cpp at once, below those of a lane that stays,
    and attention sums them in another order."""

    def forget(self, lane):
        assert llama_cpp.llama_memory_seq_rm(self._memory, lane, -1, -1)
        self._holdings.cut(lane, 0)

    monkeypatch.setattr(LaneMemory, "forget", forget)
    model = made("dense", "q4_K_M", num_layers=LAYERS_AND_CUT["dense"][0])
    with local(model) as pipeline:
        company = Company(model, pipeline)
        come_and_go(company, model)
        assert company.different


def test_the_crowd_has_what_hides_faults_if_missing():
    assert len({LONG, MID, SHORT, TALK, BRIEF}) + 1 == CONTEXT.num_lanes
    assert MID.num_prompt > 3 * 64  # windows of gemma2
    assert len(LONG.tokens) > max(BIG_STEPS)
    assert set(CHUNKS.values()) == {16, 33, 512}
