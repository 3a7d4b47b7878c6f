"""Time that lies and time that is lost: clocks that step, watchers that stop, daemons that restart."""

from __future__ import annotations

import pytest

from tests.unit.story import MONOTONIC, NOT_SERVING, SERVING, WALL, YES, Story
from vllm_cp.episodes import Memory, Rules, TransitionKind, begin, remember
from vllm_cp.models.episode import Cause, Episode
from vllm_cp.models.ladder import Reason


@pytest.mark.parametrize("step_s", [-86_400.0, -30.0, 30.0, 86_400.0])
def test_a_wall_clock_that_steps_changes_no_duration(step_s: float) -> None:
    """The wall clock may jump either way during an outage: the fault still lasted sixteen seconds."""
    story = Story().up(0).at(5, contact=False).down(10)
    story.wall += step_s
    story.down(20).up(21, "two").lives(40)
    (episode,) = story.ended
    assert episode.duration_s == pytest.approx(16)
    assert story.state.last_recovery_s == episode.duration_s
    assert (story.faults, story.ends) == ({"unreachable": 1}, {"replaced": 1})


def test_a_wall_clock_that_steps_opens_nothing() -> None:
    """A clock that jumps back and forth under a healthy worker is not seen at all."""
    story = Story().up(0)
    for second in range(5, 100, 5):
        story.wall = WALL + (3600 if second % 10 else -3600)
        story.at(second, contact=True, asked=True, round_trip=YES)
        assert story.ready
    assert story.state.fault is None


def test_observations_out_of_order_make_nothing_negative() -> None:
    """An observation that arrives with an older time than the last one is taken, and no duration goes below zero."""
    story = Story().up(10).jump(9, contact=False).jump(8, contact=True, health=SERVING, instance_id="one")
    story.jump(7, round_trip=YES).jump(30).jump(36).jump(50)
    assert story.ended[0].duration_s == 0.0


@pytest.mark.parametrize("pending_s", [0.0, 4.0, 9.0])
def test_a_stopped_watcher_invents_nothing(pending_s: float) -> None:
    """A daemon stopped for a minute with a question in flight accuses nobody when it goes on."""
    story = Story().up(0).lives(30).at(30, contact=True, asked=True).talks(30 + pending_s)
    story.jump(story.now + 60)
    assert story.ready
    story.at(story.now + 0.01, contact=True, round_trip=YES).lives(120)
    assert story.ready
    assert (story.faults, story.kinds(TransitionKind.FAULT_OPENED)) == ({}, [])


def test_a_stopped_watcher_does_not_date_a_fault_into_the_gap() -> None:
    """What broke while nobody looked began, as far as anybody knows, when it was seen."""
    story = Story().up(0).lives(30).jump(90, contact=False)
    assert story.state.open_fault is not None
    assert story.state.open_fault.episode.start - WALL == pytest.approx(90)


def test_a_stopped_watcher_does_not_let_the_window_pass() -> None:
    """A shutdown seen just before the stop is still planned when the deletion is read just after it."""
    story = Story(Rules(window_s=30.0)).up(0).at(5, contact=False).jump(65).at(66, deleted=True)
    assert (story.faults, story.ends) == ({}, {"planned": 1})


def test_a_frozen_engine_is_found_after_a_stop_too() -> None:
    """The gap only delays the verdict: a question that stays unanswered accuses."""
    story = Story().up(0).at(5, contact=True, asked=True).jump(65, contact=True).talks(76)
    assert story.faults == {}
    assert not story.ready
    story.talks(90)
    assert story.faults == {"engine_silent": 1}


def test_memory_keeps_what_lasts() -> None:
    """Instance, first readiness, the open fault and whether it was counted are kept; counters are not."""
    story = Story().up(0).lives(10).at(11, contact=False).down(30)
    memory = remember(story.state)
    assert (memory.instance_id, memory.first_ready, memory.was_admitting) == ("one", WALL, True)
    assert memory.open_fault is not None
    assert (memory.open_fault.cause, memory.open_fault.start, memory.counted) == (Cause.UNREACHABLE, WALL + 11, True)
    again = begin(at=0.0, wall=WALL + 40, memory=memory)
    assert (sum(again.faults.values()), sum(again.ends.values()), again.restarts) == (0, 0, 0)
    assert remember(again) == memory


