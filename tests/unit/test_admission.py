"""Who gets in. Without these the queue grows without end, or a place nobody holds stays taken."""

from __future__ import annotations

import asyncio
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.admission import Admission
from coordinator.coordinator import Coordinator, DirectDoorkeeper
from coordinator.remote import RemoteDoorkeeper
from skippy_mesh.errors import CoordinatorLostError, UsageError
from skippy_mesh.gateway.places import PlaceRefusedError, Places
from skippy_mesh.places import AdmissionLimits, Answer, News


def limits(ceiling=2, max_queue=2, max_queue_tokens=100, **more):
    return AdmissionLimits(
        ceiling=ceiling, max_queue=max_queue, max_queue_tokens=max_queue_tokens, **more
    )


MOVES = st.lists(
    st.tuples(
        st.sampled_from(["take", "take", "count", "start", "end"]),
        st.integers(0, 7),
        st.integers(1, 60),
        st.floats(0, 50),
    ),
    min_size=10,
    max_size=60,
)


@given(st.integers(1, 3), st.integers(0, 2), st.integers(0, 100), MOVES)
def test_the_bounds_hold_and_every_place_comes_back_once(ceiling, max_queue, max_tokens, moves):
    admission = Admission(limits(ceiling, max_queue, max_tokens))
    held, counted, waiting, now_s = set(), {}, set(), 0.0
    for move, key, num_tokens, pause_s in moves:
        now_s += pause_s
        refusal = None
        if move == "take" and key not in held:
            refusal = admission.take(key, now_s)
            if refusal is None:
                held.add(key)
                waiting.add(key)
            else:
                assert len(held) == ceiling + max_queue
                assert refusal.code == "queue_full"
        elif move == "count" and key in waiting and key not in counted:
            others = sum(counted[each] for each in waiting if each in counted)
            refusal = admission.count(key, num_tokens, now_s)
            if refusal is None:
                counted[key] = num_tokens
            else:
                assert refusal.code == "queue_tokens_full"
                assert others and others + num_tokens > max_tokens
        elif move == "start":
            admission.start(key, now_s)
            waiting.discard(key)
        elif move == "end":
            admission.end(key, now_s)
            held.discard(key)
            waiting.discard(key)
            counted.pop(key, None)
        tokens = [counted[key] for key in waiting if key in counted]
        assert admission.num_open == len(held) <= ceiling + max_queue
        assert admission.num_waiting == len(waiting)
        assert admission.waiting_tokens == sum(tokens)
        assert sum(tokens) <= max_tokens or len(tokens) == 1
        if refusal is not None:
            assert isinstance(refusal.retry_after_s, int) and 1 <= refusal.retry_after_s <= 60
    for key in held:
        admission.end(key, now_s)
    assert (admission.num_open, admission.num_waiting, admission.waiting_tokens) == (0, 0, 0)


def full(admission, now_s, *, size=4):
    for key in range(size):
        assert admission.take(key, now_s) is None
        assert admission.count(key, 1, now_s) is None
        if key < 2:
            admission.start(key, now_s)
    return admission.take("more", now_s)


def test_when_to_come_back_is_what_the_queue_takes_at_the_rate_seen():
    admission = Admission(limits())
    assert full(admission, 0.0).retry_after_s == 1, "nobody has ended yet, nor been here long"
    assert admission.take("more", 7.0).retry_after_s == 7, "one takes as long as the oldest has"
    for key, ended_s in ((0, 10.0), (1, 12.0)):
        admission.end(key, ended_s)
    for key in (2, 3):
        admission.start(key, 12.0)
        admission.end(key, 12.0)
    refusal = full(admission, 1000.0)  # idle time is no work
    assert refusal.retry_after_s == math.ceil(2 * 12 / 4)
    assert refusal.message.endswith("try again in 6 s")
    assert "2 requests may run and 2 may wait, and 4 do" in refusal.message


def test_who_was_refused_or_gave_up_says_nothing_of_the_rate():
    admission = Admission(limits())
    full(admission, 0.0)
    for key in (2, 3):
        admission.end(key, 0.01)
    full(admission, 30.0, size=0)
    for key in (2, 3):
        admission.take(key, 30.0)
    assert admission.take("more", 30.0).retry_after_s == 30


