"""The whole audit, against workers whose doors are known."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import grpc
import pytest

from tests.audit.servers import Http
from tests.certs import Certs
from vllm_cp import ConfigError, Connection, KvEventSource, Tls, WorkerUnreachable
from vllm_cp import _audit_net as net
from vllm_cp._audit_net import Endpoint
from vllm_cp.audit import CHECKS, Finding, Severity, Verdict, audit
from vllm_cp.testing import FakeWorker, TlsFiles

EXPOSED, GUARDED, ABSENT, UNKNOWN = Verdict.EXPOSED, Verdict.GUARDED, Verdict.ABSENT, Verdict.UNKNOWN
TLS = ("tls-versions", "tls-certificate", "client-certificate")
KV = ("kv-events-open", "kv-replay-open")
READS = ["Health.Check", "Control.GetServerInfo", "Control.Abort", "Control.GetKvEventSources"]
DAY = 86400.0


def _audited(
    connection: Connection | str, http_url: str | None = None, *, timeout_s: float = 3.0, later_s: float = 0.0
) -> dict[str, Finding]:
    if isinstance(connection, str):
        connection = Connection(target=connection)
    connection = replace(connection, timeout_s=timeout_s)
    found = audit(connection, http_url=http_url, clock=lambda: time.time() + later_s)
    assert [one.id for one in found] == list(CHECKS)
    assert all((one.severity is Severity.INFO) or one.verdict is EXPOSED for one in found)
    return {one.id: one for one in found}


def _verdicts(found: dict[str, Finding], checks: Sequence[str]) -> list[Verdict]:
    return [found[check].verdict for check in checks]


def _source(endpoint: str, replay: str | None = None) -> KvEventSource:
    return KvEventSource(transport="zmq", endpoint=endpoint, replay_endpoint=replay, data_parallel_rank=0)


def _tls(certs: Certs, *, mutual: bool = False) -> TlsFiles:
    return TlsFiles(
        cert=certs.server_cert, key=certs.server_key, ca=certs.ca if mutual else None, require_client_cert=mutual
    )


def test_an_open_worker() -> None:
    """A plaintext worker answers strangers: discovery, and an abort that would end anybody's request."""
    with FakeWorker() as worker:
        found = _audited(worker.target)
    assert found["grpc-plaintext"].evidence == "Health.Check: SERVING"
    assert found["discovery-open"].evidence == "GetServerInfo: vLLM 0.33.0"
    assert (found["abort-open"].verdict, found["abort-open"].severity) == (EXPOSED, Severity.HIGH)
    assert "--api-key does not guard gRPC" in found["abort-open"].remedy
    assert _verdicts(found, (*TLS, *KV)) == [ABSENT] * 5


def test_nothing_is_changed() -> None:
    """What reaches the worker is three reads and one abort of nothing, each once and with a deadline."""
    with FakeWorker() as worker:
        _audited(worker.target)
        assert [call.method for call in worker.calls] == READS
        assert [call.request_ids for call in worker.calls if call.method == "Control.Abort"] == [()]
        assert all(call.deadline_s is not None and call.deadline_s < 3.5 for call in worker.calls)


def test_a_stranger_has_no_token(tmp_path: Path) -> None:
    """The token that is configured is not shown by the stranger; it only serves to learn of the KV ports."""
    token = tmp_path / "token"
    token.write_text("s3cret")
    with FakeWorker() as worker:
        worker.fail("GetServerInfo", "UNAUTHENTICATED", "who are you?")
        worker.fail("Abort", "PERMISSION_DENIED")
        found = _audited(Connection(target=worker.target, token_file=token, insecure_token=True))
        sent = {call.method: call.get("authorization") for call in worker.calls}
    assert sent == {**dict.fromkeys(READS), "Control.GetKvEventSources": "Bearer s3cret"}
    assert found["discovery-open"].evidence == "Control.GetServerInfo: UNAUTHENTICATED"
    assert _verdicts(found, ("grpc-plaintext", "discovery-open", "abort-open")) == [EXPOSED, GUARDED, GUARDED]


@pytest.mark.parametrize(
    ("code", "verdict"),
    [("UNIMPLEMENTED", ABSENT), ("INTERNAL", UNKNOWN), ("UNAVAILABLE", UNKNOWN), ("RESOURCE_EXHAUSTED", UNKNOWN)],
)
def test_other_answers(code: str, verdict: Verdict) -> None:
    """A service that is switched off is no door; a failure says nothing, and is not taken for a guard."""
    with FakeWorker() as worker:
        worker.fail("GetServerInfo", code)
        worker.fail("Abort", code)
        found = _audited(worker.target)
    assert _verdicts(found, ("discovery-open", "abort-open")) == [verdict, verdict]


def test_a_health_check_that_is_denied_was_answered_in_plaintext() -> None:
    """Whatever the code, an answer to plaintext is an answer."""
    with FakeWorker() as worker:
        worker.fail("Check", "PERMISSION_DENIED")
        found = _audited(worker.target)
    assert found["grpc-plaintext"].evidence == "Health.Check: answered with PERMISSION_DENIED"
    assert found["grpc-plaintext"].verdict is EXPOSED


