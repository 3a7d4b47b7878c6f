"""Targets from a real name server on loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.discovery.following import FakeClock, Following
from tests.discovery.nameserver import NameServer
from vllm_cp import ConfigError
from vllm_cp.discovery import DnsDiscoverer, DnsKind, DnsName


@pytest.fixture
async def names() -> AsyncIterator[NameServer]:
    async with NameServer() as server:
        yield server


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def asking(names: NameServer, clock: FakeClock, *wanted: DnsName, **options: Any) -> DnsDiscoverer:
    return DnsDiscoverer(wanted, resolver=names.resolver(), sleep=clock.sleep, now=clock.now, **options)


def host(name: str = "w.test", **fields: Any) -> DnsName:
    return DnsName(name=name, port=9, **fields)


def each(name: str = "w.test", **fields: Any) -> DnsName:
    return DnsName(name=name, kind=DnsKind.EACH, port=9, **fields)


def srv(name: str = "_grpc._tcp.w.test", **fields: Any) -> DnsName:
    return DnsName(name=name, kind=DnsKind.SRV, **fields)


async def test_a_host_is_one_worker_that_keeps_its_key_when_it_moves(names: NameServer, clock: FakeClock) -> None:
    """The address changes, the identity is the name; the new address is used when the old answer has run out."""
    names.set("w.test", "A", "127.0.0.2", ttl=7)
    async with Following(asking(names, clock, host(http_port=80))) as seen:
        await seen.count(1)
        found = seen.targets["w.test:9"]
        assert (found.target, found.dns_name, found.http_url) == ("127.0.0.2:9", "w.test", "http://127.0.0.2:80")
        names.set("w.test", "A", "127.0.0.3", ttl=7)
        await clock.advance(6.9)
        assert len(seen.sets) == 1
        await clock.advance(0.2)
        await seen.count(2)
        assert seen.targets["w.test:9"].target == "127.0.0.3:9"


@pytest.mark.parametrize(("ttl", "nap"), [(0, 5.0), (7, 7.0), (86_400, 60.0)])
async def test_an_answer_is_used_for_its_time_within_bounds(
    names: NameServer, clock: FakeClock, ttl: int, nap: float
) -> None:
    """Neither is a server asked without a pause, nor is a move missed for a day."""
    names.set("w.test", "A", "127.0.0.2", ttl=ttl)
    async with Following(asking(names, clock, host())) as seen:
        await seen.count(1)
        assert await clock.asleep() == nap


async def test_an_alias_lives_as_long_as_its_shortest_link(names: NameServer, clock: FakeClock) -> None:
    """A CNAME that is about to change counts, whatever the address behind it says."""
    names.set("w.test", "CNAME", "pod.test.", ttl=10)
    names.set("pod.test", "A", "127.0.0.2", ttl=50)
    async with Following(asking(names, clock, host())) as seen:
        await seen.count(1)
        assert await clock.asleep() == 10.0
        assert seen.targets["w.test:9"].target == "127.0.0.2:9"


async def test_names_are_asked_each_in_its_own_time(names: NameServer, clock: FakeClock) -> None:
    """A short-lived name does not make a long-lived one expensive."""
    names.set("fast.test", "A", "127.0.0.2", ttl=5)
    names.set("slow.test", "A", "127.0.0.3", ttl=50)
    async with Following(asking(names, clock, host("fast.test"), host("slow.test"))) as seen:
        await seen.count(1)
        await clock.advance(49.0)
        assert (names.asked("fast.test"), names.asked("slow.test")) == (10, 1)


async def test_ipv6_only(names: NameServer, clock: FakeClock) -> None:
    """On a single-stack IPv6 network there are only AAAA records; addresses come in brackets, spelled one way."""
    names.set("w.test", "AAAA", "FD00:0::5")
    async with Following(asking(names, clock, host(http_port=80), each())) as seen:
        await seen.count(1)
        assert seen.keys == ["w.test:9", "w.test:9/fd00::5"]
        assert {t.target for t in seen.targets.values()} == {"[fd00::5]:9"}
        assert seen.targets["w.test:9"].http_url == "http://[fd00::5]:80"


async def test_a_worker_with_both_families_is_one_worker(names: NameServer, clock: FakeClock) -> None:
    """By default IPv4 where there is any; either can be asked for."""
    names.set("w.test", "A", "127.0.0.2")
    names.set("w.test", "AAAA", "::1")
    async with Following(asking(names, clock, each())) as seen:
        await seen.count(1)
        assert seen.keys == ["w.test:9/127.0.0.2"]
    async with Following(asking(names, clock, each(family="ipv6"))) as seen:
        await seen.count(1)
        assert seen.keys == ["w.test:9/::1"]


async def test_a_host_with_several_addresses_sticks_to_one_and_says_so(names: NameServer, clock: FakeClock) -> None:
    """Else successive questions go to different workers under one name."""
    names.set("w.test", "A", "127.0.0.3", "127.0.0.2", "127.0.0.4", ttl=30)
    source = asking(names, clock, host())
    async with Following(source) as seen:
        await seen.count(1)
        assert seen.targets["w.test:9"].target == "127.0.0.2:9"
        assert source.status.error == "w.test: 3 addresses, of which one is used: is this kind 'each'?"
        names.set("w.test", "A", "127.0.0.1", "127.0.0.4", "127.0.0.2", ttl=30)
        await clock.advance(31.0)
        assert len(seen.sets) == 1


async def test_each_address_can_be_a_worker(names: NameServer, clock: FakeClock) -> None:
    """A headless service without SRV records: workers come and go with their addresses."""
    names.set("w.test", "A", "127.0.0.3", "127.0.0.2")
    async with Following(asking(names, clock, each())) as seen:
        await seen.count(1)
        assert seen.keys == ["w.test:9/127.0.0.2", "w.test:9/127.0.0.3"]
        names.set("w.test", "A", "127.0.0.3", "127.0.0.10")
        await clock.advance(5.0)
        await seen.count(2)
        assert seen.keys == ["w.test:9/127.0.0.3", "w.test:9/127.0.0.10"]


async def test_srv_records_name_workers_and_ports(names: NameServer, clock: FakeClock) -> None:
    """The key is the pod's own name, which outlives its address."""
    names.set("_grpc._tcp.w.test", "SRV", "0 0 9001 w-1.test.", "0 0 9000 w-0.test.", ttl=30)
    names.set("w-0.test", "A", "127.0.0.2", ttl=10)
    names.set("w-1.test", "AAAA", "::1", ttl=30)
    async with Following(asking(names, clock, srv())) as seen:
        await seen.count(1)
        assert [(t.key, t.target, t.dns_name) for t in seen.sets[-1].targets] == [
            ("w-0.test:9000", "127.0.0.2:9000", "w-0.test"),
            ("w-1.test:9001", "[::1]:9001", "w-1.test"),
        ]
        names.set("w-0.test", "A", "127.0.0.3", ttl=10)
        await clock.advance(10.0)
        await seen.count(2)
        assert seen.targets["w-0.test:9000"].target == "127.0.0.3:9000"


