"""TLS and tokens, in both colours."""

from __future__ import annotations

import gc
import os
import traceback
from pathlib import Path

import pytest

from tests.certs import Certs, make_certs
from tests.faults.conftest import Connect
from vllm_cp import Tls
from vllm_cp import errors as e
from vllm_cp.faults import FaultTolerance, HttpConnection
from vllm_cp.models.health import HealthStatus
from vllm_cp.testing import TlsFiles
from vllm_cp.testing._http import FakeHttp


@pytest.fixture
def tls(certs: Certs) -> TlsFiles:
    """A server certificate for localhost."""
    return TlsFiles(cert=certs.server_cert, key=certs.server_key)


async def test_tls_with_our_own_ca(connect: Connect, certs: Certs, tls: TlsFiles) -> None:
    """With the CA given the worker is trusted, for reads and for changes."""
    with FakeHttp(tls=tls) as server:
        client = connect(HttpConnection(url=server.url, tls=Tls(ca_file=certs.ca)))
        assert await client.health() is HealthStatus.SERVING
        assert await client.apply("retry")


@pytest.mark.parametrize("ca", [None, "wrong"], ids=["system", "wrong"])
async def test_a_certificate_of_an_unknown_ca_is_refused(
    connect: Connect, certs: Certs, tls: TlsFiles, ca: str | None
) -> None:
    """Neither the system's CAs nor a wrong one make the worker trusted, and the hint says which file to give."""
    with FakeHttp(tls=tls) as server:
        files = Tls(ca_file=certs.wrong_ca) if ca else None
        with pytest.raises(e.TlsFailed) as caught:
            await connect(HttpConnection(url=server.url, tls=files)).health()
    assert "CA file" in caught.value.hint
    assert server.calls == []


async def test_an_expired_certificate_is_refused(connect: Connect, certs: Certs) -> None:
    """Yesterday's certificate is no good today."""
    files = TlsFiles(cert=certs.expired_cert, key=certs.expired_key)
    with FakeHttp(tls=files) as server, pytest.raises(e.TlsFailed) as caught:
        await connect(HttpConnection(url=server.url, tls=Tls(ca_file=certs.ca))).health()
    assert "expired" in caught.value.hint


async def test_a_certificate_for_another_name(connect: Connect, tmp_path: Path) -> None:
    """A certificate for another name is refused, by name and by address, unless that is the name expected."""
    certs = make_certs(tmp_path, names=("worker.internal",))
    with FakeHttp(tls=TlsFiles(cert=certs.server_cert, key=certs.server_key)) as server:
        files = Tls(ca_file=certs.ca)
        for url in (server.url, server.url.replace("127.0.0.1", "localhost")):
            with pytest.raises(e.TlsFailed) as caught:
                await connect(HttpConnection(url=url, tls=files)).health()
            assert "server name" in caught.value.hint
        client = connect(HttpConnection(url=server.url, tls=files, server_name="worker.internal"))
        assert await client.health() is HealthStatus.SERVING
        assert await client.apply("retry")


async def test_mtls(connect: Connect, certs: Certs) -> None:
    """A server that wants a client certificate gets it; without one the error says so."""
    files = TlsFiles(cert=certs.server_cert, key=certs.server_key, ca=certs.ca, require_client_cert=True)
    with FakeHttp(tls=files) as server:
        ours = Tls(ca_file=certs.ca, cert_file=certs.client_cert, key_file=certs.client_key)
        assert await connect(HttpConnection(url=server.url, tls=ours)).health() is HealthStatus.SERVING
        with pytest.raises(e.TlsFailed) as caught:
            await connect(HttpConnection(url=server.url, tls=Tls(ca_file=certs.ca))).health()
    assert "client certificate" in caught.value.hint


async def test_plaintext_to_a_tls_port(connect: Connect, tls: TlsFiles) -> None:
    """http:// to a port that speaks TLS: the hint says what to write."""
    with FakeHttp(tls=tls) as server, pytest.raises(e.TlsFailed) as caught:
        await connect(server.url.replace("https:", "http:")).health()
    assert "https://" in caught.value.hint


async def test_tls_to_a_plaintext_port(connect: Connect, server: FakeHttp) -> None:
    """https:// to a port that speaks plaintext: the hint says what to write."""
    with pytest.raises(e.TlsFailed) as caught:
        await connect(server.url.replace("http:", "https:")).health()
    assert "http://" in caught.value.hint


