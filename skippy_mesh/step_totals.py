"""What step records say: added up over all steps, and each of its stages.

Plain additions on one thread; :class:`skippy_mesh.telemetry.Telemetry` holds the lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from skippy_mesh.exposition import Histogram, Page, by, by_stage, geometric
from skippy_mesh.health import STUCK_S
from skippy_mesh.messages import Snapshot, StageLoss, StepRecord
from skippy_mesh.scheduler.memory import CELL_COMPONENTS, Capacity

DURATIONS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
STEP_ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
ITERATION_TOKENS = (*STEP_ROWS, 8192, 16384)  # vLLM's, of the same rows
_FINE_S = geometric(DURATIONS_S[0], STUCK_S)  # no step takes longer
_FINE_ROWS = (*geometric(1, ITERATION_TOKENS[-1]), *ITERATION_TOKENS)
_TAKEN = ("active", "resident", "reserved")
STORES = (*CELL_COMPONENTS, "recurrent")


class _Stage:
    """What one stage's part of all steps adds up to."""

    def __init__(self) -> None:
        self.compute_s = Histogram(DURATIONS_S, _FINE_S)
        self.wait_s = 0.0
        self.num_decodes = 0
        self.num_restarts = 0
        self.sent_bytes = 0


class StepTotals:
    """What the records of all steps add up to."""

    def __init__(self) -> None:
        self.kinds: dict[str, float] = {"prefill": 0, "decode": 0, "mixed": 0}
        self._tokens: dict[str, float] = {"prefill": 0, "decode": 0, "recompute": 0}
        self._recomputed: dict[str, float] = {"prompt": 0, "output": 0}
        self._admitted: dict[str, float] = {"new": 0, "resume": 0}
        self.preempted: dict[str, float] = {"memory": 0, "stage_loss": 0}
        self._num_hits = 0
        self._misses = Counter({"cold": 0, "boundary": 0, "off": 0})
        self._evictions = Counter({"deficit": 0, "cap": 0})
        self.prefix_tokens: dict[str, float] = {"hit": 0, "queried": 0}
        self.rows = Histogram(STEP_ROWS, _FINE_ROWS)
        self._step_s = Histogram(DURATIONS_S, _FINE_S)
        self._scheduler_s = Histogram(DURATIONS_S, _FINE_S)
        self._stages: list[_Stage] = []
        self.num_busy = 0
        self.epoch: int | None = None

    @property
    def num_steps(self) -> float:
        return sum(self.kinds.values())

    def add_stages(self, num_stages: int) -> None:
        while len(self._stages) < num_stages:
            self._stages.append(_Stage())

    def add_loss(self, loss: StageLoss) -> None:
        self.add_stages(loss.stage + 1)
        self._stages[loss.stage].num_restarts += 1
        self.preempted["stage_loss"] += loss.num_sequences

    def add(self, record: StepRecord, waits_s: Sequence[float], *, num_last: int) -> None:
        """``num_last`` requests had their last token with it, and run no more."""
        self.epoch = record.epoch
        self.num_busy += record.state.running + num_last
        self.kinds[record.kind] += 1
        self._tokens["prefill"] += record.prefill_tokens
        self._tokens["decode"] += record.decode_tokens
        self._recomputed["prompt"] += record.recompute_prompt_tokens
        self._recomputed["output"] += record.recompute_output_tokens
        self._tokens["recompute"] = sum(self._recomputed.values())
        self._admitted["new"] += record.admitted
        self._admitted["resume"] += record.resumed
        self.preempted["memory"] += record.preempted
        self._num_hits += record.prefix_hits
        self._misses.update(record.prefix_misses)
        self._evictions.update(record.prefix_evictions)
        self.prefix_tokens["hit"] += record.prefix_hit_tokens
        self.prefix_tokens["queried"] += record.prefix_queried_tokens
        self.rows.add(record.num_rows)
        self._step_s.add(record.step_s)
        self._scheduler_s.add(record.scheduler_s)
        self.add_stages(len(record.stages))
        for totals, stage, wait_s in zip(self._stages, record.stages, waits_s, strict=False):
            totals.compute_s.add(stage.compute_s)
            totals.wait_s += wait_s
            totals.num_decodes += stage.num_decodes
            totals.sent_bytes += stage.sent_bytes

    def add_to(self, page: Page, *, is_recurrent: bool) -> None:
        self._add_sequences(page, "state" if is_recurrent else "seq_cp")
        page.counter("steps", "Steps that computed rows", by("kind", self.kinds))
        page.counter("step_tokens", "Rows computed, by phase", by("phase", self._tokens))
        page.histogram("step_rows", "Rows of a step", [({}, self.rows)])
        page.histogram(
            "step_seconds", "From plan to sampled tokens, all stages", [({}, self._step_s)]
        )
        page.histogram(
            "scheduler_seconds", "The host's time to plan and commit a step",
            [({}, self._scheduler_s)],
        )  # fmt: skip
        self._add_stages(page)

    def _add_stages(self, page: Page) -> None:
        stages = self._stages
        page.histogram(
            "stage_compute_seconds", "A stage's part of a step",
            [({"stage": str(at)}, stage.compute_s) for at, stage in enumerate(stages)],
        )  # fmt: skip
        page.counter(
            "stage_wait_seconds", "A stage idle between steps while requests ran or waited",
            by_stage(stage.wait_s for stage in stages),
        )  # fmt: skip
        page.counter(
            "decode_calls", "Calls of llama_decode; as many as steps where a step is one call",
            by_stage(stage.num_decodes for stage in stages),
        )  # fmt: skip
        page.counter(
            "activation_bytes", "Hidden states a stage has handed to the next",
            [({"hop": f"{at}-{at + 1}"}, each.sent_bytes) for at, each in enumerate(stages[:-1])],
        )  # fmt: skip
        page.counter(
            "stage_restarts", "Times a stage died and was started again",
            by_stage(stage.num_restarts for stage in stages),
        )  # fmt: skip
        if self.epoch is not None:
            page.gauge(
                "stage_epoch", "Rises whenever all stages start over empty",
                by_stage([self.epoch] * len(stages)),
            )  # fmt: skip

    def _add_sequences(self, page: Page, kind: str) -> None:
        page.counter(
            "requests_admitted", "Entries into the running set", by("kind", self._admitted)
        )
        page.counter(
            "preemptions", "Sequences that gave up their memory", by("reason", self.preempted)
        )
        page.counter(
            "recomputed_tokens", "Rows computed once more, by what they were of",
            by("part", self._recomputed),
        )  # fmt: skip
        page.counter(
            "prefix_shares", "Admissions that could, or could not, share a computed prefix",
            [
                ({"result": "hit", "kind": kind}, self._num_hits),
                ({"result": "miss", "kind": "none"}, sum(self._misses.values())),
            ],
        )  # fmt: skip
        page.counter(
            "prefix_misses", "Admissions that share nothing, by why", by("reason", self._misses)
        )
        page.counter(
            "prefix_tokens", "Tokens found computed, and tokens looked up",
            by("result", self.prefix_tokens),
        )  # fmt: skip
        page.counter(
            "prefix_evictions", "Cached prefixes dropped: others needed the room, or the cache "
            "had its share", by("reason", self._evictions),
        )  # fmt: skip


def counted_waits(record: StepRecord, before: Snapshot | None) -> tuple[float, ...]:
    """Per stage, the idle seconds before this step that count as a bubble.

    A stage measures from the end of one step to the start of its next. That is a bubble if the
    pipeline had work all the while: if, ``before`` this step was answered, requests ran or waited.
    If none did, the mesh had run dry and was waiting for a client.
    """
    if not has_work(before):
        return (0.0,) * len(record.stages)
    return tuple(stage.wait_s for stage in record.stages)


def cells(stage: Capacity, state: Snapshot) -> Iterator[tuple[str, Mapping[str, int]]]:
    """Each store of ``stage`` by state. All stages hold the same sequences, so they differ only in
    what is free."""
    for component, size in stage.by_component().items():
        counts = state.components.get(component)
        if component in STORES and counts is not None:
            taken = {name: counts[name] for name in _TAKEN}
            yield component, {**taken, "free": size - sum(taken.values())}


def has_work(state: Snapshot | None) -> bool:
    return state is not None and (state.running > 0 or any(state.waiting.values()))
