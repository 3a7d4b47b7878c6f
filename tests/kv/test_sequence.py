"""The order of one source, without a socket: gaps, replays, restarts, late starts."""

from __future__ import annotations

from tests.kv.world import World
from vllm_cp.kv import Gap, GapReason, Settings


def test_a_stream_without_holes_passes_through() -> None:
    """Batches from 0 on are passed on as they come, and nothing is asked."""
    world = World()
    world.publish(5)
    assert world.words() == "0 1 2 3 4"
    assert world.begin_replay() is None
    assert (world.order.next_seq, world.order.begins_at) == (5, 0)


def test_b04_what_is_evicted_is_said_and_nothing_comes_twice() -> None:
    """0, 1, then 9 and 10, and a replay that holds 7 to 9: 2 to 6 are lost for good, each other one comes once."""
    world = World(buffer=3)
    world.publish(2)
    world.miss(7)
    world.publish()
    assert world.words() == "0 1"
    held = world.begin_replay()
    assert held == [7, 8, 9]
    world.publish()  # while the replay is under way
    assert world.answer(held) == "ok"
    assert world.words() == "0 1 lost:2-6 7 8 9 10"
    assert world.requests == [2]
    assert world.order.lost[GapReason.EVICTED] == 5
    assert world.order.next_seq == 11
    world.publish()
    world.settle()
    assert world.requests == [2], "the next live batch must not start the same recovery again"
    assert world.words().endswith("10 11")


def test_b04_a_late_start_is_no_loss() -> None:
    """First heard is 42: with a replay the past is fetched as far as it goes, and the view says where it begins."""
    world = World(buffer=3)
    world.miss(42)
    world.publish()
    assert world.words() == ""
    world.settle()
    assert world.words() == "late:40 40 41 42"
    assert sum(world.order.lost.values()) == 0
    assert world.order.begins_at == 40


def test_b04_a_late_start_without_replay_begins_where_it_is() -> None:
    """Without a replay the view begins at 42, which is said, and counts as no loss."""
    world = World(replay=False)
    world.miss(42)
    world.publish(2)
    assert world.words() == "late:42 42 43"
    assert sum(world.order.lost.values()) == 0


def test_a_complete_history_is_no_late_start() -> None:
    """When the replay reaches back to 0 there is nothing to say."""
    world = World()
    world.miss(5)
    world.publish()
    world.settle()
    assert world.words() == "0 1 2 3 4 5"


def test_a_silent_source_is_asked_for_its_past() -> None:
    """An idle publisher has a full cache and nothing new to say: after a moment of silence it is asked, once."""
    world = World(Settings(catch_up_after_s=2.0))
    world.miss(3)
    world.wait(1.9)
    assert world.begin_replay() is None
    world.wait(0.1)
    assert world.ask() == "ok"
    assert world.words() == "0 1 2"
    world.wait(100)
    assert world.begin_replay() is None


def test_a_silent_source_without_a_past_is_asked_once() -> None:
    """Nothing published yet: the answer is empty, and the first live batch begins the view."""
    world = World()
    world.wait(10)
    assert world.ask() == "ok"
    world.wait(10)
    assert world.begin_replay() is None
    world.publish()
    assert world.words() == "0"


def test_no_backfill_begins_with_what_is_heard() -> None:
    """Somebody who only wants what is new begins there, and still has gaps filled."""
    world = World(Settings(backfill=False))
    world.miss(5)
    world.wait(100)
    world.publish()
    world.miss()
    world.publish()
    world.settle()
    assert world.words() == "late:5 5 6 7"
    assert world.requests == [6]


def test_from_a_number_on() -> None:
    """What lies before the wanted number is not asked for."""
    world = World(Settings(from_seq=3))
    world.miss(6)
    world.publish()
    world.settle()
    assert world.words() == "late:3 3 4 5 6"
    assert world.requests == [3]


def test_without_a_replay_a_hole_is_lost() -> None:
    """There is nobody to ask: the loss is said at once and the stream goes on."""
    world = World(replay=False)
    world.publish()
    world.miss(3)
    world.publish()
    assert world.words() == "0 lost:1-3 4"
    assert world.order.lost[GapReason.NO_REPLAY] == 3


def test_a_replay_that_fails_is_tried_again_and_then_given_up() -> None:
    """No answer twice: the batches count as lost, what queued behind is passed on, and that is the end of it."""
    world = World(Settings(replay_attempts=2, replay_cool_down_s=1.0))
    world.publish()
    world.miss()
    world.publish(2)
    assert world.begin_replay() is not None
    assert world.answer([], complete=False) == "failed"
    assert world.begin_replay() is None, "not before the cool-down"
    world.wait(1.0)
    assert world.begin_replay() is not None
    assert world.answer([], complete=False) == "failed"
    assert world.words() == "0 lost:1-1 2 3"
    assert world.order.lost[GapReason.REPLAY_FAILED] == 1
    world.settle()
    assert world.requests == [1, 1]


