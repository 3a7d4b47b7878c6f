"""The daemon's HTTP face. Every page is made from the immutable snapshot, in another thread; nothing asks a worker."""

from __future__ import annotations

import asyncio
import functools
import gzip
import json
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from aiohttp import web
from prometheus_client import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from vllm_cp_exporter.collector import PageCollector
from vllm_cp_exporter.landing import episodes, landing_page
from vllm_cp_exporter.negotiate import OPENMETRICS, TEXT, Form, accepts_gzip, choose_form
from vllm_cp_exporter.selfmetrics import SelfMetrics
from vllm_cp_exporter.snapshot import Board

__all__ = ["Server"]

log = logging.getLogger("vllm_cp_exporter.server")
T = TypeVar("T")

#: Pages made at once. More threads would only share the same interpreter.
_PAGES_AT_ONCE = 2
# The library says it wants a registry, and only asks it to collect.
_FORMS: dict[Form, Callable[[Any], bytes]] = {TEXT: generate_latest, OPENMETRICS: generate_openmetrics}
#: How long answers that are under way may take when the server stops.
_STOP_WITHIN_S = 0.5


class Server:
    """Serves one board. Shares nothing with another server in the same process."""

    def __init__(
        self,
        board: Board,
        metrics: SelfMetrics,
        *,
        not_ready: Callable[[], str | None] = lambda: None,
        not_healthy: Callable[[], str | None] = lambda: None,
    ) -> None:
        """``not_ready`` and ``not_healthy`` say why not, and ``None`` when all is well."""
        self._board = board
        self._metrics = metrics
        self._not_ready = not_ready
        self._not_healthy = not_healthy
        self._told: set[str] = set()
        self._pages = ThreadPoolExecutor(_PAGES_AT_ONCE, thread_name_prefix="page")
        app = web.Application(middlewares=[_guarded])
        app.router.add_get("/", self._landing)
        app.router.add_get("/metrics", self._page)
        app.router.add_get("/-/healthy", self._healthy)
        app.router.add_get("/-/ready", self._ready)
        app.router.add_get("/api/v1/episodes", self._episodes)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=_STOP_WITHIN_S)

    async def start(self, sockets: Sequence[socket.socket]) -> None:
        """Answer on sockets that listen already; they belong to the server from here on."""
        await self._runner.setup()
        for listening in sockets:
            await web.SockSite(self._runner, listening).start()

    async def stop(self) -> None:
        """Close the sockets and finish what is under way, in half a second at most."""
        await self._runner.cleanup()
        self._pages.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, work: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pages, functools.partial(work, *arguments))

    async def _page(self, request: web.Request) -> web.Response:
        form = choose_form(",".join(request.headers.getall("Accept", ())))
        compress = accepts_gzip(",".join(request.headers.getall("Accept-Encoding", ())))
        names = request.query.getall("name[]", None)
        page = PageCollector(self._board.snapshot, self._metrics.freeze(), None if names is None else frozenset(names))
        body = await self._in_thread(_rendered, page, form, compress)
        self._metrics.row_errors(page.errors)
        for row, problem in page.problems.items():
            if row not in self._told:
                self._told.add(row)
                log.warning("row_error", extra={"fields": {"row": row, "problem": problem}})
        headers = {"Content-Type": form.content_type, "Vary": "Accept, Accept-Encoding"}
        if compress:
            headers["Content-Encoding"] = "gzip"
        return web.Response(body=body, headers=headers)

    async def _landing(self, _: web.Request) -> web.Response:
        body = await self._in_thread(landing_page, self._board.snapshot, self._not_ready())
        policy = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
        return web.Response(text=body, content_type="text/html", headers=policy)

    async def _episodes(self, _: web.Request) -> web.Response:
        found = await self._in_thread(episodes, self._board.snapshot)
        return web.Response(text=json.dumps({"schema": 1, "episodes": found}) + "\n", content_type="application/json")

    async def _healthy(self, _: web.Request) -> web.Response:
        return _verdict("healthy", self._not_healthy())

    async def _ready(self, _: web.Request) -> web.Response:
        return _verdict("ready", self._not_ready())


def _rendered(page: PageCollector, form: Form, compress: bool) -> bytes:
    body = _FORMS[form](page)
    return gzip.compress(body, compresslevel=4, mtime=0) if compress else body


def _verdict(good: str, problem: str | None) -> web.Response:
    if problem is None:
        return web.Response(text=f"{good}\n")
    return web.Response(status=503, text=f"not {good}: {problem}\n")


@web.middleware
async def _guarded(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """A page that cannot be made costs this request only, and one line."""
    try:
        return await handler(request)
    except web.HTTPException as answer:
        # Not found, or not allowed: as plain text, in one line.
        return web.Response(status=answer.status, text=f"{answer.reason}\n", headers=_allowed(answer))
    except Exception:
        log.exception("request_failed", extra={"fields": {"path": request.path}})
        return web.Response(status=500, text="this page could not be made; see the log\n")


def _allowed(answer: web.HTTPException) -> dict[str, str]:
    return {"Allow": answer.headers["Allow"]} if "Allow" in answer.headers else {}
