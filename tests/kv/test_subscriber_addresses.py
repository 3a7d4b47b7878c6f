"""Topics, IPv6, paths, and publishers that connect."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.kv.collect import STORED, batches, fast, number, pack, seq, seqs, state, states, until
from tests.real.ports import Ports
from vllm_cp.kv import SourceState, StateChange, Subscriber
from vllm_cp.models.kv_source import Address
from vllm_cp.testing import FakeKvPublisher


@pytest.fixture
def ports() -> Iterator[Ports]:
    """Loopback ports that no other worker of this run uses."""
    with Ports() as held:
        yield held


def test_topics_are_honoured() -> None:
    """ZeroMQ hears every topic that begins alike; only the one that was advertised counts."""
    with FakeKvPublisher(topic="kv") as kv, Subscriber([kv.source], settings=fast()) as events:
        kv.wait_subscribed()
        kv.poison(b"kv-2", number(0), pack(STORED))
        kv.poison(b"other", number(0), pack(STORED))
        kv.publish(STORED)
        kv.publish(STORED)
        assert seqs(until(events, seq(1))) == [0, 1]
        assert events.stats().sources[0].foreign == 1


def test_ipv6() -> None:
    """An IPv6 address, live and replay; without the option ZeroMQ would connect and hear nothing."""
    with FakeKvPublisher(host="::1") as kv, Subscriber([kv.source], settings=fast()) as events:
        assert kv.source.connect_to is not None
        assert kv.source.connect_to.startswith("tcp://[::1]:")
        kv.wait_subscribed()
        kv.publish(STORED)
        kv.drop(1)
        kv.publish(STORED)
        kv.publish(STORED)
        assert seqs(until(events, seq(2))) == [0, 1, 2]


def test_ipc(tmp_path: Path) -> None:
    """A path on this machine."""
    with FakeKvPublisher(endpoint=f"ipc://{tmp_path}/kv") as kv, Subscriber([kv.source], settings=fast()) as events:
        kv.wait_subscribed()
        kv.publish(STORED)
        assert seqs(until(events, seq(0))) == [0]


@pytest.mark.parametrize("first", ["subscriber", "publisher"])
def test_a_publisher_that_connects(first: str, ports: Ports) -> None:
    """vLLM connects its publisher to a plain host, so the subscriber binds there; who comes first does not matter."""
    [port] = ports.take()
    kv = FakeKvPublisher(endpoint=f"tcp://127.0.0.1:{port}", connect=True)
    with Subscriber([kv.source], settings=fast()) as events:
        if first == "publisher":
            kv.start()
        seen = until(events, state(SourceState.CONNECTING))
        if first == "subscriber":
            kv.start()
        try:
            kv.wait_subscribed()
            kv.publish(STORED)
            until(events, batches(1), seen=seen)
        finally:
            kv.close()
        until(events, lambda seen: states(seen)[-1] is SourceState.CONNECTING, seen=seen)
    assert states(seen) == [SourceState.CONNECTING, SourceState.CONNECTED, SourceState.CONNECTING]
    assert "bound" in next(item.detail for item in seen if isinstance(item, StateChange))


def test_an_address_to_bind_that_is_taken_is_connected_to(ports: Ports) -> None:
    """A forwarder listens there, or a publisher that binds after all: then it is heard by connecting."""
    [port] = ports.take()
    with FakeKvPublisher(endpoint=f"tcp://127.0.0.1:{port}") as kv:
        source = replace(kv.source, live=Address(connect_to=kv.source.endpoint, publisher_connects=True))
        with Subscriber([source], settings=fast()) as events:
            kv.wait_subscribed()
            kv.publish(STORED)
            seen = until(events, batches(1))
    assert "connected to" in next(item.detail for item in seen if isinstance(item, StateChange))


def test_an_address_that_is_bound_can_be_bound_again(ports: Ports) -> None:
    """The source changes its topic and keeps its address: the old socket lets go before the new one binds."""
    [port] = ports.take()
    kv = FakeKvPublisher(endpoint=f"tcp://127.0.0.1:{port}", connect=True, topic="new")
    found = [replace(kv.source, topic="old")]
    with Subscriber(found, refresh=lambda: found, settings=fast()) as events:
        seen = until(events, state(SourceState.CONNECTING))
        found = [kv.source]
        events.worker_restarted()
        until(events, lambda seen: states(seen).count(SourceState.CONNECTING) == 2, seen=seen)
        with kv:
            kv.wait_subscribed()
            kv.publish(STORED)
            until(events, batches(1), seen=seen)
    assert all("bound;" in item.detail for item in seen if isinstance(item, StateChange) and item.detail)