def test_a_replay_that_breaks_off_goes_on_where_it_stopped() -> None:
    """What came is passed on at once; the second request asks for the rest only."""
    world = World()
    world.publish()
    world.miss(4)
    world.publish()
    assert world.begin_replay() == [1, 2, 3, 4, 5]
    assert world.answer([1, 2], complete=False) == "partial"
    assert world.words() == "0 1 2"
    world.settle()
    assert world.words() == "0 1 2 3 4 5"
    assert world.requests == [1, 3]


def test_a_hole_in_a_replay_is_asked_again() -> None:
    """The transport dropped a reply: it is not taken for eviction before a second try."""
    world = World()
    world.publish()
    world.miss(4)
    world.publish()
    assert world.begin_replay() == [1, 2, 3, 4, 5]
    assert world.answer([1, 3, 4, 5]) == "partial"
    world.settle()
    assert world.words() == "0 1 2 3 4 5"


def test_a_hole_that_stays_is_lost() -> None:
    """When the second try has the same hole, it is said."""
    world = World()
    world.publish()
    world.miss(4)
    world.publish()
    for _ in range(2):
        world.wait(10)
        assert world.begin_replay() is not None
        world.answer([1, 3, 4, 5])
    assert world.words() == "0 1 lost:2-2 3 4 5"


def test_holes_that_open_during_a_replay_are_asked_for_after_it() -> None:
    """Each hole is asked for once, and one request fills all that have opened by then."""
    world = World(Settings(replay_cool_down_s=1.0))
    world.publish()
    world.miss()
    world.publish()
    held = world.begin_replay()
    assert held is not None
    for _ in range(3):
        world.miss()
        world.publish()
    world.answer(held)
    assert world.words() == "0 1 2"
    assert world.begin_replay() is None
    world.wait(1.0)
    world.settle()
    assert world.words() == "0 1 2 3 4 5 6 7 8"
    assert world.requests == [1, 3]


def test_replies_from_before_the_start_are_ignored() -> None:
    """A server that sends more than was asked for repeats what we have: it comes once."""
    world = World()
    world.publish(3)
    world.miss()
    world.publish()
    world.begin_replay()
    world.answer([0, 1, 2, 3, 4])
    assert world.words() == "0 1 2 3 4"


def test_live_batches_that_a_replay_brought_already_are_duplicates() -> None:
    """The replay ran ahead of the live stream; what follows live is no restart."""
    world = World()
    world.publish()
    world.miss(2)
    world.publish()
    world.begin_replay()
    for seq in (1, 2, 3, 4, 5):
        world.out += world.order.replayed(seq, world.batch(seq), 0.0)
    world.out += world.order.replay_ended(0.0, complete=True)[1]
    for seq in (4, 5, 6):
        world.hear(seq)
    assert world.words() == "0 1 2 3 4 5 6"
    assert world.order.restarts == 0


def test_the_same_message_twice_is_a_duplicate() -> None:
    """Same number, same bytes: dropped."""
    world = World()
    world.publish(2)
    world.hear(1)
    assert world.words() == "0 1"


def test_an_unreadable_batch_moves_nothing() -> None:
    """Its number may lie too: when the right one comes it is taken, when the next comes the hole is said."""
    world = World()
    world.publish(2)
    world.order.unreadable(2)
    world.publish()
    assert world.words() == "0 1 2"
    world.order.unreadable(3)
    world.order.unreadable(4)
    world.next = 5
    world.publish()
    assert world.words() == "0 1 2 lost:3-4 5"
    assert world.order.lost[GapReason.UNREADABLE] == 2
    assert world.begin_replay() is None


def test_an_unreadable_batch_in_a_replay_is_said() -> None:
    """The replay has the same garbage: that one is lost, the rest is not."""
    world = World()
    world.publish()
    world.miss(3)
    world.publish()
    world.begin_replay()
    for seq in (1, 2, 3, 4):
        world.out += world.order.replayed(seq, None if seq == 2 else world.batch(seq), 0.0)
    world.out += world.order.replay_ended(0.0, complete=True)[1]
    assert world.words() == "0 1 lost:2-2 3 4"
    assert [item.reason for item in world.out if isinstance(item, Gap)] == [GapReason.UNREADABLE]


def test_live_batches_without_room_are_asked_for_later() -> None:
    """While a replay takes its time only so many live batches are kept; the others come over the next one."""
    world = World(Settings(max_pending=3))
    world.publish()
    world.miss()
    world.publish()
    held = world.begin_replay()
    assert held is not None
    world.publish(10)
    assert world.order.pending == 3
    world.answer(held)
    world.settle()
    assert world.words() == " ".join(map(str, range(13)))
    assert sum(world.order.lost.values()) == 0


def test_bytes_bound_what_waits_too() -> None:
    """The same by size."""
    world = World(Settings(max_pending_bytes=10))
    world.publish()
    world.miss()
    world.publish(20)
    assert world.order.pending == 3
    world.settle()
    assert world.words() == " ".join(map(str, range(22)))
