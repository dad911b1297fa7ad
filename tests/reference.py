"""Steps that two sequences share, and the comparison of bits that every proof of exactness uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from skippy_mesh.messages import Copy, Remove, StepBatch
from stages.reference import Reference as Reference  # the other side of every comparison


def mixed_steps(
    num_vocab: int, *, num_prompt: int, num_second: int = 150, num_decodes: int = 16
) -> list[StepBatch]:
    """Two sequences sharing steps: a long prompt, a second one fed in while the first decodes,
    then both decoding. Tokens are given beforehand, so every step's logits can be compared."""
    rng = np.random.default_rng(11)
    first = rng.integers(3, num_vocab, num_prompt + num_decodes + 3).tolist()
    second = rng.integers(3, num_vocab, num_second + num_decodes).tolist()
    cut, mid = num_prompt * 2 // 3, num_second * 2 // 3 + 1
    rows = [
        [(0, at) for at in range(cut)],
        [(0, at) for at in range(cut, num_prompt)],
        [(1, at) for at in range(mid)] + [(0, num_prompt)],
        [(1, mid), (0, num_prompt + 1)] + [(1, at) for at in range(mid + 1, num_second)],
    ]
    rows += [
        [(1, num_second + step), (0, num_prompt + 2 + step)][:: 1 if step % 2 else -1]
        for step in range(num_decodes)
    ]
    tokens = {0: first, 1: second}
    return [step_of(index, step, tokens) for index, step in enumerate(rows)]


def step_of(
    step_id: int,
    rows: Sequence[tuple[int, int]],
    tokens: Mapping[int, Sequence[int]],
    *,
    operations: tuple[Copy | Remove, ...] = (),
) -> StepBatch:
    """A step over (lane, position) rows that samples each lane's last row."""
    last = {lane: row for row, (lane, _) in enumerate(rows)}
    return StepBatch(
        epoch=0,
        step_id=step_id,
        operations=operations,
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
