"""No events: off, not supported, not allowed, not readable, or just quiet? Five answers, through a worker's gRPC."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.kv.collect import auntil, batches, fast, seqs, state, until
from vllm_cp import AsyncControlClient, ControlClient
from vllm_cp.kv import AsyncSubscriber, SourceState, StateChange, Subscriber
from vllm_cp.testing import FakeKvPublisher, FakeWorker


@pytest.fixture
def kv() -> Iterator[FakeKvPublisher]:
    """A publisher."""
    with FakeKvPublisher(topic="kv@tiny") as publisher:
        yield publisher


def last(items: object) -> StateChange:
    """The last state."""
    return [item for item in items if isinstance(item, StateChange)][-1]  # type: ignore[attr-defined]


def test_b11_events_are_off() -> None:
    """The worker answers with an empty list. Without a way to ask again that is the end."""
    with FakeWorker() as worker, ControlClient(worker.target) as client:
        items = list(Subscriber(client.kv_event_sources(), settings=fast()))
        assert [(item.state, item.source) for item in items if isinstance(item, StateChange)] == [
            (SourceState.DISABLED, None)
        ]


def test_b11_events_are_switched_on_later(kv: FakeKvPublisher) -> None:
    """Off is asked again after a long while."""
    with (
        FakeWorker() as worker,
        ControlClient(worker.target) as client,
        Subscriber(None, refresh=client.kv_event_sources, settings=fast(refresh_final_s=0.2)) as events,
    ):
        seen = until(events, state(SourceState.DISABLED))
        worker.set(kv_sources=[kv.source])
        until(events, state(SourceState.CONNECTED), seen=seen)


@pytest.mark.parametrize(
    ("code", "expected"),
    [("UNIMPLEMENTED", SourceState.UNSUPPORTED), ("PERMISSION_DENIED", SourceState.DENIED)],
)
async def test_b11_the_worker_does_not_say(code: str, expected: SourceState) -> None:
    """An engine without the RPC, and a mesh that forbids it: both are final, so there is one question and no storm."""
    with FakeWorker() as worker:
        worker.fail("GetKvEventSources", code)
        async with AsyncControlClient(worker.target) as client:
            settings = fast(refresh_final_s=30.0)
            async with AsyncSubscriber(None, refresh=client.kv_event_sources, settings=settings) as events:
                change = last(await auntil(events, state(expected)))
                assert change.source is None
                assert code in change.detail
                with pytest.raises(TimeoutError):
                    await auntil(events, lambda seen: seen, timeout_s=0.3)
        assert len([call for call in worker.calls if call.method.endswith("GetKvEventSources")]) == 1


def test_b11_a_transport_that_cannot_be_read(kv: FakeKvPublisher) -> None:
    """Events over something else than ZeroMQ: unsupported, and the transport is named."""
    nats = replace(kv.source, transport="nats", endpoint="nats://broker:4222")
    with FakeWorker(kv_sources=[nats]) as worker, ControlClient(worker.target) as client:
        [change] = list(Subscriber(client.kv_event_sources(), settings=fast()))
        assert isinstance(change, StateChange)
        assert (change.state, "nats" in change.detail) == (SourceState.UNSUPPORTED, True)
        assert change.source is not None


def test_b11_just_quiet(kv: FakeKvPublisher) -> None:
    """Connected, and nothing comes: that is what it says, with the time of the last batch."""
    with (
        FakeWorker(kv_sources=[kv.source]) as worker,
        ControlClient(worker.target) as client,
        Subscriber(client.kv_event_sources(), refresh=client.kv_event_sources, settings=fast()) as events,
    ):
        until(events, state(SourceState.CONNECTED))
        [stats] = events.stats().sources
        assert (stats.state, stats.last_batch_at, stats.last_seq) == (SourceState.CONNECTED, None, None)
        kv.wait_subscribed()
        kv.store(range(32))
        assert seqs(until(events, batches(1))) == [0]
        [stats] = events.stats().sources
        assert stats.last_batch_at is not None


def test_b11_nobody_there(kv: FakeKvPublisher) -> None:
    """The publisher is dead and the worker still names it: unreachable, until it is back."""
    with FakeWorker(kv_sources=[kv.source]) as worker, ControlClient(worker.target) as client:
        kv.stop()
        with Subscriber(client.kv_event_sources(), refresh=client.kv_event_sources, settings=fast()) as events:
            seen = until(events, state(SourceState.UNREACHABLE))
            assert kv.source.connect_to is not None
            assert kv.source.connect_to in last(seen).detail
            kv.restart()
            until(events, state(SourceState.CONNECTED), seen=seen)
