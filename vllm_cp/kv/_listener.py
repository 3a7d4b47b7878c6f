"""The thread that listens. It only receives, orders and queues, so no consumer, however slow, stalls a socket."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections.abc import Callable, Iterable
from queue import SimpleQueue

import zmq

from vllm_cp.kv._feed import Feed
from vllm_cp.kv._gate import REPLAYS, Gate
from vllm_cp.kv._plan import Plan, Wanted, plan
from vllm_cp.kv._queue import Entry, ItemQueue
from vllm_cp.kv._refreshing import Refreshing
from vllm_cp.kv._replay import Replay
from vllm_cp.kv._sockets import lease
from vllm_cp.kv.settings import Settings
from vllm_cp.kv.stream import Notice, NoticeKind, Reset, ResetReason, SourceState, StateChange
from vllm_cp.models.kv_source import KvEventSource

__all__ = ["Listener"]

#: How often somebody who stands in line for a replay asks again.
_IN_LINE_S = 0.02


class Listener:
    """Listens to all sources of one worker. ``refresh`` asks for fresh ones without waiting; ``renew`` gives them."""

    def __init__(
        self,
        worker: str,
        settings: Settings,
        queue: ItemQueue,
        refresh: Callable[[], None] | None,
        gate: Gate = REPLAYS,
    ) -> None:
        self.failure: BaseException | None = None
        self._worker = worker
        self._settings = settings
        self._queue = queue
        self._ask = refresh
        self._gate = gate
        self._refreshing = Refreshing(settings)
        self._feeds: dict[Wanted, Feed] = {}
        self._replay: Replay | None = None
        self._said: tuple[Entry, ...] = ()  # of the present sources, so that each is said once
        self._excuse: Entry | None = None  # why there are no fresh ones
        self._orders: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._stopping = False
        self._context: zmq.Context[zmq.Socket[bytes]]
        self._poller = zmq.Poller()
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._thread = threading.Thread(target=self._run, daemon=True, name="vllm-cp-kv")

    @property
    def feeds(self) -> list[Feed]:
        """The sources listened to now; safe from any thread, to read numbers from."""
        return list(self._feeds.values())

    @property
    def refreshes(self) -> tuple[int, int]:
        """Times that fresh sources were asked for, and failed."""
        return self._refreshing.asked, self._refreshing.failed

    # -- from other threads

    def start(self, sources: Iterable[KvEventSource] | None) -> None:
        """Listen to these; ``None`` asks for them first."""
        if sources is None:
            self._refreshing.want(time.monotonic())
        else:
            self._order(lambda: self._apply(plan(sources, self._worker)))
        self._thread.start()

    def renew(self, sources: Iterable[KvEventSource] | Exception) -> None:
        """The answer to ``refresh``."""
        self._order(lambda: self._renew(sources))

    def restarted(self) -> None:
        """The control plane shows a new instance of the worker."""
        self._order(self._restarted)

    def stop(self) -> None:
        """End without waiting; ``join`` waits."""
        self._stopping = True
        self._wake()

    def join(self, timeout_s: float) -> None:
        """Until the thread has ended and every socket is closed."""
        if self._thread.ident is not None:
            if self._thread is not threading.current_thread():
                self._thread.join(timeout_s)
        else:
            self._close_pipe()
            self._queue.close()

    def _order(self, order: Callable[[], None]) -> None:
        self._orders.put(order)
        self._wake()

    def _wake(self) -> None:
        # Full is as good as sent: it will wake up anyway. Closed: it has ended.
        with contextlib.suppress(OSError):
            self._waker.send(b"!")

    # -- the thread

    def _run(self) -> None:
        try:
            with lease() as self._context:
                try:
                    self._poller.register(self._woken.fileno(), zmq.POLLIN)
                    while not self._stopping:
                        self._turn()
                finally:
                    self._close_all()
        except BaseException as error:  # noqa: BLE001  (the consumer raises it)
            self.failure = error
        finally:
            self._close_pipe()
            self._queue.close()

    def _turn(self) -> None:
        ready = dict(self._poller.poll(self._pause_ms()))
        if ready.pop(self._woken.fileno(), None):
            self._woken.recv(4096)
        while not self._orders.empty():
            self._orders.get_nowait()()
        now, wall = time.monotonic(), time.time()
        for feed in self.feeds:
            if feed.monitor in ready:
                self._put(feed.watch(now, wall))
            if feed.socket in ready:
                self._put(feed.read(wall))
            feed.sequencer.tick(now)
        self._replays(now, wall)
        self._refresh(now)

    def _pause_ms(self) -> int:
        now = time.monotonic()
        at = self._refreshing.due if self._ask is not None else None
        times = [math.inf if at is None else at]
        if self._replay is not None:
            times.append(self._replay.deadline())
            if self._replay.silent and self._replay.patience() > now:
                times.append(self._replay.patience())
        for feed in self._feeds.values():
            at = feed.sequencer.wake_at()
            if at is not None and at > now:
                times.append(at)
            elif at is not None and self._replay is None:
                times.append(now + _IN_LINE_S)  # others are at it; the end of our own would wake us
        return math.ceil(1000 * min(60.0, max(0.0, min(times) - now)))

    def _replays(self, now: float, wall: float) -> None:
        if self._replay is not None:
            over, entries = self._replay.read(now, wall)
            self._put(entries)
            if not over:
                if self._replay.silent and now >= self._replay.patience():
                    self._gate.leave(self._replay.feed)
                return
            self._end_replay()
        for feed in self._feeds.values():
            start = feed.sequencer.wanted(now)
            if start is not None and self._gate.enter(feed):
                self._replay = Replay(feed, start, self._settings, self._context, now)
                self._poller.register(self._replay.socket, zmq.POLLIN)
                return

    def _end_replay(self) -> None:
        if self._replay is not None:
            self._poller.unregister(self._replay.socket)
            self._replay.socket.close(0)
            self._gate.leave(self._replay.feed)
            self._replay = None

    # -- sources

    def _refresh(self, now: float) -> None:
        shaken = False
        for feed in self._feeds.values():
            shaken = shaken or feed.shaken
            feed.shaken = False
        lost = any(feed.state is SourceState.UNREACHABLE for feed in self._feeds.values())
        if shaken or lost:
            self._refreshing.want(now, urgent=shaken)
        if self._ask is not None and self._refreshing.take(now):
            self._ask()

    def _renew(self, answer: Iterable[KvEventSource] | Exception) -> None:
        now = time.monotonic()
        if not isinstance(answer, Exception):
            found = plan(answer, self._worker)
            self._refreshing.answered(now, final=not found.wanted)
            self._apply(found)
            return
        state = self._refreshing.failed_with(answer, now)
        excuse: Entry = Notice(source=None, kind=NoticeKind.REFRESH_FAILED, detail=str(answer))
        if state is not None:
            excuse = StateChange(source=None, state=state, detail=str(answer))
        if excuse != self._excuse:
            self._excuse = excuse
            self._put([excuse])

    def _restarted(self) -> None:
        for feed in self.feeds:
            self._put([*feed.sequencer.restarted()])
            feed.shaken = True
        self._refreshing.want(time.monotonic(), urgent=True)

    def _apply(self, found: Plan) -> None:
        gone = [known for known in self._feeds if known not in found.wanted]
        for wanted in gone:
            self._drop(wanted)
        freed = {wanted.source.address for wanted in gone if wanted.bind}
        wall = time.time()
        said: tuple[Entry, ...] = (*found.notices, *found.states)
        self._put([entry for entry in said if entry not in self._said])
        self._said, self._excuse = said, None
        for wanted in found.wanted:
            if wanted not in self._feeds:
                feed = self._feeds[wanted] = Feed(wanted, self._settings, self._context, wall)
                self._put(feed.open(wall, freed=wanted.source.address in freed))
                self._poller.register(feed.socket, zmq.POLLIN)
                self._poller.register(feed.monitor, zmq.POLLIN)
        if self._ask is None and not any(f.state is not SourceState.UNSUPPORTED for f in self._feeds.values()):
            self._stopping = True  # nothing can ever come

    def _drop(self, wanted: Wanted) -> None:
        feed = self._feeds.pop(wanted)
        if self._replay is not None and self._replay.feed is feed:
            self._end_replay()
        self._gate.leave(feed)
        self._poller.unregister(feed.socket)
        self._poller.unregister(feed.monitor)
        feed.close()
        self._put([Reset(source=feed.source, reason=ResetReason.DEPARTED)])

    def _put(self, entries: list[Entry]) -> None:
        self._queue.put(entries)

    def _close_all(self) -> None:
        self._end_replay()
        for feed in self._feeds.values():
            self._gate.leave(feed)
            feed.close()

    def _close_pipe(self) -> None:
        self._waker.close()
        self._woken.close()
