"""(code, detail) -> meaning, total over gRPC's status codes.

The code alone is not enough: the same UNAVAILABLE is a dead host, a TLS disagreement or a paused engine, and a
passed deadline can arrive as CANCELLED.
"""

from __future__ import annotations

import os

import grpc

from vllm_cp import errors as e

__all__ = ["MEANINGS", "meaning", "proxy_hint", "tls_suspected"]

#: What a code means when its detail says nothing special. A test holds this against grpc.StatusCode.
MEANINGS: dict[grpc.StatusCode, type[e.ControlError]] = {
    grpc.StatusCode.CANCELLED: e.WorkerUnreachable,
    grpc.StatusCode.UNKNOWN: e.EngineFailed,
    grpc.StatusCode.INVALID_ARGUMENT: e.InvalidArgument,
    grpc.StatusCode.DEADLINE_EXCEEDED: e.OutOfTime,
    grpc.StatusCode.NOT_FOUND: e.NotFound,
    grpc.StatusCode.ALREADY_EXISTS: e.Refused,
    grpc.StatusCode.PERMISSION_DENIED: e.CredentialsRejected,
    grpc.StatusCode.RESOURCE_EXHAUSTED: e.Refused,
    grpc.StatusCode.FAILED_PRECONDITION: e.PreconditionFailed,
    grpc.StatusCode.ABORTED: e.Refused,
    grpc.StatusCode.OUT_OF_RANGE: e.InvalidArgument,
    grpc.StatusCode.UNIMPLEMENTED: e.NotSupported,
    grpc.StatusCode.INTERNAL: e.EngineFailed,
    grpc.StatusCode.UNAVAILABLE: e.WorkerUnreachable,
    grpc.StatusCode.DATA_LOSS: e.EngineFailed,
    grpc.StatusCode.UNAUTHENTICATED: e.CredentialsRejected,
}

# What a broken connection looks like, under whatever code the transport chose for it.
_BROKEN = (
    "Stream removed",
    "RST_STREAM",
    "GOAWAY",
    "Socket closed",
    "Connection reset",
    "Broken pipe",
    "Connection refused",
)
_TOO_LARGE = (
    "message length too large",
    "message larger than max",
    "HTTP status code 431",
    "http2 header with status: 431",
)
_TLS = ("handshake", "ssl", "tls", "tsi_", "certificate", "peer name", "peer did not return", "hostname verification")
#: Texts behind which a TLS disagreement may hide; only asking the port with TLS tells.
_TLS_MAYBE = ("Socket closed", "Connection reset", "recvmsg", "Unwrap failed", "Broken pipe", "empty address list")
#: A CA, certificate or key that TLS could not take, in gRPC's words and in those of Python's ssl.
_TLS_FILES = ("failed to create security handshaker", "key_values_mismatch", "key values mismatch", "pem lib")
_PROXY_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")

_HINTS: dict[type[e.ControlError], str] = {
    e.WorkerUnreachable: "check the address; vLLM opens --grpc-port once every engine is ready",
    e.OutOfTime: "a frozen or draining worker never answers; if it is only busy, give a longer timeout",
    e.CredentialsRejected: "check the token file and the client certificate",
    e.NotAdmitting: "it takes requests again after a resume",
    e.TooLarge: "vLLM 0.27 takes messages up to 4 MiB, later versions 32 MiB",
    e.RanksDisagree: "every engine answers, but they are in different states: repeat the last pause, resume or update",
}


