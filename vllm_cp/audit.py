"""What an outsider can do to a worker: somebody who reaches its ports and has no token, key or certificate.

    for finding in audit(Connection(target="llama-0:8001"), http_url="http://llama-0:8000"):
        print(finding.severity.value, finding.id, finding.evidence)

Nothing is changed: over gRPC it reads, and aborts an empty list of requests; over HTTP it sends GET; KV ports are
connected to and left. Every wait ends with the connection's ``timeout_s``. It tells what can be seen from where it
runs: a firewall on the way speaks for itself, not for the worker.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta, timezone

from vllm_cp import _audit_net as net
from vllm_cp import _audit_tls as tls
from vllm_cp import errors as e
from vllm_cp._audit_checks import CHECKS, finding
from vllm_cp._audit_door import TURNED_AWAY
from vllm_cp._audit_http import http_findings
from vllm_cp._http_connection import HttpConnection
from vllm_cp.client import ControlClient
from vllm_cp.config import Connection, Retry, Tls
from vllm_cp.models.finding import Finding, Severity, Verdict
from vllm_cp.models.kv_source import Address, KvEventSource

__all__ = ["CHECKS", "Finding", "Severity", "Verdict", "audit"]

_SOON = timedelta(days=30)
_SHOWN = 4

_Seen = tuple[Verdict, str]


def audit(
    connection: Connection, *, http_url: str | None = None, clock: Callable[[], float] = time.time
) -> tuple[Finding, ...]:
    """Try the doors of one worker; one finding for each of ``CHECKS``, in that order.

    ``connection`` says where the worker is, whose CA to believe, and with its token and certificate how to learn of KV
    ports that strangers are not told. Without ``http_url`` nothing can be said about HTTP. ``clock`` gives Unix
    seconds. Raises WorkerUnreachable when nobody is there, ConfigError for a URL of no use.
    """
    http = HttpConnection(url=http_url) if http_url is not None else None
    # Each question once, straight to the worker: an audit is no place for patience, nor for a proxy's answers.
    connection = replace(connection, retry=Retry(attempts=1), proxy=False)
    reached = _reached(connection)
    stranger = replace(connection, tls=None, token_file=None, insecure_token=False, server_name=None)
    name = connection.server_name or connection.address.host or ""
    plaintext, shown = _plaintext(stranger, reached, name)
    if plaintext[0] is not Verdict.EXPOSED:
        ca_file = connection.tls.ca_file if connection.tls is not None else None
        stranger = replace(stranger, tls=Tls(ca_file=ca_file), server_name=connection.server_name)
    silent = plaintext[0] is Verdict.UNKNOWN
    sources: tuple[KvEventSource, ...] | None = None
    if shown is not None and shown.wants_certificate is True:
        discovery, abort = (finding(check, Verdict.GUARDED, TURNED_AWAY) for check in ("discovery-open", "abort-open"))
    elif silent:
        discovery, abort = (finding(check, *plaintext) for check in ("discovery-open", "abort-open"))
    else:
        with ControlClient(stranger) as client:
            discovery = _tried("discovery-open", lambda: f"GetServerInfo: vLLM {client.server_info().engine_version}")
            abort = _tried("abort-open", lambda: _aborted(client))
            if discovery.verdict is Verdict.EXPOSED:
                with suppress(e.ControlError):
                    sources = client.kv_event_sources()
    if sources is None and not silent:
        with suppress(e.ControlError), ControlClient(connection) as client:
            sources = client.kv_event_sources()
    found = [
        _beyond_loopback(reached, http, connection.timeout_s),
        finding("grpc-plaintext", *plaintext),
        *_tls_findings(shown, reached, name, connection.timeout_s, datetime.fromtimestamp(clock(), timezone.utc)),
        discovery,
        abort,
        _ports("kv-events-open", sources, lambda source: source.live, connection.timeout_s),
        _ports("kv-replay-open", sources, lambda source: source.replay, connection.timeout_s),
        *http_findings(http, discovery.verdict, connection.timeout_s),
    ]
    order = list(CHECKS)
    return tuple(sorted(found, key=lambda one: order.index(one.id)))


def _reached(connection: Connection) -> net.Endpoint | None:
    """The first address that accepts a connection; ``None`` for a unix socket."""
    address = connection.address
    if address.host is None or address.port is None:
        return None
    try:
        open_ = net.accepting(net.resolve(address.host, address.port, connection.timeout_s), connection.timeout_s)
        why = "nobody accepts a connection"
    except OSError as error:
        open_, why = (), str(error)
    if not open_:
        hint = "check the address; vLLM opens --grpc-port once every engine is ready"
        raise e.WorkerUnreachable(address.name, "TCP connect", "UNAVAILABLE", why, hint)
    return open_[0]


def _plaintext(stranger: Connection, reached: net.Endpoint | None, name: str) -> tuple[_Seen, tls.Shown | None]:
    """Whether the port answers plaintext; and what TLS shows where it does not."""
    seen: _Seen
    try:
        with ControlClient(stranger) as client:
            seen = Verdict.EXPOSED, f"Health.Check: {client.check().value}"
    except e.TlsFailed:
        seen = Verdict.GUARDED, "refused: the port speaks TLS"
    except (e.WorkerUnreachable, e.OutOfTime) as error:
        if reached is None:
            raise  # nobody behind a unix socket, where there is no TLS to try
        seen = Verdict.UNKNOWN, f"plaintext: {error.meaning} ({error.code})"
    except e.ControlError as error:
        seen = Verdict.EXPOSED, f"Health.Check: answered with {error.code}"
    if seen[0] is Verdict.EXPOSED or reached is None:
        return seen, None
    shown = tls.look(reached, name, stranger.timeout_s)
    if shown.tls:
        seen = Verdict.GUARDED, "refused: the port speaks TLS"
    return seen, shown


def _tried(check: str, attempt: Callable[[], str]) -> Finding:
    try:
        return finding(check, Verdict.EXPOSED, attempt())
    except e.CredentialsRejected as error:
        return finding(check, Verdict.GUARDED, f"{error.method}: {error.code}")
    except e.NotSupported as error:
        return finding(check, Verdict.ABSENT, f"{error.method}: {error.code}")
    except e.TlsFailed as error:
        # A stranger may not care whose certificate it is; gRPC does, so this goes as far as an honest client.
        return finding(check, Verdict.UNKNOWN, f"{error.method}: {error.meaning} ({error.code})", remedy=error.hint)
    except e.ControlError as error:
        return finding(check, Verdict.UNKNOWN, f"{error.method}: {error.meaning} ({error.code})")


def _aborted(client: ControlClient) -> str:
    client.abort(())
    return "an empty abort was accepted"


def _tls_findings(
    shown: tls.Shown | None, reached: net.Endpoint | None, name: str, timeout_s: float, now: datetime
) -> list[Finding]:
    checks = ("tls-versions", "tls-certificate", "client-certificate")
    if shown is None or reached is None:
        why = "a unix socket" if reached is None else "the port speaks plaintext"
        return [finding(check, Verdict.ABSENT, why) for check in checks]
    if not shown.tls:
        return [finding(check, Verdict.UNKNOWN, f"no TLS handshake: {shown.why}") for check in checks]
    client = Verdict.UNKNOWN, f"no telling: {shown.why}"
    if shown.wants_certificate is True:
        client = Verdict.GUARDED, TURNED_AWAY
    elif shown.wants_certificate is False:
        client = Verdict.EXPOSED, "let in without a certificate"
    return [
        _versions(shown, tls.speaks(reached, name, timeout_s)),
        _certificate(shown.certificate, now),
        finding("client-certificate", *client),
    ]


def _versions(shown: tls.Shown, agreed: dict[str, bool | None]) -> Finding:
    spoken = [version for version, yes in agreed.items() if yes]
    if shown.version and shown.version not in spoken:
        spoken.append(shown.version)
    evidence = f"TLS {_numbers(spoken)}" if spoken else "no version was agreed on"
    if refused := [version for version, yes in agreed.items() if yes is False]:
        evidence += f"; refuses {_numbers(refused)}"
    old = [agreed["TLS 1.0"], agreed["TLS 1.1"]]
    if True in old:
        return finding("tls-versions", Verdict.EXPOSED, evidence)
    return finding("tls-versions", Verdict.UNKNOWN if None in old or not spoken else Verdict.GUARDED, evidence)


def _numbers(versions: list[str]) -> str:
    return ", ".join(version.removeprefix("TLS ") for version in versions)


def _certificate(certificate: bytes | None, now: datetime) -> Finding:
    if certificate is None:
        return finding("tls-certificate", Verdict.UNKNOWN, "the handshake ended before it was shown")
    try:
        begins, ends = tls.validity(certificate)
    except ValueError as error:
        return finding("tls-certificate", Verdict.UNKNOWN, str(error))
    if now < begins:
        return finding("tls-certificate", Verdict.EXPOSED, f"not good before {begins:%Y-%m-%d %H:%M} UTC")
    if ends <= now:
        evidence = f"expired {ends:%Y-%m-%d %H:%M} UTC: clients that check turn away, the others check nothing"
        return finding("tls-certificate", Verdict.EXPOSED, evidence, severity=Severity.HIGH)
    days = (ends - now).days
    left = "less than a day" if days == 0 else f"{days} day{'' if days == 1 else 's'}"
    evidence = f"expires {ends:%Y-%m-%d %H:%M} UTC, in {left}"
    return finding("tls-certificate", Verdict.EXPOSED if ends - now < _SOON else Verdict.GUARDED, evidence)


def _ports(
    check: str,
    sources: tuple[KvEventSource, ...] | None,
    address_of: Callable[[KvEventSource], Address],
    timeout_s: float,
) -> Finding:
    if sources is None:
        remedy = "give the CA, token or certificate with which the worker tells"
        return finding(check, Verdict.UNKNOWN, "the worker does not tell its ports", remedy=remedy)
    if not sources:
        return finding(check, Verdict.ABSENT, "KV-cache events are off")
    addresses = [address_of(source) for source in sources]
    ports: dict[str, list[int]] = {}
    endpoints: list[net.Endpoint] = []
    unusable = []
    for address in addresses:
        text = address.connect_to or ""
        if address.publisher_connects and check == "kv-events-open":
            unusable.append(f"the publisher connects to {text} by itself")
        elif text.startswith("tcp://"):
            host, _, port = text.removeprefix("tcp://").rpartition(":")
            ports.setdefault(host.strip("[]"), []).append(int(port))
        else:
            unusable.append(text or address.reason or "no address")
    for host, numbers in ports.items():
        try:
            ips = [endpoint.ip for endpoint in net.resolve(host, 0, timeout_s)]
            endpoints += [net.Endpoint(ip, port) for port in numbers for ip in ips]
        except OSError as error:
            unusable.append(str(error))
    open_ = net.accepting(endpoints, timeout_s)
    if open_:
        return finding(check, Verdict.EXPOSED, f"open at {_listed(open_)}")
    if endpoints:
        return finding(check, Verdict.GUARDED, f"closed at {_listed(endpoints)}")
    return finding(check, Verdict.ABSENT, f"no port to connect to: {_listed(unusable)}")


def _beyond_loopback(reached: net.Endpoint | None, http: HttpConnection | None, timeout_s: float) -> Finding:
    check = "beyond-loopback"
    if reached is None:
        return finding(check, Verdict.ABSENT, "a unix socket")
    if not net.is_loopback(reached.ip):
        return finding(check, Verdict.EXPOSED, f"reached at {reached}")
    ports = [reached.port]
    if http is not None and (net.is_loopback(http.host) or http.host == "localhost"):
        ports.append(http.port)
    others = [net.Endpoint(ip, port) for ip in net.own_addresses(timeout_s) for port in ports]
    if not others:
        return finding(check, Verdict.UNKNOWN, "this host is not known to have any other address")
    if open_ := net.accepting(others, timeout_s):
        return finding(check, Verdict.EXPOSED, f"open at {_listed(open_)} too")
    return finding(check, Verdict.GUARDED, f"closed at {_listed(others)}, as seen from this host")


def _listed(things: Iterable[object]) -> str:
    shown = list(dict.fromkeys(map(str, things)))
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return ", ".join(shown[:_SHOWN]) + more
