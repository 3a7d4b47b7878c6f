"""One call and its tries: the deadline, the hook, the answers that are errors, and who may not call."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import grpc
import pytest

from vllm_cp import (
    ClientClosed,
    Connection,
    CredentialsRejected,
    EngineFailed,
    ForkedClient,
    HealthStatus,
    NotFound,
    Retry,
    RpcRecord,
    TlsFailed,
    WorkerUnreachable,
    _attempts,
    _rpc,
)
from vllm_cp._attempts import Attempts, Desk


class Failure(grpc.RpcError):
    """A failed call, as gRPC raises it."""

    def __init__(self, code: grpc.StatusCode, details: str | None = "") -> None:
        self._said = code, details

    def code(self) -> grpc.StatusCode:
        return self._said[0]

    def details(self) -> str | None:
        return self._said[1]


GONE = Failure(grpc.StatusCode.UNAVAILABLE, "Connection refused")


class Clock:
    """The module's own clock, moved by hand."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(_attempts, "time", clock)
    return clock


def test_tries_share_one_deadline(clock: Clock) -> None:
    """Each try has what is left of the call's time, not the call's time anew."""
    attempts = Attempts(Desk(Connection(timeout_s=5.0)), _rpc.server_info(), None)
    assert attempts.begin() == 5.0
    clock.now += 2.0
    assert attempts.begin() == 3.0
    clock.now += 60.0
    assert attempts.begin() == 0.001  # gRPC would take a passed deadline for none


def test_a_call_may_have_its_own_time(clock: Clock) -> None:
    """The deadline of one call overrides the connection's."""
    assert Attempts(Desk(Connection(timeout_s=5.0)), _rpc.server_info(), 0.25).begin() == 0.25


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan"), float("inf"), 86401.0])
def test_a_time_that_is_none_is_refused(timeout_s: float) -> None:
    """A call without a deadline does not exist, and one above a day overflows in gRPC."""
    with pytest.raises(ValueError, match=r"^timeout_s must be a number of seconds above 0 and up to 86400, not "):
        Attempts(Desk(), _rpc.server_info(), timeout_s)


def test_every_try_is_told_to_the_hook(clock: Clock) -> None:
    """The hook hears of each try: method, status, text, seconds and number, and of the answer in the end."""
    told: list[RpcRecord] = []
    attempts = Attempts(Desk("worker-0", told.append), _rpc.is_paused(), None)
    attempts.begin()
    clock.now += 0.5
    attempts.failure(GONE)
    attempts.begin()
    clock.now += 0.25
    assert attempts.answer(b"\x08\x01") is True
    assert [(r.target, r.method, r.code, r.detail, r.elapsed_s, r.attempt) for r in told] == [
        ("worker-0:8001", "Control.IsPaused", "UNAVAILABLE", "Connection refused", 0.5, 1),
        ("worker-0:8001", "Control.IsPaused", "OK", "", 0.25, 2),
    ]


def test_reads_are_tried_again_and_changes_are_not() -> None:
    """The same broken connection gives a read another try and a change none."""
    desk = Desk(Connection(retry=Retry(attempts=2)))
    for call, again in ((_rpc.server_info(), True), (_rpc.resume(), False)):
        attempts: Attempts[Any] = Attempts(desk, call, None)
        attempts.begin()
        error = attempts.failure(GONE)
        assert (attempts.pause_before_next(error) is not None) is again
        attempts.begin()
        assert attempts.pause_before_next(error) is None


def test_an_answer_that_is_no_message_is_the_engines_failure() -> None:
    """Bytes that are no ServerInfo are reported as such, with the question whether this is a vLLM port."""
    attempts = Attempts(Desk("worker-0"), _rpc.server_info(), None)
    attempts.begin()
    with pytest.raises(EngineFailed) as caught:
        attempts.answer(b"<html>")
    assert (caught.value.method, caught.value.code) == ("Control.GetServerInfo", "OK")
    assert caught.value.detail.startswith("undecodable answer")
    assert caught.value.hint == "is this a vLLM control port?"