def meaning(code: grpc.StatusCode, detail: str | None, *, target: str, method: str, since: str = "") -> e.ControlError:
    """The error that a status stands for. Never fails: a code unknown to this version is a plain ControlError."""
    # When our deadline and the server's race, gRPC may hand over the text as it travelled: "Timeout%20expired".
    said = (detail or "").replace("%20", " ")
    name = code.name
    args = (target, method, name, said)

    def made(kind: type[e.ControlError]) -> e.ControlError:
        return kind(*args, _hint(kind, said))

    if any(mark in said for mark in _TOO_LARGE):
        return made(e.TooLarge)
    if "metadata from plugin failed" in said or "from plugin failed with error" in said:
        ours = made(e.CredentialsRejected)
        ours.sent = False
        return ours
    if code is grpc.StatusCode.UNIMPLEMENTED:
        if "compressed" in said:
            return e.InvalidArgument(*args, "the server takes no compressed messages")
        return e.NotSupported(*args, _version_hint(method, since), since=since)
    if code is grpc.StatusCode.CANCELLED and "Timeout expired" in said:
        return made(e.OutOfTime)
    if code is grpc.StatusCode.UNAVAILABLE:
        if "Generation is paused" in said:
            return made(e.NotAdmitting)
        # A worker may be called llama-tls: its own name is no sign of TLS.
        low = said.lower().replace(target.rpartition(":")[0].lower() or target.lower(), "")
        if "dns resolution failed" not in low and any(mark in low for mark in _TLS):
            return e.TlsFailed(*args, tls_hint(said))
    if code is grpc.StatusCode.INTERNAL and "inconsistent results across engines" in said:
        return made(e.RanksDisagree)
    # An engine's own broken pipe is reported by the frontend as "... failed: transport error ...".
    if code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN) and " failed: " not in said:
        if any(mark in said for mark in _BROKEN):
            return made(e.WorkerUnreachable)
        if code is grpc.StatusCode.UNKNOWN and not said:
            return made(e.EngineFailed)
    return made(MEANINGS.get(code, e.ControlError))


def tls_suspected(error: e.ControlError) -> bool:
    """Whether a TLS disagreement may hide behind a connection that broke without saying why."""
    return type(error) is e.WorkerUnreachable and any(mark in error.detail for mark in _TLS_MAYBE)


def tls_hint(said: str) -> str:
    """What to do about a TLS text."""
    low = said.lower()
    if "wrong_version" in low or "wrong version" in low or "record layer" in low or "http_request" in low:
        return "the port speaks plaintext: drop the TLS options, or start vLLM with --ssl-certfile and --ssl-keyfile"
    if "peer name" in low or "hostname" in low:
        return "the certificate is for another name: give that name as the server name"
    if "expired" in low:
        return "the worker's certificate has expired: renew it"
    if "certificate_verify" in low or "certificate verify" in low or "self-signed" in low or "self signed" in low:
        if low.rstrip(") ").endswith("certificate_verify_failed"):  # older gRPC does not say why
            return "the certificate is not signed by the CA in use, or has expired: give the right CA file, or renew it"
        return "the certificate is not signed by the CA in use: give the right CA file"
    if "certificate_required" in low or "certificate required" in low:
        return "the worker wants a client certificate: give one with its key"
    if any(mark in low for mark in _TLS_FILES):
        return "a TLS file of ours is unusable: check the CA, and that certificate and key belong together"
    return "check that both sides use TLS, the CA file, the server name and the client certificate"


def proxy_hint(enabled: bool) -> str:
    """Names the proxy variables in force, for a failed call on a channel that honours them."""
    if not enabled:
        return ""
    found = [name for name in _PROXY_VARIABLES if os.environ.get(name)]  # gRPC does not read the upper-case ones
    return f"a proxy is in force ({', '.join(found)}): switch it off or set no_proxy" if found else ""


def _hint(kind: type[e.ControlError], said: str) -> str:
    if kind is e.WorkerUnreachable and "too many pings" in said.lower().replace("_", " "):
        return "the server sends away clients that ping this often: raise keepalive_s, or leave it out"
    return _HINTS.get(kind, "")


def _version_hint(method: str, since: str) -> str:
    if not since:
        return ""
    return f"{method} came with vLLM {since}: this worker is older, or the service is switched off"
