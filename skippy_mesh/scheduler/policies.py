"""The scheduler's choices, each a function found by its name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from skippy_mesh.errors import UsageError
from skippy_mesh.scheduler.sequence import Sequence

MAX_BYPASSES = 32
"""How often smaller requests may overtake one that does not fit, before nobody else gets in."""
MAX_PREEMPTIONS = 4
"""After so many a sequence is taken only if there is no other victim."""

Ordering = Callable[[Sequence], tuple[int, int]]
Admission = Callable[[Iterable[Sequence], Callable[[Sequence], bool]], Sequence | None]
Preemption = Callable[[Sequence], tuple[int, int]]


def fcfs(sequence: Sequence) -> tuple[int, int]:
    """First come, first served: Orca (OSDI '22), section 4.2."""
    return (0, sequence.turn)


def priority(sequence: Sequence) -> tuple[int, int]:
    """Lowest ``Request.priority`` first, then arrival: vLLM's priority scheduling."""
    return (sequence.request.priority, sequence.turn)


def first_that_fits(
    waiting: Iterable[Sequence], fits: Callable[[Sequence], bool]
) -> Sequence | None:
    """The first in order that fits. One that does not may be overtaken 32 times, then everybody
    behind it waits: bounded bypass, as in mesh-llm."""
    overtaken: list[Sequence] = []
    for sequence in waiting:
        if fits(sequence):
            for other in overtaken:
                other.num_bypassed += 1
            return sequence
        if sequence.num_bypassed >= MAX_BYPASSES:
            return None
        overtaken.append(sequence)
    return None


def newest(sequence: Sequence) -> tuple[int, int]:
    """Lowest priority, then newest arrival: vLLM v1's choice of a victim."""
    return (sequence.request.priority, sequence.turn)


def cheapest_recompute(sequence: Sequence) -> tuple[int, int]:
    """Lowest priority, then the least work thrown away (vllm#54644 measures what newest costs)."""
    return (sequence.request.priority, -sequence.num_scheduled)


ORDERING: dict[str, Ordering] = {"fcfs": fcfs, "priority": priority}
ADMISSION: dict[str, Admission] = {"fcfs": first_that_fits}
PREEMPTION: dict[str, Preemption] = {"newest": newest, "cheapest-recompute": cheapest_recompute}


@dataclass(frozen=True, slots=True)
class Policies:
    """Names of the choices; unknown ones are refused here."""

    ordering: str = "fcfs"
    admission: str = "fcfs"
    preemption: str = "newest"

    def __post_init__(self) -> None:
        if self.preemption == "swap":
            raise UsageError(
                "preemption policy swap needs a disk tier, which is not there: "
                "preempted sequences are recomputed"
            )
        for kind, name, known in (
            ("ordering", self.ordering, ORDERING),
            ("admission", self.admission, ADMISSION),
            ("preemption", self.preemption, PREEMPTION),
        ):
            if name not in known:
                raise UsageError(f"{kind} policy {name!r} is not one of {', '.join(known)}")


def choose_victim(candidates: Iterable[Sequence], preemption: str) -> Sequence | None:
    """Who gives way; those preempted too often only if there is nobody else."""
    rank = PREEMPTION[preemption]
    return max(
        candidates,
        key=lambda sequence: (sequence.num_preemptions < MAX_PREEMPTIONS, *rank(sequence)),
        default=None,
    )