def test_an_error_that_is_an_answer_is_one() -> None:
    """A health service that does not know the name answers SERVICE_UNKNOWN; elsewhere not found is an error."""
    missing = NotFound("w", "M", "NOT_FOUND")
    assert Attempts(Desk(), _rpc.check("x"), None).settle(missing) is HealthStatus.SERVICE_UNKNOWN
    with pytest.raises(NotFound):
        Attempts(Desk(), _rpc.server_info(), None).settle(missing)


def test_a_closed_client_refuses() -> None:
    """After close nothing is sent."""
    desk = Desk("worker-0")
    desk.closed = True
    with pytest.raises(ClientClosed, match=r"^worker-0:8001: this client was closed; make a new one$"):
        Attempts(desk, _rpc.server_info(), None).begin()


def test_a_forked_client_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that crossed a fork says so instead of hanging."""
    desk = Desk("worker-0")
    pid = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    with pytest.raises(ForkedClient, match=r"make a new one in the child process$"):
        desk.open()


def test_metadata_carries_the_rank_and_an_insecure_token_only(tmp_path: Path) -> None:
    """A rank travels as metadata; a token does so only where somebody accepted that it crosses plaintext."""
    path = tmp_path / "token"
    path.write_text("first")
    desk = Desk(Connection(token_file=path, insecure_token=True))
    assert Desk().metadata(3, "M") == (("x-data-parallel-rank", "3"),)
    assert Desk().metadata(None, "M") == ()
    assert desk.metadata(None, "M") == (("authorization", "Bearer first"),)
    with pytest.raises(ValueError, match=r"^a rank is 0 or more, not -1$"):
        Desk().metadata(-1, "M")


def test_a_token_is_read_again_when_its_file_changes(tmp_path: Path) -> None:
    """A rotated token is used from the next call on; a file that is gone rejects the call with a word on what to do."""
    path, fresh = tmp_path / "token", tmp_path / "fresh"
    path.write_text("first")
    desk = Desk(Connection(token_file=path, insecure_token=True))
    assert desk.metadata(None, "M") == (("authorization", "Bearer first"),)
    fresh.write_text("second")
    fresh.replace(path)
    assert desk.metadata(None, "M") == (("authorization", "Bearer second"),)
    path.unlink()
    with pytest.raises(CredentialsRejected) as caught:
        desk.metadata(None, "Control.Abort")
    assert (caught.value.method, caught.value.hint) == ("Control.Abort", "restore the token file")
    assert "second" not in str(caught.value)


def test_a_missing_text_is_no_text() -> None:
    """A status without details has an empty detail."""
    attempts = Attempts(Desk("worker-0"), _rpc.server_info(), None)
    attempts.begin()
    error = attempts.failure(Failure(grpc.StatusCode.INTERNAL, None))
    assert (type(error), error.detail) == (EngineFailed, "")


def test_what_lacks_a_method_names_the_version_that_has_it() -> None:
    """The call knows since when its RPC exists, and an unimplemented one says so."""
    error = Desk("worker-0").meaning(_rpc.list_loras(), Failure(grpc.StatusCode.UNIMPLEMENTED))
    assert error.hint.startswith("Control.ListLoras came with vLLM 0.29")


def test_a_proxy_in_force_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A channel that honours a proxy says so when a call fails: the first thing to look at."""
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    call = _rpc.server_info()
    assert "a proxy is in force" in Desk(Connection(proxy=True)).meaning(call, GONE).hint
    assert "proxy" not in Desk(Connection()).meaning(call, GONE).hint


def test_tls_behind_a_broken_connection_is_named() -> None:
    """When the port was found to disagree on TLS, the error becomes that, with what to do."""
    desk = Desk("worker-0")
    broken = WorkerUnreachable("worker-0:8001", "M", "UNAVAILABLE", "Socket closed")
    assert desk.tls_failed(broken, None) is broken
    found = desk.tls_failed(broken, "the port speaks TLS and this client does not")
    assert type(found) is TlsFailed
    assert found.detail == "Socket closed (the port speaks TLS and this client does not)"
    assert found.hint.startswith("give the TLS options")
