"""TLS and mTLS on the control port."""

from __future__ import annotations

import pytest

from tests.certs import Certs
from tests.contract.conftest import Build, Connect
from vllm_cp import Connection, HealthStatus, Tls, TlsFailed


async def test_tls(build: Build, connect: Connect, certs: Certs) -> None:
    """With the right CA a client gets in, calls and watches alike; with the wrong one or in plaintext it does not."""
    rig = build(certs=certs)
    trusting = Connection(target=rig.target, tls=Tls(ca_file=certs.ca))
    client = await connect(trusting)
    assert (await client.server_info()).api_version == "vllm"
    assert await anext(client.watch()) is HealthStatus.SERVING
    for other in (Connection(target=rig.target, tls=Tls(ca_file=certs.wrong_ca)), Connection(target=rig.target)):
        stranger = await connect(other)
        with pytest.raises(TlsFailed) as failed:
            await stranger.server_info(timeout_s=3)
        assert failed.value.code == "UNAVAILABLE"
        assert "CA file" in failed.value.hint


async def test_mutual_tls(build: Build, connect: Connect, certs: Certs) -> None:
    """Where client certificates are demanded, one of the CA gets in; none, or another CA's, is told what is missing."""
    rig = build(certs=certs, mutual=True)
    own = Tls(ca_file=certs.ca, cert_file=certs.client_cert, key_file=certs.client_key)
    client = await connect(Connection(target=rig.target, tls=own))
    assert await client.check() is HealthStatus.SERVING
    alien = Tls(ca_file=certs.ca, cert_file=certs.wrong_cert, key_file=certs.wrong_key)
    for tls in (Tls(ca_file=certs.ca), alien):
        stranger = await connect(Connection(target=rig.target, tls=tls))
        with pytest.raises(TlsFailed) as failed:
            await stranger.server_info(timeout_s=3)
        assert "client certificate" in failed.value.hint


async def test_tls_to_a_plaintext_port(build: Build, connect: Connect, certs: Certs) -> None:
    """A TLS client at a plaintext worker hears that the port speaks plaintext."""
    rig = build()
    client = await connect(Connection(target=rig.target, tls=Tls(ca_file=certs.ca)))
    with pytest.raises(TlsFailed) as failed:
        await client.check(timeout_s=3)
    assert "plaintext" in failed.value.hint
