"""The HTTP surface, over real sockets."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from tests.exporter.pages import Page
from tests.exporter.views import FACTS, GONE, UP, WALL, life, view
from vllm_cp.models.episode import Cause, EndKind, Episode
from vllm_cp_exporter import server as server_module
from vllm_cp_exporter.config import Listen
from vllm_cp_exporter.listen import bind
from vllm_cp_exporter.selfmetrics import SelfMetrics
from vllm_cp_exporter.server import Server
from vllm_cp_exporter.snapshot import Board, Facts

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


class Client:
    """A running server and somebody who asks it."""

    def __init__(self, server: Server, board: Board, session: aiohttp.ClientSession, port: int) -> None:
        self.server = server
        self.board = board
        self.session = session
        self.port = port

    async def ask(
        self, path: str = "/metrics", method: str = "GET", **headers: str
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        """One request; the body as it came over the wire."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        url = f"http://127.0.0.1:{self.port}{path}"
        async with self.session.request(
            method, url, headers=named, skip_auto_headers=["Accept", "Accept-Encoding"]
        ) as r:
            return r, await r.read()


@asynccontextmanager
async def serving(board: Board | None = None, port: int = 0, **words: Any) -> AsyncIterator[Client]:
    board = board or Board()
    sockets = bind(Listen("127.0.0.1", port))
    made = Server(board, SelfMetrics(), **words)
    await made.start(sockets)
    try:
        # Bodies stay compressed, so that a test sees what was sent.
        async with aiohttp.ClientSession(auto_decompress=False) as session:
            yield Client(made, board, session, sockets[0].getsockname()[1])
    finally:
        await made.stop()


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with serving() as made:
        made.board.publish(view(facts=FACTS))
        made.board.publish(view(life(UP, GONE), key="b"))
        yield made


@pytest.mark.parametrize("encoding", ["gzip", "identity", ""])
@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("", TEXT),
        ("*/*", TEXT),
        ("application/openmetrics-text;version=1.0.0", OPENMETRICS),
        ("application/openmetrics-text;version=1.0.0;q=0.1,text/plain;version=0.0.4;q=0.9", TEXT),
        ("nonsense ;q= , //", TEXT),
    ],
)
async def test_b35_content_type_matches_the_body(client: Client, accept: str, content_type: str, encoding: str) -> None:
    """The body is in the form that its content type names, compressed for those who asked, with the same numbers."""
    response, body = await client.ask(Accept=accept, Accept_Encoding=encoding)
    assert response.status == 200
    assert response.headers["Content-Type"] == content_type
    assert response.headers.get("Content-Encoding") == ("gzip" if encoding == "gzip" else None)
    assert response.headers["Vary"] == "Accept, Accept-Encoding"
    text = (gzip.decompress(body) if encoding == "gzip" else body).decode()
    assert text.endswith("# EOF\n") == (content_type == OPENMETRICS)
    seen = Page((parse_openmetrics if content_type == OPENMETRICS else parse_text)(text))
    assert seen["worker_kv_blocks", "a"] == 40000
    assert seen["worker_ready", "b"] == 0
    assert len(seen.of("worker_faults_total")) == 16


async def test_b35_no_accept_header_at_all(client: Client) -> None:
    """Somebody who says nothing gets the plain text, uncompressed."""
    response, body = await client.ask()
    assert response.headers["Content-Type"] == TEXT
    assert body.startswith(b"# HELP ")


@pytest.mark.parametrize("path", ["/metrics", "/", "/-/healthy", "/-/ready", "/api/v1/episodes"])
async def test_b35_head_and_post(client: Client, path: str) -> None:
    """HEAD is GET without the body; POST is not allowed, and says what is."""
    got, body = await client.ask(path)
    head, nothing = await client.ask(path, "HEAD")
    assert (head.status, head.headers["Content-Type"], nothing) == (200, got.headers["Content-Type"], b"")
    assert int(head.headers["Content-Length"]) > 0
    assert body
    post, said = await client.ask(path, "POST")
    assert (post.status, said) == (405, b"Method Not Allowed\n")
    assert "GET" in post.headers["Allow"]


