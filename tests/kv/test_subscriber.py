"""Subscribers on real sockets: order, losses, restarts, and strange peers."""

from __future__ import annotations

import time
from dataclasses import replace

import msgspec
import pytest

from tests.kv.collect import STORED, auntil, batches, fast, number, pack, seq, seqs, state, states, until, words
from tests.kv.relay import Relay
from vllm_cp.kv import (
    AsyncSubscriber,
    Batch,
    Gap,
    Notice,
    NoticeKind,
    Reset,
    SourceState,
    Stored,
    Subscriber,
    Unknown,
)
from vllm_cp.models.kv_source import Address, KvEventSource
from vllm_cp.testing import FakeKvPublisher, KvLayout


def test_batches_come_in_order_and_typed() -> None:
    """What is published is what comes out, with the source's rank and worker, and the connection is said first."""
    with FakeKvPublisher(rank=3, topic="kv@tiny") as kv, Subscriber([kv.source], worker="w", settings=fast()) as events:
        kv.wait_subscribed()
        kv.store(range(32))
        kv.evict()
        kv.clear()
        seen = until(events, batches(3))
    assert states(seen) == [SourceState.CONNECTING, SourceState.CONNECTED]
    first, *_ = [item for item in seen if isinstance(item, Batch)]
    assert (first.source.worker, first.rank, first.data_parallel_rank, first.replayed) == ("w", 3, 3, False)
    assert first.ts == pytest.approx(time.time(), abs=60)
    assert first.received_at == pytest.approx(time.time(), abs=60)
    [event] = first.events
    assert isinstance(event, Stored)
    assert event.token_ids == tuple(range(32))
    assert words(seen) == ["0", "1", "2"]


@pytest.mark.parametrize("layout", KvLayout)
async def test_every_layout_in_both_colours(layout: KvLayout) -> None:
    """Old and new layouts are one to the consumer, and both colours say the same."""
    with FakeKvPublisher(layout=layout) as kv:
        async with AsyncSubscriber([kv.source], settings=fast()) as events:
            with Subscriber([kv.source], settings=fast()) as others:
                kv.wait_subscribed(2)
                kv.store(range(48), lora="sql")
                kv.drop(1)
                kv.evict()
                kv.clear()
                seen = await auntil(events, batches(3))
                same = until(others, batches(3))
    assert [item.events for item in seen if isinstance(item, Batch)] == [
        item.events for item in same if isinstance(item, Batch)
    ]
    [stored] = next(item.events for item in seen if isinstance(item, Batch))
    assert isinstance(stored, Stored)
    assert (stored.lora_name, stored.medium, stored.extra) == ("sql", "GPU", None)


def test_b03_one_strange_message_does_not_stop_the_stream() -> None:
    """Strange frames and payloads are counted by reason; known events beside an unknown one are delivered."""
    with FakeKvPublisher() as kv, Subscriber([kv.source], settings=fast()) as events:
        kv.wait_subscribed()
        kv.publish(STORED)
        kv.publish(STORED, {"type": "BlockTeleported", "to": 7}, {"type": "AllBlocksCleared"})
        for frames in (
            [number(2), pack()],
            [b"", number(2)[1:], pack()],
            [b"", b"\xff" * 8, b""],
            [b"", number(2), b"\xc1\xc1"],
            [b"", number(2), msgspec.msgpack.encode("hello")],
            [b"", number(2), msgspec.msgpack.encode({1: 2})],
            [b""],
        ):
            kv.poison(*frames)
        kv.publish(STORED)
        seen = until(events, seq(2))
        [stats] = events.stats().sources
    assert words(seen) == ["0", "1", "2"]
    mixed = next(item for item in seen if isinstance(item, Batch) and item.seq == 1)
    assert [type(event).__name__ for event in mixed.events] == ["Stored", "Unknown", "Cleared"]
    assert isinstance(mixed.events[1], Unknown)
    assert {reason.value: count for reason, count in stats.failures.items()} == {
        "frames": 2,
        "sequence": 1,
        "reserved": 1,
        "msgpack": 1,
        "batch": 2,
        "event": 0,
    }
    assert (stats.unknown_events, stats.gaps, sum(stats.lost.values()), stats.restarts) == (1, 0, 0, 0)


def test_b03_a_publisher_of_garbage_loses_only_that() -> None:
    """A batch that nobody can read took its number: it is said to be lost, and nothing else is."""
    with FakeKvPublisher() as kv, Subscriber([kv.source], settings=fast()) as events:
        kv.wait_subscribed()
        kv.publish(STORED)
        kv.poison()
        kv.publish(STORED)
        assert words(until(events, seq(2))) == ["0", "lost 1-1 unreadable", "2"]
        kv.publish({**STORED, "medium": "GPU"})
        text = pack({"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"}).replace(b"GPU", b"\xff\xfe\xfd")
        kv.poison(b"", number(4), text)
        assert words(until(events, lambda seen: isinstance(seen[-1:] and seen[-1], Gap)))[-1] == "lost 4-4 unreadable"


