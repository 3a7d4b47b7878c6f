"""``/api/v1``: what the daemon knows, for programs. Nothing here asks a worker, and nothing changes one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

from aiohttp import web

from vllm_cp_exporter.demand import Demands
from vllm_cp_exporter.landing import episodes
from vllm_cp_exporter.ledger import Changes, Ledger
from vllm_cp_exporter.pools import pool_record
from vllm_cp_exporter.records import iso, worker_record
from vllm_cp_exporter.snapshot import Board, Snapshot

__all__ = ["SCHEMA", "Api"]

log = logging.getLogger("vllm_cp_exporter.api")

#: Of every answer. It changes when a field changes its meaning or goes; new fields may come at any time.
SCHEMA = 1
#: How often a waiting reader's news are looked for, seconds.
_LOOK_S = 0.25
#: A word on a stream that has nothing to say, so that proxies and dead peers are noticed.
_BREATH_S = 15.0
#: Longest wait of one long poll, seconds.
_LONGEST_WAIT_S = 60.0
#: Readers that wait, of either kind.
_READERS = 64
#: How often the demand of the pools is noted, seconds.
_NOTE_S = 2.0

InThread = Callable[..., Awaitable[Any]]


class Api:
    """The routes, and what they remember."""

    def __init__(
        self,
        board: Board,
        in_thread: InThread,
        *,
        ledger: Ledger | None = None,
        demands: Demands | None = None,
        look_s: float = _LOOK_S,
        breath_s: float = _BREATH_S,
    ) -> None:
        """``in_thread`` runs a function elsewhere: a thousand records take a while to make."""
        self._board = board
        self._in_thread = in_thread
        self._ledger = ledger or Ledger()
        self._demands = demands or Demands()
        self._look_s = look_s
        self._breath_s = breath_s
        self._readers = 0
        self._stopping = asyncio.Event()
        self._noting: asyncio.Task[None] | None = None

    def routes(self) -> list[web.RouteDef]:
        """All of it."""
        return [
            web.get("/api/v1/episodes", self._episodes),
            web.get("/api/v1/workers", self._workers),
            web.get("/api/v1/pools/{pool:.+}", self._pool),
            # Of a stream there is no head.
            web.get("/api/v1/watch", self._watch, allow_head=False),
        ]

    @property
    def revision(self) -> int:
        """The revision of the workers as they are now."""
        return self._ledger.catch_up(self._board.snapshot)

    def start(self) -> None:
        """Begin to note the pools' demand: the floor has to be known before it is needed."""
        self._noting = asyncio.create_task(self._note())

    async def stop(self) -> None:
        """Let waiting readers go."""
        self._stopping.set()
        if self._noting is not None:
            self._noting.cancel()
            await asyncio.gather(self._noting, return_exceptions=True)

    async def _note(self) -> None:
        while True:
            try:
                self._demands.tick(self._board.snapshot)
            except Exception:
                log.exception("demand_not_noted")
            await asyncio.sleep(_NOTE_S)

    # -- whole answers -----------------------------------------------------------------------

    async def _episodes(self, _: web.Request) -> web.Response:
        found = await self._in_thread(episodes, self._board.snapshot)
        return _answer({"schema": SCHEMA, "episodes": found})

    async def _workers(self, request: web.Request) -> web.Response:
        snapshot, head = self._now()
        pool = request.query.get("pool")
        keys = [key for key, view in snapshot.workers.items() if pool in (None, view.pool)]
        records = await self._in_thread(_records, snapshot, keys, time.time())
        complete = len(records) == len(keys) and not any(record["errors"] for record in records)
        return _answer({**head, "complete": complete, "workers": records})

    async def _pool(self, request: web.Request) -> web.Response:
        snapshot, head = self._now()
        name = request.match_info["pool"]
        views = snapshot.pools().get(name)
        if views is None:
            return _refusal(404, f"no pool {name!r}")
        self._demands.tick(snapshot)
        wanted = snapshot.min_ready.get(name)
        record, lost = await self._in_thread(pool_record, name, views, wanted, self._demands)
        # An autoscaler that gets no number does what it was told to do then; one that gets 0 scales down.
        return _answer({**head, **record}, status=503 if lost else 200)

    def _now(self) -> tuple[Snapshot, dict[str, Any]]:
        snapshot = self._board.snapshot
        return snapshot, {"schema": SCHEMA, "as_of": iso(time.time()), "revision": self._ledger.catch_up(snapshot)}

    # -- changes -----------------------------------------------------------------------------

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        """Changes as they happen: a stream of events, or with ``wait`` one answer as soon as there is something."""
        # A browser that connects again says here how far it got.
        asked = request.headers.get("Last-Event-ID") or request.query.get("since")
        since = None if asked is None else _whole(asked)
        if asked is not None and since is None:
            return _refusal(400, "since is a revision, a whole number")
        patience = request.query.get("wait")
        wait_s = None if patience is None else _seconds(patience)
        if patience is not None and wait_s is None:
            return _refusal(400, f"wait is a number of seconds up to {_LONGEST_WAIT_S:g}")
        self._ledger.catch_up(self._board.snapshot)
        if since is not None and self._ledger.since(since) is None:
            return _refusal(410, "this revision is not known any more: read /api/v1/workers again")
        if self._readers >= _READERS:
            return _refusal(503, f"{_READERS} readers wait already")
        self._readers += 1
        try:
            if wait_s is not None:
                return await self._poll(request, since, wait_s)
            return await self._stream(request, since)
        finally:
            self._readers -= 1

    async def _poll(self, request: web.Request, since: int | None, wait_s: float) -> web.Response:
        ends = time.monotonic() + wait_s
        while True:
            changes = self._changes(since)
            if changes is None:
                return _refusal(410, "this revision is not known any more: read /api/v1/workers again")
            if changes or since is None or time.monotonic() >= ends or self._stopping.is_set() or _left(request):
                return _answer(await self._delta(changes, full=since is None))
            await self._pause(min(self._look_s, max(0.0, ends - time.monotonic())))

    async def _stream(self, request: web.Request, since: int | None) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        )
        await response.prepare(request)
        # A peer that left is found out by the next write; there is nobody to tell.
        with contextlib.suppress(ConnectionError):
            async for event in self._events(since, lambda: _left(request)):
                await response.write(event)
            await response.write_eof()
        return response

    async def _events(self, since: int | None, left: Callable[[], bool]) -> AsyncIterator[bytes]:
        yield b"retry: 2000\n\n"
        said = time.monotonic()
        while not self._stopping.is_set() and not left():
            changes = self._changes(since)
            if changes is None:
                return  # it fell behind: connecting again, it is told to read everything
            if changes or since is None:
                delta = await self._delta(changes, full=since is None)
                since, said = changes.revision, time.monotonic()
                yield f"id: {since}\nevent: workers\ndata: {json.dumps(delta, allow_nan=False)}\n\n".encode()
            elif time.monotonic() - said >= self._breath_s:
                said = time.monotonic()
                yield b": nothing new\n\n"
            await self._pause(self._look_s)

    def _changes(self, since: int | None) -> Changes | None:
        self._ledger.catch_up(self._board.snapshot)
        return self._ledger.all() if since is None else self._ledger.since(since)

    async def _delta(self, changes: Changes, *, full: bool) -> dict[str, Any]:
        snapshot, now = self._board.snapshot, time.time()
        records = await self._in_thread(_records, snapshot, changes.changed, now)
        return {
            "schema": SCHEMA,
            "as_of": iso(now),
            "revision": changes.revision,
            "full": full,
            "changed": records,
            "removed": list(changes.removed),
        }

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)


def _records(snapshot: Snapshot, keys: Iterable[str], now: float) -> list[dict[str, Any]]:
    """The workers' records. One that cannot be written is left out, and the answer is not complete then."""
    found = []
    for key in keys:
        if (view := snapshot.workers.get(key)) is not None:
            try:
                found.append(worker_record(view, now))
            except Exception:
                log.exception("record_failed", extra={"fields": {"worker": key}})
    return found


def _answer(document: dict[str, Any], *, status: int = 200) -> web.Response:
    return web.Response(
        text=json.dumps(document, allow_nan=False) + "\n",
        status=status,
        content_type="application/json",
        headers={"Cache-Control": "no-store"},
    )


def _refusal(status: int, error: str) -> web.Response:
    return _answer({"schema": SCHEMA, "error": error}, status=status)


def _left(request: web.Request) -> bool:
    """Whether the reader is gone: a place to wait is not kept for it until there is something to write."""
    return request.transport is None or request.transport.is_closing()


def _whole(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None


def _seconds(text: str) -> float | None:
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and 0 <= seconds <= _LONGEST_WAIT_S else None