@pytest.mark.parametrize("path", ["/nothing", "/metrics/", "/-/", "/%ff%00", "/../etc/passwd", "/api/v1/"])
async def test_b35_unknown_paths(client: Client, path: str) -> None:
    """An unknown path is not found, in plain text."""
    response, body = await client.ask(path)
    assert (response.status, body) == (404, b"Not Found\n")
    assert response.headers["Content-Type"].startswith("text/plain")


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text"])
async def test_b35_some_names_only(client: Client, accept: str) -> None:
    """name[] filters, once or more often; a name that nobody knows is an empty page."""
    _, body = await client.ask(
        "/metrics?name[]=vllm_cp_worker_ready&name%5B%5D=vllm_cp_worker_faults_total", Accept=accept
    )
    names = {line.split("{")[0] for line in body.decode().splitlines() if not line.startswith("#")}
    assert names == {"vllm_cp_worker_ready", "vllm_cp_worker_faults_total"}
    _, body = await client.ask("/metrics?name[]=%ff", Accept=accept)
    assert body == (b"# EOF\n" if accept else b"")


async def test_the_landing_page(client: Client) -> None:
    """A person sees every worker with its ladder, why it is not ready, its open fault and the last episodes."""
    old = Episode(
        cause=Cause.ENGINE_SILENT, start=WALL, end=WALL + 9, kind=EndKind.RESUMED, duration_s=9.0, detail="<b>"
    )
    client.board.publish(view(life(UP, GONE), key="b", pool="<pool>", episodes=(old,)))
    response, body = await client.ask("/")
    page = body.decode()
    assert response.headers["Content-Type"] == "text/html; charset=utf-8"
    assert "1 of 2 workers ready" in page
    for word in ("a:8001", "b:8001", "40000", "unreachable", "unreachable since 2023-11-14T22:13:22.000Z", "/metrics"):
        assert word in page
    assert "engine_silent" in page
    assert "resumed at 2023-11-14T22:13:29.000Z" in page
    assert "&lt;b&gt;" in page
    assert "<b>" not in page
    assert "<pool>" not in page
    assert "http" not in page.replace("http-equiv", ""), "nothing is loaded from elsewhere"


async def test_the_landing_page_of_a_strange_worker(client: Client) -> None:
    """A worker that cannot be shown costs its own line."""
    client.board.publish(view(key="bad", facts=Facts(server=object())))  # type: ignore[arg-type]
    _, body = await client.ask("/")
    assert b"cannot be shown" in body
    assert b"a:8001" in body


async def test_episodes(client: Client) -> None:
    """The last episodes of all workers, newest first, in ISO time; what is not known is null."""
    done = Episode(
        cause=Cause.ENGINE_REPORTED, start=WALL, end=WALL + 1.5, kind=EndKind.REPLACED, duration_s=1.5, instance_id="i"
    )
    still = Episode(cause=Cause.UNREACHABLE, start=WALL + 60, detail="w\udcff")
    client.board.publish(view(key="a", episodes=(done,)))
    client.board.publish(view(key="b", episodes=(still,)))
    response, body = await client.ask("/api/v1/episodes")
    assert response.headers["Content-Type"] == "application/json; charset=utf-8"
    assert json.loads(body)["episodes"] == [
        {
            "worker": "b",
            "pool": "chat",
            "cause": "unreachable",
            "start": "2023-11-14T22:14:20.000Z",
            "end": None,
            "kind": None,
            "duration_s": None,
            "instance_id": None,
            "detail": "w\ufffd",
        },
        {
            "worker": "a",
            "pool": "chat",
            "cause": "engine_reported",
            "start": "2023-11-14T22:13:20.000Z",
            "end": "2023-11-14T22:13:21.500Z",
            "kind": "replaced",
            "duration_s": 1.5,
            "instance_id": "i",
            "detail": "",
        },
    ]


