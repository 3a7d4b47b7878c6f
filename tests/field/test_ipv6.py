"""IPv6 in targets, labels and listen addresses."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Iterator

import pytest

from tests.cli.process import run as run_cli
from tests.colours import both
from tests.exporter.process import Exporter
from tests.exporter.process import run as run_exporter
from tests.field.watching import ready, watching, worker
from vllm_cp import ConfigError, Connection, HealthStatus
from vllm_cp.testing import FakeWorker


@pytest.fixture
def far() -> Iterator[FakeWorker]:
    """A worker on an IPv6 address."""
    with FakeWorker(host="::1") as running:
        yield running


UNBRACKETED = [
    ("::1:8001", "write [::1]:8001"),
    ("::1", "write [::1]:8001"),
    ("fd00::5:50051", "write [fd00::5]:50051"),
]


async def test_brackets_work(far: FakeWorker, colour: str) -> None:
    """A bracketed address is reached by clients, command line and daemon."""
    async with both(colour, far.target) as client:
        assert await client.check() is HealthStatus.SERVING
    assert run_cli("health", "--target", far.target).code == 0


@pytest.mark.parametrize(("target", "said"), UNBRACKETED)
def test_no_brackets(target: str, said: str) -> None:
    """An address without brackets is refused everywhere, with the form to write."""
    with pytest.raises(ConfigError) as refused:
        Connection(target=target)
    command, daemon = run_cli("health", "--target", target), run_exporter("--target", target)
    assert (command.code, daemon.returncode) == (2, 2)
    for line in (str(refused.value), command.err, daemon.stderr):
        assert "IPv6 without brackets" in line
        assert said in line


async def test_one_spelling(far: FakeWorker) -> None:
    """However the address is written, errors, answers and the target label spell it in one way."""
    port = far.target.rpartition(":")[2]
    written = [f"[::1]:{port}", f"[0:0:0:0:0:0:0:1]:{port}", f"[0000::0001]:{port}"]
    assert {Connection(target=text).address.name for text in written} == {f"[::1]:{port}"}
    ended = run_cli("health", *(part for text in written for part in ("--target", text)), "-o", "name")
    assert ended.code == 0
    assert len(far.calls) == 1, "one worker is asked once"
    async with watching(worker("long", written[1])) as daemon:
        page = await daemon.until(ready("long"))
        (info,) = page.of("worker_target_info")
        assert info.labels["target"] == f"[::1]:{port}"


@pytest.mark.parametrize(
    ("listen", "reached"),
    [("[::1]:0", ["::1"]), ("[::]:0", ["::1", "127.0.0.1"]), ("0.0.0.0:0", ["127.0.0.1"])],
)
def test_listening(listen: str, reached: list[str], far: FakeWorker) -> None:
    """The daemon listens on a bracketed address; [::] serves IPv4 as well; one family alone is just that."""
    with Exporter("--target", far.target, listen=listen) as exporter:
        port = exporter.event("started")["listen"].rpartition(":")[2]
        for host in ("::1", "127.0.0.1"):
            url = f"http://[{host}]:{port}/-/healthy" if ":" in host else f"http://{host}:{port}/-/healthy"
            if host in reached:
                with urllib.request.urlopen(url, timeout=10) as answer:
                    assert answer.read() == b"healthy\n"
            else:
                with pytest.raises(OSError, match="refused"):
                    socket.create_connection((host, int(port)), timeout=2)


def test_listening_without_brackets() -> None:
    """:::9400 is refused with the form to write."""
    ended = run_exporter("--target", "a:1", "--listen", ":::9400")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "write [::]:9400" in ended.stderr
