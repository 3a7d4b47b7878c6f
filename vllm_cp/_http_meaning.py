"""HTTP statuses and broken connections -> meaning. Total: every status has one."""

from __future__ import annotations

import json
import os
import socket
import ssl

from vllm_cp import errors as e

__all__ = [
    "broken",
    "out_of_time",
    "said_by",
    "status_meaning",
    "tls_failed",
    "tls_suspected",
    "too_large",
    "unreadable",
]

#: What the Python server answers to everything while it commits a change of size.
_SCALING = "currently scaling"
_SHOWN = 300
#: Texts behind which a TLS disagreement may hide; only asking the port with TLS tells.
_TLS_MAYBE = (
    "reset",
    "disconnected",
    "broken pipe",
    "eof",
    "illegal",
    "malformed",
    "closed",
    "readerror",
    "connecterror",
)
_PROXY_VARIABLES = ("http_proxy", "https_proxy", "all_proxy")

_MEANINGS: dict[int, type[e.ControlError]] = {
    400: e.InvalidArgument,
    401: e.CredentialsRejected,
    403: e.CredentialsRejected,
    404: e.NotSupported,
    405: e.NotSupported,
    407: e.CredentialsRejected,
    408: e.OutOfTime,
    409: e.PreconditionFailed,
    412: e.PreconditionFailed,
    413: e.TooLarge,
    414: e.TooLarge,
    415: e.InvalidArgument,
    422: e.InvalidArgument,
    428: e.PreconditionFailed,
    431: e.TooLarge,
    501: e.NotSupported,
    504: e.OutOfTime,
}
_HINTS: dict[type[e.ControlError], str] = {
    e.CredentialsRejected: "check the token file; vLLM guards what is under /v1 when it runs with --api-key",
    e.OutOfTime: "a frozen worker never answers; if it is only busy, give a longer timeout",
    e.WorkerUnreachable: "check the URL; vLLM opens its HTTP port once every engine is ready",
    e.NotAdmitting: "it takes requests again when the change of size is done",
}


def status_meaning(
    status: int, body: bytes, *, target: str, method: str, location: str = "", missing: str = ""
) -> e.ControlError:
    """The error that an HTTP status stands for. ``missing`` is the hint when the worker has no such route."""
    said = said_by(body)
    code = f"HTTP {status}"
    if status == 503 and _SCALING in said:
        return e.NotAdmitting(target, method, code, said, _HINTS[e.NotAdmitting])
    if 300 <= status < 400:
        where = f"redirects to {location[:_SHOWN]}" if location else said
        return e.ControlError(target, method, code, where, "redirects are not followed: give the worker's own URL")
    kind = _MEANINGS.get(status)
    if kind is None:
        kind = e.EngineFailed if status >= 500 else e.Refused if status >= 400 else e.ControlError
    hint = missing if kind is e.NotSupported else _HINTS.get(kind, "")
    return kind(target, method, code, said, hint)


def said_by(body: bytes) -> str:
    """The message in an error's body: FastAPI's ``detail``, vLLM's ``error`` or ``message``, or the text itself."""
    text = body[: 8 * _SHOWN].decode("utf-8", "replace").strip()
    try:
        found = json.loads(body) if len(body) <= 8 * _SHOWN else None
    except (ValueError, RecursionError):
        found = None
    while isinstance(found, dict):
        found = next((found[key] for key in ("detail", "error", "message") if found.get(key)), None)
        if isinstance(found, str):
            text = found
        elif isinstance(found, list):
            text = json.dumps(found)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def broken(error: Exception, *, target: str, method: str, proxy: bool) -> e.ControlError:
    """The error that a request which got no whole answer stands for. ``error`` is one of the HTTP library's."""
    import httpx2

    said = _said(error)
    if isinstance(error, httpx2.ConnectTimeout):
        return e.OutOfTime(target, method, "DEADLINE_EXCEEDED", "no connection", _HINTS[e.WorkerUnreachable])
    if isinstance(error, httpx2.TimeoutException):
        return out_of_time(target, method)
    reason = _tls_reason(error)
    if reason is not None:
        return tls_failed(e.WorkerUnreachable(target, method, "UNAVAILABLE", said), reason)
    hint = _HINTS[e.WorkerUnreachable]
    if isinstance(error, httpx2.RemoteProtocolError) and "without sending" not in said:
        hint = "what answers there is not HTTP/1.1: is it the gRPC port?"
    if proxy:
        found = [name for name in _PROXY_VARIABLES if os.environ.get(name) or os.environ.get(name.upper())]
        if found:
            hint += f"; a proxy is in force ({', '.join(found)}): switch it off or set no_proxy"
    return e.WorkerUnreachable(target, method, "UNAVAILABLE", said, hint)


def out_of_time(target: str, method: str) -> e.OutOfTime:
    """No whole answer before the deadline."""
    return e.OutOfTime(target, method, "DEADLINE_EXCEEDED", "no answer", _HINTS[e.OutOfTime])


def too_large(status: int, limit: int, *, target: str, method: str) -> e.TooLarge:
    """The answer is longer than we read."""
    detail = f"the answer is longer than {limit} bytes"
    return e.TooLarge(target, method, f"HTTP {status}", detail, "is this a worker's URL? else raise max_answer_bytes")


def unreadable(status: int, why: str, hint: str, *, target: str, method: str) -> e.EngineFailed:
    """The answer came and is not what the route is there for."""
    return e.EngineFailed(target, method, f"HTTP {status}", f"undecodable answer: {why}", hint)


def tls_suspected(error: e.ControlError) -> bool:
    """Whether TLS may be behind a connection that was made and broke without saying why."""
    return type(error) is e.WorkerUnreachable and any(mark in error.detail.lower() for mark in _TLS_MAYBE)


def tls_failed(error: e.ControlError, reason: str) -> e.TlsFailed:
    """The same failure, now that TLS is known to be behind it."""
    from vllm_cp._status import tls_hint

    low = reason.lower()
    if "speaks tls" in low:
        hint = "write https://, with a CA file if the certificate is from your own CA"
    elif "wrong_version" in low or "wrong version" in low or "record layer" in low or "http_request" in low:
        hint = "the port speaks plaintext: write http://, or start vLLM with --ssl-certfile and --ssl-keyfile"
    elif "mismatch" in low:
        hint = "the certificate is for another name: give that name as the server name"
    else:
        hint = tls_hint(reason)
    detail = error.detail if reason in error.detail else f"{error.detail} ({reason})"
    return e.TlsFailed(error.target, error.method, error.code, detail, hint)


def _said(error: Exception) -> str:
    """What the system says, the same for both colours; else what the library says."""
    cause: BaseException | None = error
    for _ in range(8):
        if cause is None:
            break
        if isinstance(cause, socket.gaierror):
            return f"the name does not resolve: {cause.strerror}"
        if isinstance(cause, OSError) and not isinstance(cause, ssl.SSLError) and (cause.errno or 0) > 0:
            return os.strerror(cause.errno or 0)
        cause = cause.__cause__ or cause.__context__
    return str(error) or type(error).__name__


def _tls_reason(error: BaseException | None) -> str | None:
    for _ in range(8):
        if error is None:
            return None
        if isinstance(error, ssl.SSLCertVerificationError):
            return f"certificate verify failed: {error.verify_message}"
        # An end of file in the middle of TLS is a connection that broke, whatever broke it.
        if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
            return error.reason or str(error)
        error = error.__cause__ or error.__context__
    return None
