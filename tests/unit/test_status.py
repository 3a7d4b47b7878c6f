"""(code, detail) -> meaning: every code has one, and the texts that real servers send get the right one."""

from __future__ import annotations

import pickle
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_cp import _status, errors
from vllm_cp.errors import (
    ControlError,
    CredentialsRejected,
    EngineFailed,
    InvalidArgument,
    NotAdmitting,
    NotFound,
    NotSupported,
    OutOfTime,
    PreconditionFailed,
    RanksDisagree,
    Refused,
    TlsFailed,
    TooLarge,
    WorkerUnreachable,
)

Code = grpc.StatusCode
ERRORS = [kind for name in errors.__all__ if issubclass(kind := getattr(errors, name), ControlError)]


def meaning(code: grpc.StatusCode, detail: str | None = "", **more: str) -> ControlError:
    return _status.meaning(code, detail, target="worker-0:8001", method="Control.IsPaused", **more)


@pytest.mark.parametrize("code", [code for code in Code if code is not Code.OK], ids=lambda code: code.name)
def test_every_code_has_a_meaning(code: grpc.StatusCode) -> None:
    """A status that gRPC knows is never a nameless error; a new one makes this test fail."""
    error = meaning(code)
    assert type(error) is not ControlError
    assert (error.target, error.method, error.code) == ("worker-0:8001", "Control.IsPaused", code.name)
    assert set(_status.MEANINGS) == set(Code) - {Code.OK}


def test_a_code_of_the_future_is_a_plain_error() -> None:
    """A code that this version does not know is a ControlError with its name, and nothing fails."""

    class Later:
        name = "TEAPOT"

    later: Any = Later()
    error = meaning(later, "short and stout")
    assert type(error) is ControlError
    assert str(error) == "worker-0:8001: Control.IsPaused: the call failed (TEAPOT short and stout)"


REFUSED = "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:8001: Failed to connect to remote host: Connection refused"  # noqa: E501
RESET = "failed to connect to all addresses; last error: UNAVAILABLE: ipv4:127.0.0.1:8001: recvmsg:Connection reset by peer (104)"  # noqa: E501
UNWRAP = "failed to connect to all addresses; last error: UNAVAILABLE: ipv4:127.0.0.1:8001: Unwrap failed (TSI_DATA_CORRUPTED)"  # noqa: E501
HANDSHAKE = "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:8001: Tls handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: error:1000007d:SSL routines:OPENSSL_internal:CERTIFICATE_VERIFY_FAILED: self signed certificate in certificate chain"  # noqa: E501

