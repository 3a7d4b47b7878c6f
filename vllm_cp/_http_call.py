"""HTTP requests as values, and everything between sending and answering that has no colour."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from vllm_cp import _http_meaning as meaning
from vllm_cp import _retry
from vllm_cp._http_connection import HttpConnection, Token
from vllm_cp.errors import (
    ClientClosed,
    ConfigError,
    ControlError,
    CredentialsRejected,
    ForkedClient,
    NotAdmitting,
    NotSupported,
    TooLarge,
)
from vllm_cp.models.rpc import RpcRecord

if TYPE_CHECKING:
    import httpx2

__all__ = ["Answer", "Call", "Desk", "Hook", "Reader", "Tries", "UnreadableError"]

T = TypeVar("T")
Hook = Callable[[RpcRecord], None]
#: An error's body is read no further than this, bytes.
_ERROR_BYTES = 64 * 1024


class UnreadableError(ValueError):
    """An answer is not what its route is there for."""

    def __init__(self, why: str, hint: str = "is this a vLLM server's base URL?") -> None:
        super().__init__(why)
        self.hint = hint


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One whole answer."""

    status: int
    #: Without parameters, lower case; empty when the server names none.
    content_type: str
    location: str
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[T]):
    """One request, ready to run: what to ask where, how to read the answer, and whether it may be asked again."""

    verb: str
    path: str
    #: Reads an answer. Raises UnreadableError.
    parse: Callable[[Answer], T]
    #: A read: asking twice does no harm.
    safe: bool
    #: JSON to send.
    body: bytes | None = None
    accept: str = "application/json"
    #: What stands before the path, in this or that version of the server; tried in order, and remembered.
    forms: tuple[str, ...] = ("",)
    #: Statuses, beside 2xx, that ``parse`` reads.
    also: frozenset[int] = frozenset()
    #: Errors that are answers.
    answers: Mapping[type[ControlError], T] = field(default_factory=lambda: MappingProxyType({}))
    #: What to do when the worker has no such route.
    missing: str = ""

    @property
    def method(self) -> str:
        """The name that records carry, the same for all forms: ``GET /fault_tolerance/status``."""
        return f"{self.verb} {self.path}"

    @property
    def family(self) -> str:
        """Routes of one family have one form."""
        return self.path.split("/")[1]


class Desk:
    """What a client knows apart from its colour: the connection, its token, its process, which path forms it found."""

    def __init__(self, url: str | HttpConnection, on_rpc: Hook | None) -> None:
        self.connection = HttpConnection(url=url) if isinstance(url, str) else url
        self.target = self.connection.base
        self.closed = False
        #: The form found to work, by family.
        self.forms: dict[str, str] = {}
        self._on_rpc = on_rpc
        token, password = self.connection.token_file, self.connection.basic_auth_file
        self._token = Token(password, basic=True) if password else Token(token) if token else None
        self._pid = os.getpid()

    def open(self) -> None:
        """Refuse what cannot work: a closed client, or one that crossed a fork."""
        if self.closed:
            raise ClientClosed(f"{self.target}: this client was closed; make a new one")
        if os.getpid() != self._pid:
            raise ForkedClient(
                f"{self.target}: this client was made before fork(); make a new one in the child process"
            )

    def headers(self, call: Call[Any]) -> dict[str, str]:
        """Headers of one request. Raises CredentialsRejected when the token file has become unreadable."""
        headers = {"accept": call.accept}
        if call.body is not None:
            headers["content-type"] = "application/json"
        if self._token is not None:
            try:
                headers["authorization"] = self._token.header()
            except ConfigError as error:
                raise CredentialsRejected(
                    self.target, call.method, "UNAUTHENTICATED", str(error), "restore the token file"
                ) from None
        return headers

    def record(self, method: str, code: str, detail: str, elapsed_s: float, attempt: int) -> None:
        """Tell the hook, if there is one."""
        if self._on_rpc is not None:
            self._on_rpc(
                RpcRecord(
                    target=self.target, method=method, code=code, detail=detail, elapsed_s=elapsed_s, attempt=attempt
                )
            )