def test_who_would_wait_too_long_is_refused_at_once():
    admission = Admission(limits(queue_timeout_s=5.0))
    admission.take(0, 0.0)
    admission.start(0, 0.0)
    admission.end(0, 4.0)
    for key in (1, 2):
        assert admission.take(key, 10.0) is None, "it runs at once"
    assert admission.take(3, 10.0) is None, "4 s"
    refusal = admission.take(4, 10.0)
    assert (refusal.code, refusal.message[:21]) == ("queue_timeout", "it would wait 8 s, an")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_queue": -1}, "--max-queue must be 0 or more, got -1"),
        ({"max_queue_tokens": -5}, "--max-queue-tokens must be 0 or more, got -5"),
        ({"queue_timeout_s": math.nan}, "--queue-timeout-s must be 0 or more, got nan"),
        ({"ceiling": 0}, "ceiling"),
    ],
)
def test_impossible_limits_are_refused(changes, said):
    with pytest.raises(UsageError, match=said):
        limits(**changes)


class Line(DirectDoorkeeper):
    """The way to a coordinator that can be killed, and counts what it is asked."""

    def __init__(self, bounds):
        self.bounds, self.asked, self.term = bounds, [], 0
        self.restart()

    def restart(self):
        self.term += 1000
        self.coordinator = Coordinator(self.bounds, first_term=lambda: self.term)
        super().__init__(self.coordinator)

    def kill(self):
        self._coordinator = None

    async def register(self, *args):
        return self._heard("register") or await super().register(*args)

    async def take(self, *args):
        return self._heard("take") or await super().take(*args)

    async def count(self, *args):
        return self._heard("count") or await super().count(*args)

    async def note(self, *args, **kwargs):
        return self._heard("note") or await super().note(*args, **kwargs)

    def _heard(self, name):
        self.asked.append(name)
        if self._coordinator is None:
            raise CoordinatorLostError("killed")


async def turns():
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_request_asks_twice_and_tells_together():
    async def visit():
        line = Line(limits(8, 8))
        places = Places(line, tell_after_s=0)
        open_places = [await places.take() for _ in range(4)]
        for place in open_places:
            await place.count(3)
        for place in open_places:
            place.start()
            place.start()
        await turns()
        for place in open_places:
            place.end()
            place.end()
        await turns()
        # The first was alone in the queue, and its tokens came with the next question.
        assert line.asked == ["register"] + ["take"] * 4 + ["count"] * 3 + ["note"] * 2
        assert (places.num_open, line.coordinator.num_open()) == (0, 0)

    asyncio.run(visit())


def test_who_is_alone_in_the_queue_may_be_any_size_without_asking_and_counts_for_the_next():
    async def visit():
        line = Line(limits(8, 8, 100))
        places = Places(line)
        alone, next_one = [await places.take() for _ in range(2)]
        await alone.count(1000)
        assert line.asked == ["register", "take", "take"]
        with pytest.raises(PlaceRefusedError, match="1000 prompt tokens wait and 100 may"):
            await next_one.count(1)  # the news came along
        alone.start()
        await next_one.count(100)

    asyncio.run(visit())


def test_a_place_given_back_can_be_taken_at_once():
    async def visit():
        places = Places(Line(limits(1, 0)), tell_after_s=0)
        for _ in range(3):
            place = await places.take()
            place.end()
        await places.take()

    asyncio.run(visit())


def test_a_restarted_coordinator_is_told_who_is_in_and_keeps_its_bounds():
    async def visit():
        line = Line(limits(2, 2))
        places = Places(line, tell_after_s=0)
        inside = [await places.take() for _ in range(3)]
        line.kill()
        with pytest.raises(CoordinatorLostError):
            await places.take()
        inside.pop().end()  # nobody hears it
        await turns()
        line.restart()
        asked = await asyncio.gather(*(places.take() for _ in range(9)), return_exceptions=True)
        refused = [each for each in asked if isinstance(each, PlaceRefusedError)]
        assert len(refused) == 7
        assert line.coordinator.num_open() == places.num_open == 4
        assert line.asked.count("register") == 2
        for place in (*inside, *(each for each in asked if each not in refused)):
            place.end()
        await turns()
        assert line.coordinator.num_open() == 0

    asyncio.run(visit())


def test_a_coordinator_restarted_between_two_questions_costs_nobody_an_answer():
    async def visit():
        line = Line(limits(2, 2))
        places = Places(line, tell_after_s=0)
        alone, other = [await places.take() for _ in range(2)]
        line.restart()
        await other.count(7)
        assert line.coordinator.num_open() == 2
        for place in (alone, other):
            place.end()
        await turns()
        assert line.coordinator.num_open() == 0

    asyncio.run(visit())


def test_what_is_told_while_the_book_is_handed_in_is_not_forgotten():
    async def visit():
        line = Line(limits(2, 0))
        places = Places(line, tell_after_s=0)
        leaver, other = [await places.take() for _ in range(2)]
        line.restart()
        told = line.register

        async def slow(*args):
            answer = await told(*args)
            leaver.end()
            await turns()
            return answer

        line.register = slow
        await other.count(1)
        await turns()
        assert line.coordinator.num_open() == 1

    asyncio.run(visit())


