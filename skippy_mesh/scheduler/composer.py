"""Which rows ride together in one step. Pure: from the running sequences to (sequence, rows).

Decode rows come first, then prefill fills up what is left of the step, as far as the pace of the
live decodes allows (Sarathi-Serve's chunked prefill). Where memory is recurrent a step holds one or
the other (config.StepRules).
"""

from __future__ import annotations

from collections.abc import Iterable

from skippy_mesh.config import StepRules
from skippy_mesh.scheduler.pacing import PrefillPacer
from skippy_mesh.scheduler.sequence import Sequence

MAX_CHUNK_BESIDE_DECODES = 256
"""A recurrent chunk is a step of its own, for which live decodes wait: no more rows than this."""

MIN_PIPELINED_ROWS = 32
"""Where several batches are in flight, chunks are cut so that stages work on one prompt together;
rows fewer than these are not worth a hop of their own."""

Rows = list[tuple[Sequence, int]]


class Composer:
    """Remembers one thing: whether the last step was a chunk that decodes had to wait for."""

    def __init__(self, rules: StepRules, pacer: PrefillPacer, *, max_in_flight: int):
        self._rules = rules
        self._pacer = pacer
        self._max_in_flight = max_in_flight
        self._last_was_chunk = False

    def decodes(self, running: Iterable[Sequence]) -> list[Sequence]:
        """Sequences with a single row to run, those that waited longest first, and no more than
        an even share of all that decode: else one batch would hold them all and the stages idle."""
        trial = _on_trial(running)
        if trial is not None:
            return [trial] if self._runs_single(trial) and not trial.num_in_flight else []
        runnable = [sequence for sequence in running if self._runs_single(sequence)]
        num_decoding = sum(map(self._is_decoding, running))
        share = -(-num_decoding // self._max_in_flight)
        runnable.sort(key=lambda sequence: (sequence.last_step, sequence.turn))
        return runnable[: min(share, self._rules.max_rows)]

    def compose(
        self, running: Iterable[Sequence], decodes: list[Sequence], *, num_free_cells: int
    ) -> Rows:
        """The rows of one step: those of ``decodes``, which have cells, and chunks of prompts."""
        trial = _on_trial(running)
        if trial is not None:
            return self._compose_trial(trial, num_free_cells)
        if self._rules.is_homogeneous:
            return self._compose_homogeneous(running, decodes, num_free_cells)
        return self._compose_mixed(running, decodes, num_free_cells)

    def _compose_mixed(
        self, running: Iterable[Sequence], decodes: list[Sequence], num_free_cells: int
    ) -> Rows:
        rows = [(sequence, 1) for sequence in decodes]
        budget = self._rules.max_rows - len(decodes)
        if num_decoding := sum(map(self._is_decoding, running)):
            budget = min(budget, self._pacer.limit(num_decoding))
        budget = min(budget, num_free_cells - len(decodes))
        waiting = self._prefilling(running)
        budget = min(budget, self._pipelined(sum(map(self._chunk_rows, waiting))))
        for sequence in waiting:
            num_rows = min(sequence.num_left, budget)
            if num_rows <= 0:
                break
            rows.append((sequence, num_rows))
            budget -= num_rows
        return rows

    def _compose_homogeneous(
        self, running: Iterable[Sequence], decodes: list[Sequence], num_free_cells: int
    ) -> Rows:
        """One chunk, or decode rows; never two chunks in a row while others decode."""
        others_decode = any(map(self._is_decoding, running))
        waiting = self._prefilling(running)
        if waiting and not (others_decode and self._last_was_chunk):
            limit = MAX_CHUNK_BESIDE_DECODES if others_decode else self._rules.max_rows
            limit = min(limit, self._pipelined(self._chunk_rows(waiting[0])))
            chunk = self._chunk(waiting[0], min(limit, num_free_cells))
            if chunk:
                self._last_was_chunk = True
                return chunk
        if decodes:
            self._last_was_chunk = False
        return [(sequence, 1) for sequence in decodes]

    def _pipelined(self, num_waiting: int) -> int:
        """Rows of prefill for one step, of ``num_waiting`` in all. A stage has nothing to do while
        the first chunk is on the stages before it, and while a batch much larger than the others is
        on one behind it: so each gets a part of what there is, half of an even share, and what
        would be left over as too little for a step rides along."""
        if self._max_in_flight == 1:
            return num_waiting
        share = max(-(-num_waiting // (2 * self._max_in_flight)), MIN_PIPELINED_ROWS)
        return share if num_waiting - share >= MIN_PIPELINED_ROWS else num_waiting

    def _compose_trial(self, sequence: Sequence, num_free_cells: int) -> Rows:
        if sequence.num_in_flight:
            return []
        if self._runs_single(sequence):
            return [(sequence, 1)] if num_free_cells else []
        return self._chunk(sequence, num_free_cells)

    def _chunk(self, sequence: Sequence, limit: int) -> Rows:
        num_rows = min(self._chunk_rows(sequence), limit, self._rules.max_chunk)
        num_rows -= num_rows % self._rules.chunk_multiple
        return [(sequence, num_rows)] if num_rows > 0 else []

    def _prefilling(self, running: Iterable[Sequence]) -> list[Sequence]:
        """Sequences that take a chunk, oldest first."""
        found = [
            sequence
            for sequence in running
            if sequence.num_left and not sequence.is_aborted and not self._runs_single(sequence)
        ]
        found.sort(key=lambda sequence: sequence.turn)
        return found

    def _runs_single(self, sequence: Sequence) -> bool:
        return sequence.num_left > 0 and not sequence.is_aborted and self._is_decoding(sequence)

    def _is_decoding(self, sequence: Sequence) -> bool:
        """One row a step from here on."""
        return self._chunk_rows(sequence) == 0

    def _chunk_rows(self, sequence: Sequence) -> int:
        """Rows that may go in chunks; 0 where what is left goes row by row."""
        end = sequence.num_known if self._rules.replays_in_chunks else sequence.num_prompt
        if sequence.boundaries:
            end = min(end, sequence.boundaries[0])
        num_rows = max(end - sequence.num_scheduled, 0)
        num_rows -= num_rows % self._rules.chunk_multiple
        return num_rows if num_rows > 1 else 0


def _on_trial(running: Iterable[Sequence]) -> Sequence | None:
    """The oldest sequence that must prove itself alone."""
    return next((s for s in running if s.is_on_trial and not s.is_aborted), None)
