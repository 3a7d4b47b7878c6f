"""The composed daemon, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from tests.exporter.pages import Page, parse_text
from vllm_cp import Connection
from vllm_cp.testing import FakeWorker
from vllm_cp_exporter import daemon as daemon_module
from vllm_cp_exporter.config import ExporterConfig, Listen, WorkerConfig
from vllm_cp_exporter.daemon import Daemon
from vllm_cp_exporter.listen import bind
from vllm_cp_exporter.watch import Watcher


def worker(key: str, target: str) -> WorkerConfig:
    return WorkerConfig(key=key, connection=Connection.parse(target))


@asynccontextmanager
async def running(settings: ExporterConfig) -> AsyncIterator[str]:
    """A daemon; its base URL."""
    sockets = bind(Listen("127.0.0.1", 0))
    async with Daemon(settings, sockets):
        yield f"http://127.0.0.1:{sockets[0].getsockname()[1]}"


async def get(url: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        return answer.status, await answer.text()


async def until(url: str, name: str, *values: str, is_: float) -> Page:
    """The page, once a sample has a value."""

    async def look() -> Page:
        while True:
            page = Page(parse_text((await get(f"{url}/metrics"))[1]))
            if page[(name, *values)] == is_:
                return page
            await asyncio.sleep(0.01)

    return await asyncio.wait_for(look(), 15)


async def test_b35_two_daemons_and_a_second_start() -> None:
    """Two daemons in one process know nothing of each other, and one may be started again."""
    with FakeWorker() as fake:
        settings = ExporterConfig(workers=(worker("a", fake.target),))
        other = ExporterConfig(workers=(worker("b", fake.target),))
        for _ in range(2):
            async with running(settings) as one, running(other) as two:
                assert (await until(one, "worker_ready", "a", is_=1)).series("b") == 0
                assert (await until(two, "worker_ready", "b", is_=1)).series("a") == 0


async def test_not_ready_until_every_worker_was_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon is ready once the first look at every worker is done; its page is there before."""
    go_on = asyncio.Event()
    real = Watcher.run

    async def late(self: Watcher) -> None:
        await go_on.wait()
        await real(self)

    monkeypatch.setattr(Watcher, "run", late)
    async with running(ExporterConfig(workers=(worker("a", "127.0.0.1:9"),))) as url:
        assert await get(f"{url}/-/ready") == (503, "not ready: 1 of 1 workers were not looked at yet\n")
        page = await until(url, "worker_ready", "a", is_=0)
        assert page["worker_not_ready", "starting"] == 1
        go_on.set()
        await until(url, "worker_not_ready", "unreachable", is_=1)
        assert await get(f"{url}/-/ready") == (200, "ready\n")


async def test_a_watcher_that_fails_is_started_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A watcher that fails costs a line and a moment; the other workers never notice."""
    real = Watcher.run
    failed: list[str] = []

    async def once(self: Watcher) -> None:
        if self.config.key == "a" and not failed:
            failed.append(self.config.key)
            raise RuntimeError("a surprise")
        await real(self)

    monkeypatch.setattr(Watcher, "run", once)
    with FakeWorker() as fake:
        workers = (worker("a", fake.target), worker("b", fake.target))
        async with running(ExporterConfig(workers=workers, probe_interval_s=0.2)) as url:
            await until(url, "worker_ready", "b", is_=1)
            await until(url, "worker_ready", "a", is_=1)
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == ["watcher_failed"]


async def test_many_workers_start_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few workers are asked at once, many spread over an interval; all are on the page from the start."""
    starts: list[float] = []
    all_started = asyncio.Event()

    async def note(self: Watcher) -> None:
        starts.append(asyncio.get_running_loop().time())
        if len(starts) == count:
            all_started.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Watcher, "run", note)
    for count, spread in ((20, False), (40, True)):
        starts.clear()
        all_started.clear()
        workers = tuple(worker(f"w{number}", "127.0.0.1:9") for number in range(count))
        settings = ExporterConfig(workers=workers, probe_interval_s=0.8)
        async with running(settings) as url:
            page = Page(parse_text((await get(f"{url}/metrics"))[1]))
            assert len(page.of("worker_ready")) == count
            await asyncio.wait_for(all_started.wait(), 10)
        assert (starts[-1] - starts[0] > 0.5) is spread


async def test_healthy_while_any_watcher_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """One stuck watcher is a metric; when none gave a sign of life for a minute, the daemon is not healthy."""
    now = daemon_module.time.time()

    async def stuck(self: Watcher) -> None:
        self.last_tick = now - (500 if self.config.key == "a" else ages["b"])
        await asyncio.Event().wait()

    monkeypatch.setattr(Watcher, "run", stuck)
    settings = ExporterConfig(workers=(worker("a", "127.0.0.1:9"), worker("b", "127.0.0.1:9")))
    ages = {"b": 10}
    async with running(settings) as url:
        assert await get(f"{url}/-/healthy") == (200, "healthy\n")
        page = Page(parse_text((await get(f"{url}/metrics"))[1]))
        assert page["exporter_oldest_tick_timestamp_seconds",] == pytest.approx(now - 500)
    ages = {"b": 400}
    async with running(settings) as url:
        status, said = await get(f"{url}/-/healthy")
        assert status == 503
        assert said.startswith("not healthy: no watcher gave a sign of life for 4")


async def test_no_workers_at_all() -> None:
    """A daemon without workers (they may all be discovered later) is healthy, ready and empty."""
    async with running(ExporterConfig()) as url:
        assert (await get(f"{url}/-/healthy"))[0] == (await get(f"{url}/-/ready"))[0] == 200
        page = Page(parse_text((await get(f"{url}/metrics"))[1]))
        assert not page.of("exporter_oldest_tick_timestamp_seconds")
        assert "0 of 0 workers ready" in (await get(url))[1]
