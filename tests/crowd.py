"""Sequences in company, every row compared with the same row of the sequence alone.

Alone means an undivided context of llama.cpp by itself, nobody else in it, the prompt in one step.
Tokens are given beforehand, so a row can be compared whichever step it is computed in.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from skippy_mesh.config import ContextConfig, specs_of
from skippy_mesh.messages import Copy, Remove, StepBatch
from stages.batch import Floats
from stages.gguf_file import ModelFile
from stages.pipeline import LocalPipeline
from stages.profile import choose_profile, matrix_types, replays_in_chunks
from stages.reference import Reference
from stages.worker import StageWorker
from tests.reference import step_of

# One thread: tiny models finish before a second one is awake. 516 is the largest step here.
CONTEXT = ContextConfig(num_cells=1280, num_lanes=6, max_rows=520, num_threads=1)
_ALONE = ContextConfig(num_cells=1024, num_lanes=1, max_rows=1024, num_threads=1)
_NUM_VOCAB = 512


@dataclass(frozen=True, slots=True)
class Story:
    """The tokens of one sequence. Those after the prompt are decoded one at a time."""

    tokens: tuple[int, ...]
    num_prompt: int


def story(seed: int, num_prompt: int, num_decodes: int = 16, *, begin: Sequence[int] = ()) -> Story:
    """Random tokens behind those of ``begin``."""
    num_random = num_prompt + num_decodes - len(begin)
    random = np.random.default_rng(seed).integers(3, _NUM_VOCAB, num_random)
    return Story((*begin, *random.tolist()), num_prompt)


FIRST = story(11, 230, 19)
SECOND = story(12, 101, 18)


class Made:
    """A model file, and what it computes alone, computed once."""

    def __init__(self, path: Path):
        self.path = path
        self.model = ModelFile.open(path)
        self.profile = choose_profile(matrix_types(self.model.tensors.values()))
        self._alone: dict[Story, Floats] = {}

    @property
    def is_recurrent(self) -> bool:
        return self.model.family.is_recurrent

    @property
    def chunk_multiple(self) -> int:
        return self.profile.pad if self.is_recurrent else 1

    @property
    def can_replay_in_chunks(self) -> bool:
        """Whether a row has the same bits in a chunk as when it was decoded."""
        return replays_in_chunks(self.model.family, self.model.tensors)

    def alone(self, story: Story) -> Floats:
        """Logits of every position, ``[n_tokens, n_vocab]``."""
        if story not in self._alone:
            reference = Reference(self.path, _ALONE, pad=self.profile.pad)
            try:
                found = [reference.logits(step) for step in self._steps_alone(story)]
            finally:
                reference.close()
            self._alone[story] = np.concatenate(found)
        return self._alone[story]

    def _steps_alone(self, story: Story) -> Iterator[StepBatch]:
        whole = story.num_prompt - story.num_prompt % self.chunk_multiple
        borders = [0, *range(whole, len(story.tokens) + 1)]
        for step, (lo, hi) in enumerate(itertools.pairwise(borders)):
            yield StepBatch(
                epoch=0,
                step_id=step,
                lanes=(0,) * (hi - lo),
                positions=tuple(range(lo, hi)),
                tokens=story.tokens[lo:hi],
                samples=(True,) * (hi - lo),
            )


@contextlib.contextmanager
def local(
    made: Made, cuts: Sequence[int] = (), context: ContextConfig = CONTEXT
) -> Iterator[LocalPipeline]:
    """All stages in this process, closed at the end."""
    specs = specs_of(made.path, made.model.num_layers, cuts, context)
    pipeline = LocalPipeline([StageWorker(spec) for spec in specs])
    try:
        yield pipeline
    finally:
        pipeline.close()


def num_compactions(pipeline: LocalPipeline) -> list[int]:
    """How often each stage has compacted its pool."""
    return [worker._context.num_compactions for worker in pipeline._workers]


class Company:
    """Sequences on the lanes of a pipeline. ``different`` are rows whose bits were not alone's."""

    def __init__(self, made: Made, pipeline: Any):
        self.stories: dict[int, Story] = {}
        self.at: dict[int, int] = {}
        self.num_compared = 0
        self.different: list[str] = []
        self.step_sizes: set[int] = set()
        self._made, self._pipeline = made, pipeline
        self._num_prompt: dict[int, int] = {}
        self._operations: list[Copy | Remove] = []
        self._step_id = 0

    @property
    def is_recurrent(self) -> bool:
        return self._made.is_recurrent

    def seat(self, lane: int, story: Story) -> None:
        assert lane not in self.stories
        self.stories[lane], self.at[lane] = story, 0
        self._num_prompt[lane] = story.num_prompt

    def leave(self, lane: int) -> None:
        self._operations.append(Remove(lane))
        for column in (self.stories, self.at, self._num_prompt):
            del column[lane]

    def drop(self, lane: int) -> None:
        """Free what the lane holds; it comes again, in chunks like a prompt where that is exact."""
        self._operations.append(Remove(lane))
        if self._made.can_replay_in_chunks:
            self._num_prompt[lane] = max(self._num_prompt[lane], self.at[lane])
        self.at[lane] = 0

    def copy(self, source: int, lane: int, story: Story, num_tokens: int) -> None:
        """Seat ``story`` on ``lane`` with the first tokens' memory taken from ``source``."""
        assert self.stories[source].tokens[:num_tokens] == story.tokens[:num_tokens]
        self.seat(lane, story)
        self._operations.append(Copy(source, lane, 0, num_tokens))
        self.at[lane] = num_tokens

    def is_done(self, lane: int) -> bool:
        return self.at[lane] == len(self.stories[lane].tokens)

    def feed(self, *parts: tuple[int, int]) -> None:
        """One step of (lane, number of rows) in this order; a lane may come more than once."""
        rows = []
        for lane, count in parts:
            rows += [(lane, self.at[lane] + index) for index in range(count)]
            self.at[lane] += count
        step = step_of(
            self._step_id,
            rows,
            {lane: self.stories[lane].tokens for lane, _ in parts},
            operations=tuple(self._operations),
        )
        found = self._pipeline.logits(step)
        self._step_id += 1
        self._operations.clear()
        self.step_sizes.add(step.num_rows)
        self._compare(step, found)

    def turn(self, chunks: Mapping[int, int]) -> None:
        """Every lane goes on: by a chunk of its own length, or by one row behind its prompt."""
        rests = {lane: self._num_prompt[lane] - at for lane, at in self.at.items()}
        ones = [lane for lane, rest in rests.items() if rest <= 0 and not self.is_done(lane)]
        wanted = {lane: min(chunks[lane], rest) for lane, rest in rests.items() if rest > 0}
        if self.is_recurrent:
            self._turn_apart(wanted, ones)
            return
        room, parts = CONTEXT.max_rows - len(ones), []
        for lane, count in wanted.items():
            parts.append((lane, min(count, room)))
            room -= parts[-1][1]
        half = len(ones) // 2
        singles = [(lane, 1) for lane in ones]
        self.feed(*singles[:half], *(part for part in parts if part[1]), *singles[half:])

    def _turn_apart(self, wanted: Mapping[int, int], ones: list[int]) -> None:
        """A chunk is a step of its own, and a multiple of the pad; what is left over decodes."""
        for lane, count in wanted.items():
            whole = count - count % self._made.chunk_multiple
            if whole > 1:
                self.feed((lane, whole))
            else:
                ones.append(lane)
        if ones:
            self.feed(*((lane, 1) for lane in ones))

    def _compare(self, step: StepBatch, found: Floats) -> None:
        sampled = [row for row in range(step.num_rows) if step.samples[row]]
        assert len(found) == len(sampled)
        for row, logits in zip(sampled, found, strict=True):
            lane, position = step.lanes[row], step.positions[row]
            expected = self._made.alone(self.stories[lane])[position]
            self.num_compared += 1
            if not np.array_equal(logits.view(np.uint32), expected.view(np.uint32)):
                off = float(np.abs(logits - expected).max())
                self.different.append(
                    f"step {step.step_id} of {step.num_rows} rows, lane {lane}, "
                    f"position {position}: by {off:.2g}"
                )


def two_sequences(company: Company) -> None:
    """A long prompt, a second one fed in while the first decodes, then both."""
    company.seat(0, FIRST)
    company.seat(1, SECOND)
    if company.is_recurrent:
        company.feed((0, 230))
        company.feed((1, 64))
        company.feed((0, 1))
        company.feed((1, 36))
        company.feed((0, 1))
        company.feed((0, 1), (1, 1))
    else:
        company.feed((0, 150))
        company.feed((0, 80))
        company.feed((1, 68), (0, 1))
        company.feed((1, 1), (0, 1), (1, 32))
    for step in range(16):
        company.feed(*[(0, 1), (1, 1)][:: -1 if step % 2 else 1])


def assert_exact(made: Made, pipeline: Any) -> None:
    """Every row of :func:`two_sequences` has the bits it has alone."""
    company = Company(made, pipeline)
    two_sequences(company)
    assert not company.different, f"of {company.num_compared}: {company.different[:9]}"
    assert company.num_compared > 32
