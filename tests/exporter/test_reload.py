"""Reload: a good file is taken over without a stir, a bad one changes nothing."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import yaml

from tests.exporter.pages import Page, parse_text
from tests.exporter.process import Exporter
from tests.exporter.test_config_file import settings
from vllm_cp.testing import FakeWorker
from vllm_cp_exporter.configdump import redacted
from vllm_cp_exporter.daemon import Daemon
from vllm_cp_exporter.listen import bind

SECRET = "s3cr3t-t0k3n"


class Running:
    """A daemon over a file that tests rewrite."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.daemon: Daemon | None = None
        self.url = ""

    def write(self, *targets: dict[str, object], **more: object) -> None:
        document = {"probe_interval": 0.1, "targets": list(targets), **more}
        self.path.write_text(yaml.safe_dump(document))

    async def reload(self) -> str | None:
        assert self.daemon is not None
        return await self.daemon.reload()

    async def page(self) -> Page:
        async with aiohttp.ClientSession() as session, session.get(f"{self.url}/metrics") as answer:
            return Page(parse_text(await answer.text()))

    async def until(self, check: Callable[[Page], bool]) -> Page:
        """The page, once it is as it should be."""

        async def look() -> Page:
            while True:
                page = await self.page()
                if check(page):
                    return page
                await asyncio.sleep(0.02)

        return await asyncio.wait_for(look(), 15)


@asynccontextmanager
async def running(directory: Path, *targets: dict[str, object], **more: object) -> AsyncIterator[Running]:
    run = Running(directory / "exporter.yaml")
    run.write(*targets, **more)

    def read():  # type: ignore[no-untyped-def]
        return settings("--config", run.path, "--listen", "127.0.0.1:0")

    told = read()
    sockets = bind(told.listen)
    async with Daemon(told, sockets, read=read) as daemon:
        run.daemon = daemon
        run.url = f"http://127.0.0.1:{sockets[0].getsockname()[1]}"
        yield run


def target(key: str, fake: FakeWorker, **more: object) -> dict[str, object]:
    return {"name": key, "grpc": fake.target, **more}


def streams(fake: FakeWorker) -> list[str | None]:
    """How each health stream that the worker ever had ended: one per connection, ``None`` for one that stands."""
    return [call.code for call in fake.calls if call.method == "Health.Watch"]


def ready(*keys: str) -> Callable[[Page], bool]:
    return lambda page: all(page["worker_ready", key] == 1 for key in keys)


async def test_b30_adding_changing_and_removing_disturbs_no_other(tmp_path: Path) -> None:
    """Workers come, go and change pool; the others keep their connection, and so does the one whose pool changed."""
    with FakeWorker() as a, FakeWorker() as b, FakeWorker() as c, FakeWorker() as d:
        async with running(tmp_path, target("a", a), target("b", b), target("c", c)) as run:
            await run.until(ready("a", "b", "c"))
            run.write(target("a", a), target("b", b, pool="chat"), target("d", d), pools={"chat": {"min_ready": 2}})
            assert await run.reload() is None
            page = await run.page()
            assert page.series("c") == 0, "gone at the next page"
            assert page["worker_ready", "b", "chat"] == 1
            assert page["worker_ready", "a"] == 1
            assert page["pool_min_ready", "chat"] == 2
            await run.until(ready("d"))
            assert [streams(fake) for fake in (a, b, d)] == [[None]] * 3
            c.wait_for_call("Watch")
            assert (await run.page()).series("c") == 0
        assert len(streams(c)) == 1


async def test_b30_a_new_name_is_a_new_worker(tmp_path: Path) -> None:
    """A worker that is renamed is on the next page under its new name only."""
    with FakeWorker() as fake:
        async with running(tmp_path, target("old", fake)) as run:
            before = (await run.until(ready("old"))).series("old")
            run.write(target("new", fake))
            assert await run.reload() is None
            assert (await run.page()).series("old") == 0
            page = await run.until(lambda page: page.series("new") == before)
            assert page["worker_faults_total", "new", "unreachable"] == 0


