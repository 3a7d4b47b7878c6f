"""The running daemon: one board, one server, a watcher per worker, and a clean way to stop."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterable, Sequence

from vllm_cp import __version__
from vllm_cp.episodes import remember
from vllm_cp_exporter.config import ExporterConfig, Listen, WorkerConfig
from vllm_cp_exporter.dials import Dials
from vllm_cp_exporter.selfmetrics import SelfMetrics
from vllm_cp_exporter.server import Server
from vllm_cp_exporter.snapshot import Board
from vllm_cp_exporter.statefile import Remembered, StateFile
from vllm_cp_exporter.watch import Watcher

__all__ = ["Daemon", "run"]

log = logging.getLogger("vllm_cp_exporter.daemon")

#: More workers than this are not all asked in the same instant.
_SPREAD_ABOVE = 20
#: How long the watchers may take to close their connections.
_CLOSE_WITHIN_S = 1.0
#: From the signal to the end of the process, whatever hangs.
_GONE_WITHIN_S = 1.8
#: A loop that gave no sign of life for this long, or for three intervals, does not tick.
_TICK_WITHIN_S = 60.0


async def run(settings: ExporterConfig, sockets: Sequence[socket.socket], *, signals: Iterable[signal.Signals]) -> None:
    """Run until one of the signals; a second one ends the process at once."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set():
            os._exit(1)
        log.info("stopping", extra={"fields": {"signal": number.name}})
        late = threading.Timer(_GONE_WITHIN_S, os._exit, (0,))
        late.daemon = True
        late.start()
        stop.set()

    before = {number: signal.getsignal(number) for number in signals}
    for number in before:
        loop.add_signal_handler(number, on_signal, number)
    try:
        async with Daemon(settings, sockets):
            await stop.wait()
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
    log.info("stopped")


class Daemon:
    """``async with Daemon(settings, sockets):`` watches and serves. Two in one process share nothing."""

    def __init__(self, settings: ExporterConfig, sockets: Sequence[socket.socket]) -> None:
        self._settings = settings
        self._sockets = sockets
        self.board = Board(settings.min_ready)
        self.metrics = SelfMetrics()
        self._dials = Dials()
        self._state_file = StateFile(settings.state_file) if settings.state_file else None
        self._watchers: dict[str, Watcher] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._server = Server(
            self.board, self.metrics, not_ready=self._why_not_ready, not_healthy=self._why_not_healthy
        )

    async def __aenter__(self) -> Daemon:
        workers = self._settings.workers
        self.metrics.discovered("flags", None)
        self.metrics.watched(lambda: [watcher.last_tick for watcher in self._watchers.values()])
        exposed = [worker.key for worker in workers if _insecure(worker)]
        self.metrics.insecure_ports(len(exposed))
        known = self._state_file.load() if self._state_file else {}
        for worker in workers:
            self._watchers[worker.key] = self._watcher(worker, known.get(worker.key))
        await self._server.start(self._sockets)
        gap = self._settings.probe_interval_s / len(workers) if len(workers) > _SPREAD_ABOVE else 0.0
        self._tasks = [asyncio.create_task(self._keep(worker, place * gap)) for place, worker in enumerate(workers)]
        if (state_file := self._state_file) is not None:
            self.metrics.state_file(lambda: state_file.ok)
            self._tasks.append(asyncio.create_task(state_file.keep(lambda: self.board.snapshot)))
        where = ",".join(str(Listen(*bound.getsockname()[:2])) for bound in self._sockets)
        log.info("started", extra={"fields": {"listen": where, "workers": len(workers), "version": __version__}})
        if exposed:
            fields = {"count": len(exposed), "first": exposed[0], "hint": "use TLS, or run beside the worker"}
            log.warning("insecure_control_ports", extra={"fields": fields})
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            _, hanging = await asyncio.wait(self._tasks, timeout=_CLOSE_WITHIN_S)
            if hanging:
                log.warning("watchers_hang", extra={"fields": {"count": len(hanging)}})
        await self._server.stop()

    def _watcher(self, worker: WorkerConfig, remembered: Remembered | None) -> Watcher:
        return Watcher(worker, self.board, self.metrics, self._settings, dials=self._dials, remembered=remembered)

    async def _keep(self, worker: WorkerConfig, after_s: float) -> None:
        """Run one watcher for good. Should it fail, that costs this worker a moment and its counters, nobody else."""
        await asyncio.sleep(after_s)
        while True:
            watcher = self._watchers[worker.key]
            try:
                await watcher.run()
            except Exception:
                log.exception("watcher_failed", extra={"fields": {"worker": worker.key}})
            await asyncio.sleep(self._settings.probe_interval_s)
            kept = Remembered(memory=remember(watcher.observer.state), episodes=watcher.episodes)
            self._watchers[worker.key] = self._watcher(worker, kept)

    def _why_not_ready(self) -> str | None:
        waiting = sum(not watcher.attempted.is_set() for watcher in self._watchers.values())
        return f"{waiting} of {len(self._watchers)} workers were not looked at yet" if waiting else None

    def _why_not_healthy(self) -> str | None:
        """One stuck watcher is a metric; only when all stand still, the daemon does."""
        newest = max((watcher.last_tick for watcher in self._watchers.values()), default=None)
        if newest is None:
            return None
        age = time.time() - newest
        limit = max(_TICK_WITHIN_S, 3 * self._settings.probe_interval_s)
        return f"no watcher gave a sign of life for {age:.0f} s" if age > limit else None


def _insecure(worker: WorkerConfig) -> bool:
    """Whether the worker's control port is asked in plaintext across a network."""
    if worker.connection is None or worker.connection.tls is not None:
        return False
    host = worker.connection.address.host
    if host is None or host == "localhost":
        return False
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return True