# Seen on vLLM 0.27.0 to 0.33.0, or from gRPC itself.
SEEN: list[tuple[grpc.StatusCode, str, type[ControlError]]] = [
    (Code.UNAVAILABLE, REFUSED, WorkerUnreachable),
    (Code.UNAVAILABLE, RESET, WorkerUnreachable),
    (Code.UNAVAILABLE, "Stream removed (Socket closed)", WorkerUnreachable),
    (
        Code.UNAVAILABLE,
        "Stream removed (Socket closed (GOAWAY received; Error code: 0; Debug Text: ))",
        WorkerUnreachable,
    ),
    (Code.UNAVAILABLE, "Stream removed (recvmsg:Connection reset by peer (104))", WorkerUnreachable),
    (Code.UNAVAILABLE, "Stream removed (sendmsg: Broken pipe (32))", WorkerUnreachable),
    (Code.UNAVAILABLE, "DNS resolution failed for worker-0:8001", WorkerUnreachable),
    (
        Code.CANCELLED,
        "Stream removed (RST_STREAM (Received RST_STREAM with error code 8))",
        WorkerUnreachable,
    ),
    (Code.CANCELLED, "", WorkerUnreachable),
    (Code.INTERNAL, "Received RST_STREAM with error code 2", WorkerUnreachable),
    (Code.UNKNOWN, "Stream removed", WorkerUnreachable),
    (Code.DEADLINE_EXCEEDED, "Deadline Exceeded", OutOfTime),
    (Code.DEADLINE_EXCEEDED, "Stream removed (Deadline Exceeded)", OutOfTime),
    (Code.CANCELLED, "Timeout expired", OutOfTime),
    (Code.UNIMPLEMENTED, "", NotSupported),
    (Code.UNIMPLEMENTED, "Content is compressed with `gzip` which isn't supported", InvalidArgument),
    (Code.NOT_FOUND, "service not registered", NotFound),
    (Code.NOT_FOUND, "model `nope` not found", NotFound),
    (Code.UNAVAILABLE, "Generation is paused. Please retry after it resumes.", NotAdmitting),
    (
        Code.FAILED_PRECONDITION,
        "sleep mode is not configured; start vLLM with --enable-sleep-mode",
        PreconditionFailed,
    ),
    (Code.FAILED_PRECONDITION, "engine was not started with LoRA enabled", PreconditionFailed),
    (Code.FAILED_PRECONDITION, "this frontend does not manage the engine process", PreconditionFailed),
    (
        Code.INTERNAL,
        "utility call `is_scheduler_paused` returned inconsistent results across engines: [true, false]",
        RanksDisagree,
    ),
    (Code.INTERNAL, "is_sleeping failed: transport error: Codec Error: Broken pipe (os error 32)", EngineFailed),
    (
        Code.INTERNAL,
        "get_weight_version failed: transport error: Destination client not found by identity",
        EngineFailed,
    ),
    (Code.INTERNAL, "is_paused failed: engine core reported fatal failure", EngineFailed),
    (Code.INTERNAL, "engine-core error: engine core reported fatal failure", EngineFailed),
    (Code.INTERNAL, "failed to decode Protobuf message: invalid varint", EngineFailed),
    (
        Code.INVALID_ARGUMENT,
        "this model's maximum context length is 2048 tokens, but the prompt contains 3000 input tokens",
        InvalidArgument,
    ),
    (
        Code.INVALID_ARGUMENT,
        "engine-core error: data parallel rank 7 is not connected to this frontend; connected ranks: [0, 1]",
        InvalidArgument,
    ),
    (
        Code.OUT_OF_RANGE,
        "Error, decoded message length too large: found 34603013 bytes, the limit is: 33554432 bytes",
        TooLarge,
    ),
    (Code.RESOURCE_EXHAUSTED, "Received message larger than max (40000000 vs. 33554432)", TooLarge),
    (Code.RESOURCE_EXHAUSTED, "SENT message larger than max (40000000 vs. 33554432)", TooLarge),
    (Code.UNKNOWN, "Received http2 header with status: 431", TooLarge),
    (Code.OUT_OF_RANGE, "something else", InvalidArgument),
    (Code.RESOURCE_EXHAUSTED, "too many requests", Refused),
    (Code.UNAUTHENTICATED, "", CredentialsRejected),
    (Code.PERMISSION_DENIED, "RBAC: access denied", CredentialsRejected),
    (
        Code.UNAVAILABLE,
        "Getting metadata from plugin failed with error: cannot read token file",
        CredentialsRejected,
    ),
    (Code.UNAVAILABLE, HANDSHAKE, TlsFailed),
    (Code.UNAVAILABLE, UNWRAP, TlsFailed),
    (Code.UNAVAILABLE, "Peer name worker-0 is not in peer certificate", TlsFailed),
    (Code.UNKNOWN, "", EngineFailed),
    (Code.DATA_LOSS, "", EngineFailed),
]


@pytest.mark.parametrize(("code", "detail", "kind"), SEEN, ids=lambda value: getattr(value, "__name__", None))
def test_texts_that_were_seen(code: grpc.StatusCode, detail: str, kind: type[ControlError]) -> None:
    """A status of a real server means what happened there, and its code and text are kept as they came."""
    error = meaning(code, detail)
    assert type(error) is kind
    assert (error.code, error.detail) == (code.name, detail)


@given(st.sampled_from([code for code in Code if code is not Code.OK]), st.none() | st.text())
def test_any_status_prints_as_one_line(code: grpc.StatusCode, detail: str | None) -> None:
    """Whatever a server writes, the error is one line with target, method and code, and no control characters."""
    error = meaning(code, detail)
    assert str(error).isprintable()
    assert str(error).startswith("worker-0:8001: Control.IsPaused: ")
    assert code.name in str(error)


def test_an_error_prints_all_it_knows() -> None:
    """The line names target, method, meaning, code, text and what to do."""
    assert str(meaning(Code.UNAVAILABLE, REFUSED)) == (
        "worker-0:8001: Control.IsPaused: worker unreachable (UNAVAILABLE failed to connect to all addresses; last "
        "error: UNKNOWN: ipv4:127.0.0.1:8001: Failed to connect to remote host: Connection refused); check the "
        "address; vLLM opens --grpc-port once every engine is ready"
    )
    assert str(ControlError("w", "M", "X")) == "w: M: the call failed (X)"


def test_a_text_cannot_forge_lines_or_move_the_cursor() -> None:
    """Control characters are shown escaped; letters of any script stay as they are."""
    error = meaning(Code.INTERNAL, "Fehler: 引擎 é 🙂\n\x1b[2J\x00\u202e\u2028")
    assert "Fehler: 引擎 é 🙂\\n\\x1b[2J\\x00\\u202e\\u2028" in str(error)
    assert error.detail == "Fehler: 引擎 é 🙂\n\x1b[2J\x00\u202e\u2028"


