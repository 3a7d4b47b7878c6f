"""After ten thousand batches, drops, restarts and a partition: the index is what the publisher holds, or it says so."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest

from tests.kv.collect import fast, states, until
from tests.kv.relay import Relay
from vllm_cp.kv import Gap, PrefixIndex, Reset, ResetReason, Settings, SourceState, Subscriber
from vllm_cp.models.kv_source import Address
from vllm_cp.testing import FakeKvPublisher, HashKind, KvLayout


@dataclass
class Traffic:
    """Prompts that share their beginnings, now and then an eviction or a clear."""

    kv: FakeKvPublisher
    chance: random.Random
    prompts: list[tuple[list[int], str | None, str | None]] = field(default_factory=list)

    def step(self) -> None:
        """One batch, rarely none."""
        kind = self.chance.random()
        if kind < 0.001:
            self.kv.clear()
        elif kind < 0.05:
            self.kv.evict(self.chance.randrange(1, 4))
        else:
            self.store()

    def store(self) -> None:
        """A prompt that often begins like a recent one."""
        chance = self.chance
        base: list[int] = []
        lora, salt = chance.choice((None, None, "sql")), chance.choice((None, None, "pepper"))
        if self.prompts and chance.random() < 0.6:
            base, lora, salt = chance.choice(self.prompts[-40:])
        new = [chance.randrange(1000) for _ in range(16 * chance.randrange(1, 5))]
        prompt = base[: chance.randrange(len(base) + 1)][:512] + new
        self.prompts.append((prompt, lora, salt))
        self.kv.store(prompt, lora=lora, salt=salt)


@dataclass
class Reader:
    """Feeds an index, and keeps what was said about restarts, and losses since the last one."""

    events: Subscriber
    index: PrefixIndex
    lost: int = 0
    restarts: int = 0

    def read(self, seconds: float = 0.0) -> None:
        """Take in what comes until nothing has come for so long."""
        while (item := self.events.poll(seconds)) is not None:
            self.index.apply(item)
            if isinstance(item, Gap):
                self.lost += item.lost
            elif isinstance(item, Reset) and item.reason is ResetReason.RESTARTED:
                self.restarts += 1
                self.lost = 0  # what a process took with it when it died was said, and is void with the rest

    def catch_up(self, kv: FakeKvPublisher, timeout_s: float) -> None:
        """Until the last batch that was published is in."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.read(0.02)
            stats = self.events.stats()
            if not stats.queue_depth and [each.last_seq for each in stats.sources] == [kv.next_seq - 1]:
                return self.read()
            assert time.monotonic() < deadline, stats


class Network:
    """Relays in front of the live and the replay socket, which fail together."""

    def __init__(self, kv: FakeKvPublisher) -> None:
        self._relays = [
            Relay(int(address.rpartition(":")[2]))
            for address in (kv.source.endpoint, kv.source.replay_endpoint)
            if address is not None
        ]
        live, *replay = [Address(connect_to=relay.address) for relay in self._relays]
        self.source = replace(kv.source, live=live, replay=replay[0] if replay else Address())

    @contextmanager
    def up(self) -> Iterator[None]:
        """As long as it lasts."""
        for relay in self._relays:
            relay.__enter__()
        try:
            yield
        finally:
            for relay in self._relays:
                relay.__exit__(None, None, None)

    def freeze(self) -> None:
        """A partition."""
        for relay in self._relays:
            relay.freeze()

    def thaw(self) -> None:
        """Its end."""
        for relay in self._relays:
            relay.thaw()


def leading(kv: FakeKvPublisher, prompt: list[int], lora: str | None, salt: str | None) -> int:
    """Tokens from the start of the prompt that the publisher holds, by its own cache."""
    blocks = kv.cache.blocks
    names = {(block.parent, block.tokens, block.lora, block.salt): name for name, block in blocks.items()}
    parent = None
    for at in range(0, len(prompt), 16):
        salted = salt if at == 0 else None
        parent = names.get((parent, tuple(prompt[at : at + 16]), lora, salted))
        if parent is None:
            return at
    return len(prompt)


