"""The HTTP library as we use it: straight to the worker, no redirects, and a deadline that holds.

Imported when a client is made, so that nobody pays for the library who does not use it.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakSet

import httpcore2
import httpx2

from vllm_cp import __version__
from vllm_cp._http_connection import HttpConnection, tls_context

__all__ = ["Until", "async_client", "sync_client", "why_tls_fails"]

#: Idle connections are dropped before a server drops them (uvicorn after 5 s), so that few requests meet a closed one.
_LIMITS = httpx2.Limits(max_connections=None, max_keepalive_connections=4, keepalive_expiry=4.0)
_HEADERS = {
    "user-agent": f"vllm-cp/{__version__}",
    # No compression: it costs the worker more than the network, and a small answer could unfold into a huge one.
    "accept-encoding": "identity",
}
_DIAGNOSIS_S = 1.0

SocketOptions = Iterable[Any] | None


class Until(float):
    """Seconds until a deadline: a plain number to the library, the deadline itself to our own transport."""

    deadline: float

    def __new__(cls, deadline: float) -> Until:
        made = super().__new__(cls, max(0.001, deadline - time.monotonic()))
        made.deadline = deadline
        return made

    def __init__(self, deadline: float) -> None:
        """``deadline``: seconds on the clock of ``time.monotonic()``."""


class Timeouts(dict[str, float]):
    """The library asks here at each step of a request how long that may take: what is left of the whole."""

    def __init__(self, deadline: float) -> None:
        super().__init__()
        self._deadline = deadline

    def get(self, key: str, default: Any = None) -> Any:
        return Until(self._deadline)


def sync_client(connection: HttpConnection) -> httpx2.Client:
    """A synchronous client; it dials on its first request."""
    context = tls_context(connection)
    if connection.proxy:
        return httpx2.Client(
            verify=context, trust_env=True, follow_redirects=False, limits=_LIMITS, headers=_HEADERS, timeout=None
        )
    return httpx2.Client(
        transport=_Transport(context), trust_env=False, follow_redirects=False, headers=_HEADERS, timeout=None
    )


def async_client(connection: HttpConnection) -> httpx2.AsyncClient:
    """A client of the running event loop; it dials on its first request."""
    return httpx2.AsyncClient(
        verify=tls_context(connection), trust_env=connection.proxy, follow_redirects=False,
        limits=_LIMITS, headers=_HEADERS, timeout=None,
    )  # fmt: skip


class _Transport(httpx2.BaseTransport):
    """As the library's own, over sockets that know the deadline of the whole request.

    The library's time-outs are per read: a server that answers one byte at a time would outlast any of them.
    """

    def __init__(self, context: ssl.SSLContext) -> None:
        self._backend = _Backend()
        self._pool = httpcore2.ConnectionPool(
            ssl_context=context,
            max_connections=_LIMITS.max_connections,
            max_keepalive_connections=_LIMITS.max_keepalive_connections,
            keepalive_expiry=_LIMITS.keepalive_expiry,
            network_backend=self._backend,
        )

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        url = request.url
        asked = httpcore2.Request(
            method=request.method,
            url=httpcore2.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path),
            headers=request.headers.raw,
            content=request.read(),
            extensions=request.extensions,
        )
        with _translated():
            answer = self._pool.handle_request(asked)
        return httpx2.Response(
            status_code=answer.status, headers=answer.headers, stream=_Body(answer), extensions=answer.extensions
        )

    def close(self) -> None:
        self._backend.hang_up()
        self._pool.close()


class _Body(httpx2.SyncByteStream):
    def __init__(self, answer: httpcore2.Response) -> None:
        self._answer = answer

    def __iter__(self) -> Iterator[bytes]:
        with _translated():
            yield from self._answer.iter_stream()

    def close(self) -> None:
        with _translated():
            self._answer.close()


@contextmanager
def _translated() -> Iterator[None]:
    """The core's errors as the library's, which bear the same names."""
    try:
        yield
    except (httpcore2.TimeoutException, httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.ProxyError) as error:
        kind = getattr(httpx2, type(error).__name__, httpx2.TransportError)
        raise kind(str(error)) from error


class _Backend(httpcore2.NetworkBackend):
    def __init__(self) -> None:
        self._inner = httpcore2.SyncBackend()
        self._open: WeakSet[socket.socket] = WeakSet()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: SocketOptions = None,
    ) -> httpcore2.NetworkStream:
        stream = self._inner.connect_tcp(host, port, timeout, local_address, socket_options)
        self._open.add(stream.get_extra_info("socket"))
        return _Stream(stream, self._open)

    def hang_up(self) -> None:
        """End what is in flight: a thread that reads from a socket is not woken by its being closed."""
        for one in list(self._open):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


class _Stream(httpcore2.NetworkStream):
    def __init__(self, inner: httpcore2.NetworkStream, sockets: WeakSet[socket.socket]) -> None:
        self._inner = inner
        self._sockets = sockets

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._inner.read(max_bytes, _left(timeout, httpcore2.ReadTimeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._inner.write(buffer, _left(timeout, httpcore2.WriteTimeout))

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore2.NetworkStream:
        secure = self._inner.start_tls(ssl_context, server_hostname, _left(timeout, httpcore2.ConnectTimeout))
        self._sockets.add(secure.get_extra_info("socket"))
        return _Stream(secure, self._sockets)

    def close(self) -> None:
        self._inner.close()

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)


def _left(timeout: float | None, late: type[Exception]) -> float | None:
    if not isinstance(timeout, Until):
        return timeout
    left = timeout.deadline - time.monotonic()
    if left <= 0:
        raise late("the deadline has passed")
    return left


def extensions(connection: HttpConnection, deadline: float) -> Mapping[str, Any]:
    """What the library is told about one request beside the request itself."""
    told: dict[str, Any] = {"timeout": Timeouts(deadline)}
    if connection.server_name is not None:
        told["sni_hostname"] = connection.server_name
    return told


def why_tls_fails(connection: HttpConnection, timeout_s: float) -> str | None:
    """Ask the port itself: the TLS text behind a connection that broke, or ``None`` when TLS is not the cause.

    A plaintext client on a TLS port and a client without the certificate that the port wants may both see no more
    than a connection that closes. Blocks for ``timeout_s`` at most (and one second at most).
    """
    budget = min(timeout_s, _DIAGNOSIS_S)
    if connection.secure:
        context = tls_context(connection)
    else:
        # Nothing is sent over this connection; it only tells whether the port speaks TLS at all.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    try:
        with socket.create_connection((connection.host, connection.port), timeout=budget) as raw:
            name = connection.server_name or connection.host
            with context.wrap_socket(raw, server_hostname=name) as secure:
                if not connection.secure:
                    return "the port speaks TLS"
                # TLS 1.3 refuses a client certificate only after the handshake, on the first read.
                secure.settimeout(min(0.3, budget))
                if secure.recv(1) == b"" and (connection.tls is None or connection.tls.cert_file is None):
                    return "hung up after the handshake: certificate required, it seems"
    except ssl.SSLEOFError:
        return "hung up during the handshake" if connection.secure else None
    except ssl.SSLError as error:
        if not connection.secure and "CERTIFICATE_REQUIRED" not in str(error).upper():
            return None
        return error.reason or str(error)
    except (OSError, ValueError):
        return None
    return None