async def test_a_long_srv_answer_comes_over_tcp(names: NameServer, clock: FakeClock) -> None:
    """A headless service of hundreds of pods doesn't fit into a datagram."""
    numbers = range(150)
    names.set("_grpc._tcp.w.test", "SRV", *(f"0 0 9 a-rather-long-pod-name-{n}.test." for n in numbers))
    for number in numbers:
        names.set(f"a-rather-long-pod-name-{number}.test", "A", f"127.0.1.{number}")
    async with Following(asking(names, clock, srv())) as seen:
        await seen.count(1)
        assert len(seen.targets) == 150


async def test_a_host_of_an_srv_record_without_an_address_is_there_with_a_problem(
    names: NameServer, clock: FakeClock
) -> None:
    """Somebody says the worker exists: it is shown, and gets its address when there is one."""
    names.set("_grpc._tcp.w.test", "SRV", "0 0 9 w-0.test.")
    source = asking(names, clock, srv())
    async with Following(source) as seen:
        await seen.count(1)
        assert seen.targets["w-0.test:9"].problem == "w-0.test: no such name"
        assert source.status.error == "w-0.test: no such name"
        names.set("w-0.test", "A", "127.0.0.2")
        await clock.advance(5.0)
        await seen.count(2)
        assert seen.targets["w-0.test:9"].target == "127.0.0.2:9"
        assert source.status.error is None


async def test_an_srv_record_can_say_that_there_is_no_service(names: NameServer, clock: FakeClock) -> None:
    """The root as a host is an empty set, and a good answer."""
    names.set("_grpc._tcp.w.test", "SRV", "0 0 0 .")
    source = asking(names, clock, srv())
    async with Following(source) as seen:
        await seen.count(1)
        assert seen.keys == []
        assert source.status.error is None


