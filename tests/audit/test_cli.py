"""``vllm-cp audit``."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import vllm_cp.audit
from tests.audit.conftest import Cli
from tests.audit.servers import Http
from vllm_cp import Connection
from vllm_cp._audit_checks import CHECKS, finding
from vllm_cp._audit_net import Endpoint
from vllm_cp.cli import _output
from vllm_cp.models.finding import Finding, Severity, Verdict
from vllm_cp.testing import FakeWorker

GOLDEN = Path(__file__).parent / "golden"
LLAMA = (
    finding("beyond-loopback", Verdict.EXPOSED, "reached at 10.1.2.3:8001"),
    finding("grpc-plaintext", Verdict.GUARDED, "refused: the port speaks TLS"),
    finding("tls-versions", Verdict.GUARDED, "TLS 1.2, 1.3; refuses 1.0, 1.1"),
    finding("tls-certificate", Verdict.EXPOSED, "expired 2026-01-31 12:00 UTC", severity=Severity.HIGH),
    finding("client-certificate", Verdict.EXPOSED, "let in without a certificate"),
    finding("discovery-open", Verdict.EXPOSED, "GetServerInfo: vLLM 0.33.0"),
    finding("abort-open", Verdict.EXPOSED, "an empty abort was accepted"),
    finding("http-api-open", Verdict.GUARDED, "GET /v1/models: 401"),
    finding("api-key-skips-grpc", Verdict.EXPOSED, "HTTP wants a key, gRPC does not"),
    finding("kv-events-open", Verdict.EXPOSED, "open at 10.1.2.3:5557"),
    finding("kv-replay-open", Verdict.ABSENT, "no port to connect to: the server advertises no address"),
    finding("http-metrics", Verdict.EXPOSED, "GET /metrics: 200"),
    finding("http-health", Verdict.EXPOSED, "GET /health: 200"),
    finding("http-kv-sources", Verdict.UNKNOWN, "GET /kv_event_sources: 502"),
    finding("http-fault-tolerance", Verdict.ABSENT, "GET /fault_tolerance/status: 404"),
    finding("http-elastic-scaling", Verdict.GUARDED, "GET /is_scaling_elastic_ep: 401"),
)
QUIET = tuple(finding(check, Verdict.GUARDED, "refused") for check in CHECKS)


@pytest.fixture
def audited(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    """The workers and URLs that are audited; llama-0 has open doors, the others have none."""
    seen: list[tuple[str, str | None]] = []

    def audit(connection: Connection, *, http_url: str | None = None) -> tuple[Finding, ...]:
        seen.append((connection.address.name, http_url))
        return LLAMA if connection.address.host == "llama-0" else QUIET

    monkeypatch.setattr(vllm_cp.audit, "audit", audit)
    return seen


def _held(name: str, text: str) -> None:
    path = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, "utf-8")
    assert text == path.read_text("utf-8"), f"UPDATE_GOLDEN=1 writes {path.name} anew"


@pytest.mark.parametrize("output", ["80", "table", "wide", "json", "yaml", "jsonl", "name"])
def test_output_is_as_written_down(output: str, audited: list[Any], cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Worst first in tables, in the order of the checks in data; one line counts the open doors."""
    if output == "80":
        monkeypatch.setattr(_output, "terminal_width", lambda: 80)
    flags = () if output == "80" else ("-o", output)
    ended = cli("audit", "--target", "llama-0", "--target", "llama-1", *flags)
    _held(f"audit.{output}", ended.out)
    assert ended.code == 0
    assert ended.err == "vllm-cp: llama-0:8001: open doors: 4 high, 1 medium, 3 low, 1 info; -o wide says what to do\n"
    if output == "80":
        assert max(map(len, ended.out.splitlines())) <= 80
    assert len(audited) == 2


@pytest.mark.parametrize(
    ("target", "severity", "code"),
    [("llama-0", "high", 8), ("llama-0", "info", 8), ("llama-1", "info", 0)],
)
def test_fail_on(target: str, severity: str, code: int, audited: list[Any], cli: Cli) -> None:
    """Exit 8 for an open door of that severity or a higher one; guarded ones never count."""
    assert cli("audit", "--target", target, "--fail-on", severity).code == code
    assert len(audited) == 1


def test_fail_on_above_what_there_is(cli: Cli) -> None:
    """Doors of less harm do not fail the run."""
    with FakeWorker() as worker:
        worker.fail("Abort", "PERMISSION_DENIED")
        assert cli("audit", "--target", worker.target, "--fail-on", "high").code == 0
        assert cli("audit", "--target", worker.target, "--fail-on", "medium").code == 8


def test_some_of_a_fleet(audited: list[Any], cli: Cli) -> None:
    """One of two that fails is exit 6, as everywhere."""
    ended = cli("audit", "--target", "llama-0", "--target", "llama-1", "--fail-on", "high")
    assert (ended.code, len(audited)) == (6, 2)


def test_urls_of_a_fleet(audited: list[tuple[str, str | None]], cli: Cli) -> None:
    """{host} becomes each target's host, in brackets for IPv6."""
    targets = ("--target", "llama-1", "--target", "[::1]:9", "--target", "dns:///llama-2:7")
    assert cli("audit", *targets, "--http-url", "http://{host}:8000/").code == 0
    assert sorted(audited) == [
        ("[::1]:9", "http://[::1]:8000"),
        ("dns:///llama-2:7", "http://llama-2:8000"),
        ("llama-1:8001", "http://llama-1:8000"),
    ]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--target", "a", "--target", "b", "--http-url", "http://a:8000"), "write {host} in it"),
        (("--target", "unix:/run/s", "--http-url", "http://{host}:8000"), "unix:/run/s has no host"),
        (("--http-url", "localhost:8000"), "--http-url: URL 'localhost:8000' is no HTTP base URL"),
        (("--http-url", ""), "--http-url: the URL is empty"),
        (("--fail-on", "severe"), "'severe' is not one of"),
    ],
)
def test_usage(args: tuple[str, ...], said: str, audited: list[Any], cli: Cli) -> None:
    """Wrong on the command line is 2, before anybody is audited."""
    ended = cli("audit", *args)
    assert (ended.code, ended.out, audited) == (2, "", [])
    assert said in ended.err


def test_a_worker_and_its_http(cli: Cli, http: Callable[..., Http]) -> None:
    """From flags to findings, against a worker."""
    with FakeWorker() as worker:
        ended = cli("audit", "--target", worker.target, "--http-url", http({"/v1/models": 401}).url, "-o", "json")
    (record,) = json.loads(ended.out)
    by_id = {one["id"]: one for one in record["findings"]}
    assert list(by_id) == list(CHECKS)
    assert by_id["api-key-skips-grpc"]["verdict"] == "exposed"
    assert by_id["tls-versions"]["remedy"] is None


def test_nobody(refusing: Endpoint, cli: Cli) -> None:
    """Nobody there is exit 3, as everywhere."""
    ended = cli("audit", "--target", str(refusing), "--timeout", "1")
    assert (ended.code, ended.out) == (3, "")
    assert "nobody accepts a connection" in ended.err
