"""The daemon's HTTP face. Pages come from the immutable snapshot, made in a thread; only ``/probe`` asks a worker."""

from __future__ import annotations

import asyncio
import functools
import gzip
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from aiohttp import web

from vllm_cp_exporter.api import Api
from vllm_cp_exporter.collector import PageCollector
from vllm_cp_exporter.exposition import Exposition
from vllm_cp_exporter.landing import POLICY, landing_page, live_part
from vllm_cp_exporter.negotiate import Form, accepts_gzip, choose_form
from vllm_cp_exporter.probe import Prober
from vllm_cp_exporter.selfmetrics import SelfMetrics
from vllm_cp_exporter.snapshot import Board
from vllm_cp_exporter.web import Door

__all__ = ["Server"]

log = logging.getLogger("vllm_cp_exporter.server")
T = TypeVar("T")

#: Pages made at once. More threads would only share the same interpreter.
_PAGES_AT_ONCE = 2
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
        door: Door | None = None,
        prober: Prober | None = None,
        reload: Callable[[], Awaitable[str | None]] | None = None,
        config: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        """``not_ready`` and ``not_healthy`` say why not, and ``None`` when all is well.

        ``reload`` does it and says what was wrong; ``None`` where it may not be asked for over HTTP. ``config`` gives
        the settings without any secret.
        """
        self._board = board
        self._metrics = metrics
        self._not_ready = not_ready
        self._not_healthy = not_healthy
        self._told: set[str] = set()
        self._exposition = Exposition()
        self._pages = ThreadPoolExecutor(_PAGES_AT_ONCE, thread_name_prefix="page")
        self._door = door or Door()
        self._api = Api(board, self._in_thread)
        self._prober = prober
        self._reload = reload
        self._config = config
        app = web.Application(middlewares=[self._door.guard, _guarded])
        app.on_response_prepare.append(self._door.adorn)
        app.router.add_get("/", self._landing)
        app.router.add_get("/metrics", self._page)
        app.router.add_get("/-/healthy", self._healthy)
        app.router.add_get("/-/ready", self._ready)
        app.router.add_post("/-/reload", self._reloaded)
        app.router.add_get("/config", self._shown)
        app.router.add_routes([*self._api.routes(), *(prober.routes() if prober else ())])
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=_STOP_WITHIN_S)

    async def start(self, sockets: Sequence[socket.socket]) -> None:
        """Answer on sockets that listen already; they belong to the server from here on."""
        await self._runner.setup()
        assert self._runner.server is not None
        self._api.start()
        await self._door.listen(self._runner.server, sockets)

    async def stop(self) -> None:
        """Close the sockets and finish what is under way, in half a second at most."""
        await self._door.close()
        await self._api.stop()
        await self._runner.cleanup()
        if self._prober is not None:
            await self._prober.close()
        self._pages.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, work: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pages, functools.partial(work, *arguments))

    async def _page(self, request: web.Request) -> web.Response:
        form = choose_form(",".join(request.headers.getall("Accept", ())))
        compress = accepts_gzip(",".join(request.headers.getall("Accept-Encoding", ())))
        names = request.query.getall("name[]", None)
        page = PageCollector(self._board.snapshot, self._metrics.freeze(), None if names is None else frozenset(names))
        body = await self._in_thread(_rendered, self._exposition, page, form, compress)
        self._metrics.row_errors(page.errors)
        for row, problem in page.problems.items():
            if row not in self._told:
                self._told.add(row)
                log.warning("row_error", extra={"fields": {"row": row, "problem": problem}})
        headers = {"Content-Type": form.content_type, "Vary": "Accept, Accept-Encoding"}
        if compress:
            headers["Content-Encoding"] = "gzip"
        return web.Response(body=body, headers=headers)

    async def _landing(self, request: web.Request) -> web.Response:
        draw = live_part if request.query.get("part") == "live" else landing_page
        sources = self._metrics.freeze().discovered
        told = (self._not_ready(), request.query.get("pool"), self._api.revision, sources)
        body = await self._in_thread(draw, self._board.snapshot, *told)
        headers = {"Content-Security-Policy": POLICY, "Cache-Control": "no-store"}
        return web.Response(text=body, content_type="text/html", headers=headers)

    async def _reloaded(self, _: web.Request) -> web.Response:
        if self._reload is None:
            return web.Response(status=403, text="reload over HTTP is off; start with --enable-reload or send SIGHUP\n")
        problem = await self._reload()
        if problem is not None:
            return web.Response(status=500, text=f"not reloaded, the old configuration stays: {problem}\n")
        return web.Response(text="reloaded\n")

    async def _shown(self, _: web.Request) -> web.Response:
        if self._config is None:
            raise web.HTTPNotFound
        import yaml

        text = yaml.safe_dump(dict(self._config()), sort_keys=False, allow_unicode=True)
        return web.Response(text=text, content_type="text/plain")

    async def _healthy(self, _: web.Request) -> web.Response:
        return _verdict("healthy", self._not_healthy())

    async def _ready(self, _: web.Request) -> web.Response:
        return _verdict("ready", self._not_ready())


def _rendered(exposition: Exposition, page: PageCollector, form: Form, compress: bool) -> bytes:
    body = exposition.render(page, form)
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