def test_memory_of_a_healthy_worker_holds_no_fault() -> None:
    """A fault that recovered and only settles is over; it is not carried on."""
    story = Story().up(0).at(5, contact=False).up(8)
    assert remember(story.state).open_fault is None


@pytest.mark.parametrize("counted", [True, False])
def test_script_c_an_open_fault_goes_on_after_a_restart(counted: bool) -> None:
    """A daemon restarted in the middle of an outage ends the same fault: not reopened, counted once in all."""
    memory = Memory(
        instance_id="one",
        first_ready=WALL - 500,
        was_admitting=True,
        open_fault=Episode(cause=Cause.ENGINE_REPORTED, start=WALL - 20, instance_id="one"),
        counted=counted,
    )
    story = Story(memory=memory)
    assert story.state.open_fault is not None
    story.down(10)
    assert story.ends == {}
    story.up(11, "two").lives(40)
    assert story.faults == ({} if counted else {"engine_reported": 1})
    assert story.ends == {"replaced": 1}
    assert story.ended[0].duration_s == pytest.approx(31)
    assert story.kinds(TransitionKind.FAULT_OPENED, TransitionKind.FAULT_REOPENED) == []
    assert story.state.first_ready == WALL - 500


def test_a_restored_fault_does_not_recover_before_anything_is_seen() -> None:
    """After a restart the fault stays open until the worker is proved to answer, and its instance is read."""
    memory = Memory(instance_id="one", was_admitting=True, open_fault=Episode(cause=Cause.UNKNOWN, start=WALL - 60))
    story = Story(memory=memory).at(30)
    assert (story.state.open_fault is not None, story.ready, story.state.reason) == (True, False, Reason.STARTING)
    story.at(31, contact=True, health=SERVING).at(32, contact=True, asked=True)
    assert story.state.open_fault is not None
    story.up(33).lives(50)
    assert story.ends == {"resumed": 1}


def test_a_restored_fault_can_still_be_planned() -> None:
    """A daemon that restarts with its pods learns of the deletion late, and takes it all the same."""
    memory = Memory(was_admitting=True, open_fault=Episode(cause=Cause.UNREACHABLE, start=WALL - 3))
    story = Story(memory=memory).at(2, deleted=True)
    assert (story.faults, story.ends) == ({}, {"planned": 1})


def test_a_restored_fault_from_the_future_has_no_negative_age() -> None:
    """A wall clock set back between two runs makes an open fault young, not negative."""
    memory = Memory(was_admitting=True, open_fault=Episode(cause=Cause.UNREACHABLE, start=WALL + 3600))
    story = Story(memory=memory).up(4, None).lives(20)
    assert story.ended[0].duration_s == pytest.approx(4)


def test_a_replacement_while_the_daemon_was_away_is_a_restart_and_no_fault() -> None:
    """Nobody watched, so nobody knows whether it was planned: the new instance is noted, no fault is invented."""
    story = Story(memory=Memory(instance_id="one", was_admitting=True)).up(1, "two").lives(20)
    assert (story.state.restarts, story.faults, story.ends) == (1, {}, {})


def test_a_known_worker_found_broken_after_a_restart_is_a_fault_from_then_on() -> None:
    """A worker that once admitted and is down when the daemon is back failed, as far as is known, now."""
    story = Story(memory=Memory(instance_id="one", was_admitting=True)).at(1, contact=True, health=NOT_SERVING)
    assert story.state.open_fault is not None
    assert story.state.open_fault.episode.start == WALL + 1
    assert story.talks(10).faults == {"engine_reported": 1}


def test_times_are_the_observations_own() -> None:
    """The state machine reads no clock: the same story told at another hour gives the same durations."""
    early, late = Story(wall=0.0), Story()
    for story in (early, late):
        story.up(0).at(5, contact=False).up(17).lives(40)
    assert early.ended[0].duration_s == late.ended[0].duration_s == pytest.approx(12)
    assert early.state.at == MONOTONIC + 40
