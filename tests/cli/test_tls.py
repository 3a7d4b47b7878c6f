"""TLS disagreements (B25): one line naming the likely cause, exit 4, no silent fall-back to plaintext."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.certs import Certs, make_certs
from tests.cli.conftest import Cli
from vllm_cp.testing import FakeWorker, TlsFiles


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Certs:
    """Certificates for another name than the address that is dialled."""
    return make_certs(tmp_path_factory.mktemp("named"), names=["worker.internal"])


@pytest.fixture(scope="module")
def secure(named: Certs) -> Iterator[FakeWorker]:
    """A worker with TLS whose certificate says worker.internal."""
    with FakeWorker(tls=TlsFiles(cert=named.server_cert, key=named.server_key)) as worker:
        yield worker


@pytest.fixture(scope="module")
def mutual(named: Certs) -> Iterator[FakeWorker]:
    """A worker that wants a client certificate."""
    files = TlsFiles(cert=named.server_cert, key=named.server_key, ca=named.ca, require_client_cert=True)
    with FakeWorker(tls=files) as worker:
        yield worker


def _health(cli: Cli, worker: FakeWorker, *flags: str | Path) -> tuple[int, str]:
    ended = cli("health", "--target", worker.target, *map(str, flags))
    assert ended.err.count("\n") <= 1
    return ended.code, ended.err


def test_agreed(cli: Cli, secure: FakeWorker, mutual: FakeWorker, named: Certs) -> None:
    """With the right CA, name and certificate it just works."""
    flags = ("--tls-ca", named.ca, "--server-name", "worker.internal")
    assert _health(cli, secure, *flags) == (0, "")
    assert _health(cli, mutual, *flags, "--tls-cert", named.client_cert, "--tls-key", named.client_key) == (0, "")


def test_other_name(cli: Cli, secure: FakeWorker, named: Certs) -> None:
    """Dialled by address, the certificate's name does not fit: the line says to give the server name."""
    code, said = _health(cli, secure, "--tls-ca", named.ca)
    assert code == 4
    assert "the certificate is for another name" in said


def test_tls_to_plaintext(cli: Cli, worker: FakeWorker, named: Certs) -> None:
    """TLS towards a plaintext port: the line says so, and nothing is sent in the clear."""
    code, said = _health(cli, worker, "--tls-ca", named.ca)
    assert code == 4
    assert "the port speaks plaintext" in said
    assert worker.calls == []


def test_plaintext_to_tls(cli: Cli, secure: FakeWorker) -> None:
    """Plaintext towards a TLS port: the line says so."""
    code, said = _health(cli, secure)
    assert code == 4
    assert "the port speaks TLS" in said


def test_wrong_ca(cli: Cli, secure: FakeWorker, named: Certs) -> None:
    """A CA that did not sign the certificate."""
    code, said = _health(cli, secure, "--tls-ca", named.wrong_ca, "--server-name", "worker.internal")
    assert code == 4
    assert "not signed by the CA in use" in said


def test_expired(cli: Cli, certs: Certs) -> None:
    """A certificate whose time is over."""
    with FakeWorker(tls=TlsFiles(cert=certs.expired_cert, key=certs.expired_key)) as worker:
        code, said = _health(cli, worker, "--tls-ca", certs.ca)
    assert code == 4
    assert "expired" in said


def test_no_client_certificate(cli: Cli, mutual: FakeWorker, named: Certs) -> None:
    """A worker that wants a client certificate and gets none."""
    code, said = _health(cli, mutual, "--tls-ca", named.ca, "--server-name", "worker.internal")
    assert code == 4
    assert "wants a client certificate" in said


def test_foreign_client_certificate(cli: Cli, mutual: FakeWorker, named: Certs, certs: Certs) -> None:
    """A client certificate that the worker's CA did not sign."""
    flags = ("--tls-ca", named.ca, "--server-name", "worker.internal")
    code, said = _health(cli, mutual, *flags, "--tls-cert", certs.client_cert, "--tls-key", certs.client_key)
    assert code == 4
    assert "client certificate" in said


def test_wrong_key(cli: Cli, mutual: FakeWorker, named: Certs) -> None:
    """A key that belongs to another certificate."""
    flags = ("--tls-ca", named.ca, "--server-name", "worker.internal")
    code, said = _health(cli, mutual, *flags, "--tls-cert", named.client_cert, "--tls-key", named.wrong_key)
    assert code == 4
    assert "certificate and key belong together" in said


def test_garbage_in_pem(cli: Cli, secure: FakeWorker, tmp_path: Path) -> None:
    """A CA file that only looks like PEM."""
    path = tmp_path / "ca.pem"
    path.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    code, said = _health(cli, secure, "--tls-ca", path)
    assert code == 4
    assert "check the CA" in said
