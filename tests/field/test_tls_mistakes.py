"""TLS that the two sides don't agree on, and targets that can't be meant: the likely cause is named, once, for one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.certs import Certs
from tests.cli.process import run as run_cli
from tests.colours import both
from tests.exporter.process import Exporter
from tests.exporter.process import run as run_exporter
from vllm_cp import ConfigError, Connection, HealthStatus, Tls, TlsFailed
from vllm_cp.testing import FakeWorker, TlsFiles

READY = 'vllm_cp_worker_ready{pool="default",worker="%s"} 1.0\n'
UNREACHABLE = 'reason="unreachable",worker="%s"} 1.0\n'
#: What is wrong with the worker, for a client that trusts our CA and shows no certificate.
MISTAKES = {
    "renamed": "the certificate is for another name: give that name as the server name",
    "expired": "has expired",
    "wrong-ca": "the certificate is not signed by the CA in use",
    "plaintext": "the port speaks plaintext",
    "mutual": "the worker wants a client certificate",
}


def _files(certs: Certs, mistake: str) -> TlsFiles | None:
    files = {
        "none": TlsFiles(cert=certs.server_cert, key=certs.server_key),
        "renamed": TlsFiles(cert=certs.renamed_cert, key=certs.renamed_key),
        "expired": TlsFiles(cert=certs.expired_cert, key=certs.expired_key),
        "wrong-ca": TlsFiles(cert=certs.wrong_cert, key=certs.wrong_key),
        "mutual": TlsFiles(cert=certs.server_cert, key=certs.server_key, ca=certs.ca, require_client_cert=True),
    }
    return files.get(mistake)


@pytest.fixture
def workers(certs: Certs) -> Iterator[dict[str, FakeWorker]]:
    """One worker for each mistake, and one without any."""
    with ExitStack() as open_workers:
        yield {
            mistake: open_workers.enter_context(FakeWorker(tls=_files(certs, mistake)))
            for mistake in ("none", *MISTAKES)
        }


# -- the clients and the command line ---------------------------------------------------------


async def test_the_clients_name_the_cause(workers: dict[str, FakeWorker], certs: Certs, colour: str) -> None:
    """Each mistake is TlsFailed with its likely cause, is not tried again, and nothing goes out in plaintext."""
    for mistake, cause in MISTAKES.items():
        tries: list[str] = []
        trusting = Connection(target=workers[mistake].target, tls=Tls(ca_file=certs.ca))
        async with both(colour, trusting, on_rpc=lambda record, tries=tries: tries.append(record.code)) as client:
            with pytest.raises(TlsFailed) as failed:
                await client.server_info(timeout_s=3)
        assert cause in failed.value.hint, mistake
        # Only what looks like a broken connection at first is tried again.
        assert len(tries) == (1 if mistake != "mutual" else 3), mistake
        assert workers[mistake].calls == []
    plain = Connection(target=workers["none"].target)
    async with both(colour, plain) as client:
        with pytest.raises(TlsFailed) as failed:
            await client.server_info(timeout_s=3)
    assert "the port speaks TLS" in failed.value.detail


async def test_what_mends_it(workers: dict[str, FakeWorker], certs: Certs, colour: str) -> None:
    """With the name of the certificate as the server name, or with a client certificate, it works."""
    named = Connection(target=workers["renamed"].target, tls=Tls(ca_file=certs.ca), server_name="elsewhere.internal")
    own = Tls(ca_file=certs.ca, cert_file=certs.client_cert, key_file=certs.client_key)
    for mended in (named, Connection(target=workers["mutual"].target, tls=own)):
        async with both(colour, mended) as client:
            assert await client.check() is HealthStatus.SERVING


@pytest.mark.parametrize("role", ["ca_file", "key_file", "cert_file"])
def test_a_missing_file(role: str, certs: Certs, tmp_path: Path) -> None:
    """A missing file is found before anything is sent: ConfigError, 4 of the command line, 2 of the daemon."""
    gone = tmp_path / "gone.pem"
    files = {"ca_file": certs.ca, "cert_file": certs.client_cert, "key_file": certs.client_key, role: gone}
    with pytest.raises(ConfigError, match=r"gone\.pem': No such file or directory"):
        Tls(**files)
    flags = [f"--tls-{name.removesuffix('_file')}={path}" for name, path in files.items()]
    daemon = run_exporter("--target", "a:1", *flags)
    for code, out, err in (run_cli("health", *flags), (daemon.returncode, daemon.stdout, daemon.stderr)):
        assert (code, out, err.count("\n")) == (2 if err.startswith("vllm-cp-exporter") else 4, "", 1)
        assert "gone.pem': No such file or directory" in err


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("http://h:1", "write h:1 without http://"),
        ("https://h:1", "write h:1 without https://"),
        ("h:99999", "a port is a number from 1 to 65535"),
        ("", "the target is empty"),
        ("a b:1", "holds spaces"),
    ],
)
def test_a_target_that_cannot_be_meant(target: str, said: str) -> None:
    """A badly written target is refused with the right form: ConfigError for the clients, 2 on the command line."""
    with pytest.raises(ConfigError, match=said):
        Connection(target=target)
    ended = run_cli("health", "--target", target)
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert said in ended.err


def test_a_target_without_a_port() -> None:
    """A bare host is our own port, never gRPC's silent 443."""
    assert Connection(target="localhost").address.name == "localhost:8001"


