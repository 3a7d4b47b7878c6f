"""The status page, as text and in a browser."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from html.parser import HTMLParser
from typing import Any

import pytest

from tests.exporter.asking import Asker, serving, watching
from tests.exporter.browser import BINARY, Browser
from tests.exporter.test_api import busy
from tests.exporter.views import FACTS, GONE, UP, WALL, life, lives, snapshot, view
from vllm_cp import Connection, KvEventSource
from vllm_cp.faults import HttpConnection
from vllm_cp.models.episode import Cause, EndKind, Episode
from vllm_cp.models.kv_source import Address
from vllm_cp.testing import FakeHttp, FakeWorker
from vllm_cp_exporter import landing
from vllm_cp_exporter.config import ExporterConfig, WorkerConfig
from vllm_cp_exporter.landing import landing_page, live_part
from vllm_cp_exporter.snapshot import Board, Facts


def in_browser(test: Callable[..., Any]) -> Callable[..., Any]:
    """A test that drives a browser."""
    missing = pytest.mark.skipif(BINARY is None, reason="no Chromium here: install Debian's package chromium")
    marked: Callable[..., Any] = pytest.mark.browser(missing(test))
    return marked


class _Loads(HTMLParser):
    """What a page would load from somewhere, and what runs in it."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.inline: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name in ("src", "srcset", "action") or (tag == "link" and name == "href" and value != "data:,"):
                self.loads.append(f"{tag} {name}={value}")
            if name.startswith("on") or name == "style":
                self.inline.append(f"{tag} {name}")


def test_everything_about_every_worker() -> None:
    """Ladder, capacity, load, event sources, open fault, the last episodes and the sources of targets."""
    source = KvEventSource(transport="zmq", live=Address(connect_to="tcp://a:5557"))
    over = Episode(cause=Cause.ENGINE_SILENT, start=WALL, end=WALL + 9, kind=EndKind.RESUMED, duration_s=9.0)
    page = landing_page(
        snapshot(
            busy("a", facts=Facts(server=FACTS.server, model=FACTS.model, sources=(source,)), episodes=(over,)),
            view(life(UP, GONE), key="b"),
        ),
        None,
        sources={"kubernetes": WALL},
    )
    for said in ("40000 KV blocks", "3 running, 1 waiting", "50% of KV cache", "tcp://a:5557", "engine_silent",
                 "connection refused", "unreachable since 2023-", "kubernetes", "1 of 2 workers ready"):  # fmt: skip
        assert said in page, said
    assert re.findall(r'<li class="(\w+)" title="[^"]*">(\w+)', page)[:2] == [("no", "reachable"), ("no", "serving")]
    found = _Loads(page)
    assert (found.loads, found.inline) == ([], []), "one page, nothing from outside, nothing that the policy forbids"


def test_workers_in_all_walks_of_life() -> None:
    """Whatever a worker's state, the page can show it; trouble comes first."""
    page = live_part(snapshot(*(view(state, key=f"w{n}") for n, state in enumerate(lives()))), "not yet")
    assert "cannot be shown" not in page
    assert page.index("faulted</span>") < page.index("ready</span>")
    assert "Not ready: not yet" in page


def test_text_from_workers_is_text() -> None:
    """What workers and configuration say is never markup."""
    evil = '"><script>alert(1)</script>'
    facts = Facts(sources_problem=evil)
    state = life(UP, {"contact": False, "detail": evil})
    page = landing_page(snapshot(view(state, key=evil, pool=evil, facts=facts), min_ready={evil: 1}), evil, evil)
    assert page.count("<script>") == 1
    assert "alert(1)</script>" not in page


async def test_one_pool_at_a_time() -> None:
    """The filter shows one pool's workers and episodes, with the count of each pool beside it."""
    board = Board({"chat": 2})
    board.publish(view(key="one"))
    board.publish(view(life(UP, GONE), key="two", pool="a&b"))
    async with serving(board) as ask:
        everything = (await ask("/")).text
        assert 'href="?pool=a%26b"' in everything
        assert "chat 1/1, wants 2" in everything
        chosen = (await ask("/?pool=a%26b")).text
        assert ("two:8001" in chosen, "one:8001" in chosen) == (True, False)
        assert 'aria-current="page">a&amp;b 0/1' in chosen
        part = await ask("/?part=live&pool=chat")
        assert part.text.startswith("<div data-revision=")
        assert ("one:8001" in part.text, "two:8001" in part.text) == (True, False)


