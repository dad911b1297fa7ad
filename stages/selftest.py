"""Proof, on the real weights and this CPU, that company does not change a row's bits.

A profile (``profile.py``) is an expectation; ``exact`` is claimed only for what this test saw. A
lane takes a short prompt and decodes, alone; then another does the same in a company that grows
from step to step to 33 others, while the first one leaves; every output is compared bit for bit.
Inputs are random hidden states: which kernel runs does not depend on them. It runs on some of the
stage's layers (``views.py``), and the verdict is kept on disk, so a second start costs nothing.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from skippy_mesh.config import ContextConfig
from skippy_mesh.messages import Remove
from stages.batch import Floats, Rows
from stages.context import StageContext
from stages.disk import cache_dir, write_text
from stages.views import View

CROWDS = (8, 2, 2, 2, 4, 33)
"""How many others share the prompt's step, then each decode step. Kernels change from 2 rows on, at
8, and by fours: 12 rows are all in fours, 3 are all remainder, 5 and 34 are both, and 34 bring an
expert of a mixture its eight. A hundred rows of a layer take as long as loading it, so there are no
more; the small steps are cheap, and it takes several to show an order of cells that is wrong."""
RECURRENT_CROWDS = (8, 2, 2, 2, 4)  # each lane costs a state row, tens of megabytes in real models
_NUM_CELLS = 256
_CHUNK = 4  # a multiple of every pad, so that recurrent families take it whole
_VERSION = 6


def failure_of(context: StageContext, *, is_recurrent: bool, crowds: Sequence[int]) -> str | None:
    """None if a row's bits are the same in every company, else in which they were not.

    ``context`` is empty and has two lanes more than the largest crowd; it is left empty.
    """
    subject = _Subject(context, num_steps=len(crowds), is_recurrent=is_recurrent)
    try:
        alone = subject.run([0] * len(crowds), lane=1 + max(crowds))
        # The nine cells of who was alone lie below the other's own: handed out again too early,
        # they take in its next three rows and those beside them.
        among = subject.run(crowds, lane=0, leaver=1 + max(crowds))
    finally:
        context.clear()
    for step, (found, expected) in enumerate(zip(among, alone, strict=True)):
        if not np.array_equal(found.view(np.uint32), expected.view(np.uint32)):
            off = float(np.abs(found - expected).max())
            return f"a row's results change among {crowds[step]} others (step {step}, by {off:.2g})"
    return None


class _Subject:
    """A lane and the company it is given. Takes the same steps whichever lane, whatever company."""

    def __init__(self, context: StageContext, *, num_steps: int, is_recurrent: bool):
        self._context = context
        self._is_recurrent = is_recurrent
        rng = np.random.default_rng(1)
        shape = (_CHUNK + num_steps - 1, context.num_embd)
        self._own = rng.standard_normal(shape).astype(np.float32)
        self._others = rng.standard_normal((context.num_lanes, context.num_embd)).astype(np.float32)
        self._next_places = [0] * context.num_lanes
        self._lane = 0

    def run(self, crowds: Sequence[int], *, lane: int, leaver: int | None = None) -> list[Floats]:
        """Outputs of ``lane``, one array per step, the k-th among ``crowds[k]`` others. ``leaver``
        is gone with the first."""
        self._lane = lane
        outputs = [self._step(_CHUNK, crowds[0])]
        if leaver is not None:
            self._context.apply(Remove(leaver))
        return outputs + [self._step(1, num_others) for num_others in crowds[1:]]

    def _step(self, num_own: int, num_others: int) -> Floats:
        """The subject's outputs for its next ``num_own`` rows, which lie between the others'."""
        own, others = [self._lane] * num_own, list(range(1, 1 + num_others))
        if self._is_recurrent and num_own > 1:
            if others:
                self._decode(others)
            return self._decode(own)
        half = num_others // 2
        return self._decode([*others[:half], *own, *others[half:]])

    def _decode(self, lanes: Sequence[int]) -> Floats:
        """The subject's outputs of a step with the next row of each of ``lanes``, in that order."""
        places = []
        for lane in lanes:
            places.append(self._next_places[lane])
            self._next_places[lane] += 1
        inputs = np.array(
            [self._own[place] if lane == self._lane else self._others[lane]
             for lane, place in zip(lanes, places, strict=True)]
        )  # fmt: skip
        # Only a lane's last row is an output, as in real steps; elsewhere every row comes back.
        flags = [lane != after for lane, after in zip(lanes, [*lanes[1:], None], strict=True)]
        output = self._context.decode(Rows(lanes, places, flags, inputs))
        if self._context.keeps_hidden:
            output = np.hstack([output, self._context.hidden])
        kept = lanes if len(output) == len(lanes) else list(itertools.compress(lanes, flags))
        mine: Floats = output[np.array([lane == self._lane for lane in kept], bool)].copy()
        return mine


def failure_of_views(
    views: Sequence[View], config: ContextConfig, *, is_recurrent: bool
) -> str | None:
    """:func:`failure_of` each of ``views`` until one fails."""
    crowds = RECURRENT_CROWDS if is_recurrent else CROWDS
    num_lanes = max(crowds) + 2  # the company, its subject, and who was alone
    config = replace(
        config, num_cells=_NUM_CELLS, num_lanes=num_lanes, num_residents=0, max_rows=64
    )
    for view in views:
        with view(config) as context:
            failure = failure_of(context, is_recurrent=is_recurrent, crowds=crowds)
        if failure is not None:
            return failure
    return None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the self-test said: None if nothing failed."""

    failure: str | None


def recall(key: Sequence[str]) -> Verdict | None:
    """What it said for the same ``key`` before."""
    try:
        found = json.loads(_memo(key).read_text())
    except (OSError, ValueError):
        return None
    is_one = isinstance(found, dict) and "failure" in found
    return Verdict(found["failure"]) if is_one else None


def keep(key: Sequence[str], verdict: Verdict) -> None:
    write_text(_memo(key), json.dumps({"failure": verdict.failure, "of": list(key)}))


def _memo(key: Sequence[str]) -> Path:
    name = hashlib.sha256("\n".join((str(_VERSION), *key)).encode()).hexdigest()[:16]
    return cache_dir() / "selftest" / f"{name}.json"
