"""The genuine frontend speaks TLS with the certificates of tests/certs.py, and refuses as it should."""

from __future__ import annotations

from pathlib import Path

import grpc

from tests.certs import make_certs
from tests.real.raw import CHECK, SERVING, ask, channel_to, code_of
from tests.real.stack import StackFactory


def test_tls_covers_grpc(stack: StackFactory, tmp_path: Path) -> None:
    """With a certificate and key the gRPC port speaks TLS: the right CA gets in, the wrong one and plaintext do not."""
    certs = make_certs(tmp_path)
    s = stack(frontend_args=["--ssl-certfile", str(certs.server_cert), "--ssl-keyfile", str(certs.server_key)])
    assert s.http_url.startswith("https://")
    with channel_to(s, grpc.ssl_channel_credentials(certs.ca.read_bytes())) as channel:
        assert ask(channel, CHECK) == SERVING
    with channel_to(s, grpc.ssl_channel_credentials(certs.wrong_ca.read_bytes())) as channel:
        assert code_of(channel, CHECK, 2.0) is grpc.StatusCode.UNAVAILABLE
    with channel_to(s) as channel:
        assert code_of(channel, CHECK, 2.0) is grpc.StatusCode.UNAVAILABLE


def test_mutual_tls_asks_for_a_client_certificate(stack: StackFactory, tmp_path: Path) -> None:
    """When the frontend demands a client certificate, one of its CA gets in; a stranger's or none does not."""
    certs = make_certs(tmp_path)
    server = ["--ssl-certfile", str(certs.server_cert), "--ssl-keyfile", str(certs.server_key)]
    s = stack(frontend_args=[*server, "--ssl-ca-certs", str(certs.ca), "--ssl-cert-reqs", "2"])

    def as_client(key: Path | None, cert: Path | None) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(
            certs.ca.read_bytes(), key.read_bytes() if key else None, cert.read_bytes() if cert else None
        )

    with channel_to(s, as_client(certs.client_key, certs.client_cert)) as channel:
        assert ask(channel, CHECK) == SERVING
    strangers = [(certs.wrong_key, certs.wrong_cert), (certs.expired_key, certs.expired_cert), (None, None)]
    for key, cert in strangers:
        with channel_to(s, as_client(key, cert)) as channel:
            assert code_of(channel, CHECK, 2.0) is grpc.StatusCode.UNAVAILABLE


def test_an_expired_server_certificate_is_refused(stack: StackFactory, tmp_path: Path) -> None:
    """A client does not accept a frontend whose certificate has run out."""
    certs = make_certs(tmp_path)
    s = stack(frontend_args=["--ssl-certfile", str(certs.expired_cert), "--ssl-keyfile", str(certs.expired_key)])
    with channel_to(s, grpc.ssl_channel_credentials(certs.ca.read_bytes())) as channel:
        assert code_of(channel, CHECK, 2.0) is grpc.StatusCode.UNAVAILABLE
