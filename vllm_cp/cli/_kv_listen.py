"""The KV-cache events of several workers, read as one stream."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import NamedTuple

import click

from vllm_cp.cli import _context, _fanout, _stdio
from vllm_cp.cli._exit import Exit, overall
from vllm_cp.cli._output import report_of_failure
from vllm_cp.client import ControlClient
from vllm_cp.config import Connection
from vllm_cp.errors import ConfigError
from vllm_cp.models.kv_source import KvEventSource

try:
    from vllm_cp.kv import Item, Settings, Subscriber, SubscriberStats
except ConfigError as error:
    raise click.UsageError(str(error)) from None

__all__ = ["OFF", "Heard", "Listening", "Sources", "Unheard", "find_sources"]

OFF = "events are off: the engine was not started with --kv-events-config, or its publisher is null"
#: How often the reader of the stream looks around, seconds.
_LOOK_S = 0.1
#: Items that wait here; more wait with their subscriber, which drops the oldest and says so.
_WAITING = 1000


class Heard(NamedTuple):
    """One item of one worker."""

    target: str
    item: Item


class Unheard(NamedTuple):
    """A worker that there is nothing to hear from."""

    target: str
    exit: Exit
    #: In words, without the worker's name.
    why: str
    #: What asking it failed with; ``None`` when it answered.
    error: Exception | None = None


class Sources(NamedTuple):
    """What there is to listen to."""

    #: Usable sources, by worker, and how to reach that worker.
    usable: Mapping[str, tuple[Connection, tuple[KvEventSource, ...]]]
    #: The other workers, in order.
    failed: Sequence[Unheard]

    def exit(self) -> Exit:
        """The exit code of a run that listens; says why there are workers that it does not hear."""
        for unheard in self.failed:
            _stdio.say(f"{unheard.target}: {unheard.why}")
        return overall([*(unheard.exit for unheard in self.failed), *(Exit.OK for _ in self.usable)])


def find_sources(connections: Sequence[Connection], ranks: Sequence[int]) -> Sources:
    """Ask every worker for its publishers."""
    by_name = {_context.name_of(connection): connection for connection in connections}
    replies = _fanout.ask_all(connections, lambda client: client.kv_event_sources())
    usable: dict[str, tuple[Connection, tuple[KvEventSource, ...]]] = {}
    failed = []
    for reply in replies:
        if reply.value is None:
            report = report_of_failure(reply.target, reply.error or AssertionError("no answer"))
            assert report.error is not None
            why = str(report.error["message"]).removeprefix(f"{reply.target}: ")
            failed.append(Unheard(reply.target, report.exit, why, reply.error))
            continue
        wanted, code, why = _wanted(reply.value, ranks)
        if wanted:
            usable[reply.target] = (by_name[reply.target], wanted)
        else:
            failed.append(Unheard(reply.target, code, why))
    return Sources(usable, failed)


def _wanted(sources: Sequence[KvEventSource], ranks: Sequence[int]) -> tuple[tuple[KvEventSource, ...], Exit, str]:
    if not sources:
        return (), Exit.NOT_READY, OFF
    chosen = [s for s in sources if not ranks or s.data_parallel_rank is None or s.data_parallel_rank in ranks]
    if not chosen:
        there = ", ".join(str(s.data_parallel_rank) for s in sources)
        return (), Exit.REFUSED, f"no such rank: there are {there}"
    usable = tuple(s for s in chosen if s.connect_to is not None)
    return usable, Exit.NOT_SUPPORTED, f"its events can't be read from here: {chosen[0].reason}"


class Listening:
    """Subscribers of all workers: ``with Listening(...) as heard: for each in heard: ...``

    Iterating gives each item as it comes, and ``None`` when nothing came for a moment. It ends when closed, or when no
    subscriber can bring anything more.
    """

    def __init__(self, sources: Sources, settings: Settings) -> None:
        self._items: queue.Queue[Heard] = queue.Queue(_WAITING)
        self._stopping = threading.Event()
        self._subscribers = {
            target: Subscriber(found, refresh=_asker(connection), worker=target, settings=settings)
            for target, (connection, found) in sources.usable.items()
        }
        self._threads = [
            threading.Thread(target=self._read, args=each, daemon=True, name="vllm-cp-kv")
            for each in self._subscribers.items()
        ]

    def stats(self) -> dict[str, SubscriberStats]:
        """The numbers so far, by worker."""
        return {target: subscriber.stats() for target, subscriber in self._subscribers.items()}

    def __enter__(self) -> Listening:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopping.set()
        closers = [threading.Thread(target=each.close, daemon=True) for each in self._subscribers.values()]
        for closer in closers:
            closer.start()
        deadline = time.monotonic() + 2.0
        for thread in (*closers, *self._threads):
            thread.join(max(0.0, deadline - time.monotonic()))

    def __iter__(self) -> Iterator[Heard | None]:
        while True:
            try:
                yield self._items.get(timeout=_LOOK_S)
            except queue.Empty:
                if not any(thread.is_alive() for thread in self._threads) and self._items.empty():
                    return
                yield None

    def _read(self, target: str, subscriber: Subscriber) -> None:
        while not self._stopping.is_set():
            item = subscriber.poll(_LOOK_S)
            if item is None and subscriber.over:
                return
            while item is not None and not self._stopping.is_set():
                try:
                    self._items.put(Heard(target, item), timeout=_LOOK_S)
                except queue.Full:
                    continue
                break


def _asker(connection: Connection) -> Callable[[], tuple[KvEventSource, ...]]:
    def ask() -> tuple[KvEventSource, ...]:
        with ControlClient(connection) as client:
            return client.kv_event_sources()

    return ask
