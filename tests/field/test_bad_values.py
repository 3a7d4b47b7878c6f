"""One worker with something wrong in it: the page stays whole, everybody else is on it, and it is counted."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import ExitStack

import aiohttp
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

from tests.exporter.pages import Page, parse_text
from tests.field.plain_server import plain_server
from tests.field.watching import ready, watching, worker
from vllm_cp.testing import FakeWorker
from vllm_cp_exporter.config import ExporterConfig

HOSTILE = {
    "quote": 'a"b',
    "backslash": "a\\b\\",
    "newline": "a\nb",
    "long": "x" * 10_000,
    "nothing": "",
    "page end": '"} 1\n# EOF\n',
    "control characters": "a\x00b\rc\x1bd\x85e\u2028f",
    "many scripts": "ünïcödé 模型 🦙",
}
OPENMETRICS = "application/openmetrics-text;version=1.0.0"


async def _scrape(session: aiohttp.ClientSession, url: str, accept: str) -> Page:
    async with session.get(f"{url}/metrics", headers={"Accept": accept}) as answer:
        assert answer.status == 200
        text = await answer.text()
    return Page((parse_openmetrics if accept == OPENMETRICS else parse_text)(text))


async def test_hostile_names() -> None:
    """Whatever workers call their models, versions and themselves, a real parser reads every one of fifty pages."""
    with ExitStack() as open_workers:
        workers = []
        for name, text in HOSTILE.items():
            fake = open_workers.enter_context(FakeWorker())
            fake.set(model_id=text, served_model_name=text, served_model_aliases=(text, text), proto_version=text)
            workers.append(worker(f"{name} {text}", fake.target))
        undecodable = open_workers.enter_context(FakeWorker())
        workers.append(worker("w\udcff", undecodable.target))
        async with watching(*workers) as daemon, aiohttp.ClientSession() as session:
            await daemon.until(lambda page: sum(page.by("worker_ready", "worker").values()) == len(workers))
            await daemon.until(lambda page: len(page.of("worker_model_info")) == len(workers))
            forms = [OPENMETRICS if number % 2 else "text/plain" for number in range(50)]
            pages = await asyncio.gather(*(_scrape(session, daemon.url, form) for form in forms))
    for page in pages:
        assert set(page.by("worker_ready", "worker").values()) == {1}
        models = {sample.labels["worker"]: sample.labels["model_id"] for sample in page.of("worker_model_info")}
        assert models['quote a"b'] == 'a"b'
        assert models["backslash a\\b\\"] == "a\\b\\"
        assert models["newline a\nb"] == "a\nb"
        assert models["many scripts ünïcödé 模型 🦙"] == "ünïcödé 模型 🦙"
        assert models["nothing "] == ""
        assert "w\ufffd" in models
        assert max(map(len, models.values())) <= 512
        assert sum(page.by("exporter_row_errors_total", "row").values()) == 0


async def test_workers_come_and_go_under_fifty_scrapes(fake: FakeWorker, nobody: str) -> None:
    """Reloads that add and remove workers while pages are made: each page is whole, and has those who stay."""
    stays = worker("stays", fake.target)
    rounds = itertools.count()

    def read() -> ExporterConfig:
        number = next(rounds)
        others = (worker(f"w{number % 3} {text}", nobody) for text in HOSTILE.values())
        return ExporterConfig(workers=(stays, *others), probe_interval_s=0.5)

    async with watching(stays, read=read) as daemon, aiohttp.ClientSession() as session:
        await daemon.until(ready("stays"))
        scrapes = [
            asyncio.create_task(_scrape(session, daemon.url, OPENMETRICS if number % 2 else "text/plain"))
            for number in range(50)
        ]
        while not all(scrape.done() for scrape in scrapes):
            assert await daemon.daemon.reload() is None
        pages = await asyncio.gather(*scrapes)
    assert next(rounds) > 3
    for page in pages:
        assert page["worker_ready", "stays"] == 1
        for key in page.by("worker_ready", "worker"):
            own = [sample for sample in page.of("worker_not_ready") if sample.labels["worker"] == key]
            assert sum(sample.value for sample in own) == (0 if key == "stays" else 1), "no worker is there by halves"


async def test_an_answer_that_cannot_be_read(fake: FakeWorker) -> None:
    """A worker whose answers are nonsense costs its own facts: the others are there, and its calls count as failed."""
    with plain_server(answer=b"\xff\xff\xff") as nonsense:
        async with watching(worker("good", fake.target), worker("bad", nonsense.target)) as daemon:
            page = await daemon.until(
                lambda page: page["rpc_failures_total", "Control.GetServerInfo", "INTERNAL"] is not None
            )
            page = await daemon.until(ready("good"))
            page = await daemon.until(lambda page: page["worker_not_ready", "bad", "engine_error"] == 1)
            assert page["worker_rung", "bad", "serving"] == 1
            assert page["worker_kv_blocks", "bad"] is None
            await daemon.until(lambda page: page["worker_kv_blocks", "good"] is not None)
            assert page["rpc_failures_total", "Control.IsPaused", "INTERNAL"] is not None
            assert "undecodable answer" in await daemon.get("/")
