"""Connections, deadlines, sizes and lifetimes, in both colours."""

from __future__ import annotations

import asyncio
import inspect
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from tests.faults.conftest import Connect
from tests.faults.raw import raw_server, read_request
from vllm_cp import Retry
from vllm_cp import errors as e
from vllm_cp.faults import AsyncFaultTolerance, FaultTolerance, HttpConnection
from vllm_cp.models.health import HealthStatus
from vllm_cp.models.rpc import RpcRecord
from vllm_cp.testing._http import FakeHttp

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
HOUR = 3600.0


@pytest.fixture
def nobody() -> str:
    """A URL that refuses connections."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{held.getsockname()[1]}"


async def test_nobody_there_is_unreachable(connect: Connect, nobody: str) -> None:
    """A refused connection says so, the same in both colours, after three attempts of a read."""
    seen: list[RpcRecord] = []
    with pytest.raises(e.WorkerUnreachable, match="Connection refused") as caught:
        await connect(nobody, on_rpc=seen.append).health()
    assert type(caught.value) is e.WorkerUnreachable
    assert caught.value.code == "UNAVAILABLE"
    assert [one.attempt for one in seen] == [1, 2, 3]


async def test_a_change_is_never_sent_twice(connect: Connect) -> None:
    """A connection that breaks under an apply leaves it open whether it arrived: the caller hears of it at once."""
    requests: list[bytes] = []

    def hang_up(connection: socket.socket) -> None:
        requests.append(read_request(connection))

    with raw_server(hang_up) as address, pytest.raises(e.WorkerUnreachable):
        await connect(f"http://{address}").apply("retry")
    assert len([one for one in requests if one.startswith(b"POST")]) == 1


async def test_a_read_is_asked_again_when_the_connection_breaks(connect: Connect) -> None:
    """One hang-up of a server that dropped an idle connection is not an outage."""
    served: list[int] = []

    def hang_up_once(connection: socket.socket) -> None:
        served.append(1)
        read_request(connection)
        if len(served) > 1:
            connection.sendall(OK)

    with raw_server(hang_up_once) as address:
        assert await connect(f"http://{address}").health() is HealthStatus.SERVING
    assert len(served) >= 2


async def test_an_unknown_name_is_unreachable(connect: Connect) -> None:
    """A name that does not resolve is said to be just that."""
    with pytest.raises(e.WorkerUnreachable, match="does not resolve"):
        await connect("http://nowhere.invalid:8000").health()


async def test_a_silent_worker_is_out_of_time(server: FakeHttp, connect: Connect) -> None:
    """A worker that accepts and says nothing is out of time when the deadline says so, not later."""
    server.delay("/health", HOUR)
    began = time.monotonic()
    with pytest.raises(e.OutOfTime) as caught:
        await connect(server.url).health(timeout_s=0.2)
    assert 0.15 < time.monotonic() - began < 2
    assert caught.value.code == "DEADLINE_EXCEEDED"


@pytest.mark.parametrize("start", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n"], ids=["head", "body"])
async def test_a_deadline_holds_against_a_worker_that_trickles(connect: Connect, start: bytes) -> None:
    """A byte at a time resets any time-out per read; the deadline is of the whole, in both colours."""
    over = threading.Event()

    def trickle(connection: socket.socket) -> None:
        read_request(connection)
        connection.sendall(start)
        for byte in b"HTTP/1.1 200 OK\r\nx-endless: " + b"a" * 100_000:
            connection.sendall(bytes([byte]))
            if over.wait(0.02):
                return

    with raw_server(trickle) as address:
        began = time.monotonic()
        with pytest.raises(e.OutOfTime):
            await connect(f"http://{address}").health(timeout_s=0.3)
        assert time.monotonic() - began < 2
        over.set()


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan"), float("inf")])
async def test_a_deadline_is_a_positive_number(server: FakeHttp, connect: Connect, timeout_s: float) -> None:
    """No deadline is no deadline we accept."""
    with pytest.raises(ValueError, match="timeout_s"):
        await connect(server.url).health(timeout_s=timeout_s)
    assert server.calls == []


async def test_an_answer_too_long_is_not_read(server: FakeHttp, connect: Connect) -> None:
    """A page that says it is longer than the limit is refused before it is read."""
    client = connect(HttpConnection(url=server.url, max_answer_bytes=1000))
    server.fail("/metrics", 200, b"x" * 1001)
    with pytest.raises(e.TooLarge, match="1000 bytes"):
        await client.read_page()
    server.heal()
    server.fail("/metrics", 200, b"x" * 1000)
    await client.read_page()


async def test_an_answer_without_an_end_is_cut_off(connect: Connect) -> None:
    """A page that does not say how long it is is read up to the limit and no further."""
    sent: list[int] = []

    def pour(connection: socket.socket) -> None:
        read_request(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\nconnection: close\r\n\r\n")
        for _ in range(10_000):
            sent.append(connection.send(b"x" * 65536))

    with raw_server(pour) as address:
        client = connect(HttpConnection(url=f"http://{address}", max_answer_bytes=100_000))
        with pytest.raises(e.TooLarge):
            await client.read_page()
    assert sum(sent) < 100_000_000


async def test_of_an_error_only_the_beginning_is_read(server: FakeHttp, connect: Connect) -> None:
    """An error as long as a book is still the error it is."""
    server.fail("/health", 500, b"oops" + b"!" * 1_000_000)
    with pytest.raises(e.EngineFailed, match="oops"):
        await connect(server.url).health()


async def test_nothing_compressed_is_asked_for(server: FakeHttp, connect: Connect) -> None:
    """A small answer can't unfold into a huge one, and the worker spends nothing on compressing."""
    await connect(server.url).health()
    assert server.calls[0].headers["accept-encoding"] == "identity"
    assert server.calls[0].headers["user-agent"].startswith("vllm-cp/")


