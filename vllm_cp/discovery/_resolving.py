"""Questions to name servers, and answers that outlive a failure for a while."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from vllm_cp.errors import ConfigError

if TYPE_CHECKING:
    from dns.asyncresolver import Resolver
    from dns.resolver import Answer

__all__ = ["Family", "NotResolved", "Resolving", "default_resolver"]

T = TypeVar("T")
Family = Literal["any", "ipv4", "ipv6"]
#: Questions in flight for one name: an SRV record may lead to hundreds of hosts.
_AT_ONCE = 16


class NotResolved(Exception):
    """No answer, and no earlier one that may still be used. Says which name and why."""


def default_resolver() -> Resolver:
    """The system's. Raises ImportError when dnspython is missing, ConfigError when the system has none."""
    try:
        import dns.asyncresolver
        import dns.resolver
    except ImportError:
        raise ImportError("DNS discovery needs dnspython: pip install 'vllm-cp[discovery]'", name="dns") from None
    try:
        return dns.asyncresolver.Resolver()
    except dns.resolver.NoResolverConfiguration as error:
        raise ConfigError(f"no name servers are configured on this machine: {error}") from None


@dataclass
class _Kept(Generic[T]):
    """An answer and when it came, monotonic seconds."""

    answer: T
    at: float


@dataclass
class _Round:
    """What a round of questions for one name brought."""

    ttl_s: float = float("inf")
    errors: list[str] = field(default_factory=list)
    asked: set[tuple[Hashable, str, str]] = field(default_factory=set)
    gate: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_AT_ONCE))


class Resolving:
    """Asks, and remembers. A round is all questions that one configured name leads to."""

    def __init__(self, resolver: Resolver, *, timeout_s: float, keep_s: float, now: Callable[[], float]) -> None:
        self._resolver = resolver
        self._timeout_s = timeout_s
        self._keep_s = keep_s
        self._now = now
        self._kept: dict[tuple[Hashable, str, str], _Kept[Any]] = {}
        self._rounds: dict[Hashable, _Round] = {}

    def begin(self, who: Hashable) -> None:
        """A round for ``who`` begins."""
        self._rounds[who] = _Round()

    def end(self, who: Hashable) -> tuple[float, list[str]]:
        """How long its answers live, seconds (0 after a failure), and what went wrong.

        Hosts that were not asked for are forgotten."""
        done = self._rounds.pop(who)
        for key in [key for key in self._kept if key[0] == who and key not in done.asked]:
            del self._kept[key]
        return done.ttl_s, done.errors

    def complain(self, who: Hashable, error: str) -> None:
        """Something is odd with the answers."""
        self._rounds[who].errors.append(error)

    async def addresses(self, who: Hashable, host: str, family: Family) -> list[str]:
        """The addresses of a host, in numeric order. Raises NotResolved."""

        async def ask() -> tuple[list[str], float]:
            import dns.resolver

            if family != "ipv6":
                try:
                    return _numbers(await self._query(host, "A"))
                except dns.resolver.NoAnswer:
                    if family == "ipv4":
                        raise
            return _numbers(await self._query(host, "AAAA"))

        return await self._ask(who, host, "address", ask)

    async def services(self, who: Hashable, name: str) -> list[tuple[str, int]]:
        """Host and port of each SRV record, in order. Raises NotResolved."""

        async def ask() -> tuple[list[tuple[str, int]], float]:
            answer = await self._query(name, "SRV")
            hosts = {(record.target.to_text(omit_final_dot=True), int(record.port)) for record in answer}
            # The root as a host is the way to say "there is no such service".
            return sorted(pair for pair in hosts if pair[0] not in ("", ".")), _ttl(answer)

        return await self._ask(who, name, "SRV", ask)

    async def _ask(self, who: Hashable, name: str, what: str, ask: Callable[[], Awaitable[tuple[T, float]]]) -> T:
        import dns.exception

        key, this = (who, name, what), self._rounds[who]
        this.asked.add(key)
        try:
            async with this.gate:
                answer, ttl_s = await ask()
        except (dns.exception.DNSException, OSError) as error:
            this.ttl_s = 0.0
            kept: _Kept[T] | None = self._kept.get(key)
            why = f"{name}: {_reason(error, what, self._timeout_s)}"
            if kept is None or self._now() - kept.at > self._keep_s:
                this.errors.append(why)
                raise NotResolved(why) from None
            this.errors.append(f"{why}; the last answer goes on for up to {self._keep_s:g} s")
            return kept.answer
        this.ttl_s = min(this.ttl_s, ttl_s)
        self._kept[key] = _Kept(answer, self._now())
        return answer

    async def _query(self, name: str, kind: str) -> Answer:
        return await self._resolver.resolve(name, kind, lifetime=self._timeout_s, search=True)


def _numbers(answer: Answer) -> tuple[list[str], float]:
    addresses = {ipaddress.ip_address(record.address) for record in answer}
    return [str(address) for address in sorted(addresses, key=int)], _ttl(answer)


def _ttl(answer: Answer) -> float:
    # Of the whole chain: an alias may live shorter than the address it leads to.
    return float(answer.chaining_result.minimum_ttl)


def _reason(error: Exception, what: str, timeout_s: float) -> str:
    import dns.exception
    import dns.resolver

    if isinstance(error, dns.resolver.NXDOMAIN):
        return "no such name"
    if isinstance(error, dns.resolver.NoAnswer):
        return f"the name has no {what} record"
    if isinstance(error, dns.resolver.NoNameservers):
        return f"the name servers fail: {error}"
    if isinstance(error, dns.exception.Timeout):
        return f"no answer from the name servers within {timeout_s:g} s"
    return f"cannot ask the name servers: {error}"