def story(kv: FakeKvPublisher, settings: Settings, *, count: int, partition_s: float) -> tuple[Reader, Traffic]:
    """Restarts after a quarter and three quarters, a partition in the middle, one batch in a hundred dropped."""
    chance = random.Random(count)
    traffic, network = Traffic(kv, chance), Network(kv)
    with network.up(), Subscriber([network.source], worker="w", settings=settings) as events:
        reader = Reader(events, PrefixIndex())
        kv.wait_subscribed()
        for number in range(count):
            if number in (count // 4, 3 * count // 4):
                kv.restart()
            elif number == count // 2:
                network.freeze()
                end = time.monotonic() + partition_s
                while time.monotonic() < end:
                    traffic.step()
                    time.sleep(partition_s / 200)
                network.thaw()
            if chance.random() < 0.01:
                kv.drop(1)
            traffic.step()
            if number % 20 == 0:
                reader.read()
        kv.wait_subscribed(timeout_s=30.0)
        traffic.store()  # so that a drop at the very end shows
        reader.catch_up(kv, 60.0)
    return reader, traffic


def agree(reader: Reader, traffic: Traffic) -> None:
    """Block by block, and prompt by prompt."""
    kv, index = traffic.kv, reader.index
    assert {block: copies for _, _, block, copies in index.held("w", 0)} == dict.fromkeys(kv.cache.blocks, 1)
    assert len(index) == len(kv.cache.blocks) > 50
    for prompt, lora, salt in traffic.prompts[-100:]:
        found = index.match(prompt, lora=lora, salt=salt)
        assert (found[0].tokens if found else 0) == leading(kv, prompt, lora, salt)


@pytest.mark.parametrize(
    ("layout", "hashes"), [(KvLayout.MAP, HashKind.UNSIGNED), (KvLayout.ARRAY, HashKind.BYTES)], ids=["today", "old"]
)
def test_the_contents_are_the_publisher_s_own(layout: KvLayout, hashes: HashKind) -> None:
    """With a replay nothing is lost: after it all the index holds what the publisher holds, and calls it complete."""
    with FakeKvPublisher(capacity=400, layout=layout, hashes=hashes, buffer_steps=20_000) as kv:
        reader, traffic = story(kv, fast(), count=10_000, partition_s=1.0)
    assert (reader.lost, reader.restarts) == (0, 2)
    [view] = reader.index.views()
    assert (view.complete, view.unlinked_blocks) == (True, 0)
    agree(reader, traffic)


def test_a_replay_that_forgets_is_a_loss_that_is_said() -> None:
    """The history is shorter than the partition: what is lost is counted to the batch and the view is not complete;
    from the next restart on all is right again."""
    with FakeKvPublisher(capacity=400, buffer_steps=50) as kv:
        traffic, network = Traffic(kv, random.Random(2)), Network(kv)
        with network.up(), Subscriber([network.source], worker="w", settings=fast()) as events:
            reader = Reader(events, PrefixIndex())
            kv.wait_subscribed()
            for _ in range(100):
                traffic.store()
            reader.catch_up(kv, 30.0)
            network.freeze()
            before = kv.next_seq
            until(events, lambda seen: states(seen)[-1:] == [SourceState.UNREACHABLE])
            for _ in range(200):
                traffic.store()
            network.thaw()
            reader.catch_up(kv, 30.0)
            assert reader.lost == kv.next_seq - before - 50 > 0
            [view] = reader.index.views()
            assert (view.complete, view.lost_batches, view.since_seq) == (False, reader.lost, 0)
            kv.restart()
            for _ in range(49):
                traffic.store()
            reader.catch_up(kv, 30.0)
        assert reader.index.views()[0].complete
        agree(reader, traffic)


def test_without_a_replay_every_drop_is_said() -> None:
    """One in a hundred dropped and nobody to ask: as many are said to be lost as were dropped."""
    with (
        FakeKvPublisher(replay=False, capacity=400) as kv,
        Subscriber([kv.source], worker="w", settings=fast()) as events,
    ):
        reader, traffic = Reader(events, PrefixIndex()), Traffic(kv, random.Random(1))
        kv.wait_subscribed()
        dropped = 0
        traffic.store()
        for number in range(2_000):
            if number % 100 == 50:
                kv.drop(1)
                dropped += 1
            traffic.step()
        traffic.store()
        reader.catch_up(kv, 30.0)
    assert reader.lost == dropped == 20
    assert not reader.index.views()[0].complete


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ten_thousand_batches_and_ten_seconds_of_partition() -> None:
    """The same at full length, with the real time constants."""
    with FakeKvPublisher(capacity=2_000, buffer_steps=20_000) as kv:
        reader, traffic = story(kv, Settings(), count=10_000, partition_s=10.0)
    assert (reader.lost, reader.restarts) == (0, 2)
    assert reader.index.views()[0].complete
    agree(reader, traffic)