async def test_the_policy_lets_in_what_is_on_the_page_and_nothing_else() -> None:
    """Scripts and styles are allowed by their hashes; nothing may be loaded, framed or sent elsewhere."""
    async with serving() as ask:
        answer = await ask("/")
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for tag, rule in (("style", "style-src"), ("script", "script-src")):
        inside = re.findall(rf"<{tag}>(.*?)</{tag}>", answer.text, re.DOTALL)
        assert len(inside) == 1
        assert f"{rule} {landing._hash(inside[0])};" in policy


def test_a_huge_fleet_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """More workers than anybody reads are counted, and the pool is what to choose."""
    monkeypatch.setattr(landing, "_WORKERS_SHOWN", 3)
    page = live_part(snapshot(*(view(key=f"w{number}") for number in range(5))), None)
    assert page.count('class="ladder"') == 3
    assert "2 more workers are not shown" in page
    assert "5 of 5 workers ready" in page


# -- in a browser ---------------------------------------------------------------------------


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with Browser() as made:
        yield made


def _row(worker: str) -> str:
    return f"[...document.querySelectorAll('.workers tbody tr')].find(r => r.innerText.includes('{worker}')).innerText"


async def _settled(ask: Asker, worker: str, state: str) -> None:
    def there(records: list[dict[str, object]]) -> bool:
        return any(record["worker"] == worker and record["state"] == state for record in records)

    await ask.until("/api/v1/workers", lambda answer: there(answer.json["workers"]))


@in_browser
async def test_a_worker_goes_down_and_comes_back(browser: Browser) -> None:
    """The page shows it without being loaded again, in a second; the browser has nothing to complain of."""
    with FakeWorker() as fake, FakeWorker() as other:
        workers = tuple(
            WorkerConfig(key=key, pool="chat", connection=Connection.parse(each.target))
            for key, each in (("ml/llama-0", fake), ("ml/llama-1", other))
        )
        async with watching(ExporterConfig(workers=workers, probe_interval_s=0.3)) as ask:
            await _settled(ask, "ml/llama-0", "ready")
            await browser.open(ask.url)
            await browser.until(f"{_row('ml/llama-0')}.includes('ready')", "the worker being ready")
            await browser.until("document.getElementById('mark').textContent == 'live'", "the page being live")
            await browser.value("window.stays = true")
            fake.stop()
            await browser.until(f"{_row('ml/llama-0')}.includes('faulted')", "the worker going down")
            await browser.until(f"{_row('ml/llama-0')}.includes('unreachable since')", "its open fault")
            assert await browser.value(f"{_row('ml/llama-1')}.includes('ready')")
            fake.restart()
            await browser.until(f"{_row('ml/llama-0')}.includes('ready')", "the worker coming back")
            await browser.until("document.body.innerText.includes('replaced at')", "the episode that is over")
            assert await browser.value("window.stays"), "the same page all the time"
    assert [said for said in browser.complaints if "Security" in said or "exception" in said.lower()] == []


@in_browser
async def test_on_a_phone_and_without_a_script(browser: Browser) -> None:
    """On a narrow screen nothing has to be scrolled sideways; without scripts the browser loads the page again."""
    with FakeWorker() as fake, FakeHttp() as http:
        connection, side = Connection.parse(fake.target), HttpConnection.parse(http.url)
        worker = WorkerConfig(
            key="a-namespace-with-a-name/and-a-pod-with-a-longer-one-0", connection=connection, http=side
        )
        async with watching(ExporterConfig(workers=(worker,), probe_interval_s=0.3)) as ask:
            await _settled(ask, worker.key, "ready")
            await browser.open(ask.url, width=390, height=800)
            await browser.until("document.getElementById('mark')?.textContent == 'live'", "the page being live")
            assert await browser.value("document.documentElement.scrollWidth") <= 390
            await browser.open(f"{ask.url}/?pool=default", script=False)
            # Evaluating is not the page's own script, so it can look all the same.
            await browser.until("document.body?.innerText.includes('reloads every 5 s')", "the word about reloading")
            refresh = await browser.value("document.querySelector('noscript meta').content")
            assert refresh == "5; url=?pool=default"
            assert await browser.value(f"{_row('a-pod-with')}.includes('ready')")
