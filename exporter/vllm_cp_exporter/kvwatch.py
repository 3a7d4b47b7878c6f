"""Follows the KV-cache events of one worker, where that is wanted, and keeps their numbers for the page.

The subscriber listens in a thread of its own, so no publisher ever waits for us. What it heard is decoded and counted
on the event loop, in short turns: of all workers one at a time, and never more than half of the loop's time. A worker
that says more than that loses batches, and its numbers say so.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_cp import CredentialsRejected
from vllm_cp_exporter.kvview import KvView, settled
from vllm_cp_exporter.snapshot import Facts

if TYPE_CHECKING:
    from vllm_cp import KvEventSource
    from vllm_cp.kv import Subscriber
    from vllm_cp_exporter.kvfold import KvFold

__all__ = ["KvWatch"]

log = logging.getLogger("vllm_cp_exporter.watch")

#: Between two looks at what was heard.
_TICK_S = 0.25
#: Counting at one go.
_TURN_S = 0.005
#: Between two views.
_VIEW_S = 1.0
#: After something went wrong that should not.
_AGAIN_S = 10.0
#: What one worker's subscriber may hold: a daemon has many of them.
_LIMITS: dict[str, Any] = {
    "max_queue": 16_384,
    "max_queue_bytes": 64 << 20,
    "max_pending": 16_384,
    "max_pending_bytes": 64 << 20,
    "max_message_bytes": 16 << 20,
}
#: Why sources are not known, where asking again will hardly help.
_FINAL = {"not supported": "unsupported", CredentialsRejected.meaning: "denied"}


class KvWatch:
    """The KV events of one worker. ``run`` it until cancelled; it does nothing while it is not wanted."""

    def __init__(
        self, worker: str, *, wanted: bool, turn: asyncio.Lock | None = None, publish: Callable[[], None]
    ) -> None:
        """``turn`` is held while counting, and shared by all workers. ``publish``: there is a new view."""
        #: Its numbers; empty while not wanted.
        self.view = KvView()
        self._worker = worker
        self._turn = turn or asyncio.Lock()
        self._publish = publish
        self._wanted = asyncio.Event()
        self._fold: KvFold | None = None
        self._sources: tuple[KvEventSource, ...] | None = None
        #: The state of a worker without sources to listen to.
        self._otherwise = "unknown"
        self._instance: str | None = None
        self._anew = False
        self._viewed = 0.0
        self.want(wanted)

    def want(self, wanted: bool) -> None:
        """Follow the events from now on, or no longer. Raises ConfigError without the extra ``kv``."""
        if wanted == self._wanted.is_set():
            return
        if wanted:
            from vllm_cp_exporter.kvfold import KvFold

            self._fold = KvFold(self._worker)
            self._wanted.set()
            self.view = self._fold.view(None, self._sources, self._otherwise)
        else:
            self._wanted.clear()
            self._fold, self.view = None, KvView()

    def told(self, facts: Facts, instance: str | None) -> None:
        """What the control plane says of the worker now. Cheap when that is what it said before."""
        sources = facts.sources
        if sources is None:
            # A worker that is down, or slow to answer, may publish still or soon again where it did.
            if (final := _FINAL.get(facts.sources_problem)) is not None:
                self._sources, self._otherwise = None, final
        elif sources != self._sources:
            self._anew = self._anew or bool(self._sources)
            self._sources, self._otherwise = sources, "disabled"
        if instance is not None and instance != self._instance:
            self._anew = self._anew or self._instance is not None
            self._instance = instance

    async def run(self) -> None:
        """Follow the events until cancelled; then every socket and thread is gone."""
        while True:
            await self._wanted.wait()
            try:
                await self._follow()
            except Exception:
                log.exception("kv_failed", extra={"fields": {"worker": self._worker}})
                await asyncio.sleep(_AGAIN_S)

    async def _follow(self) -> None:
        fold, subscriber = self._fold, None
        try:
            while fold is not None and fold is self._fold:
                busy = False
                if subscriber is not None and not self._sources:
                    await self._close(subscriber, fold)
                    subscriber = None
                if subscriber is None and self._sources:
                    subscriber, self._anew = self._subscribe(), False
                if subscriber is not None:
                    if self._anew:
                        self._anew = False
                        subscriber.worker_restarted()
                    busy = await self._hear(subscriber, fold)
                self._look(subscriber, fold)
                # Always a way for others, also to cancel this.
                await asyncio.sleep(0 if busy else _TICK_S)
        finally:
            if subscriber is not None and fold is not None:
                await self._close(subscriber, fold)

    def _subscribe(self) -> Subscriber:
        from vllm_cp.kv import Settings, Subscriber

        # It asks for fresh sources in a thread of its own; they are the control plane's last word, and news of them
        # come as ``worker_restarted``.
        return Subscriber(
            self._sources, refresh=lambda: self._sources or (), worker=self._worker, settings=Settings(**_LIMITS)
        ).open()

    @staticmethod
    async def _close(subscriber: Subscriber, fold: KvFold) -> None:
        fold.count(subscriber.stats())
        await asyncio.to_thread(subscriber.close)
        fold.ended()

    async def _hear(self, subscriber: Subscriber, fold: KvFold) -> bool:
        """Count what there is, for one turn. Whether there may be more."""
        async with self._turn:
            begun = time.monotonic()
            while (item := subscriber.poll(0.0)) is not None:
                fold.apply(item)
                spent = time.monotonic() - begun
                if spent > _TURN_S:
                    await asyncio.sleep(spent)
                    return True
        return False

    def _look(self, subscriber: Subscriber | None, fold: KvFold) -> None:
        stats = None if subscriber is None else subscriber.stats()
        if stats is not None:
            fold.count(stats)
        now = time.monotonic()
        if now - self._viewed < _VIEW_S or fold is not self._fold:
            return
        self._viewed = now
        view = settled(self.view, fold.view(stats, self._sources, self._otherwise))
        if view is not self.view:
            self.view = view
            self._publish()
