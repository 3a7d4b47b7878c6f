"""FakeWorker: a fake vLLM worker on a real port, inside the test's own process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

import grpc

from vllm_cp.models.kv_source import KvEventSource
from vllm_cp.models.model import ModelInfo
from vllm_cp.models.server import ServerInfo
from vllm_cp.testing._bell import Refusal
from vllm_cp.testing._controls import Controls
from vllm_cp.testing._facts import Facts
from vllm_cp.testing._frontend import Frontend
from vllm_cp.testing._ports import Listening, server_options
from vllm_cp.testing._seen import SeenCall

__all__ = ["FakeWorker"]


#: The calls in flight have ended by then; a grace period makes gRPC say goodbye rather than break connections.
_GRACE_S = 0.2


class FakeWorker(Controls):
    """A scripted vLLM worker: ``vllm.Control``, ``vllm.Inference`` and the health service on a real port.

    ::

        with FakeWorker(version="0.33.0", ranks=2) as worker, ControlClient(worker.target) as client:
            worker.die(reported=True)
            assert client.check() is HealthStatus.NOT_SERVING

    It behaves as the genuine ``vllm-rs`` of that version does, and is held to that by a suite that runs against both.
    It has threads of its own and none of your event loop, so it serves synchronous and asyncio clients alike (and
    ``async with`` works too); its verbs, see ``Controls``, are plain calls in both cases. Calls that hang and watches
    that stay open hold no thread, so there may be hundreds. It starts with ``with`` or ``start()``, and ``close()``
    leaves nothing behind.
    """

    def __init__(
        self,
        *,
        version: str = "0.33.0",
        ranks: int = 1,
        info: ServerInfo | None = None,
        model: ModelInfo | None = None,
        kv_sources: Sequence[KvEventSource] = (),
        tls: Any = None,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        """
        Args:
            version: the vLLM version to be, 0.27.0 or later; what is newer than any known one behaves as the newest.
            ranks: data-parallel engines behind the frontend.
            info, model, kv_sources: what it says about itself; a small one-GPU model without KV events by default.
            tls: files of the server side, ``TlsFiles`` or alike; ``None`` is plaintext.
            host: address to listen on.
            port: port to listen on; 0 takes a free one and keeps it.
        """
        if ranks < 1:
            raise ValueError(f"a worker has 1 rank or more, not {ranks}")
        self._front = Frontend(Facts(version, ranks, info, model, kv_sources), ranks)
        self._listening = Listening(host, port, tls)
        self._front.hosts.append(_SyncHost(self._front, self._listening))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def target(self) -> str:
        """``host:port``, the same before and after a restart."""
        if not self._listening.port:
            raise RuntimeError("this FakeWorker has not started: use it in a with statement, or call start()")
        return self._listening.target

    @property
    def calls(self) -> list[SeenCall]:
        """Every call so far, oldest first, refused and unanswered ones included. A restart does not forget them."""
        return list(self._front.calls)

    def start(self) -> FakeWorker:
        """Open the port; ``with`` does it for you. Raises OSError when the port given is taken."""
        if self._loop is not None:
            raise RuntimeError("this FakeWorker has started already")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-cp-fake", daemon=True)
        self._thread.start()
        try:
            self._run(self._front.start())
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """Stop, if it still runs, and give back every thread and socket. Closing twice is fine."""
        loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return
        self._run(self._front.stop())
        self._run(_settle())
        self._loop = self._thread = None
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
        self._listening.release()

    def __enter__(self) -> FakeWorker:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> FakeWorker:
        return await asyncio.to_thread(self.start)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    def _do(self, verb: str, /, **arguments: Any) -> Any:
        return self._run(getattr(self._front, verb)(**arguments))

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        if self._loop is None:
            work.close()
            raise RuntimeError("this FakeWorker is not running: use it in a with statement, or call start()")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


async def _settle() -> None:
    """End whatever still runs on this loop, and its helper threads."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_default_executor()


class _SyncHost:
    """gRPC's synchronous server, with handlers that only hand over to the fake's loop.

    ``experimental_non_blocking`` is what grpcio-health-checking builds on: the handler returns at once and answers
    through a callback later. Every method is served as a stream, which for one answer looks the same on the wire.
    """

    def __init__(self, front: Frontend, listening: Listening) -> None:
        self._front = front
        self._listening = listening
        self._server: grpc.Server | None = None
        self._pool: ThreadPoolExecutor | None = None

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        self._pool = ThreadPoolExecutor(8, thread_name_prefix="vllm-cp-fake-rpc")
        server = grpc.server(self._pool, handlers=[_Handlers(self._front, loop)], options=server_options())
        self._listening.bind(server)
        server.start()
        self._server = server

    async def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await asyncio.to_thread(server.stop(_GRACE_S).wait, 5.0)
        if self._pool is not None:
            await asyncio.to_thread(self._pool.shutdown)


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # not generic at run time
    """A handler for every path: what does not exist is the frontend's to say."""

    def __init__(self, front: Frontend, loop: asyncio.AbstractEventLoop) -> None:
        self._front = front
        self._loop = loop

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        return grpc.unary_stream_rpc_method_handler(_Behaviour(self._front, self._loop, handler_call_details.method))


class _Behaviour:
    experimental_non_blocking = True
    experimental_thread_pool = None

    def __init__(self, front: Frontend, loop: asyncio.AbstractEventLoop, path: str) -> None:
        self._front = front
        self._loop = loop
        self._path = path

    def __call__(self, request: bytes, context: grpc.ServicerContext, send: Callable[[bytes | None], None]) -> None:
        call = _SyncCall(self._path, request, context, send)
        try:
            self._loop.call_soon_threadsafe(call.begin, self._front)
        except RuntimeError:  # the loop was closed under a call that came too late
            context.set_code(grpc.StatusCode.UNAVAILABLE)
            send(None)


class _SyncCall:
    """One call of the synchronous server."""

    def __init__(
        self, path: str, request: bytes, context: grpc.ServicerContext, send: Callable[[bytes | None], None]
    ) -> None:
        self.path = path
        self.request = request
        self.metadata = tuple((str(key), _text(value)) for key, value in context.invocation_metadata())
        left = context.time_remaining()
        # Without a deadline gRPC counts from the end of time.
        self.deadline_s = left if left is not None and left < 1e8 else None
        self._context = context
        self._send = send

    async def send(self, data: bytes) -> None:
        self._send(data)

    def begin(self, front: Frontend) -> None:
        """Answer on the loop, until done or until the caller is gone."""
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._answer(front))

        def gone() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(task.cancel)

        if not self._context.add_callback(gone):
            task.cancel()

    async def _answer(self, front: Frontend) -> None:
        try:
            await front.serve(self)
        except Refusal as refusal:
            self._context.set_code(grpc.StatusCode[refusal.code])
            self._context.set_details(refusal.detail)
        self._send(None)


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")
