"""Restarts and broken connections, without a socket; and all of it in any order."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kv.world import World
from vllm_cp.kv import Settings


@pytest.mark.parametrize("reconnect", [True, False], ids=["seen", "unseen"])
def test_numbers_that_go_back_are_a_restart(reconnect: bool) -> None:
    """A new publisher process counts from 0: everything is void, and the new view is complete."""
    world = World()
    world.publish(5)
    world.restart(reconnect=reconnect)
    world.publish(2)
    world.settle()
    assert world.words() == "0 1 2 3 4 restart 0 1"
    assert world.order.restarts == 1


def test_a_restart_that_was_missed_at_first_is_filled_up() -> None:
    """The new process is heard from 2 on; 0 and 1 come from its replay."""
    world = World()
    world.publish(5)
    world.restart()
    world.miss(2)
    world.publish()
    world.settle()
    assert world.words() == "0 1 2 3 4 restart 0 1 2"


def test_a_restart_that_overtook_us_is_noticed() -> None:
    """The new process is beyond our last number when we are back, so nothing goes backwards: its replay gives it away,
    because it has another batch under the number of our last one."""
    world = World()
    world.publish(3)
    world.restart()
    world.miss(8)
    world.publish()
    world.settle()
    assert world.words() == "0 1 2 restart 0 1 2 3 4 5 6 7 8"
    assert world.requests == [2, 0]


def test_a_restart_during_silence_is_noticed() -> None:
    """Connected anew, the publisher is asked for our last batch. It has not come that far, so it is a new one."""
    world = World()
    world.publish(9)
    world.restart()
    world.miss(3)
    world.settle()
    assert world.words() == "0 1 2 3 4 5 6 7 8 restart 0 1 2"


def test_a_broken_connection_is_no_restart() -> None:
    """The same process after a reconnection: what was missed comes over replay, and nothing is reset."""
    world = World()
    world.publish(3)
    world.order.disconnected()
    world.miss(4)
    assert world.begin_replay() is None, "nobody is there to ask"
    world.order.connected(world.now)
    world.settle()
    assert world.words() == "0 1 2 3 4 5 6"
    assert world.requests == [2]
    world.publish()
    assert world.words().endswith("6 7")


def test_a_connection_that_breaks_during_a_replay_is_asked_again() -> None:
    """The replay may have been of the old process: the new one has to prove itself."""
    world = World()
    world.publish(3)
    world.miss()
    world.publish()
    held = world.begin_replay()
    assert held is not None
    world.restart()
    world.miss(6)
    world.answer(held)
    world.settle()
    assert world.words() == "0 1 2 3 4 restart 0 1 2 3 4 5"


def test_the_control_plane_tells_of_a_restart() -> None:
    """Without a replay, numbers that go on look like a gap: a new instance id makes it a restart. Told twice, or told
    late, it does not reset the new view."""
    world = World(replay=False)
    world.publish(3)
    world.order.disconnected()
    world.out += world.order.restarted()
    world.life += 1
    world.order.connected(world.now)
    world.hear(7)
    world.out += world.order.restarted()
    world.hear(8)
    assert world.words() == "0 1 2 restart late:7 7 8"


def weather(chance: random.Random, world: World, steps: int, failing: float) -> None:
    """Everything that can happen, in any order; so many of the replays break off."""
    for _ in range(steps):
        kind = chance.random()
        if kind < 0.5:
            world.publish(chance.randrange(1, 4))
        elif kind < 0.7:
            world.miss(chance.randrange(1, 4))
        elif kind < 0.75:
            world.reconnect()
        elif kind < 0.78:
            world.restart()
            world.miss(chance.randrange(12))
        elif kind < 0.8 and world.replay:
            world.order.unreadable(world.next)
        elif kind < 0.95:
            held = world.begin_replay()
            if held is None:
                continue
            for _ in range(chance.randrange(3)):
                chance.choice((world.publish, world.publish, world.miss, world.reconnect, world.restart))()
            upto = chance.randrange(len(held) + 1) if chance.random() < failing else len(held)
            world.answer(held[:upto], complete=upto == len(held))
        else:
            world.wait(chance.choice((0.1, 1.0, 10.0)))


@given(
    seed=st.integers(0, 2**32),
    buffer=st.sampled_from([1, 3, 20, 10_000, 10_000]),
    failing=st.sampled_from([0.0, 0.0, 0.3]),
    settings=st.sampled_from(
        [Settings(), Settings(max_pending=2), Settings(backfill=False), Settings(replay_attempts=1)]
    ),
)
def test_in_any_weather_each_batch_comes_once_or_is_said_to_be_lost(
    seed: int, buffer: int, failing: float, settings: Settings
) -> None:
    """Whatever is dropped, cut, restarted or evicted: per process the numbers go on without holes that are not said,
    nothing comes twice, no batch of one process passes for another's, and in the end we are where the publisher is."""
    world = World(settings, buffer=buffer)
    weather(random.Random(seed), world, 60, failing)
    world.publish()
    world.settle()
    world.publish()
    world.settle()
    world.check(provable=buffer == 10_000 and not failing)
    assert world.order.next_seq == world.next
    assert world.order.pending == 0
