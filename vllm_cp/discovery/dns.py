"""Targets from DNS: a name that is one worker, a name with an address per worker, or SRV records.

===========  ===============================  =============================  ==================================
kind         records                          one worker is                  its key
===========  ===============================  =============================  ==================================
``host``     A or AAAA                        the name                       ``name:port``, whatever the address
``each``     A or AAAA                        each address                   ``name:port/address``
``srv``      SRV, and A or AAAA of its hosts  each host and port             ``host:port``
===========  ===============================  =============================  ==================================

For pods behind a headless service ``srv`` is the best of them: the keys are pods' own names, where ``each`` has nothing
but addresses, which are used again for other pods. Names are asked of name servers, with the search list of
``resolv.conf``; ``/etc/hosts`` plays no part.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from vllm_cp._target import parse_target
from vllm_cp.discovery._resolving import Family, NotResolved, Resolving, default_resolver
from vllm_cp.discovery._status import StatusKeeper
from vllm_cp.discovery.base import DEFAULT_POOL, DiscoveredTarget, DiscoveryStatus, Overrides, TargetSet
from vllm_cp.errors import ConfigError

if TYPE_CHECKING:
    from dns.asyncresolver import Resolver

__all__ = ["DnsDiscoverer", "DnsKind", "DnsName"]


class DnsKind(str, Enum):
    """What a name stands for."""

    #: One worker, whose address may change.
    HOST = "host"
    #: A worker at each address.
    EACH = "each"
    #: SRV records: a worker at each host and port.
    SRV = "srv"


@dataclass(frozen=True, slots=True, kw_only=True)
class DnsName:
    """One name to resolve."""

    name: str
    kind: DnsKind = DnsKind.HOST
    #: gRPC port; ``None`` with SRV, which brings its own.
    port: int | None = None
    #: HTTP port of the same hosts, if they have one.
    http_port: int | None = None
    #: ``any``: IPv4, and IPv6 where there is no IPv4; a worker with both is still one worker.
    family: Family = "any"

    def __post_init__(self) -> None:
        if (self.port is None) != (self.kind is DnsKind.SRV):
            raise ConfigError(
                f"{self.name}: {'SRV records bring the port: drop it' if self.port else 'the gRPC port is missing'}"
            )
        for port in (self.port, self.http_port):
            if port is not None:
                parse_target(f"{self.name.rstrip('.')}:{port}")


@dataclass
class _Known:
    """What is known of one name."""

    targets: tuple[DiscoveredTarget, ...] | None = None
    error: str = ""
    #: Monotonic seconds when to ask again.
    due: float = 0.0


class DnsDiscoverer:
    """Names, asked again when their answers run out.

    A name that stops resolving keeps its last answer for ``keep_s`` seconds, and ``status.error`` says so. Then its
    workers are gone, but for the kind ``host``: that worker was named by somebody, and stays with a ``problem``.
    """

    def __init__(
        self,
        names: Iterable[DnsName],
        *,
        min_ttl_s: float = 5.0,
        max_ttl_s: float = 60.0,
        keep_s: float = 300.0,
        timeout_s: float = 5.0,
        resolver: Resolver | None = None,
        pool: str = DEFAULT_POOL,
        overrides: Overrides | None = None,
        name: str = "dns",
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """
        Args:
            names: what to resolve.
            min_ttl_s, max_ttl_s: an answer is used for its own time to live, within these; seconds. A failure is
                followed by another try after ``min_ttl_s``. So a move is noticed within ``max_ttl_s`` at the latest.
            keep_s: how long the last good answer outlives the name, seconds.
            timeout_s: longest wait for an answer, over all servers and tries.
            resolver: ``dns.asyncresolver.Resolver``; the system's by default.
            pool, overrides: for every target.
            name: what to call this source.
            sleep, now, wall: where time comes from.

        Raises ConfigError, and ImportError when dnspython is missing.
        """
        self._names = tuple(names)
        if not self._names or len(set(self._names)) != len(self._names):
            raise ConfigError("dns needs one name at least, and each only once")
        if not 0 < min_ttl_s <= max_ttl_s:
            raise ConfigError(f"dns: min_ttl_s must be above 0 and not above max_ttl_s, not {min_ttl_s}, {max_ttl_s}")
        self._min_s, self._max_s = min_ttl_s, max_ttl_s
        self._sleep, self._now = sleep, now
        self._pool, self._overrides = pool, overrides or Overrides()
        self._name = name
        self._keeper = StatusKeeper(name, wall)
        self._resolving = Resolving(resolver or default_resolver(), timeout_s=timeout_s, keep_s=keep_s, now=now)
        self._known = {one: _Known() for one in self._names}

    @property
    def name(self) -> str:
        """What to call it."""
        return self._name

    @property
    def status(self) -> DiscoveryStatus:
        """How it fares."""
        return self._keeper.status

    async def stream(self) -> AsyncIterator[TargetSet]:
        """The set after each change of an answer."""
        last: TargetSet | None = None
        while True:
            now = self._now()
            await asyncio.gather(*(self._ask(one, known) for one, known in self._known.items() if known.due <= now))
            targets = self._gather()
            if targets is not None and targets != last:
                last = targets
                yield targets
            await self._sleep(max(0.0, min(known.due for known in self._known.values()) - self._now()))

    def _gather(self) -> TargetSet | None:
        known = self._known.values()
        merged, taken = TargetSet.of(target for one in known for target in one.targets or ())
        errors = [one.error for one in known if one.error]
        if taken:
            errors.append(f"{taken[0].key}: found under more than one name, first one used")
        if errors:
            self._keeper.bad("; ".join(dict.fromkeys(errors)))
        else:
            self._keeper.good()
        return None if all(one.targets is None for one in known) else merged

    async def _ask(self, one: DnsName, known: _Known) -> None:
        self._resolving.begin(one)
        targets: tuple[DiscoveredTarget, ...] | None
        try:
            targets = await {DnsKind.HOST: self._host, DnsKind.EACH: self._each, DnsKind.SRV: self._srv}[one.kind](one)
        except NotResolved as failed:
            # Never resolved yet: nothing is known. Resolved once, long ago: there is nobody any more.
            targets = () if known.targets is not None else None
            if one.kind is DnsKind.HOST:
                targets = (self._unresolved(one.name, one.port, str(failed)),)
        ttl_s, errors = self._resolving.end(one)
        known.targets = targets
        known.error = "; ".join(errors)
        known.due = self._now() + min(max(ttl_s, self._min_s), self._max_s)

    async def _host(self, one: DnsName) -> tuple[DiscoveredTarget, ...]:
        addresses = await self._resolving.addresses(one, one.name, one.family)
        assert one.port is not None
        if len(addresses) > 1:
            self._resolving.complain(
                one, f"{one.name}: {len(addresses)} addresses, of which one is used: is this kind 'each'?"
            )
        before = self._known[one].targets
        kept = [address for address in addresses if before and before[0].target == _join(address, one.port)]
        return (self._target(_join(one.name, one.port), kept[0] if kept else addresses[0], one.port, one.name, one),)

    async def _each(self, one: DnsName) -> tuple[DiscoveredTarget, ...]:
        addresses = await self._resolving.addresses(one, one.name, one.family)
        assert one.port is not None
        return tuple(
            self._target(f"{_join(one.name, one.port)}/{address}", address, one.port, one.name, one)
            for address in addresses
        )

    async def _srv(self, one: DnsName) -> tuple[DiscoveredTarget, ...]:
        hosts = await self._resolving.services(one, one.name)

        async def target(host: str, port: int) -> DiscoveredTarget:
            try:
                address = (await self._resolving.addresses(one, host, one.family))[0]
            except NotResolved as failed:
                return self._unresolved(host, port, str(failed))
            return self._target(_join(host, port), address, port, host, one)

        return tuple(await asyncio.gather(*(target(host, port) for host, port in hosts)))

    def _target(self, key: str, address: str, port: int, host: str, one: DnsName) -> DiscoveredTarget:
        return DiscoveredTarget(
            key=key,
            target=_join(address, port),
            http_url=f"http://{_join(address, one.http_port)}" if one.http_port else None,
            pool=self._pool,
            dns_name=host.rstrip("."),
            overrides=self._overrides,
        )

    def _unresolved(self, host: str, port: int | None, problem: str) -> DiscoveredTarget:
        return DiscoveredTarget(
            key=_join(host, port or 0), target=None, problem=problem, pool=self._pool, overrides=self._overrides
        )


def _join(host: str, port: int) -> str:
    host = host.rstrip(".")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
