"""Subscriber and AsyncSubscriber: the KV-cache events of one worker, in order, with every loss said."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import TracebackType
from typing import Any

from vllm_cp.errors import ClientClosed, ForkedClient
from vllm_cp.kv._asking import Asker, AsyncAsker, Sources, on_loop
from vllm_cp.kv._delivery import Delivery
from vllm_cp.kv._listener import Listener
from vllm_cp.kv._queue import ItemQueue
from vllm_cp.kv.settings import Settings
from vllm_cp.kv.stream import Item, SourceState, SubscriberStats

__all__ = ["AsyncSubscriber", "Subscriber"]

#: Closing takes a tenth of this; it is the longest that anybody waits for it.
_CLOSE_S = 1.0
#: An async iteration lets others run at least this often, items.
_AT_ONCE = 64


class _Subscriber:
    """What both colours share: a listening thread, a queue, and the way from bytes to items."""

    def __init__(self, sources: Sources | None, worker: str, settings: Settings | None) -> None:
        self.worker = worker
        self._settings = settings if settings is not None else Settings()
        self._sources = None if sources is None else tuple(sources)
        self._queue = ItemQueue(self._settings.max_queue, self._settings.max_queue_bytes)
        self._delivery = Delivery()
        self._ready: deque[Item] = deque()
        self._listener: Listener | None = None
        self._finalizer: weakref.finalize[..., Any] | None = None
        self._closed = False
        self._pid = os.getpid()

    def worker_restarted(self) -> None:
        """Tell it that the control plane shows a new ``instance_id``: sources are fetched again, and views that began
        with the old process are reset. Restarts that show in the stream itself need no telling.
        """
        if self._listener is not None:
            self._listener.restarted()

    def stats(self) -> SubscriberStats:
        """The numbers so far; from any thread, also after closing."""
        listener = self._listener
        feeds = [] if listener is None else listener.feeds
        found = [self._delivery.stats(feed, self._queue.dropped_of.get(feed.source, 0)) for feed in feeds]
        if self._closed:
            found = [replace(stats, state=SourceState.CLOSED) for stats in found]
        asked, failed = (0, 0) if listener is None else listener.refreshes
        return SubscriberStats(
            sources=tuple(found),
            queue_depth=self._queue.depth,
            queue_bytes=self._queue.bytes,
            dropped=self._queue.dropped,
            refreshes=asked,
            refresh_failures=failed,
        )

    def _open(self, asker: Asker | AsyncAsker | None) -> None:
        if self._pid != os.getpid():
            raise ForkedClient("this subscriber was made before fork(): its sockets are not yours, make a new one")
        if self._closed:
            raise ClientClosed("this subscriber is closed")
        listener = self._listener = Listener(self.worker, self._settings, self._queue, asker)
        self._finalizer = weakref.finalize(self, _end, listener)
        if asker is not None:
            asker.listener = weakref.ref(listener)
        listener.start(self._sources)

    def _pop(self) -> Item | None:
        """The next item that is here already."""
        while not self._ready:
            entry = self._queue.take()
            if entry is None:
                return None
            self._ready.extend(self._delivery.items(entry))
        return self._ready.popleft()

    def _over(self) -> bool:
        """Nothing will come any more. Raises what ended the listening thread, if it was a bug."""
        if self._pid != os.getpid():
            raise ForkedClient("this subscriber was made before fork(): its sockets are not yours, make a new one")
        if self._queue.closed and self._listener is not None and self._listener.failure is not None:
            raise RuntimeError("the listening thread of this subscriber failed") from self._listener.failure
        return self._closed or (self._queue.closed and self._queue.empty and not self._ready)


class Subscriber(_Subscriber):
    """The KV-cache events of one worker, as an iterator. Close it, or use ``with``; iterate from one thread.

    ::

        with Subscriber(client.kv_event_sources(), refresh=client.kv_event_sources) as events:
            for item in events:
                if isinstance(item, Batch): ...
                elif isinstance(item, Gap): ...      # batches first..last are lost, for this reason
                elif isinstance(item, Reset): ...    # forget what is known of item.source

    Batches of one source come in order, each once. Missed ones are asked for over replay while later ones wait; what
    cannot be had is a ``Gap`` in their place. ``StateChange`` and ``Notice`` say how a source can be heard. It begins
    with the first item asked for, or on entering ``with``; it ends when closed, or when there is nothing to listen to
    and no ``refresh`` that could bring something. Waiting is only ever for the next event: use ``poll`` to wait less.
    """

    def __init__(
        self,
        sources: Sources | None,
        *,
        refresh: Callable[[], Sources] | None = None,
        worker: str = "",
        settings: Settings | None = None,
    ) -> None:
        """
        Args:
            sources: from ``kv_event_sources()``; ``None`` asks ``refresh`` first.
            refresh: returns fresh sources; called in a thread of its own after a restart or a lost connection, again
                and again (with growing pauses) while a publisher cannot be reached.
            worker: the name that items carry in ``source.worker``.
            settings: time constants and limits.
        """
        super().__init__(sources, worker, settings)
        self._refresh = refresh

    def open(self) -> Subscriber:
        """Begin to listen; iterating does it for you. Raises ClientClosed after ``close``."""
        if self._listener is None or self._closed:
            self._open(None if self._refresh is None else Asker(self._refresh))
        return self

    def close(self) -> None:
        """End: within a second every socket and thread is gone. An iteration elsewhere stops. Twice is fine."""
        self._closed = True
        if self._finalizer is not None:
            self._finalizer()
        self._queue.close()

    def __enter__(self) -> Subscriber:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Subscriber:
        return self

    def __next__(self) -> Item:
        item = self.poll(None)
        if item is None:
            raise StopIteration
        return item

    def poll(self, timeout_s: float | None = 0.0) -> Item | None:
        """The next item, waiting ``timeout_s`` seconds at most (``None``: as long as it takes); else ``None``.

        ``None`` also when nothing will come any more, see ``over``.
        """
        if self._closed:
            return None
        self.open()
        item = self._pop()
        if item is not None or self._over():
            return item
        entry = self._queue.wait(timeout_s)
        if entry is None:
            self._over()
            return None
        self._ready.extend(self._delivery.items(entry))
        return None if self._closed else self._ready.popleft()

    @property
    def over(self) -> bool:
        """Whether it has ended: closed, or nothing to listen to."""
        return self._over()


class AsyncSubscriber(_Subscriber):
    """The same for asyncio: ``async with`` and ``async for``; ``refresh`` may be a coroutine function.

    It listens in a thread, so a loop that is busy elsewhere stalls no publisher. It belongs to the loop in which it
    was opened.
    """

    def __init__(
        self,
        sources: Sources | None,
        *,
        refresh: Callable[[], Awaitable[Sources] | Sources] | None = None,
        worker: str = "",
        settings: Settings | None = None,
    ) -> None:
        """Arguments as for ``Subscriber``; ``refresh`` is called on the loop and may return an awaitable."""
        super().__init__(sources, worker, settings)
        self._refresh = refresh
        self._bell: asyncio.Event | None = None
        self._asker: AsyncAsker | None = None
        self._delivered = 0

    async def open(self) -> AsyncSubscriber:
        """Begin to listen; iterating does it for you. Raises ClientClosed after ``close``."""
        if self._listener is None or self._closed:
            loop = asyncio.get_running_loop()
            bell = self._bell = asyncio.Event()

            def wake() -> None:
                if not bell.is_set():
                    on_loop(loop, bell.set)

            self._queue.on_change(wake)
            self._asker = None if self._refresh is None else AsyncAsker(self._refresh, loop)
            self._open(self._asker)
        return self

    async def close(self) -> None:
        """End: within a second every socket, thread and task is gone. An iteration elsewhere stops. Twice is fine."""
        self._closed = True
        if self._asker is not None:
            await self._asker.close()
        if self._finalizer is not None:
            await asyncio.to_thread(self._finalizer)
        self._queue.close()

    async def __aenter__(self) -> AsyncSubscriber:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def __aiter__(self) -> AsyncSubscriber:
        return self

    async def __anext__(self) -> Item:
        if not self._closed:
            await self.open()
        self._delivered += 1
        if not self._delivered % _AT_ONCE:
            await asyncio.sleep(0)
        while not self._closed:
            # In this order, so that what is put after looking rings the bell.
            if self._bell is not None:
                self._bell.clear()
            item = self._pop()
            if item is not None:
                return item
            if self._over() or self._bell is None:
                break
            await self._bell.wait()
        raise StopAsyncIteration


def _end(listener: Listener) -> None:
    listener.stop()
    listener.join(_CLOSE_S)