def test_a_tls_worker(certs: Certs) -> None:
    """TLS alone keeps nobody out: who trusts the CA gets in without a certificate of his own."""
    with FakeWorker(tls=_tls(certs)) as worker:
        found = _audited(Connection(target=worker.target, tls=Tls(ca_file=certs.ca)))
        assert [call.method for call in worker.calls] == READS[1:]
    assert found["grpc-plaintext"].evidence == "refused: the port speaks TLS"
    assert found["tls-versions"].evidence == "TLS 1.2, 1.3; refuses 1.0, 1.1"
    checks = ("grpc-plaintext", *TLS, "discovery-open", "abort-open")
    assert _verdicts(found, checks) == [GUARDED, GUARDED, EXPOSED, EXPOSED, EXPOSED, EXPOSED]


def test_a_tls_worker_whose_ca_we_do_not_know(certs: Certs) -> None:
    """Without its CA the audit says what would get it further; what the handshake shows is there all the same."""
    with FakeWorker(tls=_tls(certs)) as worker:
        found = _audited(worker.target)
    assert _verdicts(found, ("discovery-open", "abort-open", *KV)) == [UNKNOWN] * 4
    assert "give the right CA file" in found["abort-open"].remedy
    assert _verdicts(found, ("tls-versions", "client-certificate")) == [GUARDED, EXPOSED]


def test_a_mutual_tls_worker(certs: Certs) -> None:
    """Strangers are turned away; our own certificate still learns of the KV ports, and these may be open."""
    with FakeWorker(tls=_tls(certs, mutual=True)) as worker:
        worker.set(kv_sources=[_source(f"tcp://*:{worker.target.rpartition(':')[2]}")])
        own = Tls(ca_file=certs.ca, cert_file=certs.client_cert, key_file=certs.client_key)
        found = _audited(Connection(target=worker.target, tls=own))
        assert [call.method for call in worker.calls] == ["Control.GetKvEventSources"]
        checks = ("grpc-plaintext", "client-certificate", "discovery-open", "abort-open")
        assert _verdicts(found, checks) == [GUARDED] * 4
        assert found["kv-events-open"].verdict is EXPOSED
        found = _audited(Connection(target=worker.target, tls=Tls(ca_file=certs.ca)))
        assert _verdicts(found, KV) == [UNKNOWN, UNKNOWN]
        assert "certificate" in found["kv-events-open"].remedy


@pytest.mark.parametrize(
    ("later_s", "verdict", "severity", "words"),
    [
        (0.0, EXPOSED, Severity.MEDIUM, "in less than a day"),
        (2 * DAY, EXPOSED, Severity.HIGH, "expired 2"),
        (-1.5 * DAY, EXPOSED, Severity.MEDIUM, "in 2 days"),
        (-9 * DAY, EXPOSED, Severity.MEDIUM, "not good before"),
    ],
)
def test_the_certificates_time(later_s: float, verdict: Verdict, severity: Severity, words: str, certs: Certs) -> None:
    """A certificate that expires soon, has expired or is not good yet, by a clock that is given."""
    with FakeWorker(tls=_tls(certs)) as worker:
        found = _audited(Connection(target=worker.target, tls=Tls(ca_file=certs.ca)), later_s=later_s)
    one = found["tls-certificate"]
    assert (one.verdict, one.severity) == (verdict, severity)
    assert words in one.evidence
    assert "UTC" in one.evidence


