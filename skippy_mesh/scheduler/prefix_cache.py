"""Prefixes that are computed already: who has them, who may start from them, and who gives way.

One index finds both kinds of donors. A *running* sequence lends what every stage has computed of
it. A *resident* is a lane that nobody runs on any more: a finished sequence, or a snapshot. Sharing
is a :class:`Copy` operation, which shares cells and moves nothing. Operations reach every stage in
one order, so a donor may be evicted in the very step that shares from it: the copy goes ahead.

Attention memory (MLA's too) lends any beginning of a donor. So does window memory here, because
windows are kept whole (stages/context.py); llama.cpp's own sharing of window cells waits for
``TAG_KV_CACHE_SHARE_CELLS``. Recurrent memory is one state, that of its last position: there a
resident is a snapshot, taken where a later prompt is likely to branch off, and lent whole or not at
all. Boundaries are multiples of what a chunk is a multiple of, or the rows behind one would be
computed in other company than without it.

The least recently used residents go first, and only as many as are in the way.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from skippy_mesh.config import StepRules
from skippy_mesh.messages import Copy, Remove
from skippy_mesh.scheduler.memory import Ledger
from skippy_mesh.scheduler.plan import Plan
from skippy_mesh.scheduler.prefix_tree import PrefixTree, Tokens
from skippy_mesh.scheduler.sequence import Sequence

MIN_SHARED = 16
"""Fewer tokens in common, a template's opening, are computed sooner than they are looked up."""
MIN_AWAITED = 64
"""So many more tokens that a running sequence is about to have are worth waiting for."""
_MIN_CUT = 64
"""Cells to take from a resident at once, or a decode would take one at each step."""


@dataclass(slots=True, eq=False)
class Donor:
    """A lane and the tokens it begins with, of which every stage has computed ``num_ready``."""

    lane: int
    namespace: str
    tokens: Tokens
    num_ready: int = 0
    is_resident: bool = False
    is_planned: bool = False
    last_used: int = 0


Walk = list[tuple[int, dict[Donor, None]]]
"""Ever more tokens, and the donors that begin with them."""


@dataclass(frozen=True, slots=True)
class Match:
    """What a sequence could start from: ``num_shared`` tokens of ``donor``, or none, and why.

    ``num_awaited`` are the tokens it could start from if it waited for one that runs.
    """

    donor: Donor | None = None
    num_shared: int = 0
    num_awaited: int = 0
    miss: str = ""

    @property
    def is_worth_waiting(self) -> bool:
        return self.num_awaited - self.num_shared >= MIN_AWAITED


@dataclass(slots=True)
class PrefixCounts:
    """What happened since the last step that was told of."""

    num_hits: int = 0
    num_hit_tokens: int = 0
    num_queried_tokens: int = 0
    misses: Counter[str] = field(default_factory=Counter)
    evictions: Counter[str] = field(default_factory=Counter)