# -- the daemon -------------------------------------------------------------------------------


def test_the_daemon_marks_the_worker_and_tells_why(workers: dict[str, FakeWorker], certs: Certs) -> None:
    """Each mistake marks its own worker; the status page and one line of the log say why; mended, the worker is up.

    With JSON chosen all lines are JSON: gRPC's own are kept out of it.
    """
    flags = [f"--target={mistake}={fake.target}" for mistake, fake in workers.items()]
    with Exporter(*flags, "--tls-ca", str(certs.ca), "--log-format=json", "--probe-interval=0.3") as exporter:
        wrong = [UNREACHABLE % mistake for mistake in MISTAKES]
        exporter.eventually(lambda text: READY % "none" in text and all(line in text for line in wrong))
        shown = re.findall(r'TLS failed: ([^"<]+)', exporter.get("/"))
        for cause in MISTAKES.values():
            assert any(cause in why for why in shown)
        # Several dials later each was told once.
        dials = 'vllm_cp_rpc_failures_total{code="UNAVAILABLE",method="Health.Check"} '
        exporter.eventually(lambda text: dials in text and float(text.partition(dials)[2].split("\n")[0]) > 15)
        lines = [json.loads(line) for line in exporter.lines]
        told = {line["target"]: line["error"] for line in lines if line["event"] == "misconfigured"}
        assert len([line for line in lines if line["event"] == "misconfigured"]) == len(MISTAKES)
        for mistake, cause in MISTAKES.items():
            assert cause in told[workers[mistake].target]
        assert workers["plaintext"].calls == []
        # A renewed certificate is found without a restart of the daemon.
        port = int(workers["expired"].target.rpartition(":")[2])
        workers["expired"].close()
        with FakeWorker(tls=_files(certs, "none"), port=port):
            exporter.eventually(lambda text: READY % "expired" in text)
        assert exporter.stop()[0] == 0
        faults = [line for line in lines if line["event"].startswith("fault")]
        assert faults == [], "none of them was ever up"


def test_the_daemon_without_tls(workers: dict[str, FakeWorker]) -> None:
    """Plaintext towards a TLS port: the same, the other way round."""
    flags = [f"--target=tls={workers['none'].target}", f"--target=plain={workers['plaintext'].target}"]
    with Exporter(*flags) as exporter:
        exporter.eventually(lambda text: READY % "plain" in text and UNREACHABLE % "tls" in text)
        assert "the port speaks TLS" in exporter.event("misconfigured")["error"]
        assert "TLS failed: give the TLS options" in exporter.get("/")
