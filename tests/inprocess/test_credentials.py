"""Both clients and who is who: TLS, client certificates, tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.certs import Certs
from tests.colours import Both
from tests.inprocess.conftest import Connect, token_file
from vllm_cp import ConfigError, Connection, CredentialsRejected, HealthStatus, Tls, TlsFailed
from vllm_cp.testing import FakeWorker, TlsFiles

SECRET = "hunter2-is-no-token"


@pytest.fixture
def tls(certs: Certs) -> TlsFiles:
    """A server that shows a certificate for localhost and 127.0.0.1."""
    return TlsFiles(cert=certs.server_cert, key=certs.server_key, ca=certs.ca)


@pytest.fixture
def mtls(certs: Certs) -> TlsFiles:
    """A server that wants a certificate as well."""
    return TlsFiles(cert=certs.server_cert, key=certs.server_key, ca=certs.ca, require_client_cert=True)


async def test_tls_works(tls: TlsFiles, certs: Certs, connect: Connect) -> None:
    """With the right CA everything works as over plaintext, watches included."""
    with FakeWorker(tls=tls) as worker:
        client = await connect(Connection(target=worker.target, tls=Tls(ca_file=certs.ca)))
        assert (await client.server_info()).engine_version == "0.33.0"
        assert await anext(client.watch()) is HealthStatus.SERVING


async def test_mutual_tls_works(mtls: TlsFiles, certs: Certs, connect: Connect) -> None:
    """A client that shows its certificate is let in."""
    shown = Tls(ca_file=certs.ca, cert_file=certs.client_cert, key_file=certs.client_key)
    with FakeWorker(tls=mtls) as worker:
        client = await connect(Connection(target=worker.target, tls=shown))
        assert await client.check() is HealthStatus.SERVING


async def test_a_plaintext_client_at_a_tls_port_is_told(tls: TlsFiles, connect: Connect) -> None:
    """A plaintext client at a TLS port hears that it is TLS, not that nobody is there."""
    with FakeWorker(tls=tls) as worker:
        client = await connect(worker.target)
        with pytest.raises(TlsFailed) as failed:
            await client.server_info(timeout_s=3)
        assert "CA" in failed.value.hint


async def test_a_tls_client_at_a_plaintext_port_is_told(worker: FakeWorker, certs: Certs, connect: Connect) -> None:
    """A TLS client at a plaintext port hears that as well."""
    client = await connect(Connection(target=worker.target, tls=Tls(ca_file=certs.ca)))
    with pytest.raises(TlsFailed) as failed:
        await client.server_info(timeout_s=3)
    assert "plaintext" in failed.value.hint


async def test_a_missing_client_certificate_is_told(mtls: TlsFiles, certs: Certs, connect: Connect) -> None:
    """A client without a certificate hears that the worker wants one."""
    with FakeWorker(tls=mtls) as worker:
        client = await connect(Connection(target=worker.target, tls=Tls(ca_file=certs.ca)))
        with pytest.raises(TlsFailed) as failed:
            await client.server_info(timeout_s=3)
        assert "client certificate" in failed.value.hint


async def test_a_server_nobody_vouches_for_is_refused(tls: TlsFiles, certs: Certs, connect: Connect) -> None:
    """A server certificate from another CA is refused, and the hint names the CA file."""
    with FakeWorker(tls=tls) as worker:
        client = await connect(Connection(target=worker.target, tls=Tls(ca_file=certs.wrong_ca)))
        with pytest.raises(TlsFailed) as failed:
            await client.server_info(timeout_s=3)
        assert "CA file" in failed.value.hint


async def test_a_certificate_for_another_name_needs_that_name(certs: Certs, connect: Connect, tls: TlsFiles) -> None:
    """The name in the certificate counts; where it differs from the host, it can be given."""
    with FakeWorker(tls=tls) as worker:
        named = Connection(target=worker.target, tls=Tls(ca_file=certs.ca), server_name="localhost")
        assert await (await connect(named)).check() is HealthStatus.SERVING
        other = Connection(target=worker.target, tls=Tls(ca_file=certs.ca), server_name="elsewhere.example")
        with pytest.raises(TlsFailed) as failed:
            await (await connect(other)).check(timeout_s=3)
        assert "name" in failed.value.hint


async def test_a_token_travels_over_tls(tls: TlsFiles, certs: Certs, connect: Connect, tmp_path: Path) -> None:
    """A token goes with every call over TLS, unary or stream."""
    path = token_file(tmp_path / "token", f"{SECRET}\n")
    with FakeWorker(tls=tls) as worker:
        client = await connect(Connection(target=worker.target, tls=Tls(ca_file=certs.ca), token_file=path))
        await client.server_info()
        assert await anext(client.watch()) is HealthStatus.SERVING
        assert [call.get("authorization") for call in worker.calls] == [f"Bearer {SECRET}"] * 2


def test_a_token_over_plaintext_is_refused(tmp_path: Path) -> None:
    """A token with a plaintext connection is refused when the connection is described, before anything is sent."""
    path = token_file(tmp_path / "token", SECRET)
    with pytest.raises(ConfigError, match="plaintext") as failed:
        Connection(target="127.0.0.1:8001", token_file=path)
    assert SECRET not in str(failed.value)


async def test_a_token_crosses_plaintext_when_one_insists(worker: FakeWorker, connect: Connect, tmp_path: Path) -> None:
    """With insecure_token it travels as plain metadata, on calls and watches."""
    path = token_file(tmp_path / "token", SECRET)
    client = await connect(Connection(target=worker.target, token_file=path, insecure_token=True))
    await client.server_info()
    assert await anext(client.watch()) is HealthStatus.SERVING
    assert [call.get("authorization") for call in worker.calls] == [f"Bearer {SECRET}"] * 2


@pytest.mark.parametrize("secure", [True, False])
async def test_a_token_file_may_be_rotated(
    secure: bool, tls: TlsFiles, certs: Certs, connect: Connect, tmp_path: Path
) -> None:
    """A replaced token file is in force from the next call on; no restart, no new client."""
    path = token_file(tmp_path / "token", "first")
    with FakeWorker(tls=tls if secure else None) as worker:
        client = await connect(
            Connection(
                target=worker.target,
                tls=Tls(ca_file=certs.ca) if secure else None,
                token_file=path,
                insecure_token=not secure,
            )
        )
        await client.server_info()
        token_file(path, "second")
        await client.server_info()
        assert [call.get("authorization") for call in worker.calls] == ["Bearer first", "Bearer second"]


@pytest.mark.parametrize("secure", [True, False])
async def test_a_lost_token_file_is_a_matter_of_credentials(
    secure: bool, tls: TlsFiles, certs: Certs, connect: Connect, tmp_path: Path
) -> None:
    """A token file that vanishes is CredentialsRejected with its path and without its content; its return heals it."""
    path = token_file(tmp_path / "token", SECRET)
    with FakeWorker(tls=tls if secure else None) as worker:
        client: Both = await connect(
            Connection(
                target=worker.target,
                tls=Tls(ca_file=certs.ca) if secure else None,
                token_file=path,
                insecure_token=not secure,
            )
        )
        await client.server_info()
        path.unlink()
        with pytest.raises(CredentialsRejected) as failed:
            await client.server_info()
        assert str(path) in str(failed.value)
        assert SECRET not in str(failed.value)
        token_file(path, "again")
        await client.server_info()
        assert worker.calls[-1].get("authorization") == "Bearer again"


async def test_a_worker_that_refuses_the_token(worker: FakeWorker, connect: Connect, tmp_path: Path) -> None:
    """A proxy's or gateway's UNAUTHENTICATED is CredentialsRejected, is not retried, and shows no token."""
    path = token_file(tmp_path / "token", SECRET)
    connection = Connection(target=worker.target, token_file=path, insecure_token=True)
    client = await connect(connection)
    worker.fail("GetServerInfo", "UNAUTHENTICATED", "who are you")
    with pytest.raises(CredentialsRejected) as failed:
        await client.server_info()
    assert len(worker.calls) == 1
    assert SECRET not in f"{failed.value!r} {failed.value} {connection!r}"