async def test_a_name_that_stops_resolving_keeps_its_workers_for_a_while(names: NameServer, clock: FakeClock) -> None:
    """A pod that died takes its record with it, and just then it must not vanish; but not for ever."""
    names.set("w.test", "A", "127.0.0.2")
    source = asking(names, clock, each(), keep_s=300.0)
    async with Following(source) as seen:
        await seen.count(1)
        names.drop("w.test")
        await clock.advance(299.0)
        assert len(seen.sets) == 1
        assert source.status.error == "w.test: no such name; the last answer goes on for up to 300 s"
        await clock.advance(7.0)
        await seen.count(2)
        assert seen.keys == []
        assert source.status.error == "w.test: no such name"
        names.set("w.test", "A", "127.0.0.2")
        await clock.advance(5.0)
        await seen.count(3)
        assert source.status.error is None


async def test_a_host_that_never_resolves_is_there_with_a_problem(names: NameServer, clock: FakeClock) -> None:
    """Somebody wrote its name down, so it is shown from the start, and after its last answer has grown too old."""
    source = asking(names, clock, host(), keep_s=20.0)
    async with Following(source) as seen:
        await seen.count(1)
        assert seen.targets["w.test:9"].problem == "w.test: no such name"
        names.set("w.test", "A", "127.0.0.2")
        await clock.advance(5.0)
        await seen.count(2)
        names.set("w.test", "A")
        await clock.advance(30.0)
        await seen.count(3)
        assert seen.targets["w.test:9"].problem == "w.test: the name has no address record"


@pytest.mark.parametrize("kind", [each(), srv()])
async def test_no_answer_yet_is_not_an_empty_set(names: NameServer, clock: FakeClock, kind: DnsName) -> None:
    """Before the first answer nothing is known, and the status says why."""
    source = asking(names, clock, kind)
    async with Following(source) as seen:
        await clock.asleep()
        assert seen.sets == []
        assert "no such name" in (source.status.error or "")
        assert source.status.last_success is None


async def test_servers_that_fail_or_are_silent_are_told_apart(names: NameServer, clock: FakeClock) -> None:
    """Three kinds of trouble, three messages; the workers stay."""
    names.set("w.test", "A", "127.0.0.2")
    source = asking(names, clock, each(), timeout_s=0.2)
    async with Following(source) as seen:
        await seen.count(1)
        names.failing = True
        await clock.advance(5.0)
        assert "the name servers fail" in (source.status.error or "")
        names.failing, names.silent = False, True
        await clock.advance(5.0)
        assert "no answer from the name servers within 0.2 s" in (source.status.error or "")
        names.silent = False
        await clock.advance(5.0)
        assert source.status.error is None
        assert len(seen.sets) == 1


async def test_one_name_in_trouble_does_not_hold_up_the_others(names: NameServer, clock: FakeClock) -> None:
    """The good name's workers are there and move."""
    names.set("w.test", "A", "127.0.0.2")
    async with Following(asking(names, clock, each("gone.test"), host())) as seen:
        await seen.count(1)
        names.set("w.test", "A", "127.0.0.3")
        await clock.advance(5.0)
        await seen.count(2)
        assert seen.targets["w.test:9"].target == "127.0.0.3:9"


async def test_names_that_lead_to_one_worker_are_told(names: NameServer, clock: FakeClock) -> None:
    """A service and its SRV record may well be configured both."""
    names.set("w.test", "A", "127.0.0.2")
    names.set("_grpc._tcp.w.test", "SRV", "0 0 9 w.test.")
    source = asking(names, clock, host(), srv())
    async with Following(source) as seen:
        await seen.count(1)
        assert seen.keys == ["w.test:9"]
        assert source.status.error == "w.test:9: found under more than one name, first one used"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"name": "w.test"}, "the gRPC port is missing"),
        ({"name": "w.test", "kind": DnsKind.SRV, "port": 9}, "SRV records bring the port"),
        ({"name": "w.test", "port": 99999}, "from 1 to 65535"),
        ({"name": "w test", "port": 9}, "spaces"),
        ({"name": "http://w", "port": 9}, "URL"),
    ],
)
def test_a_name_that_makes_no_sense_is_refused(fields: dict[str, Any], words: str) -> None:
    """At once, not at the first question."""
    with pytest.raises(ConfigError, match=words):
        DnsName(**fields)


async def test_bounds_that_make_no_sense_are_refused(names: NameServer, clock: FakeClock) -> None:
    """No names, one twice, or a lower bound above the upper one."""
    for wanted, options in [((), {}), ((host(), host()), {}), ((host(),), {"min_ttl_s": 90.0})]:
        with pytest.raises(ConfigError):
            asking(names, clock, *wanted, **options)
