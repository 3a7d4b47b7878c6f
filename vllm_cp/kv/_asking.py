"""Calling the user's ``refresh`` without making the listening thread wait for it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterable
from inspect import isawaitable
from typing import TypeAlias

from vllm_cp.kv._listener import Listener
from vllm_cp.models.kv_source import KvEventSource

__all__ = ["Asker", "AsyncAsker", "Sources", "on_loop"]

Sources: TypeAlias = Iterable[KvEventSource]


class _Asker:
    #: Set once there is one; weak, so that a listener that nobody holds can end.
    listener: weakref.ref[Listener] | None = None

    def _answer(self, sources: tuple[KvEventSource, ...] | Exception) -> None:
        listener = None if self.listener is None else self.listener()
        if listener is not None:
            listener.renew(sources)


class Asker(_Asker):
    """Calls it in a thread of its own."""

    def __init__(self, refresh: Callable[[], Sources]) -> None:
        self._refresh = refresh

    def __call__(self) -> None:
        threading.Thread(target=self._run, daemon=True, name="vllm-cp-kv-refresh").start()

    def _run(self) -> None:
        try:
            self._answer(tuple(self._refresh()))
        except Exception as error:  # noqa: BLE001  (whatever it is, it is reported, and tried again)
            self._answer(error)


class AsyncAsker(_Asker):
    """Calls it on the subscriber's event loop."""

    def __init__(self, refresh: Callable[[], Awaitable[Sources] | Sources], loop: asyncio.AbstractEventLoop) -> None:
        self._refresh = refresh
        self._loop = loop
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def __call__(self) -> None:
        on_loop(self._loop, self._begin)

    async def close(self) -> None:
        """Cancel a call that is under way."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _begin(self) -> None:
        if not self._closed:
            self._task = self._loop.create_task(self._run())

    async def _run(self) -> None:
        try:
            found = self._refresh()
            self._answer(tuple(await found if isawaitable(found) else found))
        except Exception as error:  # noqa: BLE001  (whatever it is, it is reported, and tried again)
            self._answer(error)


def on_loop(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """Call it there; nothing happens when the loop is closed."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call)
