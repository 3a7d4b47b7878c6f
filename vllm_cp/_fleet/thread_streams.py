"""The health streams behind Fleet.watch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from vllm_cp._fleet.changes import DIALS_AT_ONCE, TURN_S, FleetChange, Pace, WorkerWatch
from vllm_cp._fleet.roster import EXPECTED
from vllm_cp.client import ControlClient
from vllm_cp.discovery.base import DiscoveredTarget, TargetSet
from vllm_cp.errors import ClientClosed
from vllm_cp.models.health import HealthStatus

__all__ = ["Streams"]

#: Longest wait for a thread to end, seconds.
_JOIN_S = 5.0


class Streams:
    """The health streams of a watch, one thread each."""

    def __init__(
        self, connect: Callable[[DiscoveredTarget], ControlClient], news: SimpleQueue[Any], check_every_s: float
    ) -> None:
        self.connect = connect
        self.news = news
        self.check_every_s = check_every_s
        self.gate = threading.BoundedSemaphore(DIALS_AT_ONCE)
        self._pace = Pace()
        self._lock = threading.Lock()
        self._open: dict[str, _Stream] = {}

    def turn_s(self) -> float:
        """Seconds to wait for one's turn."""
        with self._lock:
            return self._pace.turn_s()

    def tell(self, watch: WorkerWatch, change: FleetChange | None) -> None:
        """News, if it is any."""
        if change is not None:
            self.news.put((watch, change))

    def current(self, watch: WorkerWatch) -> bool:
        """Whether news of a worker is still of interest: it may have left since."""
        held = self._open.get(watch.target.key)
        return held is not None and held.watch is watch

    def follow(self, targets: TargetSet) -> None:
        """Open and close streams so that each of these workers has one."""
        before, kept, fresh, ended = self._open, {}, {}, []
        for target in targets.targets:
            held = before.pop(target.key, None)
            if held is not None and target.reached_as(held.target):
                held.watch.target = target
                kept[target.key] = held
                continue
            if held is not None:
                ended.append(held)
            fresh[target.key] = (target, held.watch if held is not None else None)
        ended += before.values()
        for stream in ended:
            stream.end()
        for stream in ended:
            stream.thread.join(_JOIN_S)
        # Only now: what an old stream knew goes on in the new one.
        new = {
            key: _Stream(self, watch.moved(target) if watch else WorkerWatch(target), target)
            for key, (target, watch) in fresh.items()
        }
        self._open = {**kept, **new}
        for stream in new.values():
            stream.thread.start()


class _Stream:
    """One worker's health stream: a thread, and a client that can be closed under it."""

    def __init__(self, streams: Streams, watch: WorkerWatch, target: DiscoveredTarget) -> None:
        self.watch = watch
        self.target = target
        self._streams = streams
        self._ended = threading.Event()
        self._client: ControlClient | None = None
        self._lock = threading.Lock()
        self.thread = threading.Thread(target=self._run, daemon=True, name="vllm-cp-fleet-watch")

    def end(self) -> None:
        """Let the thread end soon."""
        with self._lock:
            self._ended.set()
            if self._client is not None:
                self._client.close()

    def _run(self) -> None:
        streams, watch = self._streams, self.watch
        try:
            while not self._ended.wait(streams.turn_s()):
                try:
                    self._read()
                    error = None
                except EXPECTED as failure:
                    error = failure
                if self._ended.is_set():
                    return
                streams.tell(watch, watch.lost(error))
                if self._ended.wait(watch.pause_s()):
                    return
        except Exception as defect:  # noqa: BLE001  (raised where the changes are read)
            streams.news.put(defect)

    def _read(self) -> None:
        streams, watch = self._streams, self.watch
        opening = streams.gate.acquire(timeout=TURN_S)
        try:
            client = self._connected()
            for status in client.watch(check_every_s=streams.check_every_s):
                streams.tell(watch, watch.said(status))
                if opening:
                    streams.gate.release()
                    opening = False
                if status is not HealthStatus.SERVING:
                    continue  # a draining server would let us wait
                try:
                    streams.tell(watch, watch.instance(client.server_info().instance_id))
                except EXPECTED:
                    continue
        finally:
            if opening:
                streams.gate.release()

    def _connected(self) -> ControlClient:
        with self._lock:
            if self._ended.is_set():
                raise ClientClosed("this watch has ended")
            if self._client is None:
                self._client = self._streams.connect(self.target)
            return self._client
