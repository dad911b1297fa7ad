"""Which rows every stage runs in the next step.

The life of a step: :meth:`Scheduler.schedule` makes room, admits and composes one
:class:`StepBatch`; the pipeline runs it; :meth:`Scheduler.commit` takes the sampled tokens, ends
what is finished and frees it. Several batches may be in flight, over different sequences or over
consecutive chunks of one prompt; they are committed in the order they were scheduled.

Memory is promised at admission and preempted when promises were too small: a victim keeps its
tokens, goes to the front of the queue and is computed again.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Mapping

from skippy_mesh.config import StepRules
from skippy_mesh.errors import RequestError
from skippy_mesh.messages import (
    Copy,
    FinishReason,
    Remove,
    Request,
    Snapshot,
    StepBatch,
    StepResult,
    TokenEvent,
    TokenLogprobs,
)
from skippy_mesh.scheduler.composer import Composer
from skippy_mesh.scheduler.memory import Capacity, Ledger
from skippy_mesh.scheduler.pacing import PrefillPacer, RunLimit
from skippy_mesh.scheduler.plan import Part, Plan, RowCounts
from skippy_mesh.scheduler.policies import ADMISSION, ORDERING, Policies, choose_victim
from skippy_mesh.scheduler.prefix_cache import PrefixCache, PrefixCounts
from skippy_mesh.scheduler.queues import RunningSet, WaitingQueue
from skippy_mesh.scheduler.sequence import Sequence, Status

_REASONS = {
    None: "order", "lanes": "lane", "attention": "memory", "window": "memory", "recurrent": "memory"
}  # fmt: skip


class Scheduler:
    """Decides for one mesh. Not thread-safe: its engine alone calls it.

    ``max_model_len`` bounds prompt plus output of a request, ``max_in_flight`` the batches that are
    scheduled and not committed. ``ceiling`` is the most sequences that may run at once, ``pacer``
    and ``run_limit`` what is worth running. Stages that have seen ``first_epoch`` take no step.
    """

    def __init__(
        self,
        *,
        capacity: Capacity,
        rules: StepRules,
        max_model_len: int,
        max_in_flight: int = 1,
        policies: Policies | None = None,
        pacer: PrefillPacer | None = None,
        run_limit: RunLimit | None = None,
        first_epoch: int = 0,
    ):
        policies = policies or Policies()
        self._capacity = capacity
        self.max_model_len = min(max_model_len, capacity.num_cells)
        self._max_in_flight = max_in_flight
        self._choose_next = ADMISSION[policies.admission]
        self._preemption = policies.preemption
        self._pacer = pacer or PrefillPacer()
        self._rules = rules
        self._composer = Composer(rules, self._pacer, max_in_flight=max_in_flight)
        self._run_limit = run_limit or RunLimit(capacity.lanes)
        self.waiting = WaitingQueue(ORDERING[policies.ordering])
        self.running = RunningSet()
        self.in_flight: deque[Plan] = deque()
        self._open: dict[str, Sequence] = {}
        self._ended: list[TokenEvent] = []
        self._num_turns = 0
        self._prefix_counts = PrefixCounts()
        self.epoch = first_epoch - 1
        self._start_epoch()

    @property
    def has_work(self) -> bool:
        """Something waits, runs, is in flight, or must still be freed on the stages."""
        return bool(self._open or self._next.operations or self.in_flight or self._ended)

    def add(self, request: Request) -> None:
        """Queue ``request``; :class:`RequestError` if it can never fit or its id is open."""
        request.check_fits(self.max_model_len)
        if request.request_id in self._open:
            raise RequestError(f"request id {request.request_id} is already open")
        sequence = Sequence.of(request, turn=self._num_turns, max_model_len=self.max_model_len)
        self._num_turns += 1
        self._open[request.request_id] = sequence
        self.waiting.add(sequence)
        if len(sequence.outputs) >= sequence.max_tokens:  # it comes from an engine with more memory
            self._finish(sequence, "length")

    def abort(self, request_id: str) -> bool:
        """End a request wherever it is; False if it is not open. One that is in flight ends when
        its rows have come back from every stage."""
        sequence = self._open.get(request_id)
        if sequence is None:
            return False
        sequence.is_aborted = True
        if not sequence.num_in_flight:
            self._finish(sequence, "abort")
        return True

    def abort_all(self) -> None:
        for request_id in list(self._open):
            self.abort(request_id)

    # -- a step ------------------------------------------------------------------------------------

    def schedule(self) -> StepBatch | None:
        """The next step, or None while there is nothing to run before an answer comes back."""
        if len(self.in_flight) >= self._max_in_flight:
            return None
        plan = self._next
        decodes = self._composer.decodes(self.running)
        self._make_room(plan, decodes)
        if not plan.num_preempted and self._admit(plan):
            # A short prompt is a single row from the start.
            decodes = self._composer.decodes(self.running)[: self._ledger.num_free_cells]
        for sequence, num_rows in self._composer.compose(
            self.running, decodes, num_free_cells=self._ledger.num_free_cells
        ):
            self._add_rows(plan, sequence, num_rows)
        if not plan.parts and (self.in_flight or not plan.operations):
            assert self.in_flight or not self._open, "work is waiting and nothing can run"
            return None
        self._launch(plan)
        return plan.batch(self.epoch)

    def commit(self, result: StepResult) -> Plan:
        """Take the answer to the oldest batch in flight, and return what that was.

        A result that is not this batch's is refused before anything changes; a sequence the answer
        forgot fails alone.
        """
        plan = self.in_flight[0]
        plan.check(self.epoch, result)
        self.in_flight.popleft()
        for lane in plan.removed:
            self._ledger.confirm(lane)
        for snapshot in plan.snapshots:
            snapshot.num_ready = len(snapshot.tokens)
        for part in plan.parts:
            sequence = part.sequence
            sequence.num_in_flight -= 1
            sequence.num_computed = part.end
            sequence.num_reached = max(sequence.num_reached, part.end)
            self._prefixes.computed(sequence)
            if not sequence.is_on_trial:
                sequence.trial_end = 0
            if sequence.is_aborted:
                if not sequence.num_in_flight:
                    self._finish(sequence, "abort")
            elif part.samples:
                self._take_token(part, result)
        return plan

    def take_events(self) -> list[TokenEvent]:
        """Events since the last call."""
        events, self._ended = self._ended, []
        return events

    def take_prefix_counts(self) -> PrefixCounts:
        """Hits, misses and evictions since the last call."""
        taken = self._prefix_counts
        self._prefix_counts = self._prefixes.counts = PrefixCounts()
        return taken

    def observe(self, plan: Plan, counts: RowCounts, *, step_s: float, now_s: float) -> None:
        """Let the pacing learn from a committed step of so many rows that took ``step_s``."""
        if not plan.completes_prompt:
            self._pacer.observe(
                step_s=step_s,
                num_prefill=counts.prefill + counts.recompute,
                num_decode=counts.decode,
            )
        self._run_limit.observe(
            now_s=now_s,
            num_rows=counts.rows - counts.recompute,
            num_waiting=len(self.waiting),
        )

    def snapshot(self) -> Snapshot:
        return Snapshot(
            running=len(self.running),
            waiting=self._waiting_by_reason(),
            waiting_tokens=self.waiting.num_tokens,
            components=self._ledger.snapshot(),
        )

    def _waiting_by_reason(self) -> dict[str, int]:
        reasons = dict.fromkeys(("memory", "lane", "order", "preempted"), 0)
        reasons["preempted"] = self.waiting.num_preempted
        fresh = itertools.islice(self.waiting, self.waiting.num_preempted, None)
        is_full = len(self.running) >= self._run_limit.limit
        lacked_by_all = "lanes" if is_full else self._ledger.lacks(1)
        if lacked_by_all is not None:  # the common case under load: no need to ask each
            reasons[_REASONS[lacked_by_all]] = len(self.waiting) - self.waiting.num_preempted
            return reasons
        for sequence in fresh:
            reasons[_REASONS[self._ledger.lacks(self._need(sequence))]] += 1
        return reasons

    def lane_ends(self, stages: Iterable[Mapping[int, int]]) -> list[dict[int, int]]:
        """How many positions each lane must hold on every one of ``stages``; those that are to be
        removed may still hold what they do."""
        unsent = {op.dst for op in self._next.operations if isinstance(op, Copy)}
        held = self._prefixes.resident_ends()
        held |= {s.lane: s.num_computed for s in self.running if s.num_computed}
        held = {lane: end for lane, end in held.items() if lane not in unsent}
        leaving = {op.lane for op in self._next.operations if isinstance(op, Remove)}
        return [
            held | {lane: end for lane, end in ends.items() if lane in leaving} for ends in stages
        ]

    def recover(self, reason: str) -> None:
        """The oldest batch in flight failed on a stage, so all stages start over empty.

        Whoever ran is computed again. A step's failure is one sequence's fault at most: those that
        were in it are tried alone, and one that fails alone is ended.
        """
        failed = self.in_flight[0].parts if self.in_flight else []
        culprit = (
            failed[0].sequence if len(failed) == 1 and failed[0].sequence.is_on_trial else None
        )
        for part in failed:
            part.sequence.trial_end = max(part.sequence.trial_end, part.end)
        survivors = list(self.running)
        self._start_epoch()
        for sequence in survivors:
            sequence.rewind()
            sequence.status = Status.PREEMPTED
            self.waiting.add(sequence)
            if sequence is culprit:
                self._finish(sequence, "error", error=reason)
            elif sequence.is_aborted:
                self._finish(sequence, "abort")

    def fail_all(self, reason: str) -> None:
        """End every open request with an error: no stage is left to run it."""
        for sequence in list(self.running):
            sequence.num_in_flight = 0
        for sequence in list(self._open.values()):
            self._finish(sequence, "error", error=reason)
        self._start_epoch()

    def _start_epoch(self) -> None:
        """All stages are empty, or will be when they see the new epoch."""
        self.epoch += 1
        self._next = Plan(0)
        self._ledger = Ledger(self._capacity)
        self._prefixes = PrefixCache(self._ledger, self._rules, self._prefix_counts)
        self.running = RunningSet()
        self.in_flight.clear()

    # -- make room, admit --------------------------------------------------------------------------

    def _make_room(self, plan: Plan, decodes: list[Sequence]) -> None:
        """Evict, then preempt, until every row of ``decodes`` has a cell. Who finds none waits for
        an answer; one that is alone and still too large for the pool has reached its end."""
        self._prefixes.make_room(plan, len(decodes))
        while len(decodes) > self._ledger.num_free_cells:
            if len(self.running) == 1 and not self.in_flight:
                self._finish(decodes.pop(), "length")
                return
            # Who shares all its cells frees none, unless everybody does.
            victims = [s for s in self.running if self._ledger.exclusive(s.lane)]
            victim = choose_victim(victims or self.running, self._preemption)
            if victim is None or victim.num_in_flight:
                # Nobody else gives way in its place: its rows come back before long.
                del decodes[self._ledger.num_free_cells :]
                return
            self._preempt(victim)
            plan.num_preempted += 1
            if victim in decodes:
                decodes.remove(victim)

    def _preempt(self, sequence: Sequence) -> None:
        self._free(sequence)
        sequence.rewind()
        sequence.num_preemptions += 1
        sequence.status = Status.PREEMPTED
        self.waiting.add(sequence)

    def _admit(self, plan: Plan) -> bool:
        """Let in whoever fits; whether anybody did."""
        num_before = len(self.running)
        while len(self.running) < self._run_limit.limit and self._ledger.lacks(1) is None:
            sequence = self._choose_next(self.waiting, self._fits)
            if sequence is None:
                break
            self._start(sequence, plan)
        return len(self.running) > num_before

    def _start(self, sequence: Sequence, plan: Plan) -> None:
        match = self._prefixes.find(sequence)
        if sequence.status is Status.WAITING:
            sequence.num_cached = match.num_shared
            plan.admitted.append(sequence.request.request_id)
        plan.num_resumed += sequence.status is Status.PREEMPTED
        self.waiting.remove(sequence)
        sequence.lane = self._ledger.admit(self._need(sequence))
        sequence.status = Status.RUNNING
        plan.new_lanes[sequence.lane] = sequence
        self.running.add(sequence)
        self._prefixes.enter(sequence, match, plan)
        self._prefixes.make_room(plan, 0)

    def _fits(self, sequence: Sequence) -> bool:
        """Whether there is room for it, and nothing to gain by waiting for somebody's prefix."""
        if self._ledger.lacks(self._need(sequence) - self._prefixes.most(sequence)):
            return False  # whoever it shared from; a full pool is asked for all who wait
        match = self._prefixes.find(sequence)
        donor = None if match.donor is None else match.donor.lane
        lacking = self._ledger.lacks(self._need(sequence), donor=donor, num_shared=match.num_shared)
        return lacking is None and not match.is_worth_waiting

    def _need(self, sequence: Sequence) -> int:
        """With nobody else running, whatever fits the pool is let in."""
        return min(sequence.need, self._capacity.num_cells)

    def _add_rows(self, plan: Plan, sequence: Sequence, num_rows: int) -> None:
        start = sequence.num_scheduled
        end = start + num_rows
        num_again = max(min(end, sequence.num_reached) - start, 0)
        samples = end == sequence.num_known
        plan.parts.append(
            Part(sequence, sequence.lane, start, end, samples=samples, num_again=num_again)
        )
        sequence.num_recomputed += num_again
        self._ledger.grow(sequence.lane, num_rows)
        sequence.num_scheduled = end
        sequence.num_in_flight += 1
        sequence.last_step = plan.step_id

    def _launch(self, plan: Plan) -> None:
        self._next = Plan(plan.step_id + 1)
        self.in_flight.append(plan)
        for part in plan.parts:
            if part.end in part.sequence.boundaries:
                self._prefixes.snapshot(part.sequence, self._next)

    # -- ends --------------------------------------------------------------------------------------

    def _take_token(self, part: Part, result: StepResult) -> None:
        sequence = part.sequence
        token = result.tokens.get(part.lane)
        if token is None:
            reason = result.failed.get(part.lane, "the last stage did not answer for it")
            self._finish(sequence, "error", error=reason)
            return
        sequence.outputs.append(token)
        logprobs = result.logprobs.get(part.lane)
        finish: FinishReason | None = None
        if token in sequence.request.stop_token_ids:
            finish = "stop"
        elif len(sequence.outputs) >= sequence.max_tokens:
            finish = "length"
        if finish is None:
            self._ended.append(sequence.event(token, logprobs=logprobs))
        else:
            self._finish(sequence, finish, token=token, logprobs=logprobs)

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        *,
        token: int | None = None,
        logprobs: TokenLogprobs | None = None,
        error: str | None = None,
    ) -> None:
        """The one way out: frees whatever ``sequence`` holds and says so once."""
        assert not sequence.num_in_flight, "its rows are still being computed"
        if sequence.status is Status.RUNNING:
            self._free(sequence, keeps=reason != "error")
        else:
            self.waiting.remove(sequence)
            self._prefixes.forget(sequence)
        sequence.status = Status.FINISHED
        del self._open[sequence.request.request_id]
        self._ended.append(sequence.event(token, reason, error, logprobs=logprobs))

    def _free(self, sequence: Sequence, *, keeps: bool = False) -> None:
        """Give back cells now, because the removal travels ahead of any row that takes them; the
        id only when every stage has confirmed. Or ``keeps`` what it has for later prompts."""
        self.running.remove(sequence)
        self._next.forget(sequence.lane)
        self._prefixes.leave(sequence, self._next, keeps=keeps)
