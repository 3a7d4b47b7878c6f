"""Rule 6: a death and a shutdown look alike, and only one of them is a fault."""

from __future__ import annotations

import pytest

from tests.unit.story import NOT_SERVING, SERVICE_UNKNOWN, SERVING, YES, Story
from vllm_cp.episodes import Rules, TransitionKind
from vllm_cp.models.episode import EndKind
from vllm_cp.models.ladder import Reason

KUBERNETES = Rules(window_s=30.0)


def test_what_is_seen_shows_at_once_and_is_counted_later() -> None:
    """Ready falls and the start is stamped with the first sign; the cause is counted when the window has passed."""
    story = Story().up(0).lives(10).at(11, contact=False)
    assert (story.ready, story.faults, story.state.open_fault is not None) == (False, {}, True)
    story.down(15.9)
    assert story.faults == {}
    story.down(16.1)
    assert story.faults == {"unreachable": 1}


@pytest.mark.parametrize("sign", [{"contact": True, "health": NOT_SERVING}, {"contact": False}])
@pytest.mark.parametrize("planned", [{"deleted": True}, {"removed": True}])
def test_a_deletion_in_the_window_is_planned(sign: dict[str, object], planned: dict[str, object]) -> None:
    """A pod that falls silent and is then told to be deleted, or is removed, had no fault; the end says planned."""
    story = Story(KUBERNETES).up(0).lives(10).at(11, **sign).at(25, **planned)
    assert (story.faults, story.ends, story.state.fault) == ({}, {"planned": 1}, None)
    assert story.ended[0].kind is EndKind.PLANNED
    assert story.ended[0].duration_s is None


def test_a_deletion_before_the_first_sign_opens_nothing() -> None:
    """A pod that was told to go may lose everything without a fault."""
    story = Story().up(0).at(5, deleted=True)
    assert story.state.reason is Reason.DRAINING
    story.at(6, contact=True, health=NOT_SERVING).down(60).at(61, removed=True)
    assert (story.faults, story.ends) == ({}, {})


def test_a_deletion_in_the_window_covers_a_worker_that_came_back_for_a_moment() -> None:
    """A shutdown that flickers is a shutdown."""
    story = Story().up(0).at(5, contact=True, health=NOT_SERVING).up(6).at(8, deleted=True).down(20)
    assert (story.faults, story.ends) == ({}, {"planned": 1})
    assert story.ended[0].duration_s is None


def test_a_deletion_that_was_taken_back_excuses_nothing_later() -> None:
    """A worker that was up all the time it was to be deleted, and no longer is, can crash like any other."""
    story = Story().up(0).at(5, deleted=True).lives(10).at(11, deleted=False).lives(20).down(40)
    assert story.faults == {"unreachable": 1}


def test_a_removal_later_is_gone() -> None:
    """A target removed when its fault was already counted is gone: no duration, one fault, one end."""
    story = Story().up(0).at(5, contact=False).down(60).at(61, removed=True)
    assert (story.faults, story.ends) == ({"unreachable": 1}, {"gone": 1})
    assert (story.ended[0].duration_s, story.state.last_recovery_s) == (None, None)


def test_a_removal_after_a_recovery_keeps_the_recovery() -> None:
    """A worker that was counted, recovered and is then removed had a recovery, settled at once."""
    story = Story().up(0).at(5, contact=False).down(20).up(21).at(22, removed=True)
    assert (story.faults, story.ends) == ({"unreachable": 1}, {"resumed": 1})
    assert story.ended[0].duration_s == pytest.approx(16)


def test_a_deletion_after_the_count_does_not_take_it_back() -> None:
    """A crash that was counted stays counted when somebody deletes the pod afterwards."""
    story = Story().up(0).at(5, contact=False).down(20).at(21, deleted=True).at(40, removed=True)
    assert (story.faults, story.ends) == ({"unreachable": 1}, {"gone": 1})


