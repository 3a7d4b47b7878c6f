"""A gRPC server as Python people start one, with gRPC's own default rules, in the role of a worker."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc


class _Control(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # not generic at run time
    """Answers every other call with an empty message: not paused, nothing known."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self.asked: list[str] = []

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        self.asked.append(handler_call_details.method)
        return grpc.unary_unary_rpc_method_handler(lambda request, context: self._answer)


class PlainServer:
    """A running server."""

    def __init__(self, target: str, servicer: health.HealthServicer, control: _Control) -> None:
        self.target = target
        self._servicer = servicer
        self._control = control

    @property
    def asked(self) -> list[str]:
        """Paths of the calls so far, health apart."""
        return list(self._control.asked)

    def says(self, serving: bool) -> None:
        """Change the word of the health service."""
        status = health_pb2.HealthCheckResponse
        self._servicer.set("", status.SERVING if serving else status.NOT_SERVING)


@contextmanager
def plain_server(answer: bytes = b"", **options: int) -> Iterator[PlainServer]:
    """Start one. ``options`` are gRPC's, without their ``grpc.`` and with ``__`` for further dots."""
    arguments = [(f"grpc.{name.replace('__', '.')}", value) for name, value in options.items()]
    control = _Control(answer)
    with ThreadPoolExecutor(8) as pool:
        # Nothing else is said: strikes, intervals and permissions are gRPC's defaults.
        server = grpc.server(pool, options=arguments)
        servicer = health.HealthServicer(experimental_non_blocking=True)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        server.add_generic_rpc_handlers([control])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        made = PlainServer(f"127.0.0.1:{port}", servicer, control)
        made.says(True)
        try:
            yield made
        finally:
            server.stop(None).wait()