async def test_a_fault_outlives_a_reload(tmp_path: Path) -> None:
    """A fault that is open stays open with its start, and counters go on."""
    with FakeWorker() as fake:
        async with running(tmp_path, target("a", fake)) as run:
            await run.until(ready("a"))
            fake.restart()
            await run.until(lambda page: page["worker_restarts_total", "a"] == 1)
            fake.die(reported=True)
            before = await run.until(lambda page: page["worker_fault_active", "a"] == 1)
            run.write(target("a", fake, pool="other"), pools={"other": {"answer_within": 60}})
            assert await run.reload() is None
            after = await run.page()
            start = "worker_fault_start_timestamp_seconds"
            assert after[start, "a", "other"] == before[start, "a"]
            assert after["worker_restarts_total", "a"] == 1


async def test_pool_settings_reach_the_watchers(tmp_path: Path) -> None:
    """What makes a worker ready changes at once, on the connection that there is."""
    with FakeWorker() as fake:
        async with running(tmp_path, target("a", fake, pool="p")) as run:
            await run.until(ready("a"))
            fake.hang()
            run.write(target("a", fake, pool="p"), pools={"p": {"answer_within": 0.3, "ready_rung": "answering"}})
            assert await run.reload() is None
            await run.until(lambda page: page["worker_not_ready", "a", "engine_silent"] == 1)
            run.write(target("a", fake, pool="p"), pools={"p": {"answer_within": 0.3, "ready_rung": "serving"}})
            assert await run.reload() is None
            await run.until(ready("a"))
            assert streams(fake) == [None]


async def test_b24_a_new_address_is_no_fault(tmp_path: Path) -> None:
    """A worker that is moved to another address keeps its counters; another instance there is a restart, no fault."""
    with FakeWorker() as here, FakeWorker() as there:
        async with running(tmp_path, target("a", here)) as run:
            first = await run.until(ready("a"))
            run.write(target("a", there))
            assert await run.reload() is None
            page = await run.until(lambda page: page["worker_restarts_total", "a"] == 1 and ready("a")(page))
            assert page["worker_discovered_timestamp_seconds", "a"] == first["worker_discovered_timestamp_seconds", "a"]
            assert not [s for s in page.of("worker_faults_total") if s.value]
            assert page["worker_target_info", "a", there.target] == 1
            assert len(streams(here)) == 1


async def test_b24_a_new_address_where_nobody_is(tmp_path: Path) -> None:
    """A worker that is moved to where nobody answers is unreachable, and that is a fault."""
    with FakeWorker() as here:
        async with running(tmp_path, target("a", here)) as run:
            await run.until(ready("a"))
            run.write({"name": "a", "grpc": "127.0.0.1:9"})
            assert await run.reload() is None
            page = await run.until(lambda page: page["worker_fault_active", "a"] == 1)
            assert page["worker_not_ready", "a", "unreachable"] == 1


async def test_b24_many_moves_leave_nothing_behind(tmp_path: Path) -> None:
    """After a hundred moves there are no more open files than before."""
    with FakeWorker() as one, FakeWorker() as two:
        async with running(tmp_path, target("a", one)) as run:
            await run.until(ready("a"))

            async def moves(count: int) -> int:
                for number in range(count):
                    fake = (two, one)[number % 2]
                    seen = len(streams(fake))
                    run.write(target("a", fake))
                    assert await run.reload() is None
                    await asyncio.to_thread(fake.wait_for_call, "Watch", count=seen + 1)
                return len(os.listdir("/proc/self/fd"))

            before = await moves(10)
            assert await moves(100) <= before + 4
            page = await run.until(ready("a"))
            assert page["worker_faults_total", "a", "replaced_unseen"] == 0


@pytest.mark.parametrize("wrong", ["targets: [a:1\n", "pol: x\n", "targets: [a:b]\n", None])
async def test_a_bad_file_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture, wrong: str | None) -> None:
    """With mistakes in the file, or no file, all goes on as before; a metric and one line say so until it is mended."""
    with FakeWorker() as fake:
        async with running(tmp_path, target("a", fake)) as run:
            await run.until(ready("a"))
            good = run.path.read_text()
            run.path.unlink() if wrong is None else run.path.write_text(wrong)
            caplog.clear()
            said = await run.reload()
            assert said is not None
            assert str(run.path) in said
            page = await run.page()
            assert page["config_last_reload_successful",] == 0
            assert page["worker_ready", "a"] == 1
            assert [record.message for record in caplog.records if record.levelno > logging.INFO] == ["reload_refused"]
            run.path.write_text(good)
            assert await run.reload() is None
            assert (await run.page())["config_last_reload_successful",] == 1
            assert streams(fake) == [None]


