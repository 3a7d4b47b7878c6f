"""The running daemon: one board, one server, sources, a watcher per worker; a way to reload and a clean way to stop."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from vllm_cp import ConfigError, __version__
from vllm_cp_exporter import logs
from vllm_cp_exporter.config import ExporterConfig, Listen, WorkerConfig
from vllm_cp_exporter.configdump import redacted
from vllm_cp_exporter.discovering import Discovering
from vllm_cp_exporter.probe import Prober
from vllm_cp_exporter.roster import Roster
from vllm_cp_exporter.selfmetrics import SelfMetrics
from vllm_cp_exporter.server import Server
from vllm_cp_exporter.snapshot import Board
from vllm_cp_exporter.statefile import StateFile
from vllm_cp_exporter.wanted import Wanted
from vllm_cp_exporter.web import Door

__all__ = ["Daemon", "run"]

log = logging.getLogger("vllm_cp_exporter.daemon")

#: How long the watchers may take to close their connections.
_CLOSE_WITHIN_S = 1.0
#: From the signal to the end of the process, whatever hangs.
_GONE_WITHIN_S = 1.8
#: A loop that gave no sign of life for this long, or for three intervals, does not tick.
_TICK_WITHIN_S = 60.0
#: What is taken up at a start only.
_AT_START = ("listen", "state_file", "web_config_file", "enable_reload")


async def run(
    settings: ExporterConfig,
    sockets: Sequence[socket.socket],
    *,
    signals: Iterable[signal.Signals],
    read: Callable[[], ExporterConfig] | None = None,
) -> None:
    """Run until one of the signals; a second one ends the process at once. SIGHUP reloads what ``read`` reads."""
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

    def on_hangup(daemon: Daemon) -> None:
        reloads.add(reload := loop.create_task(daemon.reload()))
        reload.add_done_callback(reloads.discard)

    reloads: set[asyncio.Task[str | None]] = set()
    before = {number: signal.getsignal(number) for number in signals}
    for number in before:
        if number != signal.SIGHUP:
            loop.add_signal_handler(number, on_signal, number)
    try:
        async with Daemon(settings, sockets, read=read) as daemon:
            if signal.SIGHUP in before:
                loop.add_signal_handler(signal.SIGHUP, on_hangup, daemon)
            await stop.wait()
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
    log.info("stopped")


class Daemon:
    """``async with Daemon(settings, sockets):`` watches and serves. Two in one process share nothing."""

    def __init__(
        self,
        settings: ExporterConfig,
        sockets: Sequence[socket.socket],
        *,
        read: Callable[[], ExporterConfig] | None = None,
    ) -> None:
        """``read`` reads the settings anew for ``reload``, in another thread. It raises ConfigError."""
        self._settings = settings
        self._sockets = sockets
        self._read = read
        self.board = Board(settings.min_ready)
        self.metrics = SelfMetrics()
        self._state_file = StateFile(settings.state_file) if settings.state_file else None
        remembered = self._state_file.claim if self._state_file else lambda _: None
        self._roster = Roster(self.board, self.metrics, settings, remembered=remembered)
        self._discovering = Discovering(self._apply)
        self._wanted = Wanted()
        self._clashes: tuple[str, ...] = ()
        self._exposed = 0
        self._was_ready = False
        self._reloading = asyncio.Lock()
        self._state_task: asyncio.Task[None] | None = None
        self._server = Server(
            self.board,
            self.metrics,
            not_ready=self._why_not_ready,
            not_healthy=self._why_not_healthy,
            door=Door(settings.web_config_file),
            prober=Prober(self.board, self.metrics, lambda: self._settings, lambda: self._roster.configs),
            reload=self.reload if settings.enable_reload else None,
            config=lambda: redacted(self._settings),
        )

    @property
    def settings(self) -> ExporterConfig:
        """Those in force."""
        return self._settings

    async def __aenter__(self) -> Daemon:
        self.metrics.discovering(lambda: self._discovering.successes)
        self.metrics.watched(lambda: [watcher.last_tick for watcher in self._roster.watchers.values()])
        if self._state_file:
            self._state_file.start()
        where = ",".join(str(Listen(*bound.getsockname()[:2])) for bound in self._sockets)
        fields = {"listen": where, "workers": len(self._settings.workers), "sources": len(self._settings.sources)}
        self._discovering.use(self._settings.sources)
        self._apply()
        await self._server.start(self._sockets)
        log.info("started", extra={"fields": {**fields, "version": __version__}})
        if (state_file := self._state_file) is not None:
            self.metrics.state_file(lambda: state_file.ok)
            self._state_task = asyncio.create_task(state_file.keep(lambda: self.board.snapshot))
        return self

    async def __aexit__(self, *error: object) -> None:
        tasks = self._discovering.close() | self._roster.close()
        if self._state_task is not None:
            self._state_task.cancel()
            tasks = tasks | {self._state_task}
        if tasks:
            _, hanging = await asyncio.wait(tasks, timeout=_CLOSE_WITHIN_S)
            if hanging:
                log.warning("watchers_hang", extra={"fields": {"count": len(hanging)}})
        await self._server.stop()

    async def reload(self) -> str | None:
        """Read the settings again and take them over; a wrong one changes nothing. What was wrong, or ``None``."""
        async with self._reloading:
            try:
                settings = await asyncio.to_thread(self._read) if self._read else self._settings
                self._discovering.use(settings.sources)
            except ConfigError as error:
                return self._refused(str(error))
            except Exception as error:
                log.exception("reload_failed")
                return self._refused(f"{type(error).__name__}: {error}")
            old, self._settings = self._settings, settings
            if (settings.log_format, settings.log_level) != (old.log_format, old.log_level):
                logs.set_up(settings.log_format, settings.log_level)
            self.board.want(settings.min_ready)
            self._apply()
            self.metrics.reloaded(True)
            log.info("reloaded", extra={"fields": {"workers": len(self._roster.watchers)}})
            later = [name for name in _AT_START if getattr(settings, name) != getattr(old, name)]
            if later:
                log.warning("needs_restart", extra={"fields": {"settings": ",".join(later)}})
            return None

    def _refused(self, why: str) -> str:
        self.metrics.reloaded(False)
        log.error("reload_refused", extra={"fields": {"error": why, "hint": "the old configuration stays in force"}})
        return why

    def _apply(self) -> None:
        """Watch whom settings and discovery name now."""
        settings = self._settings
        workers = self._wanted.workers(settings, self._discovering.found)
        self._roster.apply(workers, settings)
        fixed = sorted({worker.source for worker in settings.workers})
        self.metrics.fixed(fixed if fixed or settings.sources else ["flags"])
        if self._wanted.clashes != self._clashes:
            self._clashes = self._wanted.clashes
            if self._clashes:
                fields = {"count": len(self._clashes), "first": self._clashes[0], "hint": "the first source has it"}
                log.warning("named_twice", extra={"fields": fields})
        self._count_insecure(workers.values())
        if self._state_file and self._discovering.waiting() is None:
            self._state_file.forget_unclaimed()

    def _count_insecure(self, workers: Iterable[WorkerConfig]) -> None:
        exposed = [worker.key for worker in workers if _insecure(worker)]
        self.metrics.insecure_ports(len(exposed))
        if exposed and not self._exposed:
            fields = {"count": len(exposed), "first": exposed[0], "hint": "use TLS, or run beside the worker"}
            log.warning("insecure_control_ports", extra={"fields": fields})
        self._exposed = len(exposed)

    def _why_not_ready(self) -> str | None:
        """Once ready, the daemon stays so: workers that come later are no reason to take it away."""
        if self._was_ready:
            return None
        if (waiting := self._discovering.waiting()) is not None:
            return waiting
        watchers = self._roster.watchers.values()
        left = sum(not watcher.attempted.is_set() for watcher in watchers)
        self._was_ready = left == 0
        return f"{left} of {len(watchers)} workers were not looked at yet" if left else None

    def _why_not_healthy(self) -> str | None:
        """One stuck watcher is a metric; only when all stand still, the daemon does."""
        newest = max((watcher.last_tick for watcher in self._roster.watchers.values()), default=None)
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
