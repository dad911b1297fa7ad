"""A step in the making and in flight: which rows of which sequences."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from skippy_mesh.errors import StageError
from skippy_mesh.messages import Copy, Remove, StepBatch, StepResult
from skippy_mesh.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of one sequence in a plan: positions [start, end)."""

    sequence: Sequence
    lane: int
    start: int
    end: int
    samples: bool
    num_again: int
    """Rows, the first ones, that had been computed before a preemption."""

    @property
    def num_rows(self) -> int:
        return self.end - self.start

    @property
    def num_again_output(self) -> int:
        """Those of ``num_again`` that are generated tokens."""
        return max(self.start + self.num_again - max(self.start, self.sequence.num_prompt), 0)

    @property
    def is_decode(self) -> bool:
        return self.start >= self.sequence.num_prompt and not self.num_again


class RowCounts(NamedTuple):
    """The rows of a step: all, those of generated tokens, and those that had been computed before,
    of which ``recompute_output`` are generated tokens, too. The rest are ``prefill``."""

    rows: int
    decode: int
    recompute: int
    recompute_output: int

    @property
    def prefill(self) -> int:
        return self.rows - self.decode - self.recompute

    @property
    def kind(self) -> Literal["prefill", "decode", "mixed"]:
        if not self.decode:
            return "prefill"
        return "decode" if self.decode == self.rows else "mixed"


@dataclass(slots=True)
class Plan:
    """One step in the making, then in flight.

    ``operations`` come before the rows. ``removed`` lanes are among them; their ids are free again
    when the step is committed, and ``snapshots`` can be shared from then on.
    """

    step_id: int
    parts: list[Part] = field(default_factory=list)
    operations: list[Copy | Remove] = field(default_factory=list)
    removed: list[int] = field(default_factory=list)
    snapshots: list[Any] = field(default_factory=list)
    new_lanes: dict[int, Sequence] = field(default_factory=dict)
    forgotten_lanes: list[int] = field(default_factory=list)
    admitted: list[str] = field(default_factory=list)
    """Requests that left the queue for the first time."""
    num_resumed: int = 0
    num_preempted: int = 0

    @property
    def num_admitted(self) -> int:
        return len(self.admitted)

    def count(self) -> RowCounts:
        rows = decode = recompute = recompute_output = 0
        for part in self.parts:
            rows += part.num_rows
            decode += part.is_decode
            if part.num_again:
                recompute += part.num_again
                recompute_output += part.num_again_output
        return RowCounts(rows, decode, recompute, recompute_output)

    @property
    def completes_prompt(self) -> bool:
        return any(part.samples and not part.is_decode for part in self.parts)

    def remove(self, lane: int) -> None:
        """Empty ``lane`` on every stage."""
        self.operations.append(Remove(lane))
        self.removed.append(lane)

    def forget(self, lane: int) -> None:
        """Nobody samples on ``lane`` any more."""
        self.new_lanes.pop(lane, None)
        self.forgotten_lanes.append(lane)

    def check(self, epoch: int, result: StepResult) -> None:
        """:class:`StageError` if ``result`` is not that of this step."""
        if (result.epoch, result.step_id) != (epoch, self.step_id):
            raise StageError(
                f"got the result of step {result.epoch}/{result.step_id}, "
                f"expected {epoch}/{self.step_id}"
            )
        sampled = {part.lane for part in self.parts if part.samples}
        strangers = (result.tokens.keys() | result.failed.keys()) - sampled
        if strangers:
            raise StageError(
                f"step {self.step_id} has results for lanes {sorted(strangers)}, "
                f"which did not sample"
            )

    def batch(self, epoch: int) -> StepBatch:
        """What the stages are sent."""
        pasts = {lane: sequence.history() for lane, sequence in self.new_lanes.items()}
        lanes: list[int] = []
        positions: list[int] = []
        tokens: list[int] = []
        samples: list[bool] = []
        # In the order of lanes: one run of rows each is how llama.cpp splits a step.
        for part in sorted(self.parts, key=lambda part: part.lane):
            lanes += [part.lane] * part.num_rows
            positions += range(part.start, part.end)
            tokens += part.sequence.tokens(part.start, part.end)
            samples += [False] * (part.num_rows - 1) + [part.samples]
        return StepBatch(
            epoch=epoch,
            step_id=self.step_id,
            operations=tuple(self.operations),
            lanes=tuple(lanes),
            positions=tuple(positions),
            tokens=tuple(tokens),
            samples=tuple(samples),
            new_lanes={lane: s.request.sampling for lane, s in self.new_lanes.items()},
            histories={lane: past for lane, past in pasts.items() if past is not None},
            forgotten_lanes=tuple(self.forgotten_lanes),
        )
