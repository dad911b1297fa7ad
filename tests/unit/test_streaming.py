"""Events to text: nothing may be lost, repeated, or shown too early, wherever tokens are cut."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from skippy_mesh.gateway.errors import ApiError, timed_out
from skippy_mesh.gateway.replies import Delta
from skippy_mesh.gateway.streaming import Answer, joined
from skippy_mesh.gateway.text import Choice, StopMatcher, TextRules
from skippy_mesh.gateway.token_stream import Limits, TokenStream
from skippy_mesh.messages import FinishReason, TokenEvent
from stages.fake import EOS, FakeTokenizer

# A tiny alphabet makes overlaps and near misses common.
stop_lists = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)
pieces_lists = st.lists(st.text("abc", max_size=4), max_size=8)


def event(token: int | None, reason: FinishReason | None = None) -> TokenEvent:
    return TokenEvent(request_id="r", token_id=token, finish_reason=reason)


def deltas_of(choice: Choice, events: Sequence[TokenEvent]) -> list[Delta]:
    return [delta for each in events if (delta := choice.push(each)) is not None]


def first_match(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """The rule in words: the earliest place wins, there the longest stop string."""
    for place in range(len(text)):
        for stop in sorted(stops, key=len, reverse=True):
            if text.startswith(stop, place):
                return place, stop
    return None


@given(stop_lists, pieces_lists)
@example(["ab", "abc"], ["a", "bc"])
@example(["aab"], ["aa", "ab"])
def test_stop_strings_are_cut_exactly_and_nothing_is_held_too_long(
    stops: list[str], pieces: list[str]
) -> None:
    matcher = StopMatcher(stops)
    seen = shown = ""
    for piece in pieces:
        seen += piece
        shown += matcher.feed(piece)
        match = first_match(seen, stops)
        if match is not None:
            assert (shown, matcher.matched) == (seen[: match[0]], match[1])
            return
        assert matcher.matched is None
        held = max(
            size
            for size in range(len(seen) + 1)
            if any(stop.startswith(seen[len(seen) - size :]) and size < len(stop) for stop in stops)
        )
        assert shown == seen[: len(seen) - held]
    assert shown + matcher.flush() == seen


@given(stop_lists, pieces_lists)
def test_a_kept_stop_string_ends_the_text(stops: list[str], pieces: list[str]) -> None:
    matcher = StopMatcher(stops, keeps_stop=True)
    shown = ""
    for piece in pieces:
        shown += matcher.feed(piece)
        if matcher.matched is not None:
            assert shown.endswith(matcher.matched)
            assert first_match(shown, [matcher.matched]) == (
                len(shown) - len(matcher.matched),
                matcher.matched,
            )
            return


@given(st.binary(max_size=40))
@example("a🦜漢".encode())
@example("🦜".encode()[:3])
@example(b"\xff\xf0\x9f")
def test_joined_deltas_are_the_bytes_decoded_at_once(data: bytes) -> None:
    choice = Choice(FakeTokenizer())
    deltas = deltas_of(choice, [*map(event, data), event(EOS, "stop")])
    assert "".join(delta.text for delta in deltas) == data.decode(errors="replace")
    assert [token for delta in deltas for token in delta.token_ids] == [*data, EOS]
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["stop"]
    assert choice.num_tokens == len(data) + 1


def test_an_incomplete_character_is_not_shown_before_it_is_whole() -> None:
    deltas = deltas_of(Choice(FakeTokenizer()), [event(byte) for byte in "é🦜".encode()])
    assert [(delta.text, len(delta.token_ids)) for delta in deltas] == [("é", 2), ("🦜", 4)]


def test_a_stop_string_across_tokens_ends_the_choice() -> None:
    choice = Choice(FakeTokenizer(), TextRules(stops=["END"]))
    deltas = deltas_of(choice, [event(byte) for byte in b"so END"])
    assert "".join(delta.text for delta in deltas) == "so "
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "END")
    assert choice.num_tokens == 6, "the tokens of the stop string were sampled too"


def test_held_text_is_released_when_the_end_comes_first() -> None:
    choice = Choice(FakeTokenizer(), TextRules(stops=["END"]))
    deltas = deltas_of(choice, [event(ord("E")), event(ord("N"), "length")])
    assert [(delta.text, delta.finish_reason) for delta in deltas] == [("EN", "length")]


def test_a_stop_string_finished_by_the_last_token_is_a_stop() -> None:
    choice = Choice(FakeTokenizer(), TextRules(stops=["EN"]))
    deltas = deltas_of(choice, [event(ord("E")), event(ord("N"), "length")])
    assert [(delta.text, delta.finish_reason) for delta in deltas] == [("", "stop")]


def test_only_a_stop_token_of_the_client_is_named() -> None:
    for token, named in ((EOS, None), (ord("x"), ord("x"))):
        (delta,) = deltas_of(Choice(FakeTokenizer()), [event(token, "stop")])
        assert (delta.text, delta.stop_reason) == ("", named)


def stream_of(
    calls: list[str], *, limits: Limits | None = None, num_choices: int = 1
) -> TokenStream:
    return TokenStream(
        limits or Limits(),
        num_choices=num_choices,
        abort=lambda index, reason: calls.append(f"{reason} {index}"),
        on_start=lambda: calls.append("start"),
        on_end=lambda: calls.append("end"),
    )


def answer_of(tokens: TokenStream, *choices: Choice) -> Answer:
    return Answer(tokens, choices or [Choice(FakeTokenizer())])


def test_events_of_another_thread_arrive_in_order_and_end_once() -> None:
    data = ("one two 🦜 " * 20).encode()
    calls: list[str] = []

    async def read() -> list[Delta]:
        tokens = stream_of(calls)

        def produce() -> None:
            for byte in data:
                tokens.put(0, event(byte))
            tokens.put(0, event(EOS, "stop"))

        producer = threading.Thread(target=produce)
        producer.start()
        whole = await answer_of(tokens).whole()
        tokens.close()
        producer.join()
        return whole

    (delta,) = asyncio.run(read())
    assert delta.text == data.decode()
    assert calls == ["end"], "an ended request is not aborted"


def test_closing_early_aborts_every_choice_that_still_runs() -> None:
    calls: list[str] = []

    async def leave() -> None:
        tokens = stream_of(calls, num_choices=3)
        answer = answer_of(tokens, *(Choice(FakeTokenizer()) for _ in range(3)))
        tokens.put(1, event(EOS, "stop"))
        assert (await answer.next())[0] == 1
        answer.close()

    asyncio.run(leave())
    assert calls == ["abort 0", "abort 2"]


def test_a_choice_that_has_what_it_wants_ends_alone_and_what_still_comes_is_not_shown() -> None:
    calls: list[str] = []

    async def read() -> list[Delta]:
        tokens = stream_of(calls, num_choices=2)
        answer = answer_of(
            tokens, Choice(FakeTokenizer(), TextRules(stops=["b"])), Choice(FakeTokenizer())
        )
        for byte in b"abc":
            tokens.put(0, event(byte))
            tokens.put(1, event(byte))
        found = [await answer.next() for _ in range(4)]
        tokens.put(0, event(None, "stop"))
        tokens.put(1, event(EOS, "stop"))
        found.append(await answer.next())
        return [joined([delta for at, delta in found if at == index]) for index in range(2)]

    first, second = asyncio.run(read())
    assert (first.text, first.stop_reason, second.text) == ("a", "b", "abc")
    assert calls == ["stop 0", "end"]


def test_a_request_out_of_time_ends_with_that_reason() -> None:
    calls: list[str] = []

    async def read() -> None:
        tokens = stream_of(calls, limits=Limits(request_timeout_s=0.01))
        tokens.limit(in_queue=timed_out(1), in_all=timed_out(0.01))
        try:
            await answer_of(tokens).whole()
        finally:
            tokens.close()

    with pytest.raises(ApiError, match="longer than"):
        asyncio.run(read())
    assert calls == ["timeout 0"]


def test_waiting_may_be_given_up_without_losing_text() -> None:
    async def impatient() -> str:
        tokens = stream_of([])
        answer = answer_of(tokens)
        first, second = "é".encode()
        tokens.put(0, event(first))
        try:
            async with asyncio.timeout(0.01):
                await answer.next()
        except TimeoutError:
            tokens.put(0, event(second))
        return (await answer.next())[1].text

    assert asyncio.run(impatient()) == "é"


@pytest.mark.parametrize("num_choices", [1, 2])
def test_only_a_reader_that_leaves_the_buffer_full_is_stalled(num_choices: int) -> None:
    async def stalls(*, reads: bool) -> bool:
        limits = Limits(max_pending=4, stall_timeout_s=0.03)
        tokens = stream_of([], limits=limits, num_choices=num_choices)
        for _ in range(4):
            for index in range(num_choices):
                tokens.put(index, event(65))
        await asyncio.sleep(0)
        if reads:
            await tokens.get()
        await asyncio.sleep(0.06)
        return tokens.stalled.is_set()

    assert asyncio.run(stalls(reads=False))
    assert not asyncio.run(stalls(reads=True))


def test_an_event_after_the_loop_has_closed_does_not_reach_the_engine_as_an_error() -> None:
    async def make() -> TokenStream:
        return stream_of([])

    asyncio.run(make()).put(0, event(65))
