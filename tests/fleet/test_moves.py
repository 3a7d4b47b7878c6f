"""Workers that come back under a new address."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.certs import make_certs
from tests.discovery.following import FakeClock, until
from tests.discovery.nameserver import NameServer
from vllm_cp import Connection, Tls, TlsFailed
from vllm_cp.discovery import DiscoveryFailed, DnsDiscoverer, DnsKind, DnsName, InThread, StaticDiscoverer
from vllm_cp.fleet import AsyncFleet, Fleet
from vllm_cp.models.server import ServerInfo
from vllm_cp.testing import FakeWorker, TlsFiles


@pytest.fixture
async def names() -> AsyncIterator[NameServer]:
    async with NameServer() as server:
        yield server


@pytest.fixture
def pair() -> Iterator[tuple[FakeWorker, FakeWorker]]:
    """Two workers on one port of two addresses."""
    old, new = ServerInfo(instance_id="old"), ServerInfo(instance_id="new")
    with (
        FakeWorker(host="127.0.0.2", info=old) as first,
        FakeWorker(host="127.0.0.3", port=port(first), info=new) as second,
    ):
        yield first, second


def port(worker: FakeWorker) -> int:
    return int(worker.target.rpartition(":")[2])


async def instance(fleet: AsyncFleet) -> str | None:
    (only,) = await fleet.map(lambda worker: worker.server_info(timeout_s=2.0))
    return only.value.instance_id if only.value is not None else None


async def test_a_name_that_moves_is_followed(names: NameServer, pair: tuple[FakeWorker, FakeWorker]) -> None:
    """The pod was replaced, its name leads elsewhere: one TTL later the new address is asked, under the same key."""
    first, second = pair
    names.set("w.test", "A", "127.0.0.2", ttl=10)
    clock = FakeClock()
    source = DnsDiscoverer(
        [DnsName(name="w.test", port=port(first))], resolver=names.resolver(), sleep=clock.sleep, now=clock.now
    )
    async with AsyncFleet(source) as fleet:
        assert await instance(fleet) == "old"
        (before,) = fleet.targets
        first.stop()
        names.set("w.test", "A", "127.0.0.3", ttl=10)
        assert await instance(fleet) is None
        await clock.advance(10.0)
        await until(lambda: fleet.targets[0].target == second.target)
        assert await instance(fleet) == "new"
        assert fleet.targets[0].key == before.key == f"w.test:{port(first)}"


async def test_a_certificate_carries_the_name_that_was_resolved(names: NameServer, tmp_path: Path) -> None:
    """gRPC dials an address that we found; the name is what the certificate is checked against, without an option."""
    certs = make_certs(tmp_path, ["w.test"])
    tls = Connection(tls=Tls(ca_file=certs.ca))
    names.set("w.test", "A", "127.0.0.2")
    names.set("other.test", "A", "127.0.0.2")
    with FakeWorker(host="127.0.0.2", tls=TlsFiles(cert=certs.server_cert, key=certs.server_key)) as worker:
        wanted = [DnsName(name=name, port=port(worker)) for name in ("w.test", "other.test")]
        async with AsyncFleet(DnsDiscoverer(wanted, resolver=names.resolver()), connection=tls) as fleet:
            right, wrong = await fleet.map(lambda worker: worker.server_info())
    assert right.ok
    assert isinstance(wrong.error, TlsFailed)


async def test_a_name_with_three_addresses_is_three_workers_or_one_and_a_complaint(names: NameServer) -> None:
    """Successive questions under one identity never go to different pods."""
    with FakeWorker(host="127.0.0.2", info=ServerInfo(instance_id="2")) as first:
        at = port(first)
        with (
            FakeWorker(host="127.0.0.3", port=at, info=ServerInfo(instance_id="3")),
            FakeWorker(host="127.0.0.4", port=at, info=ServerInfo(instance_id="4")),
        ):
            names.set("w.test", "A", "127.0.0.4", "127.0.0.2", "127.0.0.3", ttl=0)
            each = DnsName(name="w.test", kind=DnsKind.EACH, port=at)
            async with AsyncFleet(DnsDiscoverer([each], resolver=names.resolver())) as fleet:
                outcomes = await fleet.map(lambda worker: worker.server_info())
                assert [(one.key, one.unwrap().instance_id) for one in outcomes] == [
                    (f"w.test:{at}/127.0.0.{number}", str(number)) for number in (2, 3, 4)
                ]
            source = DnsDiscoverer([DnsName(name="w.test", port=at)], resolver=names.resolver(), min_ttl_s=0.01)
            async with AsyncFleet(source) as fleet:
                for asked in range(4):
                    await until(lambda asked=asked: names.asked("w.test") > asked + 1)  # type: ignore[misc]
                    assert await instance(fleet) == "2"
                assert fleet.status is not None
                assert "3 addresses, of which one is used" in (fleet.status.error or "")


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_five_hundred_moves_cost_nothing_that_stays(pair: tuple[FakeWorker, FakeWorker]) -> None:
    """Each move closes the old connection and opens a new one: files and threads stay as they are."""
    workers = {"old": pair[0].target, "new": pair[1].target}
    source = StaticDiscoverer([f"w={workers['new']}"])
    levels: list[tuple[int, int]] = []
    async with AsyncFleet(source) as fleet:
        for move in range(500):
            wanted = "old" if move % 2 == 0 else "new"
            source.replace([f"w={workers[wanted]}"])
            await until(lambda wanted=wanted: fleet.targets[0].target == workers[wanted])  # type: ignore[misc]
            assert await instance(fleet) == wanted
            if move in (49, 499):
                levels.append((open_files(), threading.active_count()))
    (files, threads), (files_later, threads_later) = levels
    assert files_later <= files + 10
    assert threads_later <= threads + 2


def test_a_synchronous_fleet_follows_moves_too(pair: tuple[FakeWorker, FakeWorker]) -> None:
    """It looks at its source before each round, and closes what it leaves behind."""
    workers = [worker.target for worker in pair]
    source = StaticDiscoverer([])
    levels: list[tuple[int, int]] = []
    with Fleet(source) as fleet:
        for move in range(200):
            source.replace([f"w={workers[move % 2]}"])
            (only,) = fleet.map(lambda worker: worker.server_info())
            assert only.unwrap().instance_id == ("old", "new")[move % 2]
            if move in (19, 199):
                levels.append((open_files(), threading.active_count()))
    (files, threads), (files_later, threads_later) = levels
    assert files_later <= files + 10
    assert threads_later <= threads + 2


async def test_a_synchronous_fleet_over_dns(names: NameServer, pair: tuple[FakeWorker, FakeWorker]) -> None:
    """With a thread around the source that reads it."""
    import asyncio

    names.set("w.test", "A", "127.0.0.2")
    source = DnsDiscoverer([DnsName(name="w.test", port=port(pair[0]))], resolver=names.resolver(), min_ttl_s=0.02)

    def ask() -> list[str | None]:
        with InThread(source) as followed, Fleet(followed) as fleet:
            return [one.unwrap().instance_id for one in fleet.map(lambda worker: worker.server_info())]

    assert await asyncio.to_thread(ask) == ["old"]


async def test_no_set_in_time_is_no_empty_fleet(names: NameServer) -> None:
    """Entering the fleet says what is wrong instead."""
    each = DnsName(name="gone.test", kind=DnsKind.EACH, port=1)
    with pytest.raises(DiscoveryFailed, match=r"dns: no targets within 0.3 s: gone.test: no such name"):
        async with AsyncFleet(DnsDiscoverer([each], resolver=names.resolver()), first_set_s=0.3):
            pass
