"""The audit and the lock against the genuine vllm-rs: what its key, TLS and ports are worth."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.certs import make_certs
from tests.real.sim.facts import NEWEST
from tests.real.stack import Stack, StackFactory
from vllm_cp import Connection, ControlClient, Tls
from vllm_cp.audit import Finding, Severity, Verdict, audit
from vllm_cp.profile import capture, compare, dumps, loads


def _audited(stack: Stack, tls: Tls | None = None) -> dict[str, Finding]:
    return {one.id: one for one in audit(Connection(target=stack.target, tls=tls), http_url=stack.http_url)}


@pytest.mark.parametrize("version", ["0.27.0", NEWEST])
def test_the_key_guards_http_and_not_grpc(version: str, stack: StackFactory) -> None:
    """With --api-key, HTTP refuses a stranger and gRPC does as he says; /metrics and /health are his too."""
    s = stack(version, frontend_args=["--api-key", "sk-s3cret"], kv_events=True)
    found = _audited(s)
    assert found["http-api-open"].verdict is Verdict.GUARDED
    for check in ("api-key-skips-grpc", "abort-open", "kv-events-open", "kv-replay-open"):
        assert (found[check].verdict, found[check].severity) == (Verdict.EXPOSED, Severity.HIGH), check
    for check in ("grpc-plaintext", "discovery-open", "http-metrics", "http-health"):
        assert found[check].verdict is Verdict.EXPOSED, check
    assert found["discovery-open"].evidence == f"GetServerInfo: vLLM {version}"
    # The Rust frontend has no fault tolerance.
    assert found["http-fault-tolerance"].verdict is Verdict.ABSENT


def test_tls_without_client_certificates(stack: StackFactory, tmp_path: Path) -> None:
    """TLS stops plaintext and old versions, and lets every client in."""
    certs = make_certs(tmp_path)
    s = stack(frontend_args=["--ssl-certfile", str(certs.server_cert), "--ssl-keyfile", str(certs.server_key)])
    found = _audited(s, Tls(ca_file=certs.ca))
    assert found["grpc-plaintext"].verdict is Verdict.GUARDED
    assert found["tls-versions"].evidence == "TLS 1.2, 1.3; refuses 1.0, 1.1"
    assert "in less than a day" in found["tls-certificate"].evidence
    for check in ("client-certificate", "discovery-open", "abort-open", "http-api-open"):
        assert found[check].verdict is Verdict.EXPOSED, check


def test_mutual_tls(stack: StackFactory, tmp_path: Path) -> None:
    """Client certificates keep strangers out of gRPC and HTTP, and not off the KV ports."""
    certs = make_certs(tmp_path)
    server = ["--ssl-certfile", str(certs.server_cert), "--ssl-keyfile", str(certs.server_key)]
    s = stack(frontend_args=[*server, "--ssl-ca-certs", str(certs.ca), "--ssl-cert-reqs", "2"], kv_events=True)
    found = _audited(s, Tls(ca_file=certs.ca, cert_file=certs.client_cert, key_file=certs.client_key))
    for check in ("grpc-plaintext", "client-certificate", "discovery-open", "abort-open", "api-key-skips-grpc"):
        assert found[check].verdict is Verdict.GUARDED, check
    assert found["http-metrics"].verdict is Verdict.GUARDED
    assert found["kv-events-open"].evidence == f"open at {s.kv_endpoint().removeprefix('tcp://')}"


def test_listening_beyond_loopback(stack: StackFactory) -> None:
    """Without --host the frontend keeps to loopback."""
    assert _audited(stack())["beyond-loopback"].verdict in (Verdict.GUARDED, Verdict.UNKNOWN)


def test_an_audit_ends_nobodys_request(stack: StackFactory) -> None:
    """The engine behind the frontend sees no abort, however often the worker is audited."""
    s = stack()
    for _ in range(3):
        _audited(s)
    assert [message for message in s.received() if "abort" in str(message)] == []


@pytest.mark.parametrize("version", ["0.27.0", NEWEST])
def test_a_lock_of_the_genuine_server(version: str, stack: StackFactory) -> None:
    """A lock survives its file and a restart of the worker, and notices another engine."""
    s = stack(version, kv_events=True, engines=2)
    with ControlClient(s.target) as client:
        lock = loads(dumps(capture(client)))
        s.restart()
        assert compare(lock, capture(client)) == ()
        s.restart(num_gpu_blocks=77)
        (drift,) = compare(lock, capture(client))
    assert (drift.name, drift.live) == ("total_kv_blocks", 154)
    assert lock.facts["engine_version"] == version
    assert (lock.facts["proto_version"] is None) is (version == "0.27.0")