def test_b04_a_gap_whose_start_is_evicted() -> None:
    """0, 1, then 9 and 10, a replay of 7 to 9: one request, five lost, each of the others once."""
    with FakeKvPublisher(buffer_steps=3) as kv, Subscriber([kv.source], settings=fast()) as events:
        kv.wait_subscribed()
        kv.publish(STORED)
        kv.publish(STORED)
        kv.drop(7)
        for _ in range(8):
            kv.publish(STORED)
        seen = until(events, seq(9))
        kv.publish(STORED)
        until(events, seq(10), seen=seen)
        [stats] = events.stats().sources
    assert words(seen) == ["0", "1", "lost 2-6 evicted", "7", "8", "9", "10"]
    assert kv.replay_requests == [2]
    assert (stats.last_seq, sum(stats.lost.values()), dict(stats.replays)) == (
        10,
        5,
        {"ok": 1, "partial": 0, "failed": 0},
    )


@pytest.mark.parametrize(
    ("replay", "said"), [(True, ["late_start 40", "40", "41", "42"]), (False, ["late_start 42", "42"])]
)
def test_b04_a_late_start(replay: bool, said: list[str]) -> None:
    """42 is the first that is heard: the past comes as far as there is one, and none of it counts as lost."""
    with FakeKvPublisher(buffer_steps=3, replay=replay) as kv:
        for _ in range(42):
            kv.publish(STORED)
        with Subscriber([kv.source], settings=fast(catch_up_after_s=60.0)) as events:
            kv.wait_subscribed()
            kv.publish(STORED)
            assert words(until(events, seq(42))) == said
            [stats] = events.stats().sources
    assert sum(stats.lost.values()) == 0
    assert stats.begins_at == int(said[1])


def test_an_idle_publisher_is_asked_for_its_past() -> None:
    """A fleet at night: nothing is published, and the caches are known all the same."""
    with FakeKvPublisher() as kv:
        kv.store(range(64))
        with Subscriber([kv.source], settings=fast()) as events:
            [batch] = [item for item in until(events, batches(1)) if isinstance(item, Batch)]
    assert batch.replayed


@pytest.mark.parametrize("replay_topic", [True, False], ids=["topic", "older"])
async def test_replies_with_and_without_a_topic(replay_topic: bool) -> None:
    """Older servers leave out the topic frame of a reply."""
    with FakeKvPublisher(topic="kv", replay_topic=replay_topic) as kv:
        async with AsyncSubscriber([kv.source], settings=fast()) as events:
            kv.wait_subscribed()
            kv.publish(STORED)
            kv.drop(2)
            for _ in range(3):
                kv.publish(STORED)
            assert words(await auntil(events, seq(3))) == ["0", "1", "2", "3"]


def test_a_replay_that_never_answers_is_given_up() -> None:
    """Two tries of half a second, then the batches are lost, and live ones that waited come out."""
    with (
        FakeKvPublisher() as kv,
        Subscriber([kv.source], settings=fast(replay_idle_s=0.15, replay_attempts=2)) as events,
    ):
        kv.wait_subscribed()
        kv.deafen()
        kv.publish(STORED)
        kv.drop(1)
        kv.publish(STORED)
        kv.publish(STORED)
        assert words(until(events, seq(2))) == ["0", "lost 1-1 replay_failed", "2"]
        [stats] = events.stats().sources
        assert kv.replay_requests == [1, 1]
        assert stats.replays["failed"] == 2
        assert 0.3 <= stats.replay_seconds < 3


def test_a_restart_is_a_reset() -> None:
    """A new process at the same address: everything of the old one is void, and nothing of the new one is missed."""
    with FakeKvPublisher() as kv, Subscriber([kv.source], settings=fast()) as events:
        kv.wait_subscribed()
        kv.store(range(64))
        seen = until(events, batches(1))
        kv.restart()
        kv.store(range(32))
        kv.store(range(48))
        until(events, batches(3), seen=seen)
        [stats] = events.stats().sources
    assert words(seen) == ["0", "restarted", "0", "1"]
    assert (stats.restarts, stats.last_seq, stats.connects) == (1, 1, 2)


async def test_the_control_plane_may_tell_of_a_restart() -> None:
    """Without a replay a restart can pass for a gap; who sees a new instance id says so, and sources are asked for."""
    asked = []

    async def refresh() -> list[KvEventSource]:
        asked.append(1)
        return [kv.source]

    with FakeKvPublisher(replay=False) as kv:
        async with AsyncSubscriber([kv.source], refresh=refresh, settings=fast()) as events:
            kv.wait_subscribed()
            kv.publish(STORED)
            await auntil(events, batches(1))
            kv.stop()
            await auntil(events, state(SourceState.CONNECTING))
            events.worker_restarted()
            seen = await auntil(events, lambda seen: any(isinstance(item, Reset) for item in seen))
    assert words(seen) == ["restarted"]
    assert asked


