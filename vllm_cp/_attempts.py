"""One call and its tries inside one deadline: all that the two clients share between sending and answering."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import Generic, TypeVar

import grpc

from vllm_cp import _channel, _retry, _status, _wire
from vllm_cp._rpc import Call
from vllm_cp.config import DEFAULT_TARGET, LONGEST_S, Connection
from vllm_cp.errors import (
    ClientClosed,
    ConfigError,
    ControlError,
    CredentialsRejected,
    EngineFailed,
    ForkedClient,
    TlsFailed,
)
from vllm_cp.models.rpc import RpcRecord

__all__ = ["Attempts", "Desk", "RpcHook"]

T = TypeVar("T")
RpcHook = Callable[[RpcRecord], None]


class Desk:
    """What a client knows apart from its colour: the connection, its process, its hook, whether it was closed."""

    def __init__(self, target: str | Connection = DEFAULT_TARGET, on_rpc: RpcHook | None = None) -> None:
        self.connection = Connection(target=target) if isinstance(target, str) else target
        self.address = self.connection.address
        self.target = self.address.name
        self.on_rpc = on_rpc
        self.closed = False
        self._metadata = _channel.call_metadata(self.connection)
        self._pid = os.getpid()

    @property
    def inherited(self) -> bool:
        """Made before a fork: what gRPC holds for it is the parent's, and may be locked for ever."""
        return os.getpid() != self._pid

    def open(self) -> None:
        """Refuse what cannot work: a closed client, or one that crossed a fork."""
        if self.closed:
            raise ClientClosed(f"{self.target}: this client was closed; make a new one")
        if self.inherited:
            raise ForkedClient(
                f"{self.target}: this client was made before fork(); make a new one in the child process"
            )

    def metadata(self, rank: int | None, method: str) -> _channel.Metadata:
        """Metadata of one call. Raises CredentialsRejected when the token file has become unreadable."""
        try:
            return self._metadata(rank)
        except ConfigError as error:
            refused = CredentialsRejected(self.target, method, "UNAUTHENTICATED", str(error), "restore the token file")
            refused.sent = False
            raise refused from None

    def record(self, method: str, code: str, detail: str, elapsed_s: float, attempt: int) -> None:
        """Tell the hook, if there is one."""
        if self.on_rpc is not None:
            self.on_rpc(
                RpcRecord(
                    target=self.target, method=method, code=code, detail=detail, elapsed_s=elapsed_s, attempt=attempt
                )
            )

    def meaning(self, call: Call[T], error: grpc.RpcError) -> ControlError:
        """The error that a failed RPC stands for."""
        # Every RpcError that a call raises is also a Call, in both colours; the base class does not say so.
        code, detail = error.code(), error.details() or ""
        made = _status.meaning(code, detail, target=self.target, method=call.method, since=call.since)
        if proxy := _status.proxy_hint(self.connection.proxy):
            made.hint = f"{made.hint}; {proxy}" if made.hint else proxy
        return made

    def read(self, call: Call[T], data: bytes) -> T:
        """What an answer says. Raises EngineFailed when it is no message of the expected kind."""
        try:
            return call.parse(data)
        except _wire.UndecodableError as error:
            raise EngineFailed(
                self.target,
                call.method,
                "OK",
                f"undecodable answer: {error}",
                "is this a vLLM control port?",
            ) from None

    def tls_failed(self, error: ControlError, why: str | None) -> ControlError:
        """The same error, if TLS turned out to be behind it."""
        if why is None:
            return error
        if self.connection.tls is None:
            hint = "give the TLS options (a CA file at least), and a client certificate if the worker wants one"
        else:
            hint = _status.tls_hint(why)
        return TlsFailed(error.target, error.method, error.code, f"{error.detail} ({why})", hint)


class Attempts(Generic[T]):
    """The tries of one call."""

    def __init__(self, desk: Desk, call: Call[T], timeout_s: float | None) -> None:
        self._desk = desk
        self._call = call
        self._number = 0
        self._began = time.monotonic()
        limit = desk.connection.timeout_s if timeout_s is None else timeout_s
        if not 0 < limit <= LONGEST_S:
            raise ValueError(f"timeout_s must be a number of seconds above 0 and up to {LONGEST_S:.0f}, not {limit}")
        self._deadline = self._began + limit

    @property
    def remaining_s(self) -> float:
        """Seconds left of the deadline, never below a millisecond: gRPC takes a passed deadline for none."""
        return max(0.001, self._deadline - time.monotonic())

    def begin(self) -> float:
        """Start a try; the seconds it has."""
        self._desk.open()
        self._number += 1
        self._began = time.monotonic()
        return self._deadline - self._began if self._number == 1 else self.remaining_s

    def answer(self, data: bytes) -> T:
        """Read an answer. Raises EngineFailed when it is no message of the expected kind."""
        try:
            value = self._desk.read(self._call, data)
        except EngineFailed as error:
            self._record("INTERNAL", error.detail)  # as gRPC calls it when it can't read an answer itself
            raise
        self._record("OK", "")
        return value

    def failure(self, error: grpc.RpcError) -> ControlError:
        """What a failed try means."""
        made = self._desk.meaning(self._call, error)
        self._record(made.code, made.detail)
        return made

    def pause_before_next(self, error: ControlError) -> float | None:
        """Seconds to wait before the next try; ``None``: there is none."""
        return _retry.pause_before_next(
            error,
            safe=self._call.safe,
            attempt=self._number,
            remaining_s=self._deadline - time.monotonic(),
            retry=self._desk.connection.retry,
            jitter=random.random,
        )

    def settle(self, error: ControlError) -> T:
        """The value that the error stands for, where an error is an answer; else it is raised."""
        for kind, value in self._call.answers.items():
            if isinstance(error, kind):
                return value
        raise error

    def _record(self, code: str, detail: str) -> None:
        self._desk.record(self._call.method, code, detail, time.monotonic() - self._began, self._number)
