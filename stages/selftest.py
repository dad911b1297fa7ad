"""Proof, on the real weights and this CPU, that company does not change a row's bits.

A profile (``profile.py``) is an expectation; ``exact`` is claimed only for what this test saw. One
lane takes a short prompt and decodes, alone and then among 2, 4, 8 and 33 others, some of which
leave on the way, and every output is compared bit for bit. Inputs are random hidden states: which
kernel runs does not depend on them. The verdict is kept on disk, so a second start costs nothing.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from skippy_mesh.config import ContextConfig
from skippy_mesh.messages import Remove
from stages.batch import Floats, Rows
from stages.context import StageContext
from stages.disk import cache_dir, write_text

CROWDS = (2, 4, 8, 33)
RECURRENT_CROWDS = (2, 4, 8)  # each lane costs a state row, tens of megabytes in a real model
_NUM_CELLS = 512
_CHUNK, _NUM_DECODES = 4, 3  # a multiple of every pad, so that recurrent families take it whole
_VERSION = 3


def failure_of(context: StageContext, *, is_recurrent: bool, crowds: Sequence[int]) -> str | None:
    """None if the subject's bits are the same in every company, else in which they were not.

    ``context`` is empty and has a lane more than the largest crowd's company and one; it is left
    empty.
    """
    subject = _Subject(context, is_recurrent=is_recurrent)
    alone = subject.run(0)
    for size in crowds:
        for step, (found, expected) in enumerate(zip(subject.run(size), alone, strict=True)):
            if not np.array_equal(found.view(np.uint32), expected.view(np.uint32)):
                off = float(np.abs(found - expected).max())
                return f"a row's results change among {size} others (step {step}, by {off:.2g})"
    return None


class _Subject:
    """Lane 0 and the company it is given. Runs the same steps whatever the company."""

    def __init__(self, context: StageContext, *, is_recurrent: bool):
        self._context = context
        self._is_recurrent = is_recurrent
        rng = np.random.default_rng(1)
        shape = (_CHUNK + _NUM_DECODES + 1, context.num_embd)
        self._own = rng.standard_normal(shape).astype(np.float32)
        self._others = rng.standard_normal((context.num_lanes, context.num_embd)).astype(np.float32)

    def run(self, num_others: int) -> list[Floats]:
        """Outputs of the subject, one array per step."""
        context, others = self._context, range(1, 1 + num_others)
        leaver = 1 + num_others
        try:
            if num_others:
                # So many cells that, reused too early, they would take in the subject's next row.
                num_rows = _CHUNK * (1 + num_others // _CHUNK)
                self._decode([(leaver, place) for place in range(num_rows)])
            outputs = [self._step(range(_CHUNK), others, [0] * num_others)]
            if num_others:
                context.apply(Remove(leaver))  # its cells lie below the subject's
            for step in range(_NUM_DECODES):
                outputs.append(self._step([_CHUNK + step], others, [1 + step] * num_others))
            return outputs
        finally:
            context.clear()

    def _step(self, own: Sequence[int], others: Sequence[int], places: Sequence[int]) -> Floats:
        """The subject's outputs for its positions ``own``, its rows between the others'."""
        if self._is_recurrent and len(own) > 1:
            for lane, place in zip(others, places, strict=True):
                self._decode([(lane, place)])
            return self._decode([(0, place) for place in own])
        half = len(others) // 2
        pairs = list(zip(others, places, strict=True))
        return self._decode([*pairs[:half], *((0, place) for place in own), *pairs[half:]])

    def _decode(self, rows: Sequence[tuple[int, int]]) -> Floats:
        lanes = [lane for lane, _ in rows]
        inputs = np.array(
            [self._own[place] if lane == 0 else self._others[lane] for lane, place in rows]
        )
        # Only a lane's last row is an output, as in real steps; elsewhere every row comes back.
        flags = [lane != 0 or row == len(rows) - 1 or lanes[row + 1] != 0
                 for row, lane in enumerate(lanes)]  # fmt: skip
        output = self._context.decode(Rows(lanes, [place for _, place in rows], flags, inputs))
        kept = lanes if len(output) == len(rows) else list(itertools.compress(lanes, flags))
        mine: Floats = output[np.array([lane == 0 for lane in kept], bool)].copy()
        return mine


def verdict(
    key: Sequence[str],
    new_contexts: Sequence[Callable[[ContextConfig], StageContext]],
    config: ContextConfig,
    *,
    is_recurrent: bool,
) -> str | None:
    """:func:`failure_of` fresh contexts, or what it said for the same ``key`` before."""
    name = hashlib.sha256("\n".join((str(_VERSION), *key)).encode()).hexdigest()[:16]
    path = cache_dir() / "selftest" / f"{name}.json"
    known = _read(path)
    if known is not None:
        return known["failure"]
    crowds = RECURRENT_CROWDS if is_recurrent else CROWDS
    num_lanes = max(crowds) + 2  # the subject, its company, and one that leaves
    config = replace(config, num_cells=_NUM_CELLS, num_lanes=num_lanes, max_rows=64)
    failure = None
    for new_context in new_contexts:
        context = new_context(config)
        try:
            failure = failure_of(context, is_recurrent=is_recurrent, crowds=crowds)
        finally:
            context.close()
        if failure is not None:
            break
    write_text(path, json.dumps({"failure": failure, "of": list(key)}))
    return failure


def _read(path: Path) -> dict[str, str | None] | None:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and "failure" in found else None
