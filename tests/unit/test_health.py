"""When a stage is given up, and when it is stuck. Without these a stage that can never live is
started for ever, or a legal long step is ended."""

from __future__ import annotations

from skippy_mesh.health import STUCK_S, Pulse, RestartLimit, Watchdog


def test_a_stage_may_be_started_again_so_often_within_the_window_and_no_oftener():
    limit = RestartLimit(2, 100.0)
    assert [limit.allows(1, now_s) for now_s in (0, 10, 20, 99)] == [True, True, False, False]
    assert limit.allows(2, 20), "another stage has restarts of its own"
    assert limit.allows(1, 100), "the first is out of the window"
    assert not limit.allows(1, 109.9)
    assert limit.allows(1, 110)


def test_what_was_refused_does_not_count():
    limit = RestartLimit(1, 100.0)
    assert limit.allows(0, 0)
    assert not any(limit.allows(0, now_s) for now_s in range(1, 100))
    assert limit.allows(0, 100)


def test_a_lost_stage_a_week_goes_on_for_ever():
    limit = RestartLimit()
    assert all(limit.allows(1, week * 604800.0) for week in range(100))


def working(step_s):
    return Pulse(is_loaded=True, epoch=0, step_s=step_s)


def test_a_legal_step_of_a_minute_survives_and_one_without_end_does_not():
    dog = Watchdog(STUCK_S)
    for second in range(int(STUCK_S) + 1):
        assert dog.stuck({0: working(0.0), 1: working(second)}, second) == {}
    assert dog.stuck({0: working(0.0), 1: working(121.0)}, 121.0) == {
        1: "has been in one step for 121 s"
    }


def test_silence_is_no_end_until_it_has_lasted_and_any_word_ends_it():
    dog = Watchdog(STUCK_S)
    for second in range(121):
        assert dog.stuck({1: None}, second) == {}
    assert dog.stuck({1: working(0.0)}, 121) == {}
    assert dog.stuck({1: None}, 122) == {}
    assert dog.stuck({1: None}, 122 + STUCK_S) == {}
    assert dog.stuck({1: None}, 123 + STUCK_S) == {1: "has not answered for 121 s"}
    assert dog.stuck({1: None}, 124 + STUCK_S) == {}, "it is being started again"


def test_a_stage_whose_process_is_gone_is_not_silent():
    dog = Watchdog(STUCK_S)
    dog.stuck({1: None}, 0)
    assert dog.stuck({}, STUCK_S + 1) == {}
    assert dog.stuck({1: None}, STUCK_S + 2) == {}