def test_unusable_tls_files_are_said_to_be_so_when_the_client_is_made(certs: Certs, tmp_path: Path) -> None:
    """A key of another certificate, or an encrypted one, is found at once and nobody is asked for a passphrase."""
    url = "https://localhost:8000"
    with pytest.raises(e.ConfigError, match="belong together"):
        FaultTolerance(HttpConnection(url=url, tls=Tls(cert_file=certs.client_cert, key_file=certs.server_key)))
    from cryptography.hazmat.primitives import serialization as s

    key = s.load_pem_private_key(certs.client_key.read_bytes(), None)
    locked = tmp_path / "locked.pem"
    locked.write_bytes(key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.BestAvailableEncryption(b"x")))
    with pytest.raises(e.ConfigError, match="passphrase"):
        FaultTolerance(HttpConnection(url=url, tls=Tls(cert_file=certs.client_cert, key_file=locked)))


async def test_the_token_goes_over_tls(connect: Connect, certs: Certs, tls: TlsFiles, token_file: Path) -> None:
    """The bearer token opens what --api-key guards, and is read again when its file changes."""
    with FakeHttp(tls=tls, prefix="/v1", api_key="s3cret") as server:
        client = connect(HttpConnection(url=server.url, tls=Tls(ca_file=certs.ca), token_file=token_file))
        assert len((await client.status()).engines) == 1
        _replace(token_file, "another-one\n")
        with pytest.raises(e.CredentialsRejected, match="Unauthorized") as caught:
            await client.status()
        assert "token file" in caught.value.hint
        os.unlink(token_file)
        with pytest.raises(e.CredentialsRejected, match="token"):
            await client.status()


def _replace(path: Path, text: str) -> None:
    path.write_text(text)
    os.utime(path, ns=(1, 1))


async def test_without_a_token_the_guarded_form_rejects(connect: Connect) -> None:
    """A server that guards /v1 says 401 there: that is credentials, not a missing feature."""
    guarded = pytest.raises(e.CredentialsRejected, match="/v1/fault_tolerance/status")
    with FakeHttp(prefix="/v1", api_key="s3cret") as server, guarded:
        await connect(server.url).status()


async def test_the_key_guards_nothing_outside_v1(connect: Connect) -> None:
    """As on the real server: health, metrics and the routes without /v1 are open."""
    with FakeHttp(api_key="s3cret") as server:
        client = connect(server.url)
        assert await client.health() is HealthStatus.SERVING
        assert len((await client.status()).engines) == 1


def test_a_token_never_crosses_plaintext_by_mistake(token_file: Path) -> None:
    """http:// with a token is refused when it is built, and the message holds no token."""
    with pytest.raises(e.ConfigError, match="plaintext") as caught:
        HttpConnection(url="http://localhost:8000", token_file=token_file)
    assert "s3cret" not in str(caught.value)


async def test_a_token_crosses_plaintext_when_told_to(connect: Connect, server: FakeHttp, token_file: Path) -> None:
    """The loud option sends it."""
    connection = HttpConnection(url=server.url, token_file=token_file, insecure_token=True)
    await connect(connection).health()
    assert server.calls[0].headers["authorization"] == "Bearer s3cret"


async def test_the_token_is_in_no_text(
    connect: Connect, server: FakeHttp, token_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No repr, error, traceback or log line shows the token, whether the call works or fails."""
    caplog.set_level(0)
    connection = HttpConnection(url=server.url, token_file=token_file, insecure_token=True)
    client = connect(connection)
    await client.health()
    server.fail("*", 401, {"error": "Unauthorized"})
    with pytest.raises(e.CredentialsRejected) as caught:
        await client.status()
    shown = [
        repr(connection),
        repr(client.client),
        repr(caught.value),
        "".join(traceback.format_exception(caught.value)),
    ]
    assert not any("s3cret" in text for text in (*shown, caplog.text))


def test_clients_of_a_fleet_share_one_tls_context(certs: Certs) -> None:
    """A thousand workers with the same CA cost its parsing once."""
    from vllm_cp._http_connection import tls_context

    made = [HttpConnection(url=f"https://w{n}:8000", tls=Tls(ca_file=certs.ca)) for n in range(3)]
    assert len({id(tls_context(one)) for one in made}) == 1
    gc.collect()
    assert tls_context(made[0]) is not tls_context(
        HttpConnection(url="https://w:8000", tls=Tls(ca_file=certs.wrong_ca))
    )