def test_a_drain_is_planned() -> None:
    """Not serving, the stream ended in order, and the port accepts and answers nothing: a drain, and no fault."""
    story = Story().up(0).lives(10)
    story.at(10.1, contact=True, health=NOT_SERVING).at(10.11, stream_ended=True)
    assert story.state.reason is Reason.NOT_SERVING
    story.at(14)
    assert story.state.reason is Reason.DRAINING
    story.at(30).down(60)
    assert (story.faults, story.ends) == ({}, {"planned": 1})


def test_a_name_that_is_forgotten_is_a_drain() -> None:
    """A Check that no longer knows a name it knew says that the server is going away."""
    story = Story().up(0).at(5, contact=True, health=SERVICE_UNKNOWN)
    assert story.state.reason is Reason.DRAINING
    story.down(30)
    assert (story.faults, story.ends, story.state.fault) == ({}, {}, None)


def test_a_shutdown_without_a_drain_looks_like_a_death() -> None:
    """A stream that ended in order on a port that then refuses is a fault, unless discovery says otherwise."""
    story = Story().up(0).at(5, contact=True, health=NOT_SERVING).at(5.01, stream_ended=True).down(20)
    assert story.faults == {"engine_reported": 1}


def test_a_reported_death_keeps_its_stream() -> None:
    """A stream that stays open after not serving is a dead engine behind a living frontend."""
    story = Story().up(0).at(5, contact=True, health=NOT_SERVING).talks(60)
    assert (story.faults, story.state.reason) == ({"engine_reported": 1}, Reason.NOT_SERVING)


@pytest.mark.parametrize("seen_to_break", [True, False])
def test_who_comes_after_a_drain_is_no_replacement_unseen(seen_to_break: bool) -> None:
    """A drained worker that comes back as another instance was seen to go: zero faults."""
    story = Story().up(0, "one").at(5, contact=True, health=NOT_SERVING).at(5.1, stream_ended=True).at(10)
    if seen_to_break:
        story.down(20)
    story.at(21, contact=True, health=SERVING).at(21.5, contact=True, asked=True, round_trip=YES)
    story.at(22, contact=True, instance_id="two").lives(40)
    assert story.ready
    assert (story.faults, story.ends, story.state.restarts) == ({}, {"planned": 1}, 1)


def test_a_pod_deleted_and_back_under_its_name_has_no_fault_while_it_loads() -> None:
    """A pod of a set keeps its key: its successor refuses for minutes while it loads, and that is a start."""
    story = Story(KUBERNETES).up(0, "one").at(5, deleted=True).down(10)
    story.at(11, deleted=False).down(200)
    assert (story.state.reason, story.state.fault) == (Reason.UNREACHABLE, None)
    story.up(201, "two").lives(230)
    assert story.ready
    assert (story.faults, story.ends) == ({}, {})


@pytest.mark.parametrize("told_first", [True, False])
def test_a_rolling_upgrade_of_fifty_counts_nothing_and_one_crash_counts_one(told_first: bool) -> None:
    """Fifty pods told to go, one after another, are zero faults; the one that crashes among them is one."""
    stories = [Story(KUBERNETES) for _ in range(50)]
    crashed = 17
    for number, story in enumerate(stories):
        story.up(0, f"old {number}").lives(10 + number)
        leaves = story.now + 1
        if number == crashed:
            story.down(leaves + 60).up(leaves + 61, "again").lives(leaves + 120)
            continue
        if told_first:
            story.at(leaves, deleted=True)
        story.at(leaves + 0.1, contact=True, health=NOT_SERVING).at(leaves + 0.2, contact=False)
        if not told_first:
            story.at(leaves + 20, deleted=True)
        story.at(leaves + 25, removed=True)
    assert [sum(story.faults.values()) for story in stories] == [int(n == crashed) for n in range(50)]
    assert stories[crashed].ends == {"replaced": 1}
    assert all(set(story.ends) <= {"planned"} for n, story in enumerate(stories) if n != crashed)


def test_removal_of_a_healthy_worker_is_nothing() -> None:
    """A worker taken out of discovery while all is well leaves no trace."""
    story = Story().up(0).lives(10).at(11, removed=True)
    assert (story.faults, story.ends) == ({}, {})
    assert TransitionKind.FAULT_OPENED not in story.kinds()
