"""Fleet: many workers, with threads."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from vllm_cp._attempts import RpcHook
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
from vllm_cp._fleet.thread_streams import Streams
from vllm_cp.client import ControlClient
from vllm_cp.config import Connection
from vllm_cp.discovery.base import DiscoveredTarget, DiscoveryStatus, SyncDiscoverer, TargetSet
from vllm_cp.errors import ClientClosed, ConfigError
from vllm_cp.models.outcome import Outcome

if TYPE_CHECKING:
    from vllm_cp._http_connection import HttpConnection

__all__ = ["Fleet"]

T = TypeVar("T")
#: How often a watch looks at the source, seconds.
_LOOK_S = 0.5

_Member = Member[ControlClient]


class Fleet:
    """Many workers at once. Thread-safe; close it, or use ``with``.

    ::

        with Fleet(["llama-0:8001", "llama-1:8001"]) as fleet:
            for outcome in fleet.map(lambda worker: worker.server_info(), deadline_s=2):
                print(outcome.key, outcome.value or outcome.error)

    Each worker has one client, made on first use, kept as long as the worker stays where it is, and closed when it
    leaves or the fleet is closed. There is no event loop anywhere and no thread between calls: a source (static or
    files) is looked at before each use. DNS and Kubernetes need a loop, so they need ``InThread`` around them, which
    is a thread you start, or an ``AsyncFleet``.
    """

    def __init__(
        self,
        targets: Targets | SyncDiscoverer,
        /,
        *,
        connection: Connection | None = None,
        on_rpc: RpcHook | None = None,
    ) -> None:
        """
        Args:
            targets: ``[NAME=]HOST:PORT`` texts, ``Connection`` or ``DiscoveredTarget`` values; or a source with
                ``look()``: StaticDiscoverer, FileDiscoverer, InThread.
            connection: how to reach workers, apart from where; its own target is not used.
            on_rpc: called after each attempt of each call to any worker, on the thread of that call.

        Raises ConfigError.
        """
        self._source: SyncDiscoverer | None = None
        ready: dict[str, Connection] = {}
        members = TargetSet()
        if isinstance(targets, Iterable):
            members, ready = plain(targets)
        elif hasattr(targets, "look"):
            self._source = targets
        elif hasattr(targets, "stream"):
            raise ConfigError(
                f"{type(targets).__name__} needs an event loop: put InThread(…) around it, or use AsyncFleet"
            )
        else:
            raise ConfigError(f"a Fleet takes targets or a source, not {type(targets).__name__}")

        def make(connection: Connection) -> ControlClient:
            return ControlClient(connection, on_rpc=on_rpc)

        self._roster = Roster(make, connection, ready)
        self._roster.replace(members)
        self._lock = threading.Lock()
        self._watchers: set[SimpleQueue[Any]] = set()
        self._closed = False

    @classmethod
    def from_daemon(cls, url: str | HttpConnection, /) -> Fleet:
        """A fleet as a ``vllm-cp-exporter`` sees it, which is the one that asks the workers: a consumer adds no load.

        ``snapshot()`` and ``watch()`` give the same types as of a direct fleet, as of the daemon's last look;
        ``map()`` and ``client()`` raise ConfigError. While the daemon does not answer, ``snapshot()`` raises
        ControlError, and a ``watch()`` that began goes on without a change: ``status`` says what is wrong.

        Args:
            url: the daemon's base URL, or an ``HttpConnection`` with TLS files and a password file.

        Raises ConfigError. Needs ``vllm-cp[http]``.
        """
        from vllm_cp._fleet.daemon_threads import DaemonFleet

        return DaemonFleet(url)

    @property
    def targets(self) -> tuple[DiscoveredTarget, ...]:
        """Who is in it now, in order. Raises DiscoveryFailed."""
        self._members()
        return self._roster.targets.targets

    @property
    def status(self) -> DiscoveryStatus | None:
        """How its source fares; ``None`` for plain targets."""
        return self._source.status if self._source is not None else None

    def client(self, key: str) -> ControlClient:
        """The client of one worker; the fleet closes it, you don't. Raises KeyError, ConfigError, ClientClosed."""
        return self._roster.member(key).client()

    def start(self) -> Fleet:
        """Look at the source, if there is one; ``with`` does it for you. Raises DiscoveryFailed."""
        self._members()
        return self

    def close(self) -> None:
        """Close every client; calls in flight end, watches stop. Closing twice is fine."""
        with self._lock:
            self._closed = True
            leaving = self._roster.replace(TargetSet())
            watchers = tuple(self._watchers)
        for watcher in watchers:
            watcher.put(None)
        for client in leaving:
            client.close()

    def __enter__(self) -> Fleet:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def map(
        self, fn: Callable[[ControlClient], T], *, deadline_s: float | None = None, at_once: int = 64
    ) -> list[Outcome[T]]:
        """Ask every worker: one Outcome each, in the order of ``targets``.

        Args:
            fn: gets a worker's client; called on up to ``at_once`` threads. Meant for reads; each worker is asked once.
            deadline_s: seconds for all of it; what isn't finished then gets OutOfTime. A call in flight can't be
                interrupted from outside: it ends in the background by its own ``timeout_s``, 5 s by default.
            at_once: workers asked at the same time.

        A worker's own failure is its Outcome: ControlError, ConfigError, OSError, a time-out, ClientClosed when it left
        meanwhile. Any other exception is a defect of ``fn``: nobody else is asked, and it is raised. Raises
        DiscoveryFailed.
        """
        return self._ask(lambda member: fn(member.client()), deadline_s, at_once)

    def snapshot(self, *, deadline_s: float | None = None, at_once: int = 64) -> FleetSnapshot:
        """Health, server, model and KV-event sources of every worker. A worker that doesn't answer costs one deadline.

        ``deadline_s`` and ``at_once`` as for ``map``; facts that came before the deadline are kept."""
        as_of = time.time()
        members = self._members()
        looks = {member: Look() for member in members}

        def look(member: _Member) -> None:
            mine, client = looks[member], member.client()
            for fact, method in FACTS:
                try:
                    mine.came(fact, getattr(client, method)())
                except EXPECTED as error:
                    if mine.failed(fact, error):
                        return

        outcomes = self._ask(look, deadline_s, at_once, members)
        return together(as_of, members, looks.values(), outcomes)

    def watch(self, *, check_every_s: float = 5.0) -> Iterator[FleetChange]:
        """Changes as they happen: who joins, moves and leaves, each worker's health, and its instance.

        It begins with a WorkerAdded and a HealthChanged for each worker, and ends when the fleet is closed. Each worker
        has one health stream, see ``ControlClient.watch`` for ``check_every_s``; a broken one is opened again after
        1.5 s, after a minute every 10 s, and every 60 s where time does not help (TLS, credentials). A stream takes a
        connection and two threads of its own, so for hundreds of workers use ``AsyncFleet``. Close the iterator to end
        them at once. Raises DiscoveryFailed.
        """
        self._members()
        news: SimpleQueue[Any] = SimpleQueue()
        streams = Streams(self._roster.connect, news, check_every_s)
        seen = TargetSet()
        with self._lock:
            self._watchers.add(news)
        try:
            while not self._closed:
                try:
                    self._members()
                except ClientClosed:
                    return
                if seen is not self._roster.targets:
                    old, seen = seen, self._roster.targets
                    streams.follow(seen)
                    yield from set_changes(old, seen, time.time())
                try:
                    item = news.get(timeout=_LOOK_S)
                except Empty:
                    continue
                if isinstance(item, BaseException):
                    raise item
                if item is not None and streams.current(item[0]):
                    yield item[1]
        finally:
            with self._lock:
                self._watchers.discard(news)
            streams.follow(TargetSet())

    def _members(self) -> list[_Member]:
        """Who is in it, after a look at the source."""
        leaving: list[ControlClient] = []
        with self._lock:
            if self._closed:
                raise ClientClosed("this fleet was closed; make a new one")
            if self._source is not None:
                targets = self._source.look()
                if targets is not self._roster.targets and targets != self._roster.targets:
                    leaving = self._roster.replace(targets)
            members = self._roster.members
        for client in leaving:
            client.close()
        return members

    def _ask(
        self,
        fn: Callable[[_Member], T],
        deadline_s: float | None,
        at_once: int,
        members: list[_Member] | None = None,
    ) -> list[Outcome[T]]:
        check_bounds(deadline_s, at_once)
        ends = None if deadline_s is None else time.monotonic() + deadline_s
        if members is None:
            members = self._members()
        turns, answers = deque(enumerate(members)), SimpleQueue[tuple[int, Outcome[T] | BaseException]]()
        threads = [
            threading.Thread(target=_asker, args=(fn, turns, answers), daemon=True, name="vllm-cp-fleet")
            for _ in range(min(at_once, len(members)))
        ]
        outcomes: list[Outcome[T] | None] = [None] * len(members)
        try:
            for thread in threads:
                thread.start()
            for _ in members:
                left = None if ends is None else max(0.0, ends - time.monotonic())
                try:
                    index, answer = answers.get(timeout=left)
                except Empty:
                    break
                if isinstance(answer, BaseException):
                    raise answer
                outcomes[index] = answer
            else:
                for thread in threads:
                    thread.join()
        finally:
            waiting = _drain(turns)
        return [
            outcome or unfinished(members[index], deadline_s, index not in waiting)
            for index, outcome in enumerate(outcomes)
        ]


def _asker(
    fn: Callable[[_Member], T],
    turns: deque[tuple[int, _Member]],
    answers: SimpleQueue[tuple[int, Outcome[T] | BaseException]],
) -> None:
    """One thread of a map: whoever is free takes the next worker."""
    while True:
        try:
            index, member = turns.popleft()
        except IndexError:
            return
        try:
            value = fn(member)
        except EXPECTED as error:
            answers.put((index, failed(member, error)))
        except BaseException as defect:  # noqa: BLE001  (raised where map was called)
            blame(defect, member)
            answers.put((index, defect))
        else:
            answers.put((index, Outcome(key=member.target.key, target=member.target.target, value=value)))


def _drain(turns: deque[tuple[int, _Member]]) -> set[int]:
    """Take away the turns that are left, so that the threads end; whose they were."""
    left = set()
    while True:
        try:
            left.add(turns.popleft()[0])
        except IndexError:
            return left
