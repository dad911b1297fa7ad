"""``--step-log``: a JSON object a line, one for each step that computed rows.

It is an instrument, so it never takes the server with it: a disk that is full ends the log and
nothing else, and one that is slow holds up nobody but the log's own thread.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from skippy_mesh.errors import UsageError
from skippy_mesh.messages import StepRecord
from skippy_mesh.scheduler.memory import Capacity
from skippy_mesh.step_totals import cells

logger = logging.getLogger(__name__)

_END_S = 5.0
_BEHIND_S = 0.002  # a step's tokens are on their way to clients, and go first
MakeLine = Callable[[], Mapping[str, object]]


class StepLog:
    """A new file at ``path``, or the one that is there; :class:`UsageError` if there can be none.

    Every line is written soon and whole, so that whoever follows the file sees complete steps.
    """

    def __init__(self, path: str | Path, *, is_new: bool = True):
        self._path = path
        try:
            self._file = open(path, "wb" if is_new else "ab", buffering=0)  # noqa: SIM115
        except (OSError, ValueError) as error:  # a NUL byte in the path is a ValueError
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"cannot write the step log {str(path)!r}: {reason}") from error
        self._lines: queue.SimpleQueue[MakeLine | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="step log", daemon=True)
        self._thread.start()

    def write(self, make_line: MakeLine) -> None:
        """The line that ``make_line`` makes, a moment later on another thread."""
        self._lines.put(make_line)

    def close(self) -> None:
        """Returns when all is written, or the disk has kept it waiting too long."""
        self._lines.put(None)
        self._thread.join(_END_S)

    def _run(self) -> None:
        make_line = self._lines.get()
        while make_line is not None:
            if self._lines.empty():
                time.sleep(_BEHIND_S)
            self._write(make_line())
            make_line = self._lines.get()
        self._file.close()

    def _write(self, line: Mapping[str, object]) -> None:
        if self._file.closed:
            return
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        try:
            written = self._file.write(data)
        except OSError as error:
            self._give_up(str(error.strerror))
            return
        if written != len(data):
            self._give_up("no space for a whole line")

    def _give_up(self, reason: str) -> None:
        logger.warning("the step log %s ends here, serving goes on: %s", self._path, reason)
        try:
            self._file.close()
        except OSError as error:  # some file systems say only now what failed before
            logger.debug("closing it failed, too: %s", error)


def step_line(
    record: StepRecord,
    waits_s: Sequence[float],
    stages: Sequence[Capacity],
    *,
    finished: int,
    cancelled: int,
) -> dict[str, object]:
    """The line of one step; ``stage_ms``, ``wait_ms`` and ``kv`` are lists over the stages.

    ``admitted`` includes those resumed, ``finished`` those cancelled. ``answered_s`` is on the
    clock of the engine's machine.
    """
    state = record.state
    return {
        "epoch": record.epoch,
        "step_id": record.step_id,
        "kind": record.kind,
        "rows": record.num_rows,
        "in_flight": record.batches_in_flight,
        "running": state.running,
        "waiting": sum(state.waiting.values()),
        "admitted": record.admitted + record.resumed,
        "preempted": record.preempted,
        "finished": finished,
        "cancelled": cancelled,
        "prefill_tokens": record.prefill_tokens,
        "decode_tokens": record.decode_tokens,
        "recompute_tokens": record.recompute_prompt_tokens + record.recompute_output_tokens,
        "kv": [dict(cells(stage, state)) for stage in stages],
        "prefix_hits": record.prefix_hits,
        "prefix_misses": sum(record.prefix_misses.values()),
        "prefix_hit_tokens": record.prefix_hit_tokens,
        "answered_s": round(record.answered_s, 6),
        "step_ms": _ms(record.step_s),
        "plan_ms": _ms(record.scheduler_s),
        "stage_ms": [_ms(stage.compute_s) for stage in record.stages],
        "wait_ms": [_ms(wait_s) for wait_s in waits_s],
    }


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)