def test_unimplemented_says_which_version_has_it() -> None:
    """A method that is missing names the version that brought it; without that knowledge there is no hint."""
    error = meaning(Code.UNIMPLEMENTED, "", since="0.28")
    assert isinstance(error, NotSupported)
    assert error.since == "0.28"
    assert error.hint == "Control.IsPaused came with vLLM 0.28: this worker is older, or the service is switched off"
    assert meaning(Code.UNIMPLEMENTED).hint == ""


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ("WRONG_VERSION_NUMBER", "the port speaks plaintext"),
        (HANDSHAKE, "not signed by the CA in use"),
        ("CERTIFICATE_VERIFY_FAILED: certificate has expired", "has expired: renew it"),
        ("Peer name worker-0 is not in peer certificate", "give that name as the server name"),
        ("Hostname Verification Check failed.", "give that name as the server name"),
        ("TLSV13_ALERT_CERTIFICATE_REQUIRED", "wants a client certificate"),
        ("Unwrap failed (TSI_DATA_CORRUPTED)", "check that both sides use TLS"),
    ],
)
def test_tls_texts_say_what_to_do(said: str, advice: str) -> None:
    """Behind each TLS text stands one thing to do."""
    assert advice in _status.tls_hint(said)


@pytest.mark.parametrize(
    ("code", "detail", "suspected"),
    [
        (Code.UNAVAILABLE, RESET, True),
        (Code.UNAVAILABLE, "Socket closed", True),
        (Code.UNAVAILABLE, REFUSED, False),
        (Code.UNAVAILABLE, HANDSHAKE, False),
        (Code.DEADLINE_EXCEEDED, "Deadline Exceeded", False),
    ],
)
def test_only_what_tls_may_hide_behind_is_looked_into(code: grpc.StatusCode, detail: str, suspected: bool) -> None:
    """A connection that broke without saying why may be a TLS disagreement; one that was refused is not."""
    assert _status.tls_suspected(meaning(code, detail)) is suspected


def test_proxies_in_force_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A channel that honours proxies names those it found; one that does not says nothing."""
    for name in ("grpc_proxy", "https_proxy", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    assert _status.proxy_hint(True) == ""
    monkeypatch.setenv("HTTP_PROXY", "http://proxy:3128")  # which gRPC does not read
    assert _status.proxy_hint(True) == ""
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    assert _status.proxy_hint(True) == "a proxy is in force (https_proxy): switch it off or set no_proxy"
    assert _status.proxy_hint(False) == ""


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_errors_survive_pickling(kind: type[ControlError]) -> None:
    """An error that crosses a process boundary keeps its type, its facts and its text."""
    more = {"since": "0.29"} if kind is NotSupported else {}
    error = kind("worker-0:8001", "Control.ListLoras", "UNIMPLEMENTED", "said\n", "do this", **more)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_errors_that_are_not_calls_survive_pickling() -> None:
    """The other errors are plain, and pickle as such."""
    for kind in (errors.ConfigError, errors.ClientClosed, errors.ForkedClient):
        again = pickle.loads(pickle.dumps(kind("wrong")))
        assert (type(again), str(again)) == (kind, "wrong")


def test_the_tree_is_the_one_that_is_documented() -> None:
    """The classes stand in the tree that the module draws."""
    assert issubclass(TlsFailed, WorkerUnreachable)
    assert issubclass(PreconditionFailed, Refused)
    assert issubclass(NotAdmitting, Refused)
    assert issubclass(RanksDisagree, EngineFailed)
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.ClientClosed, RuntimeError)
    assert issubclass(errors.ForkedClient, RuntimeError)
    drawn = errors.__doc__ or ""
    assert all(name in drawn for name in errors.__all__)
    assert len({kind.meaning for kind in ERRORS}) == len(ERRORS)


def test_a_name_is_no_sign_of_tls() -> None:
    """A worker called llama-tls whose name does not resolve is unreachable, and no matter of certificates."""
    detail = "DNS resolution failed for llama-tls.ml.svc:8001: C-ares status is not ARES_SUCCESS"
    refused = "failed to connect to all addresses; last error: llama-tls.ml.svc:8001: Connection refused"
    target = "llama-tls.ml.svc:8001"
    for said in (detail, refused):
        error = _status.meaning(grpc.StatusCode.UNAVAILABLE, said, target=target, method="Health.Check")
        assert type(error) is errors.WorkerUnreachable
