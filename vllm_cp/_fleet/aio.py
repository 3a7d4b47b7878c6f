"""AsyncFleet: many workers, asyncio."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from vllm_cp._attempts import RpcHook
from vllm_cp._fleet.aio_streams import Streams
from vllm_cp._fleet.changes import FleetChange, set_changes
from vllm_cp._fleet.roster import (
    EXPECTED,
    Member,
    Roster,
    Targets,
    blame,
    check_bounds,
    failed,
    plain,
    unfinished,
)
from vllm_cp._fleet.snapshot import FACTS, FleetSnapshot, Look, together
from vllm_cp.aio import AsyncControlClient
from vllm_cp.config import Connection
from vllm_cp.discovery.base import DiscoveredTarget, Discoverer, DiscoveryFailed, DiscoveryStatus, TargetSet
from vllm_cp.discovery.merge import reading
from vllm_cp.errors import ClientClosed, ConfigError
from vllm_cp.models.outcome import Outcome

if TYPE_CHECKING:
    from vllm_cp._http_connection import HttpConnection

__all__ = ["AsyncFleet"]

T = TypeVar("T")
#: How long a cancelled function may take to end before it is left behind.
_GRACE_S = 1.0

_Member = Member[AsyncControlClient]


class AsyncFleet:
    """Many workers for asyncio: the same names as ``Fleet``.

    ::

        async with AsyncFleet(["llama-0:8001", "llama-1:8001"]) as fleet:
            for outcome in await fleet.map(lambda worker: worker.server_info(), deadline_s=2):
                print(outcome.key, outcome.value or outcome.error)

    Each worker has one client, made on first use, kept as long as the worker stays where it is, and closed when it
    leaves or the fleet is closed. With a ``Discoverer`` a task of the running loop follows it, from ``start()`` (or the
    first use) to ``close()``.
    """

    def __init__(
        self,
        targets: Targets | Discoverer,
        /,
        *,
        connection: Connection | None = None,
        on_rpc: RpcHook | None = None,
        first_set_s: float = 10.0,
    ) -> None:
        """
        Args:
            targets: ``[NAME=]HOST:PORT`` texts, ``Connection`` or ``DiscoveredTarget`` values; or a ``Discoverer``.
            connection: how to reach workers, apart from where; its own target is not used.
            on_rpc: called after each attempt of each call to any worker.
            first_set_s: how long to wait for a Discoverer's first set, seconds.

        Raises ConfigError.
        """
        self._source: Discoverer | None = None
        ready: dict[str, Connection] = {}
        members = TargetSet()
        if isinstance(targets, Iterable):
            members, ready = plain(targets)
        elif hasattr(targets, "stream"):
            self._source = targets
        else:
            raise ConfigError(f"an AsyncFleet takes targets or a Discoverer, not {type(targets).__name__}")

        def make(connection: Connection) -> AsyncControlClient:
            return AsyncControlClient(connection, on_rpc=on_rpc)

        self._roster = Roster(make, connection, ready)
        self._roster.replace(members)
        self._first_set_s = first_set_s
        self._following: asyncio.Task[None] | None = None
        self._first: asyncio.Event | None = None
        self._watchers: set[asyncio.Queue[Any]] = set()
        self._closed = False

    @classmethod
    def from_daemon(cls, url: str | HttpConnection, /) -> AsyncFleet:
        """A fleet as a ``vllm-cp-exporter`` sees it, which is the one that asks the workers: a consumer adds no load.

        ``snapshot()`` and ``watch()`` give the same types as of a direct fleet, as of the daemon's last look;
        ``map()`` and ``client()`` raise ConfigError. While the daemon does not answer, ``snapshot()`` raises
        ControlError, and a ``watch()`` that began goes on without a change: ``status`` says what is wrong.

        Args:
            url: the daemon's base URL, or an ``HttpConnection`` with TLS files and a password file.

        Raises ConfigError. Needs ``vllm-cp[http]``.
        """
        from vllm_cp._fleet.daemon_aio import AsyncDaemonFleet

        return AsyncDaemonFleet(url)

    @property
    def targets(self) -> tuple[DiscoveredTarget, ...]:
        """Who is in it now, in order."""
        return self._roster.targets.targets

    @property
    def status(self) -> DiscoveryStatus | None:
        """How its Discoverer fares; ``None`` for plain targets."""
        return self._source.status if self._source is not None else None

    def client(self, key: str) -> AsyncControlClient:
        """The client of one worker; the fleet closes it, you don't. Raises KeyError, ConfigError, ClientClosed."""
        return self._roster.member(key).client()

    async def start(self) -> AsyncFleet:
        """Follow the Discoverer, if there is one, and wait for its first set; ``async with`` does it for you.

        Raises DiscoveryFailed when none comes in ``first_set_s`` seconds."""
        await self._ready()
        return self

    async def close(self) -> None:
        """Close every client; calls in flight end, watches stop. Closing twice is fine."""
        self._closed = True
        following, self._following = self._following, None
        if following is not None and following.get_loop() is asyncio.get_running_loop():
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        for watcher in self._watchers:
            watcher.put_nowait(None)
        await self._replace(TargetSet())

    async def __aenter__(self) -> AsyncFleet:
        try:
            return await self.start()
        except BaseException:
            await self.close()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def map(
        self,
        fn: Callable[[AsyncControlClient], Awaitable[T]],
        *,
        deadline_s: float | None = None,
        at_once: int = 64,
    ) -> list[Outcome[T]]:
        """Ask every worker: one Outcome each, in the order of ``targets``.

        Args:
            fn: gets a worker's client and returns an awaitable. Meant for reads; each worker is asked once.
            deadline_s: seconds for all of it; what isn't finished then is cancelled and gets OutOfTime.
            at_once: workers asked at the same time.

        A worker's own failure is its Outcome: ControlError, ConfigError, OSError, a time-out, ClientClosed when it left
        meanwhile. Any other exception is a defect of ``fn``: it ends all calls and is raised. Raises DiscoveryFailed.
        """
        return await self._ask(lambda member: fn(member.client()), deadline_s, at_once)

    async def snapshot(self, *, deadline_s: float | None = None, at_once: int = 64) -> FleetSnapshot:
        """Health, server, model and KV-event sources of every worker. A worker that doesn't answer costs one deadline.

        ``deadline_s`` and ``at_once`` as for ``map``; facts that came before the deadline are kept."""
        as_of = time.time()
        looks: dict[_Member, Look] = {}

        async def look(member: _Member) -> None:
            mine = looks[member] = Look()
            client = member.client()
            for fact, method in FACTS:
                try:
                    mine.came(fact, await getattr(client, method)())
                except EXPECTED as error:
                    if mine.failed(fact, error):
                        return

        await self._ready()
        members = self._roster.members
        outcomes = await self._ask(look, deadline_s, at_once, members)
        return together(as_of, members, [looks.get(member) or Look() for member in members], outcomes)

    async def watch(self, *, check_every_s: float = 5.0) -> AsyncIterator[FleetChange]:
        """Changes as they happen: who joins, moves and leaves, each worker's health, and its instance.

        It begins with a WorkerAdded and a HealthChanged for each worker, and ends when the fleet is closed. Each worker
        has one health stream, see ``AsyncControlClient.watch`` for ``check_every_s``; a broken one is opened again
        after 1.5 s, after a minute every 10 s, and every 60 s where time does not help (TLS, credentials). Close the
        iterator (``contextlib.aclosing``) to end the streams at once. Raises DiscoveryFailed.
        """
        await self._ready()
        news: asyncio.Queue[Any] = asyncio.Queue()
        streams = Streams(self._roster, news, check_every_s)
        seen = TargetSet()
        self._watchers.add(news)
        try:
            while not self._closed:
                if seen is not self._roster.targets:
                    old, seen = seen, self._roster.targets
                    await streams.follow(seen)
                    for change in set_changes(old, seen, time.time()):
                        yield change
                item = await news.get()
                if isinstance(item, BaseException):
                    raise item
                if item is not None and streams.current(item[0]):
                    yield item[1]
        finally:
            self._watchers.discard(news)
            await streams.follow(TargetSet())

    async def _ready(self) -> None:
        """Refuse a closed fleet; see that the Discoverer is followed on this loop, and that there was a set."""
        if self._closed:
            raise ClientClosed("this fleet was closed; make a new one")
        if self._source is None:
            return
        loop = asyncio.get_running_loop()
        if self._following is None or self._following.get_loop() is not loop:
            self._first = asyncio.Event()
            self._following = loop.create_task(self._follow(self._source, self._first), name="vllm-cp-discovery")
        assert self._first is not None
        if self._following.done():
            self._following.result()
        if not self._first.is_set():
            waiting = asyncio.ensure_future(self._first.wait())
            try:
                await asyncio.wait(
                    (waiting, self._following), timeout=self._first_set_s, return_when=asyncio.FIRST_COMPLETED
                )
            finally:
                waiting.cancel()
            if self._following is not None and self._following.done() and not self._following.cancelled():
                self._following.result()
            if not self._first.is_set():
                why = self._source.status.error or "no answer yet"
                raise DiscoveryFailed(f"{self._source.name}: no targets within {self._first_set_s:g} s: {why}")

    async def _follow(self, source: Discoverer, first: asyncio.Event) -> None:
        try:
            async with reading(source) as sets:
                async for targets in sets:
                    await self._replace(targets)
                    first.set()
        except Exception as defect:
            for watcher in self._watchers:
                watcher.put_nowait(defect)
            raise

    async def _replace(self, targets: TargetSet) -> None:
        leaving = self._roster.replace(targets)
        for watcher in self._watchers:
            watcher.put_nowait(None)
        await asyncio.gather(*(client.close() for client in leaving))

    async def _ask(
        self,
        fn: Callable[[_Member], Awaitable[T]],
        deadline_s: float | None,
        at_once: int,
        members: list[_Member] | None = None,
    ) -> list[Outcome[T]]:
        check_bounds(deadline_s, at_once)
        if members is None:
            await self._ready()
            members = self._roster.members
        outcomes: list[Outcome[T] | None] = [None] * len(members)
        # One iterator for all askers: whoever is free takes the next worker.
        turns = enumerate(members)
        begun, over = 0, False

        async def asker() -> None:
            nonlocal begun
            for index, member in turns:
                if over:  # cancelled, and the function made something else of it
                    return
                begun = index + 1
                try:
                    value = await fn(member)
                except EXPECTED as error:
                    outcomes[index] = failed(member, error)
                except Exception as defect:
                    blame(defect, member)
                    raise
                else:
                    outcomes[index] = Outcome(key=member.target.key, target=member.target.target, value=value)

        askers = [asyncio.ensure_future(asker()) for _ in range(min(at_once, len(members)))]
        if askers:
            try:
                done, _ = await asyncio.wait(askers, timeout=deadline_s, return_when=asyncio.FIRST_EXCEPTION)
                for ended in done:
                    ended.result()
            finally:
                over = True
                await _end(askers)
        return [
            outcome or unfinished(members[index], deadline_s, index < begun) for index, outcome in enumerate(outcomes)
        ]


async def _end(tasks: Sequence[asyncio.Future[None]]) -> None:
    """Cancel what still runs and wait for it, though not for ever: a function may refuse to end."""
    left = []
    for task in tasks:
        task.add_done_callback(_retrieved)
        if not task.done():
            task.cancel()
            left.append(task)
    if left:
        await asyncio.wait(left, timeout=_GRACE_S)


def _retrieved(task: asyncio.Future[None]) -> None:
    """Tell asyncio that nobody forgot about the exception of a task: one defect of many is raised."""
    if not task.cancelled():
        task.exception()
