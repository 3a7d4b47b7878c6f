"""Servers and daemons of this process, and somebody who asks them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

import vllm_cp_exporter
from vllm_cp_exporter.config import ExporterConfig, Listen
from vllm_cp_exporter.daemon import Daemon
from vllm_cp_exporter.listen import bind
from vllm_cp_exporter.selfmetrics import SelfMetrics
from vllm_cp_exporter.server import Server
from vllm_cp_exporter.snapshot import Board

SCHEMAS = Path(vllm_cp_exporter.__file__).parent / "schema"
_WITHIN_S = 15.0


@dataclass(frozen=True)
class Answer:
    """One whole answer."""

    status: int
    headers: Mapping[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)


class Asker:
    """``await ask("/metrics")``."""

    def __init__(self, port: int, session: aiohttp.ClientSession, scheme: str = "http") -> None:
        self.port = port
        self.url = f"{scheme}://127.0.0.1:{port}"
        self.session = session

    async def __call__(self, path: str, method: str = "GET", **options: Any) -> Answer:
        async with self.session.request(method, self.url + path, **options) as answer:
            return Answer(answer.status, answer.headers, await answer.text())

    async def until(self, path: str, ready: Callable[[Answer], bool], **options: Any) -> Answer:
        """The answer, once it is as it should be."""

        async def look() -> Answer:
            while True:
                answer = await self(path, **options)
                if ready(answer):
                    return answer
                await asyncio.sleep(0.02)

        return await asyncio.wait_for(look(), _WITHIN_S)


async def until(ready: Callable[[], Awaitable[bool]]) -> None:
    """Wait until something is so."""

    async def look() -> None:
        done = False
        while not done:
            done = await ready()
            await asyncio.sleep(0.02)

    await asyncio.wait_for(look(), _WITHIN_S)


@asynccontextmanager
async def serving(
    board: Board | None = None, *, tls: ssl.SSLContext | None = None, **words: Any
) -> AsyncIterator[Asker]:
    """A server over a board, without watchers."""
    sockets = bind(Listen("127.0.0.1", 0))
    port = sockets[0].getsockname()[1]
    server = Server(board or Board(), SelfMetrics(), **words)
    await server.start(sockets)
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls or True)) as session:
            yield Asker(port, session, "https" if tls else "http")
    finally:
        await server.stop()
        if tls is not None:
            # aiohttp's client leaves TLS connections to be closed by the loop's next turns.
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.Event().wait(), 0.05)


@asynccontextmanager
async def watching(settings: ExporterConfig, **words: Any) -> AsyncIterator[Asker]:
    """A whole daemon."""
    sockets = bind(Listen("127.0.0.1", 0))
    port = sockets[0].getsockname()[1]
    async with Daemon(settings, sockets, **words), aiohttp.ClientSession() as session:
        yield Asker(port, session)


def _closed(schema: Any) -> Any:
    """The schema, with nothing in the answers that it does not name."""
    if isinstance(schema, dict):
        made = {key: _closed(value) for key, value in schema.items()}
        if "properties" in made:
            made["additionalProperties"] = False
        return made
    return [_closed(each) for each in schema] if isinstance(schema, list) else schema


def check(name: str, document: Any, *, closed: bool = True) -> None:
    """Hold an answer to its schema, which has to name all that is in it."""
    raw = {path.stem: json.loads(path.read_text()) for path in SCHEMAS.glob("*.json")}
    schemas = {key: _closed(schema) if closed else schema for key, schema in raw.items()}
    registry: Registry[Any] = Registry().with_resources(
        [(schema["$id"], Resource.from_contents(schema)) for schema in schemas.values()]
    )
    Draft202012Validator.check_schema(schemas[name])
    Draft202012Validator(schemas[name], registry=registry).validate(document)
