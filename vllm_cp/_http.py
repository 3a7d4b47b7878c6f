"""The two ways to run an HTTP call: ``HttpClient`` and ``AsyncHttpClient`` only send, wait and sleep."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from vllm_cp import _http_meaning as meaning
from vllm_cp._http_call import Answer, Call, Desk, Hook, Tries
from vllm_cp._http_connection import DEFAULT_URL, HttpConnection, tls_context
from vllm_cp.errors import ConfigError, ControlError

if TYPE_CHECKING:
    import httpx2

__all__ = ["AsyncHttpClient", "HttpClient"]

T = TypeVar("T")


def _desk(url: str | HttpConnection, on_rpc: Hook | None) -> Desk:
    try:
        import httpx2
    except ImportError:
        raise ConfigError('HTTP to workers needs a library that is not here: pip install "vllm-cp[http]"') from None
    desk = Desk(url, on_rpc)
    try:
        httpx2.URL(desk.target)
    except (httpx2.InvalidURL, ValueError) as error:
        raise ConfigError(f"URL {desk.target!r} is malformed: {error}") from None
    tls_context(desk.connection)
    return desk


class HttpClient:
    """Runs calls on one worker. Thread-safe; not usable in a forked child; close it, or use ``with``."""

    def __init__(self, url: str | HttpConnection = DEFAULT_URL, /, *, on_rpc: Hook | None = None) -> None:
        """``url``: the worker's base URL; ``on_rpc`` is called after each attempt of each call.

        Raises ConfigError for a URL or a file that cannot be used, and when the ``http`` extra is not installed."""
        self._desk = _desk(url, on_rpc)
        from vllm_cp._http_wire import sync_client

        self._client = sync_client(self._desk.connection)

    @property
    def target(self) -> str:
        """The worker's base URL, in canonical spelling."""
        return self._desk.target

    @property
    def connection(self) -> HttpConnection:
        """How the worker is reached."""
        return self._desk.connection

    def close(self) -> None:
        """Close the connections. Closing twice is fine."""
        self._desk.closed = True
        self._client.close()

    def __enter__(self: C) -> C:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def run(self, call: Call[T], timeout_s: float | None = None) -> T:
        """The answer to a call, within ``timeout_s`` seconds (the connection's by default). Raises ControlError."""
        import httpx2

        from vllm_cp._http_wire import sync_client, why_tls_fails

        tries = Tries(self._desk, call, timeout_s)
        while True:
            request = tries.begin()
            try:
                if call.safe:
                    answer = self._exchange(self._client, tries, request)
                else:
                    # A kept connection may be closed by the server as we write, and a change is never sent twice.
                    with sync_client(self._desk.connection) as fresh:
                        answer = self._exchange(fresh, tries, request)
            except (httpx2.HTTPError, TimeoutError, ControlError) as failed:
                self._desk.open()
                error: ControlError | None = tries.failure(failed)
            except RuntimeError:
                self._desk.open()  # closed between begin() and the request
                raise
            else:
                error = tries.refusal(answer)
                if error is None:
                    return tries.read(answer)
            assert error is not None
            pause = tries.pause_before_next(error)
            if pause is None:
                why = None
                if meaning.tls_suspected(error):
                    why = why_tls_fails(self._desk.connection, tries.remaining_s)
                return tries.settle(error, why)
            time.sleep(pause)

    @staticmethod
    def _exchange(client: httpx2.Client, tries: Tries[T], request: dict[str, Any]) -> Answer:
        with client.stream(**request) as response:
            reader = tries.reader(response)
            for chunk in response.iter_raw():
                if not reader.take(chunk):
                    break
        return reader.answer()


class AsyncHttpClient:
    """Runs calls on one worker for asyncio.

    It may be made anywhere and used from several event loops, one after another or side by side: each loop gets its own
    connections. Not usable in a forked child. Close it, or use ``async with``.
    """

    def __init__(self, url: str | HttpConnection = DEFAULT_URL, /, *, on_rpc: Hook | None = None) -> None:
        """``url``: the worker's base URL; ``on_rpc`` is called after each attempt of each call.

        Raises ConfigError for a URL or a file that cannot be used, and when the ``http`` extra is not installed."""
        self._desk = _desk(url, on_rpc)
        self._lines: WeakKeyDictionary[asyncio.AbstractEventLoop, _Line] = WeakKeyDictionary()

    @property
    def target(self) -> str:
        """The worker's base URL, in canonical spelling."""
        return self._desk.target

    @property
    def connection(self) -> HttpConnection:
        """How the worker is reached."""
        return self._desk.connection

    async def close(self) -> None:
        """Close the connections. Closing twice is fine."""
        self._desk.closed = True
        lines, self._lines = self._lines, WeakKeyDictionary()
        if line := lines.pop(asyncio.get_running_loop(), None):
            await line.keeper.aclose()

    async def __aenter__(self: A) -> A:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def run(self, call: Call[T], timeout_s: float | None = None) -> T:
        """The answer to a call, within ``timeout_s`` seconds (the connection's by default). Raises ControlError."""
        import httpx2

        from vllm_cp._http_wire import async_client, why_tls_fails

        tries = Tries(self._desk, call, timeout_s)
        while True:
            request = tries.begin()
            try:
                if call.safe:
                    exchange = self._exchange(await self._client(), tries, request)
                    answer = await asyncio.wait_for(exchange, tries.remaining_s)
                else:
                    # A kept connection may be closed by the server as we write, and a change is never sent twice.
                    async with async_client(self._desk.connection) as fresh:
                        answer = await asyncio.wait_for(self._exchange(fresh, tries, request), tries.remaining_s)
            except (httpx2.HTTPError, TimeoutError, asyncio.TimeoutError, ControlError) as failed:
                self._desk.open()
                error: ControlError | None = tries.failure(failed)
            except RuntimeError:
                self._desk.open()  # closed between begin() and the request
                raise
            else:
                error = tries.refusal(answer)
                if error is None:
                    return tries.read(answer)
            assert error is not None
            pause = tries.pause_before_next(error)
            if pause is None:
                why = None
                if meaning.tls_suspected(error):
                    why = await asyncio.to_thread(why_tls_fails, self._desk.connection, tries.remaining_s)
                return tries.settle(error, why)
            await asyncio.sleep(pause)

    async def _client(self) -> httpx2.AsyncClient:
        loop = asyncio.get_running_loop()
        line = self._lines.get(loop)
        if line is None:
            keeper = _keep(self._desk.connection)
            line = self._lines[loop] = _Line(await keeper.__anext__(), keeper)
        return line.client

    @staticmethod
    async def _exchange(client: httpx2.AsyncClient, tries: Tries[T], request: dict[str, Any]) -> Answer:
        async with client.stream(**request) as response:
            reader = tries.reader(response)
            async for chunk in response.aiter_raw():
                if not reader.take(chunk):
                    break
        return reader.answer()


class _Line(NamedTuple):
    """The connections of one event loop."""

    client: httpx2.AsyncClient
    keeper: AsyncGenerator[httpx2.AsyncClient, None]


async def _keep(connection: HttpConnection) -> AsyncGenerator[httpx2.AsyncClient, None]:
    """A generator, because a loop that ends closes those that it began: no connection outlives its loop unclosed."""
    from vllm_cp._http_wire import async_client

    async with async_client(connection) as client:
        yield client


C = TypeVar("C", bound=HttpClient)
A = TypeVar("A", bound=AsyncHttpClient)
