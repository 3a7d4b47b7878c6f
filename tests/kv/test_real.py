"""The genuine vllm-rs with simulated engines that publish: through its discovery to the index."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kv.collect import auntil, batches, fast, seqs, until, words
from tests.real.conftest import require_binary
from tests.real.sim.facts import NEWEST, EngineFacts, KvEventsFacts
from tests.real.stack import Stack
from vllm_cp import AsyncControlClient, ControlClient, PauseMode
from vllm_cp.kv import (
    AsyncSubscriber,
    Batch,
    Cleared,
    Item,
    PrefixIndex,
    Removed,
    SourceState,
    StateChange,
    Stored,
    Subscriber,
)

pytestmark = pytest.mark.real


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    """Two ranks, eight blocks of 16 tokens each."""
    require_binary(NEWEST)
    facts = EngineFacts(num_gpu_blocks=8, block_size=16)
    with Stack(engines=2, facts=facts, kv_events=KvEventsFacts(topic="kv@tiny"), directory=tmp_path) as running:
        yield running


def connected(count: int) -> object:
    """So many sources can be heard."""
    return lambda seen: (
        len([item for item in seen if isinstance(item, StateChange) and item.state is SourceState.CONNECTED]) >= count
    )


def events(items: list[Item], kind: type) -> list[object]:
    """Events of a kind."""
    return [event for item in items if isinstance(item, Batch) for event in item.events if isinstance(event, kind)]


def test_generate_stores_and_a_full_cache_removes(stack: Stack) -> None:
    """A generated prompt shows up as stored under the rank that served it; prompts that need its room remove it; the
    index follows."""
    with ControlClient(stack.target) as client:
        sources = client.kv_event_sources()
        assert [(source.connect_to, source.replay.connect_to) for source in sources] == [
            (stack.kv_endpoint(rank), stack.kv_replay(rank)) for rank in (0, 1)
        ]
        index = PrefixIndex()
        with Subscriber(sources, refresh=client.kv_event_sources, worker="w", settings=fast()) as subscriber:
            until(subscriber, connected(2))
            prompt, other = list(range(10, 74)), list(range(100, 228))
            client.generate(prompt, rank=1)
            seen = until(subscriber, lambda seen: events(seen, Stored))
            for item in seen:
                index.apply(item)
            [match] = index.match(prompt)
            assert (match.worker, match.rank, match.tokens, match.by_medium["GPU"].blocks) == ("w", 1, 64, 4)
            assert match.complete
            client.generate(other, rank=1)
            more = until(subscriber, lambda seen: len(events(seen, Removed)) >= 1)
            for item in more:
                index.apply(item)
            assert index.match(prompt) == ()
            assert index.match(other)[0].rank == 1
            client.pause(mode=PauseMode.KEEP, clear_cache=True)
            client.resume()
            until(subscriber, lambda seen: events(seen, Cleared))


async def test_gaps_restarts_and_the_past(stack: Stack) -> None:
    """What was published before is fetched, what is dropped too, and a new instance on the same ports is a reset."""
    stack.publish(tokens=list(range(32)))
    async with AsyncControlClient(stack.target) as client:
        sources = await client.kv_event_sources()
        async with AsyncSubscriber(
            sources[:1], refresh=client.kv_event_sources, worker="w", settings=fast()
        ) as subscriber:
            assert seqs(await auntil(subscriber, batches(1))) == [0]
            stack.drop(2)
            for start in (100, 200, 300):
                stack.publish(tokens=list(range(start, start + 16)))
            assert seqs(await auntil(subscriber, batches(3))) == [1, 2, 3]
            [stats] = subscriber.stats().sources
            assert (stats.replayed, sum(stats.lost.values()), stats.restarts) == (4, 0, 0)
            await asyncio.to_thread(stack.restart)
            stack.publish(tokens=list(range(48)))
            seen = await auntil(subscriber, batches(1), timeout_s=20.0)
            assert words(seen) == ["restarted", "0"]