class PrefixCache:
    """All donors of one epoch. Only this module copies. It adds to ``counts``."""

    def __init__(self, ledger: Ledger, rules: StepRules, counts: PrefixCounts):
        self._ledger = ledger
        self._rule = rules.prefix_rule
        self._multiple = rules.chunk_multiple
        self._replays_in_chunks = rules.replays_in_chunks
        self.counts = counts
        self._trees: dict[str, PrefixTree[Donor]] = {}
        self._running: dict[int, Donor] = {}
        self._planned: dict[int, list[Donor]] = {}
        self._residents: dict[int, Donor] = {}
        self._walks: dict[Sequence, Walk] = {}
        self._clock = 0

    # -- who may start from what -------------------------------------------------------------------

    def find(self, sequence: Sequence) -> Match:
        """The longest usable prefix; the last token is always left to compute. Changes nothing."""
        if not self._takes_part(sequence):
            return Match(miss="off")
        limit = self._limit(sequence)
        best, num_shared, num_awaited, num_common = None, 0, 0, 0
        for num_seen, donors in reversed(self._walk(sequence)):
            num_seen = min(num_seen, limit)
            num_common = max(num_common, num_seen)
            if num_seen <= num_shared:
                break
            for donor in donors:
                if num_shared == num_seen:
                    break  # nobody has more of it
                num_usable = self._usable(donor, num_seen, donor.num_ready)
                if num_usable > num_shared:
                    best, num_shared = donor, num_usable
                num_awaited = max(num_awaited, self._usable(donor, num_seen, len(donor.tokens)))
        if num_shared >= MIN_SHARED:
            return Match(best, num_shared, num_awaited)
        return Match(None, 0, num_awaited, "cold" if num_common < MIN_SHARED else "boundary")

    def most(self, sequence: Sequence) -> int:
        """No match of ``sequence`` has more tokens; found without a look at the donors."""
        walk = self._walk(sequence) if self._takes_part(sequence) else ()
        return min(walk[-1][0], self._limit(sequence)) if walk else 0

    def _limit(self, sequence: Sequence) -> int:
        """Another's prompt was computed in chunks, which may not be how its outputs were."""
        if self._replays_in_chunks:
            return sequence.num_known - 1
        return min(sequence.num_known - 1, sequence.num_prompt)

    def _usable(self, donor: Donor, num_common: int, num_ready: int) -> int:
        if self._rule == "any":
            return min(num_ready, num_common)
        return num_ready if num_ready == len(donor.tokens) <= num_common else 0

    def _walk(self, sequence: Sequence) -> Walk:
        """What the index says of its tokens, kept while it waits and the index does not change."""
        if sequence not in self._walks:
            tokens = sequence.tokens(0, sequence.num_known)
            self._walks[sequence] = self._look_up(sequence.request.namespace, tokens)
        return self._walks[sequence]

    def _look_up(self, namespace: str, tokens: Tokens) -> Walk:
        tree = self._trees.get(namespace)
        return list(tree.walk(tokens)) if tree else []

    def _takes_part(self, sequence: Sequence) -> bool:
        """A sequence on trial must not depend on others."""
        return self._rule != "none" and sequence.request.shares_prefix and not sequence.trial_end

    def forget(self, sequence: Sequence) -> None:
        """It does not wait any more, so nobody asks what it could start from."""
        self._walks.pop(sequence, None)

    # -- a sequence comes, gets on, and goes -------------------------------------------------------

    def enter(self, sequence: Sequence, match: Match, plan: Plan) -> None:
        """``sequence`` has a lane now: it starts from ``match``, and others may start from it."""
        self.forget(sequence)
        if match.donor is not None:
            self._touch(match.donor)
            self._copy(match.donor.lane, sequence.lane, match.num_shared, plan)
            sequence.num_scheduled = sequence.num_computed = match.num_shared
        self._count(sequence, match)
        if not self._takes_part(sequence):
            return
        if self._rule == "any":
            tokens = sequence.tokens(0, sequence.num_known)
            donor = Donor(sequence.lane, sequence.request.namespace, tokens, match.num_shared)
            self._running[sequence.lane] = donor
            self._list(donor)
        else:
            self._plan_snapshots(sequence, plan)

    def computed(self, sequence: Sequence) -> None:
        """Every stage has computed ``sequence.num_computed`` positions."""
        donor = self._running.get(sequence.lane)
        if donor is not None:
            donor.num_ready = min(sequence.num_computed, len(donor.tokens))

    def leave(self, sequence: Sequence, plan: Plan, *, keeps: bool) -> None:
        """``sequence`` is done with its lane: if it ``keeps`` and is worth it, a resident now."""
        lane = sequence.lane
        donor = self._running.pop(lane, None)
        if donor is not None:
            self._unlist(donor)
        for planned in self._planned.pop(lane, ()):
            self._drop(planned, plan)
        if not (keeps and self._settle(sequence, plan)):
            self._ledger.release(lane)
            plan.remove(lane)
        while (num_cells := self._ledger.num_excess) or self._ledger.has_too_many_residents:
            if not self._evict(plan, "cap", num_cells):
                break

    def _settle(self, sequence: Sequence, plan: Plan) -> bool:
        """Make a resident of what ``sequence`` has computed, unless another has it all."""
        if self._rule != "any" or not self._takes_part(sequence):
            return False
        tokens = sequence.tokens(0, sequence.num_computed)
        if len(tokens) < MIN_SHARED or not self._ledger.capacity.residents:
            return False
        namespace = sequence.request.namespace
        for num_common, donors in self._look_up(namespace, tokens):
            for donor in [donor for donor in donors if donor.is_resident]:
                if num_common == len(tokens):
                    self._touch(donor)
                    return False
                if len(donor.tokens) <= num_common:
                    self._drop(donor, plan)  # its cells live on in this one
        self._ledger.keep(sequence.lane)
        self._add_resident(Donor(sequence.lane, namespace, tokens, len(tokens), is_resident=True))
        return True

    # -- snapshots of recurrent memory -------------------------------------------------------------

    def _plan_snapshots(self, sequence: Sequence, plan: Plan) -> None:
        """Set aside ids for the states at the end of the chat's history and of the prompt. Where
        the two are close together the first serves both: later turns have it in common."""
        prompt = sequence.request.token_ids
        ends = [
            end - end % self._multiple for end in (sequence.request.history_end, len(prompt) - 1)
        ]
        at = sequence.num_scheduled
        lacks_id = False
        for end in ends:
            if end - at < MIN_SHARED or self._has_snapshot(sequence, prompt[:end]):
                continue
            lane = self._ledger.reserve_resident()
            if lane is None:
                lacks_id = True
                break
            planned = Donor(
                lane, sequence.request.namespace, prompt[:end], is_resident=True, is_planned=True
            )
            self._add_resident(planned)
            self._planned.setdefault(sequence.lane, []).append(planned)
            sequence.boundaries.append(end)
            at = end
        # An id comes back a step after it was given up: have one ready for the next. Where there is
        # one only, whoever starts from the snapshot on it leaves it to others.
        num_ids = self._ledger.capacity.residents
        while self._ledger.num_residents >= num_ids and (lacks_id or num_ids > 1):
            if not self._evict(plan, "cap", 0):
                break

    def _has_snapshot(self, sequence: Sequence, tokens: Tokens) -> bool:
        for num_common, donors in self._look_up(sequence.request.namespace, tokens):
            for donor in donors:
                if num_common == len(donor.tokens) == len(tokens):
                    self._touch(donor)
                    return True
        return False

    def snapshot(self, sequence: Sequence, plan: Plan) -> None:
        """The rows up to the next boundary of ``sequence`` are in the step before ``plan``."""
        sequence.boundaries.pop(0)
        planned = self._planned[sequence.lane].pop(0)
        planned.is_planned = False
        self._copy(sequence.lane, planned.lane, len(planned.tokens), plan)
        plan.snapshots.append(planned)

    # -- giving way --------------------------------------------------------------------------------

    def make_room(self, plan: Plan, num_rows: int) -> None:
        """Evict until there are cells for ``num_rows`` and all that was promised, or nothing is
        left to evict."""
        while (num_cells := self._ledger.shortage(num_rows)) or self._ledger.lacks_states:
            if not self._evict(plan, "deficit", num_cells):
                return

    def _evict(self, plan: Plan, reason: str, num_cells: int) -> bool:
        """Take ``num_cells`` from the end of the resident that was used least recently, or drop it;
        one whose cells are free then before one whose cells others hold. False if there is none."""
        victims = [donor for donor in self._residents.values() if not donor.is_planned]
        if not victims:
            return False
        victim = min(
            victims, key=lambda donor: (not self._ledger.exclusive(donor.lane), donor.last_used)
        )
        num_cut = max(num_cells, _MIN_CUT)
        num_own = self._ledger.exclusive(victim.lane)
        if num_cells and self._rule == "any" and num_cut + MIN_SHARED <= num_own:
            self._cut(victim, len(victim.tokens) - num_cut, plan)
        else:
            self._drop(victim, plan)
        self.counts.evictions[reason] += 1
        return True

    def _cut(self, resident: Donor, end: int, plan: Plan) -> None:
        self._unlist(resident)
        self._ledger.cut(resident.lane, end)
        plan.operations.append(Remove(resident.lane, end))
        resident.tokens, resident.num_ready = resident.tokens[:end], end
        self._list(resident)

    def _drop(self, resident: Donor, plan: Plan) -> None:
        self._unlist(resident)
        del self._residents[resident.lane]
        self._ledger.release(resident.lane, is_resident=True)
        plan.remove(resident.lane)

    # -- the index ---------------------------------------------------------------------------------

    def resident_ends(self) -> dict[int, int]:
        """How many positions each resident holds on every stage."""
        return {
            donor.lane: donor.num_ready for donor in self._residents.values() if donor.num_ready
        }

    def _add_resident(self, donor: Donor) -> None:
        self._residents[donor.lane] = donor
        self._touch(donor)
        self._list(donor)

    def _list(self, donor: Donor) -> None:
        self._trees.setdefault(donor.namespace, PrefixTree()).add(donor.tokens, donor)
        self._walks.clear()

    def _unlist(self, donor: Donor) -> None:
        tree = self._trees[donor.namespace]
        tree.remove(donor.tokens, donor)
        if tree.is_empty:
            del self._trees[donor.namespace]
        self._walks.clear()

    def _touch(self, donor: Donor) -> None:
        self._clock += 1
        donor.last_used = self._clock

    def _copy(self, donor: int, lane: int, num_tokens: int, plan: Plan) -> None:
        self._ledger.share(donor, lane, num_tokens)
        plan.operations.append(Copy(donor, lane, 0, num_tokens))

    def _count(self, sequence: Sequence, match: Match) -> None:
        self.counts.num_queried_tokens += sequence.num_known
        if match.donor is None:
            self.counts.misses[match.miss] += 1
        else:
            self.counts.num_hits += 1
            self.counts.num_hit_tokens += match.num_shared