class Tries(Generic[T]):
    """The tries of one call: again after a broken connection where that is safe, and with the next path form."""

    def __init__(self, desk: Desk, call: Call[T], timeout_s: float | None) -> None:
        self._desk = desk
        self.call = call
        self._number = 0
        self._began = time.monotonic()
        limit = desk.connection.timeout_s if timeout_s is None else timeout_s
        if not 0 < limit < float("inf"):
            raise ValueError(f"timeout_s must be a positive number of seconds, not {limit}")
        #: Seconds on the clock of ``time.monotonic()``.
        self.deadline = self._began + limit
        known = desk.forms.get(call.family)
        self._forms = list(call.forms)
        if known in self._forms:
            self._forms.remove(known)
            self._forms.insert(0, known)
        self._broken = 0

    @property
    def remaining_s(self) -> float:
        """Seconds left of the deadline, never below a millisecond."""
        return max(0.001, self.deadline - time.monotonic())

    @property
    def method(self) -> str:
        """The request as it is sent, path form included."""
        return f"{self.call.verb} {self._forms[0]}{self.call.path}"

    def begin(self) -> dict[str, Any]:
        """Start a try: the arguments of the HTTP library's ``stream``."""
        from vllm_cp import _http_wire

        self._desk.open()
        self._number += 1
        self._began = time.monotonic()
        return {
            "method": self.call.verb,
            "url": f"{self._desk.target}{self._forms[0]}{self.call.path}",
            "headers": self._desk.headers(self.call),
            "content": self.call.body,
            "extensions": _http_wire.extensions(self._desk.connection, self.deadline),
        }

    def reader(self, response: httpx2.Response) -> Reader:
        """Collects the body of an answer. Raises TooLarge at once when the server says that it is."""
        limit = self._desk.connection.max_answer_bytes
        reader = Reader(response, self, limit if self.good(response.status_code) else min(limit, _ERROR_BYTES))
        said = response.headers.get("content-length", "")
        if reader.strict and said.isdecimal() and len(said) < 20 and int(said) > limit:
            raise self.too_large(response.status_code)
        return reader

    def too_large(self, status: int) -> TooLarge:
        """The answer is longer than we read."""
        return meaning.too_large(
            status, self._desk.connection.max_answer_bytes, target=self._desk.target, method=self.method
        )

    def failure(self, failed: Exception) -> ControlError:
        """What a try means that got no whole answer: an error of the HTTP library, or one of ours."""
        target, method = self._desk.target, self.method
        if isinstance(failed, ControlError):
            error = failed
        elif isinstance(failed, (TimeoutError, asyncio.TimeoutError)):
            error = meaning.out_of_time(target, method)
        else:
            error = meaning.broken(failed, target=target, method=method, proxy=self._desk.connection.proxy)
        self._record(error.code, error.detail)
        return error

    def refusal(self, answer: Answer) -> ControlError | None:
        """What the status of an answer means; ``None``: it is good, read it."""
        error = meaning.status_meaning(
            answer.status, answer.body, target=self._desk.target, method=self.method,
            location=answer.location, missing=self.call.missing,
        )  # fmt: skip
        # A server that is being scaled says so with a status that else means something of its own.
        if self.good(answer.status) and not isinstance(error, NotAdmitting):
            self._record("OK", "")
            self._desk.forms[self.call.family] = self._forms[0]
            return None
        self._record(error.code, error.detail)
        return error

    def read(self, answer: Answer) -> T:
        """Read a good answer. Raises ControlError when it is not what the route is there for."""
        try:
            return self.call.parse(answer)
        except UnreadableError as error:
            raise meaning.unreadable(
                answer.status, str(error), error.hint, target=self._desk.target, method=self.method
            ) from None

    def pause_before_next(self, error: ControlError) -> float | None:
        """Seconds to wait before the next try; ``None``: there is none."""
        if isinstance(error, NotSupported) and len(self._forms) > 1 and time.monotonic() < self.deadline:
            # Nothing was done where there is no route, so even a change may go on to the next form.
            self._forms.pop(0)
            return 0.0
        self._broken += 1
        return _retry.pause_before_next(
            error,
            safe=self.call.safe,
            attempt=self._broken,
            remaining_s=self.deadline - time.monotonic(),
            retry=self._desk.connection.retry,
            jitter=random.random,
        )

    def settle(self, error: ControlError, why_tls: str | None) -> T:
        """The value that the error stands for, where an error is an answer; else it is raised."""
        for kind, value in self.call.answers.items():
            if isinstance(error, kind):
                return value
        raise error if why_tls is None else meaning.tls_failed(error, why_tls)

    def good(self, status: int) -> bool:
        """Whether an answer of that status is for the call to read."""
        return 200 <= status < 300 or status in self.call.also

    def _record(self, code: str, detail: str) -> None:
        self._desk.record(self.call.method, code, detail, time.monotonic() - self._began, self._number)


class Reader:
    """The body of one answer, up to a limit: of a good answer all or nothing, of an error the beginning."""

    def __init__(self, response: httpx2.Response, tries: Tries[Any], limit: int) -> None:
        self._response = response
        self._tries = tries
        self._limit = limit
        self._body = bytearray()
        self.strict = tries.good(response.status_code)

    def take(self, chunk: bytes) -> bool:
        """One more piece; whether to go on. Raises TooLarge, and TimeoutError after the deadline."""
        self._body += chunk
        if time.monotonic() > self._tries.deadline:
            raise TimeoutError
        if len(self._body) <= self._limit:
            return True
        if self.strict:
            raise self._tries.too_large(self._response.status_code)
        return False

    def answer(self) -> Answer:
        """The whole."""
        headers = self._response.headers
        return Answer(
            status=self._response.status_code,
            content_type=headers.get("content-type", "").partition(";")[0].strip().lower(),
            location=headers.get("location", ""),
            body=bytes(self._body),
        )
