"""Workers that move to another address, and names behind which several workers are."""

from __future__ import annotations

from tests.unit.story import Story
from vllm_cp.episodes import TransitionKind
from vllm_cp.models.episode import Cause


def test_another_instance_at_another_address_is_no_fault() -> None:
    """A worker that is asked elsewhere from now on and is another instance there was restarted; nothing failed."""
    story = Story().up(0).at(5, moved=True).up(6, "two")
    assert story.state.restarts == 1
    assert sum(story.state.faults.values()) == 0
    assert story.state.ready


def test_the_same_instance_at_another_address() -> None:
    """A worker that is reached in another way and is the same goes on as if nothing had been."""
    story = Story().up(0).at(5, moved=True).up(6)
    assert story.state.restarts == 0
    assert story.state.ready
    story.up(10, "two")
    assert story.state.faults[Cause.REPLACED_UNSEEN] == 1, "the move excuses one instance, not all that follow"


def test_nobody_at_another_address_is_a_fault() -> None:
    """A worker that was well and is not where it is said to be now has a fault."""
    story = Story().up(0).at(5, moved=True).at(6, contact=False).down(20)
    assert story.state.faults[Cause.UNREACHABLE] == 1


def test_a_move_ends_the_wait_for_an_answer() -> None:
    """A question that was on its way when the address changed is nobody's silence."""
    story = Story().up(0).at(5, asked=True).at(18, moved=True, contact=True).at(25, contact=True)
    assert story.state.rungs.answering.holds is not False


def test_an_instance_that_comes_back_is_a_shared_name() -> None:
    """An instance never comes back from a restart: the name is several workers, and their turns are not counted."""
    story = Story().up(0, "one").up(5, "two")
    assert (story.state.restarts, story.state.shared_name) == (1, False)
    for second in range(10, 60, 5):
        story.up(second, ("one", "two", "three")[second // 5 % 3])
    assert story.state.shared_name
    assert story.state.restarts == 2, "each of the three was new once"
    assert story.state.faults[Cause.REPLACED_UNSEEN] == 2
    told = [change for change in story.transitions if change.kind is TransitionKind.SHARED_NAME]
    assert len(told) == 1
    assert "in turns" in told[0].detail


def test_a_name_that_moves_may_be_one_worker_again() -> None:
    """What was seen of the old address says nothing of the new one."""
    story = Story().up(0, "one").up(5, "two").up(10, "one")
    assert story.state.shared_name
    story.at(15, moved=True).up(16, "three")
    assert not story.state.shared_name
    assert story.state.restarts == 2


def test_a_crash_loop_is_no_shared_name() -> None:
    """However often a worker restarts, with a new id each time it is one worker, and few ids are remembered."""
    story = Story()
    for number in range(100):
        story.up(5.0 * number, f"id-{number}")
    assert not story.state.shared_name
    assert story.state.restarts == 99
    assert len(story.state.instances_before) == 32
