"""A scheduler on a fake pipeline, driven by hand: what is scheduled, and when it is answered.

Every move is followed by :meth:`Run.check`, so each test of a rule is one of the invariants, too.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Sequence as Items
from typing import Any

from skippy_mesh.config import StepRules
from skippy_mesh.errors import StageError
from skippy_mesh.messages import Request, StepBatch, TokenEvent
from skippy_mesh.scheduler.memory import Capacity
from skippy_mesh.scheduler.pacing import PrefillPacer, RunLimit
from skippy_mesh.scheduler.plan import Plan
from skippy_mesh.scheduler.policies import Policies
from skippy_mesh.scheduler.scheduler import Scheduler
from skippy_mesh.scheduler.sequence import Sequence, Status
from stages.fake import FakePending, FakePipeline, babble

PROMPTS = [(7 * at) % 200 + 1 for at in range(5000)]


def request(request_id: str, num_prompt: int = 5, max_tokens: int = 8, **fields: Any) -> Request:
    """A prompt of its own for each ``request_id``."""
    first = sum(request_id.encode()) % 251
    ids = (first, *PROMPTS[1:num_prompt])
    return Request(request_id=request_id, token_ids=ids, max_tokens=max_tokens, **fields)


def answer_alone(asked: Request, count: int) -> list[int]:
    """What the fake model says to ``asked`` with nobody else there."""
    history = list(asked.token_ids)
    for _ in range(count):
        history.append(babble(history, asked.sampling))
    return history[len(asked.token_ids) :]


def scheduler_of(
    *,
    cells: int = 64,
    lanes: int = 32,
    window: int | None = None,
    recurrent: int | None = None,
    residents: int = 0,
    max_rows: int = 16,
    in_flight: int = 1,
    limit: int | None = None,
    prefill_rows: int | None = None,
    max_model_len: int = 10**6,
    rules: dict[str, Any] | None = None,
    **policies: str,
) -> Scheduler:
    capacity = Capacity(
        lanes=lanes, residents=residents, attention=cells, window=window, recurrent=recurrent
    )
    return Scheduler(
        capacity=capacity,
        rules=StepRules(max_rows=max_rows, **(rules or {})),
        max_model_len=max_model_len,
        max_in_flight=in_flight,
        policies=Policies(**policies),
        pacer=PrefillPacer(pinned=prefill_rows),
        run_limit=RunLimit(lanes, pinned=limit or lanes),
    )


class Run:
    """``scheduler`` and ``pipeline``, what they said of each request and the plans between them."""

    def __init__(self, *, pipeline: FakePipeline | None = None, num_stages: int = 1, **knobs: Any):
        self.scheduler = scheduler_of(**knobs)
        capacities = [self.scheduler._capacity] * num_stages
        self.pipeline = pipeline or FakePipeline(capacities=capacities)
        self.pending: deque[FakePending] = deque()
        self.asked: dict[str, Request] = {}
        self.tokens: defaultdict[str, list[int]] = defaultdict(list)
        self.ends: dict[str, TokenEvent] = {}
        self.batches: list[StepBatch] = []
        self.plans: list[Plan] = []
        self.admitted: list[str] = []

    def ask(self, *requests: Request) -> None:
        for asked in requests:
            self.scheduler.add(asked)
            self.asked[asked.request_id] = asked
        self.check()

    def abort(self, request_id: str) -> bool:
        was_open = self.scheduler.abort(request_id)
        self._take_events()
        return was_open

    def send(self) -> Plan | None:
        """Schedule one batch and submit it; its plan."""
        before = self.names()
        batch = self.scheduler.schedule()
        self.admitted += sorted(self.names() - before, key=self._turn)
        self._take_events()
        if batch is None:
            return None
        plan = self.scheduler.in_flight[-1]
        self.pending.append(self.pipeline.submit(batch))
        self.batches.append(batch)
        self.plans.append(plan)
        return plan

    def answer(self) -> None:
        """Take the oldest answer, or start over if there is none."""
        try:
            self.scheduler.commit(self.pending.popleft().result())
        except StageError as error:
            self.pending.clear()
            self.scheduler.recover(str(error))
        self._take_events()

    def step(self) -> list[Plan]:
        """As the engine does it: fill the pipeline, take one answer."""
        sent = []
        while (plan := self.send()) is not None:
            sent.append(plan)
        if self.pending:
            self.answer()
        return sent

    def finish(self, max_steps: int = 20_000) -> None:
        """Step until nothing is left, then look at what is left behind."""
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.has_work, f"not done after {max_steps} steps"
        self.pipeline.lane_ends()
        for stage in self.pipeline._stages:
            # After a failure a stage is emptied by the first step of the new epoch.
            held = {lane: len(tokens) for lane, tokens in stage.histories.items()}
            kept = self.scheduler._prefixes.resident_ends()
            assert held == kept or stage._epoch < self.scheduler.epoch, "lanes left behind"
        assert self.ends.keys() == self.asked.keys()

    def names(self) -> set[str]:
        return {sequence.request.request_id for sequence in self.scheduler.running}

    def sequence(self, request_id: str) -> Sequence:
        return self.scheduler._open[request_id]

    def reasons(self) -> dict[str, str | None]:
        return {name: event.finish_reason for name, event in self.ends.items()}

    def assert_answers(self) -> None:
        """Whatever a request got is the beginning of its answer alone, and all if it ended well."""
        for name, asked in self.asked.items():
            got = self.tokens[name]
            assert got == answer_alone(asked, len(got)), name
            if name in self.ends and self.ends[name].finish_reason == "length":
                room = self.scheduler.max_model_len - len(asked.token_ids)
                assert len(got) == min(asked.max_tokens, room), name

    def check(self) -> None:
        """Nobody is in two places, and the ledger agrees with the sequences."""
        scheduler, ledger = self.scheduler, self.scheduler._ledger
        waiting, running = list(scheduler.waiting), list(scheduler.running)
        assert Counter(waiting + running) == Counter(scheduler._open.values())
        assert all(s.status in (Status.WAITING, Status.PREEMPTED) for s in waiting)
        assert all(s.status is Status.RUNNING for s in running)
        assert scheduler.waiting.num_tokens == sum(s.num_known for s in waiting)
        ids = ledger._ids
        residents = scheduler._prefixes._residents
        lanes = [s.lane for s in running] + ids._free + list(ids._retired) + list(residents)
        num_ids = ledger.capacity.lanes + ledger.capacity.residents
        assert sorted(lanes) == list(range(num_ids)), "an id is lost or twice there"
        assert ids._retired == {
            lane for plan in (scheduler._next, *scheduler.in_flight) for lane in plan.removed
        }
        held = {s.lane: s.num_scheduled for s in running if s.num_scheduled}
        held |= {d.lane: len(d.tokens) for d in residents.values() if not d.is_planned}
        for pool in ledger._pools.values():
            assert held == pool.holdings._ends
            assert pool.num_used <= pool.size
            assert pool.num_promised == sum(
                max(pool._promises[s.lane] - s.num_scheduled, 0) for s in running
            )
        assert ledger.num_residents == len(residents) <= ledger.capacity.residents
        self._check_flight(running)

    def _check_flight(self, running: Items[Sequence]) -> None:
        parts = [part for plan in self.scheduler.in_flight for part in plan.parts]
        counts = Counter(part.sequence for part in parts)
        assert all(s.num_in_flight == counts[s] for s in (*running, *counts))
        for sequence in counts:
            own = [part for part in parts if part.sequence is sequence]
            assert own[0].start == sequence.num_computed
            assert all(a.end == b.start for a, b in itertools.pairwise(own))
            assert sum(part.samples for part in own) <= 1, "a decode before its token is known"
            assert not any(part.samples for part in own[:-1])

    def _turn(self, name: str) -> int:
        return self.sequence(name).turn

    def _take_events(self) -> None:
        for event in self.scheduler.take_events():
            name = event.request_id
            assert name not in self.ends, f"{name} has ended already"
            if event.token_id is not None:
                self.tokens[name].append(event.token_id)
            if event.finish_reason is not None:
                self.ends[name] = event
        self.check()