async def test_redirects_are_not_followed(server: FakeHttp, connect: Connect) -> None:
    """A redirect could lead a token anywhere: it is an error that says where it led."""

    def redirect(connection: socket.socket) -> None:
        read_request(connection)
        connection.sendall(
            b"HTTP/1.1 307 T\r\nlocation: " + server.url.encode() + b"/health\r\ncontent-length: 0\r\n\r\n"
        )

    with raw_server(redirect) as address, pytest.raises(e.ControlError, match="redirects to") as caught:
        await connect(f"http://{address}").health()
    assert caught.value.code == "HTTP 307"
    assert server.url in str(caught.value)
    assert server.calls == []


async def test_something_else_than_http_is_said_to_be_that(connect: Connect) -> None:
    """The gRPC port answers in HTTP/2 frames: the hint asks whether that is the port."""

    def frames(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(b"\x00\x00\x12\x04\x00\x00\x00\x00\x00" + b"\x00" * 18)

    with raw_server(frames) as address, pytest.raises(e.WorkerUnreachable) as caught:
        await connect(HttpConnection(url=f"http://{address}", retry=Retry(attempts=1))).health()
    assert "gRPC port" in caught.value.hint


async def test_proxies_of_the_environment_are_ignored_unless_asked_for(
    server: FakeHttp, connect: Connect, monkeypatch: pytest.MonkeyPatch, nobody: str
) -> None:
    """A proxy variable meant for downloads must not catch the way to a worker; who wants it says so, and is told."""
    monkeypatch.setenv("http_proxy", nobody)
    assert await connect(server.url).health() is HealthStatus.SERVING
    with pytest.raises(e.WorkerUnreachable) as caught:
        await connect(HttpConnection(url=server.url, proxy=True)).health()
    assert "http_proxy" in caught.value.hint
    assert len(server.calls) == 1


async def test_a_proxy_that_is_asked_for_is_used(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``proxy=True`` the request goes to the proxy."""
    with FakeHttp() as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        proxy.fail("*", 200)
        client = connect(HttpConnection(url="http://worker.invalid:8000", proxy=True))
        assert await client.health() is HealthStatus.SERVING
        assert proxy.calls[0].path == "http://worker.invalid:8000/health"


async def test_connections_are_kept(connect: Connect) -> None:
    """Polling does not dial each time."""
    dialled: list[int] = []

    def serve(connection: socket.socket) -> None:
        dialled.append(1)
        while True:
            read_request(connection)
            connection.sendall(OK)

    with raw_server(serve) as address:
        client = connect(f"http://{address}")
        for _ in range(5):
            await client.health()
    assert len(dialled) == 1


async def test_many_calls_at_once(server: FakeHttp, connect: Connect) -> None:
    """One client serves many callers side by side; none waits for a connection."""
    server.delay("/health", 0.2)
    client = connect(server.url)
    began = time.monotonic()
    assert set(await asyncio.gather(*(client.health() for _ in range(20)))) == {HealthStatus.SERVING}
    assert time.monotonic() - began < 3


async def test_a_worker_under_a_path(server: FakeHttp, connect: Connect) -> None:
    """A base URL with a path is kept before every route."""
    await_client = connect(f"{server.url}/workers/0/")
    assert await_client.target == f"{server.url}/workers/0"
    with pytest.raises(e.NotSupported):
        await await_client.status()
    assert server.calls[0].path == "/workers/0/fault_tolerance/status"


async def test_a_closed_client_says_so(server: FakeHttp, connect: Connect) -> None:
    """After close() every call is ClientClosed, and closing again is fine."""
    client = connect(server.url)
    await client.health()
    await client.close()
    await client.close()
    with pytest.raises(e.ClientClosed):
        await client.health()


async def test_closing_ends_a_call_in_flight(server: FakeHttp, connect: Connect) -> None:
    """Nobody waits for an hour on a client that was closed."""
    server.delay("/health", HOUR)
    client = connect(server.url)
    call = asyncio.ensure_future(client.health(timeout_s=60))
    await asyncio.to_thread(server.wait_for_call, "/health")
    await client.close()
    with pytest.raises(e.ClientClosed):
        await call


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_refused(server: FakeHttp) -> None:
    """Connections of the parent are the parent's: the child is told to make a client of its own."""
    with FaultTolerance(server.url) as client:
        child = os.fork()
        if child == 0:
            try:
                client.health()
            except e.ForkedClient:
                os._exit(7)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_one_client_in_two_event_loops(server: FakeHttp) -> None:
    """A client may outlive the loop it was first used in."""
    client = AsyncFaultTolerance(server.url)

    async def ask() -> HealthStatus:
        return await client.health()

    async def ask_and_close() -> HealthStatus:
        async with client:
            return await client.health()

    assert asyncio.run(ask()) is HealthStatus.SERVING
    assert asyncio.run(ask_and_close()) is HealthStatus.SERVING


async def test_a_cancelled_call_is_cancelled(server: FakeHttp) -> None:
    """Cancelling a coroutine is not an error of the worker's."""
    server.delay("/health", HOUR)
    async with AsyncFaultTolerance(server.url) as client:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(client.health(timeout_s=60), 0.1)


@pytest.mark.parametrize("make", [FaultTolerance, AsyncFaultTolerance])
def test_without_the_extra_the_message_names_it(monkeypatch: pytest.MonkeyPatch, make: Callable[[str], object]) -> None:
    """Without the HTTP library one learns what to install, and importing the module costs nothing."""
    monkeypatch.setitem(sys.modules, "httpx2", None)
    with pytest.raises(e.ConfigError, match=r'pip install "vllm-cp\[http\]"'):
        make("http://localhost:8000")


def test_the_colours_have_the_same_names_and_signatures() -> None:
    """What one client can do the other can, under the same name with the same arguments."""

    def public(kind: type) -> dict[str, inspect.Signature]:
        members = inspect.getmembers(kind, inspect.isfunction)
        return {name: inspect.signature(one) for name, one in members if not name.startswith("_")}

    assert public(FaultTolerance) == public(AsyncFaultTolerance)


@pytest.mark.parametrize("module", ["vllm_cp.faults", "vllm_cp.engine_page"])
def test_importing_loads_neither_grpc_nor_the_http_library(module: str) -> None:
    """Who only looks at the names pays for none of the libraries."""
    script = f"import sys, {module}\nprint(*sorted({{'grpc', 'httpx2', 'google.protobuf'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []
