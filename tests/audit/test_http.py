"""What HTTP says to somebody without a key."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable

import pytest

from tests.audit.servers import Http
from tests.certs import Certs
from vllm_cp._audit_checks import ROUTES
from vllm_cp._audit_http import http_findings, status_of
from vllm_cp._audit_net import Endpoint
from vllm_cp._http_connection import HttpConnection
from vllm_cp.models.finding import Finding, Severity, Verdict

Start = Callable[..., Http]
EVERY = dict.fromkeys(("/v1/models", *ROUTES.values()), 200)


def _seen(url: str | None, discovery: Verdict = Verdict.EXPOSED, timeout_s: float = 2.0) -> dict[str, Finding]:
    found = http_findings(HttpConnection(url=url) if url else None, discovery, timeout_s)
    return {one.id: one for one in found}


def test_everything_open(http: Start) -> None:
    """Without a key to ask for, the API and every route are open; there is no key that could skip gRPC."""
    found = _seen(http(EVERY).url)
    assert {check: one.verdict for check, one in found.items()} == {
        "http-api-open": Verdict.EXPOSED,
        "api-key-skips-grpc": Verdict.ABSENT,
        **dict.fromkeys(ROUTES, Verdict.EXPOSED),
    }
    assert found["http-health"].severity is Severity.INFO
    assert found["http-metrics"].evidence == "GET /metrics: 200"


def test_only_get_and_no_credentials(http: Start) -> None:
    """Each route gets one GET, with nothing in it that says who we are."""
    server = http(EVERY)
    _seen(server.url)
    assert [(method, path) for method, path, _ in server.seen] == [("GET", path) for path in EVERY]
    assert all(set(headers) == {"Host", "Connection"} for _, _, headers in server.seen)


def test_a_key_that_guards_http_only(http: Start) -> None:
    """The API asks for a key and gRPC does not: high. Where gRPC refuses too, or was not told, it is not."""
    url = http({"/v1/models": 401}).url
    key = "api-key-skips-grpc"
    assert (_seen(url)[key].verdict, _seen(url)[key].severity) == (Verdict.EXPOSED, Severity.HIGH)
    assert _seen(url)["http-api-open"].verdict is Verdict.GUARDED
    assert _seen(url, Verdict.GUARDED)[key].verdict is Verdict.GUARDED
    assert _seen(url, Verdict.UNKNOWN)[key].verdict is Verdict.UNKNOWN


@pytest.mark.parametrize(
    ("status", "verdict"),
    [
        (200, Verdict.EXPOSED),
        (405, Verdict.EXPOSED),
        (401, Verdict.GUARDED),
        (403, Verdict.GUARDED),
        (404, Verdict.ABSENT),
        (302, Verdict.UNKNOWN),
        (500, Verdict.UNKNOWN),
        (503, Verdict.UNKNOWN),
    ],
)
def test_statuses_of_a_route(status: int, verdict: Verdict, http: Start) -> None:
    """What each status says of a route; one that is there for other methods only is open, and they are not tried."""
    server = http({"/is_scaling_elastic_ep": status})
    assert _seen(server.url)["http-elastic-scaling"].verdict is verdict
    assert {method for method, _, _ in server.seen} == {"GET"}


def test_an_unhealthy_worker_answers_all_the_same(http: Start) -> None:
    """503 from /health is an answer of the worker's."""
    assert _seen(http({"/health": 503}).url)["http-health"].verdict is Verdict.EXPOSED


def test_a_base_path(http: Start) -> None:
    """Behind a proxy that puts the worker under a path, its routes are there."""
    server = http({"/llama/metrics": 200})
    assert _seen(server.url + "/llama")["http-metrics"].verdict is Verdict.EXPOSED


def test_no_url() -> None:
    """Without a URL nothing is said but how to get more."""
    found = _seen(None)
    assert len(found) == 7
    assert {one.verdict for one in found.values()} == {Verdict.UNKNOWN}
    assert all("--http-url" in one.remedy for one in found.values())


def test_nobody(refusing: Endpoint) -> None:
    """A port that refuses makes all of it unknown."""
    found = _seen(f"http://{refusing}")
    assert {one.verdict for one in found.values()} == {Verdict.UNKNOWN}
    assert found["http-metrics"].evidence == "GET /metrics: nobody accepts a connection"


def test_silence_is_waited_for_once(silent: Endpoint) -> None:
    """A server that never answers costs one time-out, not one for each route."""
    began = time.monotonic()
    found = _seen(f"http://{silent}", timeout_s=0.2)
    assert time.monotonic() - began < 1.2
    assert found["http-health"].evidence == "GET /health: timed out"


def test_tls(http: Start, certs: Certs) -> None:
    """Over TLS it does not matter who signed the certificate; plaintext to it is no answer."""
    server = http(EVERY, cert=certs.wrong_cert, key=certs.wrong_key)
    assert _seen(server.url)["http-api-open"].verdict is Verdict.EXPOSED
    assert _seen(server.url.replace("https", "http"))["http-api-open"].verdict is Verdict.UNKNOWN


def test_tls_that_wants_a_certificate(http: Start, certs: Certs) -> None:
    """Turned away without a client certificate: guarded, all of it."""
    server = http(EVERY, cert=certs.server_cert, key=certs.server_key, ca=certs.ca)
    found = _seen(server.url, Verdict.GUARDED)
    assert {one.verdict for one in found.values()} == {Verdict.GUARDED}
    assert "without a certificate" in found["http-metrics"].evidence


def test_tls_to_plaintext(http: Start) -> None:
    """https to a plaintext port fails in TLS, and says so."""
    found = _seen(http(EVERY).url.replace("http", "https"))
    assert found["http-health"].verdict is Verdict.UNKNOWN
    assert "TLS failed" in found["http-health"].evidence


@pytest.mark.parametrize(
    ("says", "why"),
    [(b"", "hung up without an answer"), (b"220 smtp ready\r\n", "no HTTP answer"), (b"x" * 9999, "no")],
)
def test_what_is_no_http(says: bytes, why: str, scripted: Callable[..., Endpoint]) -> None:
    """A server of another kind is an OSError, after a few kilobytes at most."""
    with pytest.raises(OSError, match=why):
        status_of(scripted(says), "localhost", "/", secure=False, timeout_s=2)


def test_one_byte_at_a_time(scripted: Callable[..., Endpoint]) -> None:
    """A server that drips is left at the deadline, however often it sends."""
    endpoint = scripted(b"", drips=True)
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        status_of(endpoint, "localhost", "/", secure=False, timeout_s=0.3)
    assert time.monotonic() - began < 2


def test_silent_handshake(silent: Endpoint) -> None:
    """The handshake is inside the deadline as well."""
    with pytest.raises((TimeoutError, ssl.SSLError), match="timed out"):
        status_of(silent, "localhost", "/", secure=True, timeout_s=0.1)
