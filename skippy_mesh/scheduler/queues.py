"""Who waits and who runs."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from skippy_mesh.scheduler.policies import Ordering
from skippy_mesh.scheduler.sequence import Sequence, Status


class WaitingQueue:
    """Sequences in the order they are to be admitted: the preempted first, then by ``ordering``.

    ``num_tokens`` is what they would have to compute; the first ``num_preempted`` are to resume.
    """

    def __init__(self, ordering: Ordering):
        self._ordering = ordering
        self._sequences: list[Sequence] = []
        self.num_tokens = 0
        self.num_preempted = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def add(self, sequence: Sequence) -> None:
        insort(self._sequences, sequence, key=self._key)
        self.num_tokens += sequence.num_known
        self.num_preempted += sequence.status is Status.PREEMPTED

    def remove(self, sequence: Sequence) -> None:
        self._sequences.remove(sequence)
        self.num_tokens -= sequence.num_known
        self.num_preempted -= sequence.status is Status.PREEMPTED

    def _key(self, sequence: Sequence) -> tuple[int, int, int]:
        return (sequence.status is not Status.PREEMPTED, *self._ordering(sequence))


class RunningSet:
    """Admitted sequences, each on a lane of its own, in the order they were admitted."""

    def __init__(self) -> None:
        self._by_lane: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._by_lane)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._by_lane.values())

    def add(self, sequence: Sequence) -> None:
        assert sequence.lane not in self._by_lane, f"lane {sequence.lane} has an owner"
        self._by_lane[sequence.lane] = sequence

    def remove(self, sequence: Sequence) -> None:
        assert self._by_lane.pop(sequence.lane) is sequence
