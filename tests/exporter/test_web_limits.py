"""What one client, or all of them, may ask of the daemon."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import aiohttp
import pytest

from tests.certs import Certs, make_certs
from tests.exporter.asking import Asker, serving, until
from tests.exporter.doors import Written, tls_section, trusting
from vllm_cp_exporter import server as server_module
from vllm_cp_exporter.web import Door, Limits


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Certs:
    return make_certs(tmp_path_factory.mktemp("certs"))


@pytest.fixture
def file(tmp_path: Path) -> Written:
    return Written(tmp_path / "web.yml")


async def _rest(reader: asyncio.StreamReader) -> bytes:
    """What still comes until the server ends the connection."""
    with suppress(ConnectionError):
        return await asyncio.wait_for(reader.read(), 10)
    return b""


# -- limits ---------------------------------------------------------------------------------


async def test_a_long_request_is_refused() -> None:
    """A query longer than any page needs is 414, one that no parser should hold is 400; the next one is served."""
    async with serving() as ask:
        assert (await ask("/metrics?name[]=" + "a" * 5000)).status == 414
        assert (await ask("/metrics?name[]=" + "a" * 60000)).status == 400
        assert (await ask("/metrics")).status == 200


async def test_so_many_requests_at_once() -> None:
    """More than the limit are told to come back; health is answered all the same."""
    go_on = asyncio.Event()

    async def slowly() -> str | None:
        await go_on.wait()
        return None

    async with serving(door=Door(limits=Limits(requests=2)), reload=slowly) as ask:
        waiting = [asyncio.create_task(ask("/-/reload", "POST")) for _ in range(2)]
        refused = await ask.until("/metrics", lambda answer: answer.status == 503)
        assert refused.headers["Retry-After"] == "5"
        assert (await ask("/-/healthy")).status == (await ask("/-/ready")).status == 200
        go_on.set()
        assert [(await task).text for task in waiting] == ["reloaded\n"] * 2
        assert (await ask("/metrics")).status == 200


@pytest.mark.parametrize("sent", [b"", b"GET /metrics HTTP/1.1\r\nHost: a\r\nX-Slow: "])
async def test_slow_headers_are_cut(sent: bytes) -> None:
    """Who connects and never says what it wants is cut; others are served meanwhile."""
    async with serving(door=Door(limits=Limits(headers_s=0.3))) as ask:
        reader, writer = await asyncio.open_connection("127.0.0.1", ask.port)
        writer.write(sent)
        assert (await ask("/metrics")).status == 200
        assert await _rest(reader) == b"", "cut without a word"
        writer.close()


async def test_a_slow_handshake_is_cut(file: Written, certs: Certs) -> None:
    """TLS counts: a connection that never shakes hands is cut as well."""
    file.says(tls_section(certs))
    async with serving(door=Door(file.path, limits=Limits(headers_s=0.3)), tls=trusting(certs)) as ask:
        reader, writer = await asyncio.open_connection("127.0.0.1", ask.port)
        assert (await ask("/metrics")).status == 200
        assert await _rest(reader) == b""
        writer.close()


async def test_a_slow_body_holds_nobody() -> None:
    """A body that is announced and never comes is not waited for: no page reads one."""
    async with serving() as ask:
        reader, writer = await asyncio.open_connection("127.0.0.1", ask.port)
        writer.write(b"POST /-/reload HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\n")
        assert (await asyncio.wait_for(reader.readline(), 10)).startswith(b"HTTP/1.1 403")
        await asyncio.wait_for(reader.read(), 10)
        writer.close()


async def test_who_does_not_read_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that nobody takes is dropped after a while, instead of being kept for ever."""
    monkeypatch.setattr(server_module, "landing_page", lambda *_: "x" * 20_000_000)
    door = Door(limits=Limits(reading_s=0.2))
    async with serving(door=door) as ask:
        reader, writer = await asyncio.open_connection("127.0.0.1", ask.port, limit=1024)
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        assert (await asyncio.wait_for(reader.readline(), 20)).startswith(b"HTTP/1.1 200")
        # The answer is under way; from here on it is read only after the server has given up.
        await ask.until("/-/healthy", lambda _: len(door._open) == 1)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(reader.readexactly(20_000_000), 20)
        writer.close()


async def test_so_many_connections() -> None:
    """Connections beyond the limit are closed at once; when one ends, there is room again."""
    async with serving(door=Door(limits=Limits(connections=1))) as ask:
        _, writer = await asyncio.open_connection("127.0.0.1", ask.port)
        await until(lambda: _served(ask, False))
        writer.close()
        await until(lambda: _served(ask, True))


async def _served(ask: Asker, wanted: bool) -> bool:
    """Whether a new connection is served, or refused, as wanted."""
    try:
        await ask("/-/healthy", headers={"Connection": "close"})
    except aiohttp.ClientError:
        return not wanted
    return wanted
