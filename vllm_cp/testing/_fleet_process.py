"""The other side of FakeFleet: one event loop, one asyncio gRPC server per worker."""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

import grpc
import grpc.aio

from vllm_cp.testing._bell import Refusal
from vllm_cp.testing._facts import Facts
from vllm_cp.testing._frontend import Frontend
from vllm_cp.testing._ports import Listening, server_options

__all__: list[str] = []


class _AioHost:
    """gRPC's asyncio server for one worker."""

    def __init__(self, front: Frontend, listening: Listening) -> None:
        self._front = front
        self._listening = listening
        self._server: grpc.aio.Server | None = None

    async def open(self) -> None:
        server = grpc.aio.server(handlers=[_Handlers(self._front)], options=server_options())
        self._listening.bind(server)
        await server.start()
        self._server = server

    async def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await server.stop(0.2)


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # not generic at run time
    """A handler for every path: what does not exist is the frontend's to say."""

    def __init__(self, front: Frontend) -> None:
        self._front = front

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        async def answer(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
            try:
                await self._front.serve(_AioCall(handler_call_details.method, request, context))
            except Refusal as refusal:
                await context.abort(grpc.StatusCode[refusal.code], refusal.detail)

        return grpc.unary_stream_rpc_method_handler(answer)


class _AioCall:
    """One call of the asyncio server."""

    def __init__(self, path: str, request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        self.path = path
        self.request = request
        metadata = context.invocation_metadata() or ()
        self.metadata = tuple((k, v if isinstance(v, str) else v.decode("latin-1")) for k, v in metadata)
        left = context.time_remaining()
        self.deadline_s = left if left is not None and left < 1e8 else None
        self._context = context

    async def send(self, data: bytes) -> None:
        await self._context.write(data)


class _Fleet:
    def __init__(self) -> None:
        self.fronts: list[Frontend] = []

    async def start(self, wanted: list[dict[str, Any]]) -> list[str]:
        targets = []
        for one in wanted:
            facts = Facts(one["version"], one["ranks"], one["info"], one["model"], one["kv_sources"])
            front = Frontend(facts, one["ranks"])
            listening = Listening(one["host"], 0, one["tls"])
            front.hosts.append(_AioHost(front, listening))
            await front.start()
            self.fronts.append(front)
            targets.append(listening.target)
        return targets

    async def do(self, worker: int | None, verb: str, arguments: dict[str, Any]) -> Any:
        if worker is None:
            return await self.start(**arguments)
        front = self.fronts[worker]
        if verb == "calls":
            return list(front.calls)
        return await getattr(front, verb)(**arguments)


async def _serve(pipe: Connection[Any, Any]) -> None:
    fleet = _Fleet()
    loop = asyncio.get_running_loop()
    lock = threading.Lock()

    async def answer(number: int, worker: int | None, verb: str, arguments: dict[str, Any]) -> None:
        try:
            reply = (number, True, await fleet.do(worker, verb, arguments))
        except Exception as error:  # noqa: BLE001  (whatever it is, it is the caller's)
            reply = (number, False, error)
        with lock:
            pipe.send(reply)

    while True:
        try:
            question = await loop.run_in_executor(None, pipe.recv)
        except (EOFError, OSError, pickle.UnpicklingError):
            question = None
        if question is None:
            # Nothing to save: the kernel closes what is open, at once.
            os._exit(0)
        asyncio.ensure_future(answer(*question))  # noqa: RUF006  (it holds itself until it has answered)


async def _main() -> None:
    pipe: Connection[Any, Any] = Connection(int(sys.argv[1]))
    serving = asyncio.ensure_future(_serve(pipe))
    parent = os.getppid()
    while not serving.done():
        # A fork of the parent may hold the pipe open for longer than the parent lives.
        if os.getppid() != parent:
            os._exit(0)
        await asyncio.wait((serving,), timeout=1.0)


if __name__ == "__main__":
    asyncio.run(_main())
