"""The daemon inside the test's process, with its times at a scale of the test's choosing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from tests.exporter.pages import Page, parse_text
from vllm_cp import Connection
from vllm_cp.episodes import Rules, WorkerState
from vllm_cp_exporter.config import ExporterConfig, Listen, WorkerConfig
from vllm_cp_exporter.daemon import Daemon
from vllm_cp_exporter.listen import bind

#: How long anything may take that has no limit of its own.
LONG_S = 20.0


class Watching:
    """A running daemon and somebody who reads its pages."""

    def __init__(self, daemon: Daemon, url: str) -> None:
        self.daemon = daemon
        self.url = url

    def state(self, key: str) -> WorkerState:
        """What is known of a worker now."""
        return self.daemon.board.snapshot.workers[key].state

    async def get(self, path: str = "/metrics") -> str:
        """A page, as text; anything but 200 is an error."""
        async with aiohttp.ClientSession(raise_for_status=True) as session, session.get(self.url + path) as answer:
            return await answer.text()

    async def page(self) -> Page:
        """The metrics, as a parser reads them."""
        return Page(parse_text(await self.get()))

    async def until(self, check: Callable[[Page], bool], timeout_s: float = LONG_S) -> Page:
        """The metrics, once they are so."""

        async def look() -> Page:
            while True:
                page = await self.page()
                if check(page):
                    return page
                await asyncio.sleep(0.01)

        return await asyncio.wait_for(look(), timeout_s)

    async def eventually(self, check: Callable[[], Any], timeout_s: float = LONG_S) -> None:
        """Wait until that is true."""

        async def look() -> None:
            while True:
                if check():
                    return
                await asyncio.sleep(0.01)

        await asyncio.wait_for(look(), timeout_s)


@asynccontextmanager
async def watching(
    *workers: WorkerConfig,
    interval_s: float = 0.5,
    info_s: float = 60.0,
    read: Callable[[], ExporterConfig] | None = None,
) -> AsyncIterator[Watching]:
    """A daemon over these workers. ``read`` gives other settings for a reload."""
    settings = ExporterConfig(workers=workers, probe_interval_s=interval_s, info_interval_s=info_s)
    sockets = bind(Listen("127.0.0.1", 0))
    async with Daemon(settings, sockets, read=read) as daemon:
        yield Watching(daemon, f"http://127.0.0.1:{sockets[0].getsockname()[1]}")


def worker(key: str, target: str, rules: Rules | None = None, **settings: Any) -> WorkerConfig:
    """One worker; ``settings`` are fields of its connection."""
    return WorkerConfig(key=key, connection=Connection.parse(target, **settings), rules=rules or Rules())


def ready(*keys: str) -> Callable[[Page], bool]:
    """Whether all of them are ready."""
    return lambda page: all(page["worker_ready", key] == 1 for key in keys)


def counted(page: Page, key: str, name: str = "worker_faults_total") -> dict[str, float]:
    """The counts of a worker that are not zero, by cause or kind."""
    label = {"worker_faults_total": "cause", "worker_fault_ends_total": "kind"}[name]
    return {s.labels[label]: s.value for s in page.of(name) if s.labels["worker"] == key and s.value}