async def test_a_source_that_stays_goes_on(tmp_path: Path) -> None:
    """Reloaded with the same source and one more, the workers of the first are never off the page."""
    with FakeWorker() as a, FakeWorker() as b:
        for name, fake in (("one", a), ("two", b)):
            (tmp_path / f"{name}.json").write_text(json.dumps([{"targets": [fake.target]}]))
        files = [{"name": name, "files": [f"{name}.json"], "poll_interval": 60} for name in ("one", "two")]
        async with running(tmp_path, discovery={"file_sd": files[:1]}) as run:
            await run.until(ready(a.target))
            (tmp_path / "one.json").unlink()
            run.write(discovery={"file_sd": files})
            assert await run.reload() is None
            await run.until(ready(a.target, b.target))
            # Configured anew, a source keeps what it knew until it has something else.
            run.write(discovery={"file_sd": [{**files[0], "poll_interval": 61}, files[1]]})
            assert await run.reload() is None
            assert ready(a.target, b.target)(await run.page())
            assert [streams(fake) for fake in (a, b)] == [[None]] * 2


def test_sighup(tmp_path: Path) -> None:
    """SIGHUP reads the file again: a good one is taken over, a bad one is not, and the process never stops for it."""
    path = tmp_path / "exporter.yaml"
    with FakeWorker() as fake:
        path.write_text(f"targets: [a={fake.target}]\n")
        with Exporter("--config", str(path)) as exporter:
            exporter.eventually(lambda page: 'worker_ready{pool="default",worker="a"} 1.0' in page)
            path.write_text("targets: 7\n")
            os.kill(exporter.process.pid, signal.SIGHUP)
            assert f"{path}:1: targets: this is no list" in exporter.event("reload_refused")["error"]
            exporter.eventually(lambda page: "config_last_reload_successful 0.0" in page)
            path.write_text(f"targets: [b={fake.target}]\nstate_file: state\nlog: {{format: json}}\n")
            os.kill(exporter.process.pid, signal.SIGHUP)
            page = exporter.eventually(lambda page: 'worker_ready{pool="default",worker="b"} 1.0' in page)
            assert 'worker="a"' not in page
            assert "config_last_reload_successful 1.0" in page
            assert exporter.event("needs_restart")["settings"] == "state_file"
            assert exporter.lines[-1].startswith("{"), "the form of the lines is taken over too"
            assert exporter.stop()[0] == 0


async def test_a_token_is_in_no_dump_repr_or_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A token reaches its worker, and is in nothing that the daemon says, shows or holds as text."""
    caplog.set_level(logging.DEBUG)
    (tmp_path / "token").write_text(SECRET)
    defaults = {"token_file": "token", "insecure_token": True}
    modules = {"m": {"token_file": "token", "insecure_token": True}}
    with FakeWorker() as fake:
        async with running(tmp_path, target("a", fake), defaults=defaults, modules=modules) as run:
            await run.until(ready("a"))
            assert any(SECRET in str(call.metadata) for call in fake.calls)
            assert run.daemon is not None
            told = run.daemon.settings
            (tmp_path / "token").write_text(f"{SECRET} and more")
            said = await run.reload()
            assert said is not None
            shown = [repr(told), str(told), repr(run.daemon.board.snapshot), yaml.safe_dump(redacted(told)), said]
            async with aiohttp.ClientSession() as session:
                for path in ("/metrics", "/", "/api/v1/episodes", "/-/ready"):
                    async with session.get(f"{run.url}{path}") as answer:
                        shown.append(await answer.text())
    shown += [str(vars(record)) for record in caplog.records]
    assert not [text for text in shown if SECRET in text]
