"""What an HTTP server answers to somebody without a key."""

from __future__ import annotations

import re
import ssl
from urllib.parse import urlsplit

from vllm_cp._audit_checks import ROUTES, finding
from vllm_cp._audit_door import TURNED_AWAY, stranger, turns_away
from vllm_cp._audit_net import Deadline, Endpoint, accepting, resolve, words
from vllm_cp._http_connection import HttpConnection
from vllm_cp.models.finding import Finding, Verdict

__all__ = ["http_findings", "status_of"]

_API = "/v1/models"
_LONGEST_LINE = 4096
_REFUSALS = (401, 403, TURNED_AWAY)


def http_findings(http: HttpConnection | None, discovery: Verdict, timeout_s: float) -> list[Finding]:
    """The API, whether its key guards gRPC too, and the operational routes. ``discovery`` is what gRPC made of us."""
    if http is None:
        remedy = "give the URL of the worker's HTTP server (--http-url)"
        checks = ("http-api-open", "api-key-skips-grpc", *ROUTES)
        return [finding(check, Verdict.UNKNOWN, "HTTP was not looked at", remedy=remedy) for check in checks]
    statuses = _statuses(http, (_API, *ROUTES.values()), timeout_s)
    api = _api(statuses[_API])
    return [
        finding("http-api-open", *api),
        finding("api-key-skips-grpc", *_key(api[0], discovery)),
        *(finding(check, *_route(path, statuses[path])) for check, path in ROUTES.items()),
    ]


def _api(status: int | str) -> tuple[Verdict, str]:
    evidence = f"GET {_API}: {status}"
    if status in _REFUSALS:
        return Verdict.GUARDED, evidence
    return Verdict.EXPOSED if status == 200 else Verdict.UNKNOWN, evidence


def _key(api: Verdict, discovery: Verdict) -> tuple[Verdict, str]:
    if api is Verdict.EXPOSED:
        return Verdict.ABSENT, "HTTP asks for no key"
    if api is not Verdict.GUARDED or discovery is Verdict.UNKNOWN:
        return Verdict.UNKNOWN, "HTTP or gRPC could not be judged"
    if discovery is Verdict.EXPOSED:
        return Verdict.EXPOSED, "HTTP wants a key, gRPC does not"
    return Verdict.GUARDED, "both refuse a caller without key"


def _route(path: str, status: int | str) -> tuple[Verdict, str]:
    evidence = f"GET {path}: {status}"
    if status in _REFUSALS:
        return Verdict.GUARDED, evidence
    if status == 404:
        return Verdict.ABSENT, evidence
    if status == 405:
        # A route that is there for other methods; those are not tried, for they may change something.
        return Verdict.EXPOSED, f"{evidence}: it is there for other methods, which were not tried"
    healthy_or_not = path == "/health" and status == 503
    return Verdict.EXPOSED if status == 200 or healthy_or_not else Verdict.UNKNOWN, evidence


def _statuses(http: HttpConnection, paths: tuple[str, ...], timeout_s: float) -> dict[str, int | str]:
    """By path, the status, or in words why there is none."""
    statuses: dict[str, int | str] = {}
    endpoint: Endpoint | None = None
    try:
        endpoint = _reached(http, timeout_s)
        base = urlsplit(http.base).path
        for path in paths:
            statuses[path] = status_of(endpoint, http.host, base + path, secure=http.secure, timeout_s=timeout_s)
    except ssl.SSLError as error:
        why = f"TLS failed ({error.reason or error})"
    except OSError as error:
        why = words(error)
    else:
        return statuses
    if http.secure and endpoint is not None and turns_away(endpoint, http.host, timeout_s, protocol="http/1.1"):
        why = TURNED_AWAY
    # What failed once would fail again, and each time take as long.
    return {path: statuses.get(path, why) for path in paths}


def _reached(http: HttpConnection, timeout_s: float) -> Endpoint:
    open_ = accepting(resolve(http.host, http.port, timeout_s), timeout_s)
    if not open_:
        raise OSError("nobody accepts a connection")
    return open_[0]


def status_of(endpoint: Endpoint, host: str, path: str, *, secure: bool, timeout_s: float) -> int:
    """The status of a GET without credentials. Raises OSError, of which TimeoutError and ssl.SSLError are.

    Whose certificate it is does not matter here: nothing secret is sent. No library, because theirs wait for each
    piece of an answer, and a server that sends one byte at a time would never be done.
    """
    deadline = Deadline(timeout_s)
    name = f"[{host}]" if ":" in host else host
    request = f"GET {path} HTTP/1.1\r\nHost: {name}:{endpoint.port}\r\nConnection: close\r\n\r\n"
    with endpoint.connect(deadline) as raw:
        raw.settimeout(deadline.left())
        connection = stranger("http/1.1").wrap_socket(raw, server_hostname=host) if secure else raw
        with connection:
            connection.settimeout(deadline.left())
            connection.sendall(request.encode("ascii"))
            said = b""
            while b"\n" not in said and len(said) < _LONGEST_LINE:
                connection.settimeout(deadline.left())
                more = connection.recv(1024)
                if not more:
                    break
                said += more
    found = re.match(rb"HTTP/1\.\d (\d{3})\b", said)
    if found is None:
        raise OSError("hung up without an answer" if not said else "no HTTP answer")
    return int(found[1])