def test_b09_the_wrong_rank_is_reported_and_the_advertised_one_counts() -> None:
    """Two ranks on unrelated ports; one stamps the wrong rank: one notice, and each batch has its source's rank."""
    with (
        FakeKvPublisher(rank=0) as zero,
        FakeKvPublisher(rank=1, stamp=0) as one,
        Subscriber([one.source, zero.source], settings=fast()) as events,
    ):
        for kv in (zero, one):
            kv.wait_subscribed()
            kv.publish(STORED)
            kv.publish(STORED)
        seen = until(events, batches(4))
        stats = {each.source.rank: each for each in events.stats().sources}
    assert sorted(item.rank or 0 for item in seen if isinstance(item, Batch)) == [0, 0, 1, 1]
    [notice] = [item for item in seen if isinstance(item, Notice)]
    assert notice.kind is NoticeKind.RANK_DISAGREES
    assert notice.source is not None
    assert (notice.source.rank, stats[1].rank_disagreements, stats[0].rank_disagreements) == (1, 2, 0)


def test_b09_one_address_for_two_ranks_is_subscribed_once() -> None:
    """The batches are delivered once, and belong to the rank that they are stamped with."""
    with FakeKvPublisher(rank=0, stamp=1) as kv:
        twice = [kv.source, replace(kv.source, data_parallel_rank=1)]
        with Subscriber(twice, settings=fast()) as events:
            kv.wait_subscribed()
            kv.publish(STORED)
            kv.publish(STORED)
            seen = until(events, seq(1))
            assert kv.subscribers == 1
    assert seqs(seen) == [0, 1]
    assert {item.rank for item in seen if isinstance(item, Batch)} == {1}
    assert [item.kind for item in seen if isinstance(item, Notice)] == [NoticeKind.SHARED_ADDRESS]


def test_b09_after_a_restart_with_new_ports_sources_are_fetched_again() -> None:
    """The old address is dead: fresh sources are asked for until they name the new one."""
    with FakeKvPublisher() as old, FakeKvPublisher() as new:
        found = [old.source]
        with Subscriber(found, refresh=lambda: found, settings=fast()) as events:
            old.wait_subscribed()
            old.publish(STORED)
            seen = until(events, batches(1))
            old.stop()
            until(events, state(SourceState.UNREACHABLE), seen=seen)
            found = [new.source]
            new.wait_subscribed()
            new.publish(STORED)
            until(events, batches(2), seen=seen)
            [stats] = events.stats().sources
    assert words(seen) == ["0", "departed", "0"]
    assert stats.source.address == new.source.connect_to


@pytest.mark.parametrize("colour", ["sync", "async"])
async def test_b12_a_peer_that_vanishes_without_a_word(colour: str) -> None:
    """A relay goes silent and stays open: heartbeats notice, and after it comes back nothing is missing."""
    with FakeKvPublisher() as kv, Relay(int(kv.source.endpoint.rpartition(":")[2])) as relay:
        source = replace(kv.source, live=Address(connect_to=relay.address))
        if colour == "sync":
            with Subscriber([source], settings=fast()) as events:
                kv.wait_subscribed()
                kv.publish(STORED)
                seen = until(events, batches(1))
                relay.freeze()
                kv.publish(STORED)
                until(events, lambda seen: states(seen)[-1] is not SourceState.CONNECTED, seen=seen)
                relay.thaw()
                until(events, batches(2), seen=seen)
        else:
            async with AsyncSubscriber([source], settings=fast()) as aevents:
                kv.wait_subscribed()
                kv.publish(STORED)
                seen = await auntil(aevents, batches(1))
                relay.freeze()
                kv.publish(STORED)
                seen += await auntil(aevents, lambda seen: states(seen)[-1:] == [SourceState.UNREACHABLE])
                relay.thaw()
                seen += await auntil(aevents, batches(1))
    assert words(seen) == ["0", "1"]
    assert states(seen)[:3] == [SourceState.CONNECTING, SourceState.CONNECTED, SourceState.CONNECTING]


def test_a_slow_consumer_loses_the_oldest_and_is_told() -> None:
    """The socket is read all the time; what does not fit goes, oldest first, with a gap in its place."""
    with FakeKvPublisher() as kv, Subscriber([kv.source], settings=fast(max_queue=10)) as events:
        kv.wait_subscribed()
        for _ in range(50):
            kv.publish(STORED)
        deadline = time.monotonic() + 5
        while events.stats().dropped < 40 and time.monotonic() < deadline:
            time.sleep(0.005)
        seen = until(events, seq(49))
        stats = events.stats()
    assert words(seen) == ["lost 0-39 overflow", *map(str, range(40, 50))]
    assert stats.dropped == 40
    assert {reason.value: count for reason, count in stats.sources[0].lost.items() if count} == {"overflow": 40}