def test_a_certificate_with_time_left(certs: Certs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A month and more is fine."""
    ends = datetime(2200, 1, 1, tzinfo=timezone.utc)
    monkeypatch.setattr("vllm_cp._audit_tls.validity", lambda _: (datetime(2000, 1, 1, tzinfo=timezone.utc), ends))
    with FakeWorker(tls=_tls(certs)) as worker:
        one = _audited(worker.target)["tls-certificate"]
    assert (one.verdict, one.severity, one.remedy) == (GUARDED, Severity.INFO, "")
    assert one.evidence.startswith("expires 2200-01-01 00:00 UTC, in ")


def test_kv_ports(silent: Endpoint, refusing: Endpoint) -> None:
    """Ports as the worker advertises them, its wildcard replaced by its host: connected to, and nothing else."""
    with FakeWorker() as worker:
        worker.set(kv_sources=[_source(f"tcp://*:{silent.port}", f"tcp://0.0.0.0:{refusing.port}")])
        found = _audited(worker.target)
    assert found["kv-events-open"].evidence == f"open at {silent}"
    assert found["kv-events-open"].severity is Severity.HIGH
    assert "token ids" in found["kv-events-open"].remedy
    assert found["kv-replay-open"].verdict is GUARDED
    assert found["kv-replay-open"].evidence == f"closed at {refusing}"


@pytest.mark.parametrize(
    ("endpoint", "said"),
    [
        ("ipc:///tmp/kv", "ipc:///tmp/kv"),
        ("inproc://kv", "inproc: reachable inside the engine's process only"),
        ("tcp://10.9.8.7:5557", "the publisher connects to tcp://10.9.8.7:5557 by itself"),
    ],
)
def test_kv_without_a_port(endpoint: str, said: str) -> None:
    """Sockets of files, of processes, and publishers that connect outwards are no open ports."""
    with FakeWorker() as worker:
        worker.set(kv_sources=[_source(endpoint)])
        found = _audited(worker.target)
    assert _verdicts(found, KV) == [ABSENT, ABSENT]
    assert said in found["kv-events-open"].evidence


def test_many_ranks_are_told_in_short(silent: Endpoint) -> None:
    """Evidence names four ports and counts the rest; two publishers on one port are one port."""
    with FakeWorker() as worker:
        worker.set(kv_sources=[_source(f"tcp://*:{port}") for port in (1, 2, 3, 4, 5, 6, 6)])
        found = _audited(worker.target)
    assert found["kv-events-open"].evidence.endswith("127.0.0.1:4 and 2 more")


def test_beyond_loopback(elsewhere: list[str]) -> None:
    """A worker that binds every address is reached at the host's others; one that binds loopback is not."""
    with FakeWorker(host="0.0.0.0") as worker:
        port = worker.target.rpartition(":")[2]
        one = _audited(f"127.0.0.1:{port}")["beyond-loopback"]
        assert (one.verdict, one.severity) == (EXPOSED, Severity.LOW)
        assert one.evidence == f"open at 127.0.0.2:{port} too"
        elsewhere.clear()
        one = _audited(f"127.0.0.1:{port}")["beyond-loopback"]
        assert (one.verdict, one.evidence) == (UNKNOWN, "this host is not known to have any other address")
    elsewhere.append("127.0.0.2")
    with FakeWorker() as worker:
        one = _audited(worker.target)["beyond-loopback"]
    assert one.verdict is GUARDED
    assert "as seen from this host" in one.evidence


def test_a_worker_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is reached at an address that is not loopback listens beyond it."""
    monkeypatch.setattr(net, "is_loopback", lambda _: False)
    with FakeWorker() as worker:
        one = _audited(worker.target)["beyond-loopback"]
        assert (one.verdict, one.evidence) == (EXPOSED, f"reached at {worker.target}")


def test_http_beside_it(http: Callable[..., Http]) -> None:
    """The key that guards HTTP and not gRPC is the finding this is all about."""
    server = http({"/v1/models": 401, "/metrics": 200})
    with FakeWorker() as worker:
        found = _audited(worker.target, server.url)
    assert (found["api-key-skips-grpc"].verdict, found["api-key-skips-grpc"].severity) == (EXPOSED, Severity.HIGH)
    assert _verdicts(found, ("http-api-open", "http-metrics", "http-health")) == [GUARDED, EXPOSED, ABSENT]
    assert f"127.0.0.2:{server.endpoint.port}" in found["beyond-loopback"].evidence


def test_a_unix_socket(tmp_path: Path) -> None:
    """A socket of a file has no TLS and no network to listen on; the rest is asked as of any other."""
    target = f"unix:{tmp_path}/s"
    with pytest.raises(WorkerUnreachable):
        _audited(target, timeout_s=0.5)
    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)  # it has no service at all
        server.add_insecure_port(target)
        server.start()
        found = _audited(target)
        server.stop(None).wait()
    assert found["beyond-loopback"].evidence == "a unix socket"
    assert _verdicts(found, TLS) == [ABSENT] * 3
    assert _verdicts(found, ("grpc-plaintext", "discovery-open", "abort-open")) == [EXPOSED, ABSENT, ABSENT]
    assert _verdicts(found, KV) == [UNKNOWN] * 2


def test_nobody(refusing: Endpoint) -> None:
    """Where nobody listens there is nothing to audit: an error, not a row of unknowns."""
    with pytest.raises(WorkerUnreachable, match="nobody accepts a connection"):
        audit(Connection(target=str(refusing), timeout_s=1))
    with pytest.raises(WorkerUnreachable, match="cannot be resolved"):
        audit(Connection(target="a" * 64 + ".example:1", timeout_s=1))


def test_silence(silent: Endpoint) -> None:
    """A port that accepts and says nothing makes everything unknown, within a few time-outs."""
    began = time.monotonic()
    found = _audited(str(silent), timeout_s=0.3)
    assert time.monotonic() - began < 5
    assert {one.verdict for check, one in found.items() if check != "beyond-loopback"} == {UNKNOWN}
    assert found["grpc-plaintext"].evidence == "plaintext: no answer in time (DEADLINE_EXCEEDED)"


def test_a_url_of_no_use() -> None:
    """A URL that cannot be one is refused before anything is sent."""
    with FakeWorker() as worker:
        with pytest.raises(ConfigError, match="no HTTP base URL"):
            _audited(worker.target, "localhost:8000")
        assert worker.calls == []


def test_severities_have_an_order() -> None:
    """info < low < medium < high; every check has a harm and, but for health, a remedy."""
    assert [severity.level for severity in Severity] == [0, 1, 2, 3]
    assert {check for check, (_, remedy) in CHECKS.items() if not remedy} == {"http-health"}
