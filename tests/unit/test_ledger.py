"""Who holds what. Without these, cells leak until nothing fits, or two sequences own one."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skippy_mesh.errors import IdsExhaustedError
from skippy_mesh.scheduler.memory import Capacity, Cells, IdPool, Ledger


def ledger_of(lanes=8, attention=100, **components):
    return Ledger(Capacity(lanes=lanes, attention=attention, **components))


def test_a_257th_id_is_a_typed_error():
    ids = IdPool(256)
    assert [ids.take() for _ in range(256)] == list(range(256))
    with pytest.raises(IdsExhaustedError, match="all sequence ids are taken, 0 not yet back"):
        ids.take()


def test_an_id_is_free_only_when_its_return_is_confirmed():
    ids = IdPool(2)
    first, _ = ids.take(), ids.take()
    ids.retire(first)
    with pytest.raises(IdsExhaustedError, match="1 not yet back"):
        ids.take()
    with pytest.raises(AssertionError):
        ids.retire(first)
    ids.confirm(first)
    assert ids.take() == first


def test_a_promise_decays_as_cells_are_used():
    ledger = ledger_of()
    lane = ledger.admit(60)
    assert ledger.lacks(40) is None
    assert ledger.lacks(41) == "attention"
    ledger.grow(lane, 50)
    assert ledger.lacks(40) is None
    assert ledger.lacks(41) == "attention"
    ledger.grow(lane, 30)
    assert ledger.lacks(20) is None
    assert ledger.lacks(21) == "attention"
    assert (ledger.num_free_cells, ledger.held(lane), ledger.exclusive(lane)) == (20, 80, 80)
    ledger.release(lane)
    assert ledger.lacks(100) is None


@pytest.mark.parametrize(
    ("capacity", "component"),
    [
        (Capacity(lanes=8, attention=10, window=99), "attention"),
        (Capacity(lanes=8, attention=99, window=10), "window"),
        (Capacity(lanes=8, attention=99, recurrent=1), "recurrent"),
        (Capacity(lanes=1, attention=99), "lanes"),
    ],
)
def test_the_component_that_is_full_is_named(capacity, component):
    ledger = Ledger(capacity)
    lane = ledger.admit(8)
    assert ledger.lacks(8) == component
    ledger.release(lane)
    assert ledger.lacks(8) == ("lanes" if component == "lanes" else None)
    ledger.confirm(lane)
    assert ledger.lacks(8) is None


def test_shared_cells_are_counted_once_and_free_with_their_last_holder():
    ledger = ledger_of()
    donor = ledger.admit(20)
    ledger.grow(donor, 20)
    sharers = [ledger.admit(15) for _ in range(7)]
    for lane in sharers:
        ledger.share(donor, lane, 12)
        ledger.grow(lane, 3)
    assert ledger.num_free_cells == 100 - 20 - 7 * 3
    assert ledger.exclusive(donor) == 8
    assert [ledger.exclusive(lane) for lane in sharers] == [3] * 7
    ledger.release(donor)
    assert ledger.num_free_cells == 100 - 12 - 7 * 3
    for lane in sharers[:6]:
        ledger.release(lane)
    assert ledger.num_free_cells == 100 - 15
    assert ledger.exclusive(sharers[6]) == 15
    ledger.release(sharers[6])
    assert ledger.num_free_cells == 100


@pytest.mark.parametrize("lengths", [(5, 12), (12, 5), (20, 20), (7, 7)])
def test_sharers_of_different_lengths_split_the_same_run(lengths):
    cells = Cells(100)
    for lane in range(3):
        cells.promise(lane, 20)
    cells.grow(0, 20)
    cells.share(0, 1, lengths[0])
    cells.share(0, 2, lengths[1])
    assert cells.num_used == 20
    cells.grow(1, 4)
    holdings = cells.holdings
    assert (holdings.held(1), holdings.exclusive(1)) == (lengths[0] + 4, 4)
    assert holdings.exclusive(0) == 20 - max(lengths)
    cells.release(0)
    assert cells.num_used == max(lengths) + 4
    cells.release(1)
    cells.release(2)
    assert (cells.num_used, cells.num_promised) == (0, 0)


def test_the_states_of_each_component_add_up_to_what_there_is():
    ledger = ledger_of(window=80, recurrent=4)
    lanes = [ledger.admit(30), ledger.admit(20)]
    ledger.grow(lanes[0], 40)
    ledger.release(lanes[1])
    for name, size in {"attention": 100, "window": 80, "recurrent": 4}.items():
        assert sum(ledger.snapshot()[name].values()) == size
    assert ledger.snapshot()["attention"] == {
        "active": 40, "resident": 0, "reserved": 0, "free": 60
    }  # fmt: skip
    assert ledger.snapshot()["lanes"] == {"running": 1, "resident": 0, "free": 7}


class Owners:
    """A model of :class:`Cells` that knows each cell and who holds it."""

    def __init__(self):
        self.cells = Cells(200)
        self.lists: dict[int, list[int]] = {}
        self.promises: dict[int, int] = {}
        self.residents: set[int] = set()
        self.fresh = itertools.count()

    def move(self, move, lane, size):
        is_there = lane in self.lists
        if move == "admit" and not is_there:
            self.cells.promise(lane, size)
            self.lists[lane], self.promises[lane] = [], size
        elif move == "grow" and lane in self.lists.keys() - self.residents:
            if 0 < size <= self.cells.num_free:
                self.cells.grow(lane, size)
                self.lists[lane] += itertools.islice(self.fresh, size)
        elif move == "share" and is_there and not self.lists[lane]:
            self.share(lane, size)
        elif move == "keep" and is_there and lane not in self.residents:
            self.cells.keep(lane)
            self.residents.add(lane)
            self.promises[lane] = 0
        elif move == "release" and is_there:
            self.cells.release(lane)
            self.residents.discard(lane)
            del self.lists[lane], self.promises[lane]

    def share(self, lane, size):
        donor = next((other for other in self.lists if self.lists[other]), None)
        if donor is not None:
            size = min(size, len(self.lists[donor]))
            self.cells.share(donor, lane, size)
            self.lists[lane] = self.lists[donor][:size]

    def check(self):
        owners: dict[int, set[int]] = {}
        for lane, own in self.lists.items():
            for cell in own:
                owners.setdefault(cell, set()).add(lane)
        idle = {cell for cell, lanes in owners.items() if lanes <= self.residents}
        holdings = self.cells.holdings
        assert (holdings.num_used, holdings.num_idle) == (len(owners), len(idle))
        assert self.cells.num_promised == sum(
            max(promise - len(self.lists[lane]), 0) for lane, promise in self.promises.items()
        )
        for lane, own in self.lists.items():
            assert holdings.held(lane) == len(own)
            assert holdings.exclusive(lane) == sum(owners[cell] == {lane} for cell in own)
            for size in (0, 3, 100):
                assert holdings.idle(lane, size) == len(idle.intersection(own[:size]))
        pieces: dict[int, list[tuple[int, int]]] = {}
        for piece in holdings.pieces():
            for lane in piece.lanes:
                pieces.setdefault(lane, []).append((piece.start, piece.end))
        for lane, spans in pieces.items():
            assert [start for start, _ in spans] == [0, *(end for _, end in spans[:-1])]
            assert spans[-1][1] == len(self.lists[lane])
        assert sum(p.end - p.start for p in holdings.pieces()) == len(owners)


MOVES = st.sampled_from(["admit", "grow", "share", "keep", "release"])


@given(st.lists(st.tuples(MOVES, st.integers(0, 9), st.integers(0, 40))))
def test_whatever_happens_cells_are_counted_as_owned(moves):
    owners = Owners()
    for move in moves:
        owners.move(*move)
        owners.check()
