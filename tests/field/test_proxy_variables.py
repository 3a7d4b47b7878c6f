"""Proxy variables of a company machine: they don't get between us and a worker unless asked to, and then say so."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.cli.process import environment, run
from tests.colours import both
from tests.exporter.process import Exporter
from vllm_cp import Connection, HealthStatus, Retry, WorkerUnreachable
from vllm_cp.testing import FakeHttp, FakeWorker

LOWER = ("http_proxy", "https_proxy", "grpc_proxy")
VARIABLES = (*LOWER, *(name.upper() for name in LOWER))
#: Nothing, the worker's address, and a range of pods that the worker is not in.
EXCEPTIONS = (None, "127.0.0.1", "10.0.0.0/8")


class Proxy:
    """Takes connections, notes what is said first, and hangs up."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        #: First lines, oldest first.
        self.asked: list[bytes] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                with near:
                    self.asked.append(near.recv(4096).partition(b"\r\n")[0])

    def close(self) -> None:
        """Stop."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy, and an environment that knows no other."""
    for name in (*VARIABLES, "no_proxy", "NO_PROXY", "no_grpc_proxy", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    made = Proxy()
    yield made
    made.close()


@pytest.mark.parametrize("exempt", EXCEPTIONS)
async def test_the_clients_go_direct(
    exempt: str | None, colour: str, fake: FakeWorker, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever variable is set, with or without exceptions, a client goes straight to its worker."""
    if exempt is not None:
        monkeypatch.setenv("no_proxy", exempt)
    for variable in VARIABLES:
        with monkeypatch.context() as only:
            only.setenv(variable, proxy.url)
            async with both(colour, fake.target) as client:
                assert await client.check() is HealthStatus.SERVING
                assert await anext(client.watch()) is HealthStatus.SERVING
    assert proxy.asked == []


@pytest.mark.parametrize("exempt", EXCEPTIONS)
def test_the_command_line_goes_direct(exempt: str | None, fake: FakeWorker, proxy: Proxy) -> None:
    """So does the command line, with every variable set at once."""
    env = dict.fromkeys(VARIABLES, proxy.url) | ({} if exempt is None else {"no_proxy": exempt})
    assert run("health", "--target", fake.target, env=env).code == 0
    assert proxy.asked == []


def test_the_daemon_goes_direct(fake: FakeWorker, proxy: Proxy) -> None:
    """So does the daemon, over gRPC and over HTTP, and it says nothing of proxies."""
    variables = environment(dict.fromkeys((*VARIABLES, "all_proxy", "ALL_PROXY"), proxy.url))
    with FakeHttp() as http:
        target = f"w={fake.target},{http.url}"
        with Exporter("--target", target, "--probe-interval", "0.2", **variables) as exporter:
            exporter.eventually(lambda text: 'worker_ready{pool="default",worker="w"} 1.0' in text)
            exporter.eventually(lambda text: 'check="engine_metrics"' in text)
            exporter.stop()
            assert "proxy" not in "\n".join(exporter.lines)
    assert proxy.asked == []


@pytest.mark.parametrize("variable", LOWER)
async def test_a_proxy_on_request(
    variable: str, colour: str, fake: FakeWorker, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked to honour proxies a client goes there, and the error of a call that fails names the variable."""
    monkeypatch.setenv(variable, proxy.url)
    wanted = Connection(target=fake.target, proxy=True, retry=Retry(attempts=1))
    async with both(colour, wanted) as client:
        with pytest.raises(WorkerUnreachable) as failed:
            await client.server_info(timeout_s=3)
    assert f"a proxy is in force ({variable}): switch it off or set no_proxy" in failed.value.hint
    assert proxy.asked[0].startswith(b"CONNECT " + fake.target.encode())
    assert fake.calls == []


@pytest.mark.parametrize("exempt", ["127.0.0.1", "localhost,127.0.0.0/8"])
async def test_exceptions_hold(
    exempt: str, colour: str, fake: FakeWorker, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With proxies honoured, no_proxy is as well, by address and by range."""
    monkeypatch.setenv("http_proxy", proxy.url)
    monkeypatch.setenv("no_proxy", exempt)
    async with both(colour, Connection(target=fake.target, proxy=True)) as client:
        assert await client.check() is HealthStatus.SERVING
    assert proxy.asked == []


async def test_upper_case_is_not_honoured(
    colour: str, fake: FakeWorker, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even on request only the lower-case variables count, as everywhere with gRPC; no error blames the others."""
    for name in LOWER:
        monkeypatch.setenv(name.upper(), proxy.url)
    async with both(colour, Connection(target=fake.target, proxy=True)) as client:
        assert await client.check() is HealthStatus.SERVING
        fake.stop()
        with pytest.raises(WorkerUnreachable) as failed:
            await client.check(timeout_s=1)
    assert "proxy" not in failed.value.hint
    assert proxy.asked == []
    assert "http_proxy" not in os.environ
