"""Fleet.from_daemon."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from vllm_cp._fleet import daemon
from vllm_cp._fleet.changes import FleetChange
from vllm_cp._fleet.roster import check_bounds
from vllm_cp._fleet.snapshot import FleetSnapshot
from vllm_cp._fleet.threads import Fleet
from vllm_cp._http import HttpClient
from vllm_cp._http_connection import HttpConnection
from vllm_cp.client import ControlClient
from vllm_cp.discovery.base import DiscoveredTarget, DiscoveryStatus
from vllm_cp.errors import ClientClosed, ControlError
from vllm_cp.models.outcome import Outcome

__all__ = ["DaemonFleet"]

T = TypeVar("T")


class DaemonFleet(Fleet):
    """A fleet that a daemon tells of."""

    def __init__(self, url: str | HttpConnection) -> None:
        super().__init__(())
        self._daemon = HttpClient(url)
        self._seen = daemon.Follower()
        self._closing = threading.Event()

    @property
    def targets(self) -> tuple[DiscoveredTarget, ...]:
        return self._seen.targets

    @property
    def status(self) -> DiscoveryStatus | None:
        return self._seen.status

    def client(self, key: str) -> ControlClient:
        raise daemon.refuse_map()

    def start(self) -> Fleet:
        self.snapshot()
        return self

    def close(self) -> None:
        self._closing.set()
        self._daemon.close()
        super().close()

    def map(
        self,
        fn: Callable[[ControlClient], T],
        *,
        deadline_s: float | None = None,
        at_once: int = 64,
    ) -> list[Outcome[T]]:
        raise daemon.refuse_map()

    def snapshot(self, *, deadline_s: float | None = None, at_once: int = 64) -> FleetSnapshot:
        check_bounds(deadline_s, at_once)
        self._check()
        snapshot, revision = self._daemon.run(daemon.snapshot_call(), deadline_s)
        for _ in self._seen.all(snapshot, revision):
            pass
        return snapshot

    def watch(self, *, check_every_s: float = 5.0) -> Iterator[FleetChange]:
        self._check()
        seen = daemon.Follower()
        try:
            while not self._closing.is_set():
                yield from self._next(seen)
        except ClientClosed:
            return

    def _next(self, seen: daemon.Follower) -> list[FleetChange]:
        """What comes next; nothing now and then. Raises ControlError when there was never an answer."""
        try:
            if seen.revision is None:
                changes = list(seen.all(*self._daemon.run(daemon.snapshot_call())))
            else:
                delta = self._daemon.run(daemon.changes_since(seen.revision), daemon.POLL_S + 5.0)
                changes = list(seen.some(delta)) if delta is not None else []
                if delta is None:
                    seen.revision = None
        except ControlError as error:
            if seen.status.last_success is None:
                raise
            seen.lost(error)
            self._seen.status = seen.status
            self._closing.wait(daemon.PAUSE_S)
            return []
        self._seen.status = seen.status
        return changes

    def _check(self) -> None:
        if self._closing.is_set():
            raise ClientClosed("this fleet was closed; make a new one")