def test_a_gateway_that_was_restarted_takes_the_place_of_the_old_one():
    async def visit():
        line = Line(limits(2, 0))
        old = Places(line, tell_after_s=0)
        for _ in range(2):
            await old.take()
        other = Places(line, tell_after_s=0, gateway="gateway_1")
        with pytest.raises(PlaceRefusedError):
            await other.take()
        new = Places(line, tell_after_s=0)
        await new.take()
        await other.take()
        assert line.coordinator.num_open() == 2
        assert await line.take("gateway_0", 1, 99, News()) == Answer(new._term), "of an old term"

    asyncio.run(visit())


def test_a_mesh_that_runs_fewer_now_lets_in_fewer_and_a_restarted_coordinator_hears_of_it():
    async def visit():
        line = Line(limits(4, 1))
        places = Places(line, tell_after_s=0)
        for _ in range(4):
            await places.take()
        places.ceiling = 2
        for _ in range(2):
            with pytest.raises(PlaceRefusedError, match="2 requests may run and 1 may wait, and 4"):
                await places.take()
            line.restart()
        places.ceiling = 9
        await places.take()
        with pytest.raises(PlaceRefusedError, match="4 requests may run and 1 may wait, and 5"):
            await places.take()

    asyncio.run(visit())


def test_a_gateway_that_knows_of_no_other_ceiling_goes_by_the_plan():
    """It was started again, and meanwhile the mesh has its memory back."""
    coordinator = Coordinator(limits(4, 1))
    for ceiling, said in ((2, "ceiling 2"), (None, "ceiling 4"), (9, "ceiling 4")):
        coordinator.register("gateway_0", (), ceiling)
        assert said in repr(coordinator)


def test_a_ceiling_that_falls_while_the_book_is_handed_in_holds_at_the_next_question():
    async def visit():
        line = Line(limits(4, 0))
        places = Places(line, tell_after_s=0)
        told = line.register

        async def slow(*args):
            answer = await told(*args)
            if places.ceiling is None:
                places.ceiling = 1
            return answer

        line.register = slow
        await places.take()
        with pytest.raises(PlaceRefusedError, match="1 requests may run"):
            await places.take()
        assert line.coordinator.num_open() == 1

    asyncio.run(visit())


def test_who_leaves_while_asking_leaves_nothing_behind():
    async def visit():
        line = Line(limits(2, 0))
        places = Places(line, tell_after_s=0)
        await (await places.take()).count(1)
        taken = line.take

        async def slow(*args):
            answer = await taken(*args)
            await asyncio.sleep(30)
            return answer

        line.take = slow
        task = asyncio.create_task(places.take())
        await turns()
        assert line.coordinator.num_open() == 2
        task.cancel()
        await turns()
        assert line.coordinator.num_open() == 1

    asyncio.run(visit())


def test_a_silent_coordinator_makes_nobody_wait_for_the_others():
    """One after another, a thousand requests would wait for it for an hour."""

    async def visit():
        line = Line(limits(2, 2))
        places = Places(line, tell_after_s=0)
        tries = []

        async def silent(*_args):
            tries.append(1)
            await turns()
            raise CoordinatorLostError("silent")

        line.register = silent
        asked = await asyncio.gather(*(places.take() for _ in range(20)), return_exceptions=True)
        assert [type(each) for each in asked] == [CoordinatorLostError] * 20
        assert len(tries) == 1
        del line.register
        await places.take()
        assert line.coordinator.num_open() == places.num_open == 1

    asyncio.run(visit())


class Slow:
    """An actor that answers one question after the other."""

    def __init__(self, each_s):
        self.note = self
        self._each_s, self._free_s = each_s, 0.0

    def remote(self, *_args):
        loop = asyncio.get_running_loop()
        self._free_s = max(self._free_s, loop.time()) + self._each_s
        answer = loop.create_future()
        loop.call_at(self._free_s, lambda: answer.cancelled() or answer.set_result(Answer(1)))
        return answer


def test_a_coordinator_that_a_crowd_asks_at_once_is_not_lost():
    async def visit():
        line = RemoteDoorkeeper(Slow(0.05), answers_within_s=0.5)
        asked = [line.note("gateway_0", 1, News()) for _ in range(20)]
        assert await asyncio.gather(*asked) == [Answer(1)] * 20
        with pytest.raises(CoordinatorLostError):
            await RemoteDoorkeeper(Slow(60), answers_within_s=0.05).note("gateway_0", 1, News())

    asyncio.run(visit())
