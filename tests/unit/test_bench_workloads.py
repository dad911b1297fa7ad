"""Prompts share what their workload says and no more, or a figure is of something else."""

from __future__ import annotations

import pytest

from bench.workloads import LENGTHS, SHAPES, Workload, mixes, named
from skippy_mesh.errors import UsageError


def words(workload: Workload, count: int) -> list[list[str]]:
    return [workload.prompt(index).split() for index in range(count)]


def common(one: list[str], other: list[str]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
                min(len(one), len(other)))  # fmt: skip


def test_groups_share_within_and_not_between() -> None:
    prompts = words(Workload(prompt_tokens=60, shared_tokens=40, num_groups=8), 32)
    assert {len(prompt) for prompt in prompts} == {60}
    assert 40 <= common(prompts[0], prompts[8]) < 50
    assert common(prompts[0], prompts[1]) < 10
    assert len({tuple(prompt[:40]) for prompt in prompts}) == 8


def test_a_turn_begins_with_all_turns_before_it() -> None:
    workload = Workload(prompt_tokens=10, num_turns=4)
    places = [workload.place_of(index) for index in range(64)]
    assert sorted(places) == [(chat, turn) for chat in range(16) for turn in range(4)]
    by_place = dict(zip(places, words(workload, 64), strict=True))
    for chat in range(16):
        for turn in range(1, 4):
            before, now = by_place[chat, turn - 1], by_place[chat, turn]
            assert now[: len(before)] == before and len(now) == len(before) + 10
    assert common(by_place[0, 3], by_place[1, 3]) < 5
    order = [places.index((0, turn)) for turn in range(4)]
    assert order == sorted(order), "a turn is asked for after the one it goes on from"


def test_there_are_eight_mixes_that_tiny_models_hold() -> None:
    found = mixes()
    assert len(found) == 8 == len(set(found.values()))
    assert all(workload.max_tokens < 1024 for workload in found.values())
    for name, workload in found.items():
        assert bool(workload.shared_tokens) == workload.uses_cache == name.endswith("shared")


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_scale_shrinks_all_of_a_named_workload(lengths: str, shape: str) -> None:
    whole, small = named(lengths, shape), named(lengths, shape, scale=1 / 16)
    assert small.shared_tokens * 16 == whole.shared_tokens
    assert small.prompt_tokens * 16 == whole.prompt_tokens
    assert small.output_tokens * 16 == whole.output_tokens
    assert len(small.prompt(0).split()) == small.prompt_tokens
    own = LENGTHS[lengths][0]
    assert whole.prompt_tokens == own + whole.shared_tokens


def test_words_are_counted_in_the_model_s_tokens() -> None:
    workload = Workload(prompt_tokens=90, shared_tokens=30, words_per_token=1 / 3)
    assert {len(prompt) for prompt in words(workload, 4)} == {30}
    assert len(Workload(prompt_tokens=1, words_per_token=0.1).prompt(0).split()) == 1


def test_a_longest_request_is_foreseen() -> None:
    workload = Workload(prompt_tokens=10, num_turns=4, output_tokens=5)
    assert workload.max_tokens >= max(map(len, words(workload, 32))) + 5


@pytest.mark.parametrize(
    ("lengths", "shape", "scale", "says"),
    [
        ("nonsense", "unique", 1.0, "no workload 'nonsense'"),
        ("chat", "square", 1.0, "no workload 'chat' of shape 'square'"),
        ("short-long-shared", "turns", 1.0, "leave --shape out"),
        ("chat", "unique", 0.0, "--scale must be above 0"),
    ],
)
def test_unknown_names_are_refused(lengths: str, shape: str, scale: float, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        named(lengths, shape, scale=scale)
