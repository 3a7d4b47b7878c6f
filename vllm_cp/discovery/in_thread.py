"""Any source for synchronous code: its stream is read by a thread that is asked for by name."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from types import TracebackType

from vllm_cp.discovery.base import Discoverer, DiscoveryFailed, DiscoveryStatus, TargetSet
from vllm_cp.discovery.merge import reading

__all__ = ["InThread"]


class InThread:
    """Reads ``source`` in a thread with an event loop of its own, so that a synchronous ``Fleet`` can use it.

    ::

        with InThread(DnsDiscoverer([...])) as source, Fleet(source) as fleet:
            ...

    One thread, ``vllm-cp-discovery``, from ``start()`` to ``close()``.
    """

    def __init__(self, source: Discoverer, *, first_set_s: float = 10.0) -> None:
        """``first_set_s``: how long ``look`` waits for the first set, seconds."""
        self._source = source
        self._first_set_s = first_set_s
        self._news = threading.Condition()
        self._set: TargetSet | None = None
        self._defect: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reader: asyncio.Future[None] | None = None
        self._thread: threading.Thread | None = None

    @property
    def name(self) -> str:
        """The source's."""
        return self._source.name

    @property
    def status(self) -> DiscoveryStatus:
        """The source's."""
        return self._source.status

    def start(self) -> InThread:
        """Start the thread; ``with`` does it for you. Returns at once."""
        if self._thread is not None:
            raise RuntimeError("this InThread has started already")
        started = threading.Event()
        self._thread = threading.Thread(
            target=asyncio.run, args=(self._run(started),), name="vllm-cp-discovery", daemon=True
        )
        self._thread.start()
        started.wait()
        return self

    def close(self) -> None:
        """End the thread. Closing twice is fine."""
        thread, loop, reader = self._thread, self._loop, self._reader
        if thread is None or loop is None or reader is None:
            return
        with suppress(RuntimeError):  # it has ended by itself
            loop.call_soon_threadsafe(reader.cancel)
        thread.join()
        self._thread = self._loop = self._reader = None

    def look(self) -> TargetSet:
        """The newest set; waits for the first one. Raises DiscoveryFailed, and whatever defect ended the source."""
        with self._news:
            self._news.wait_for(lambda: self._set is not None or self._defect is not None, self._first_set_s)
            if self._defect is not None:
                raise self._defect
            if self._set is None:
                why = self.status.error or ("not started" if self._thread is None else "no answer yet")
                raise DiscoveryFailed(f"{self.name}: no targets within {self._first_set_s:g} s: {why}")
            return self._set

    def __enter__(self) -> InThread:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    async def _run(self, started: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._reader = asyncio.ensure_future(self._read())
        started.set()
        await asyncio.wait((self._reader,))

    async def _read(self) -> None:
        try:
            async with reading(self._source) as sets:
                async for targets in sets:
                    with self._news:
                        self._set = targets
                        self._news.notify_all()
        except Exception as error:  # noqa: BLE001  (raised where it is looked for)
            with self._news:
                self._defect = error
                self._news.notify_all()