async def test_healthy_and_ready() -> None:
    """Ready and healthy are 200, or 503 with the reason."""
    problems: dict[str, str | None] = {"ready": "2 of 3 workers were not looked at yet", "healthy": None}
    async with serving(not_ready=lambda: problems["ready"], not_healthy=lambda: problems["healthy"]) as client:
        response, body = await client.ask("/-/ready")
        assert (response.status, body) == (503, b"not ready: 2 of 3 workers were not looked at yet\n")
        problems.update(ready=None, healthy="asleep")
        response, body = await client.ask("/-/ready")
        assert (response.status, body) == (200, b"ready\n")
        response, body = await client.ask("/-/healthy")
        assert (response.status, body) == (503, b"not healthy: asleep\n")
        assert (await client.ask())[0].status == 200, "the page is there all the same"


async def test_b35_start_stop_start() -> None:
    """A server that stopped leaves its port to the next one, and nothing of its numbers."""
    async with serving() as first:
        first.board.publish(view(key="old"))
        port = first.port
        assert b'worker="old"' in (await first.ask())[1]
    async with serving(port=port) as second:
        assert b'worker="old"' not in (await second.ask())[1]


async def test_b35_two_in_one_process() -> None:
    """Two exporters in one process work beside each other, each with its own workers."""
    async with serving() as one, serving() as two:
        one.board.publish(view(key="one"))
        two.board.publish(view(key="two"))
        assert b'worker="two"' not in (await one.ask())[1]
        assert b'worker="two"' in (await two.ask())[1]


async def test_b35_200_scrapes_at_once(client: Client) -> None:
    """200 scrapes at once are all answered, and the loop goes on ticking meanwhile."""
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0)
            ticks += 1

    ticking = asyncio.create_task(tick())
    answers = await asyncio.gather(*(client.ask(Accept_Encoding="gzip" if n % 2 else "") for n in range(200)))
    ticking.cancel()
    assert {response.status for response, _ in answers} == {200}
    assert ticks > 200


async def test_pages_are_not_made_on_the_loop(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a page is being made, the loop answers others."""
    started, go_on = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    real = server_module._rendered

    def slow(*arguments: Any) -> bytes:
        loop.call_soon_threadsafe(started.set)
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(timeout=10)
        return real(*arguments)

    monkeypatch.setattr(server_module, "_rendered", slow)
    page = asyncio.create_task(client.ask())
    await started.wait()
    assert (await client.ask("/-/healthy"))[0].status == 200
    go_on.set()
    assert (await page)[0].status == 200


async def test_a_page_that_fails_costs_one_request(
    client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Should a page be impossible to make, that request gets a 500 and the log a line; the next one is served."""
    with monkeypatch.context() as patch:
        patch.setattr(server_module, "landing_page", None)
        response, body = await client.ask("/")
        assert (response.status, body) == (500, b"this page could not be made; see the log\n")
    assert [record.message for record in caplog.records] == ["request_failed"]
    assert (await client.ask("/"))[0].status == 200


async def test_b29_a_bad_row_is_counted_and_told_once(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    """A row that cannot be read is a 200 with a count, and one line in the log however often it is scraped."""
    client.board.publish(view(key="bad", facts=Facts(server=object())))  # type: ignore[arg-type]
    for number in (1, 2, 3):
        response, body = await client.ask()
        assert response.status == 200
        assert Page(parse_text(body.decode()))["exporter_row_errors_total", "vllm_cp_worker_kv_blocks"] == number
    told = [record.fields["row"] for record in caplog.records]  # type: ignore[attr-defined]
    assert told.count("vllm_cp_worker_kv_blocks") == 1


async def test_stop_is_quick_with_a_connection_open() -> None:
    """A client that keeps its connection open does not hold up the end."""
    async with serving() as client:
        with socket.create_connection(("127.0.0.1", client.port)) as idle:
            await client.ask()
            await asyncio.wait_for(client.server.stop(), timeout=2)
            idle.settimeout(2)
            assert idle.recv(1) == b""
