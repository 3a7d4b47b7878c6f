"""What ``--verbose`` and ``--debug`` say on standard error: every call with its time, and what crossed the wire."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from vllm_cp.cli import _stdio
from vllm_cp.cli._flags import kept

if TYPE_CHECKING:
    from vllm_cp._rpc import Call
    from vllm_cp.config import Connection
    from vllm_cp.models.rpc import RpcRecord

__all__ = ["Wire", "call_hook", "debugging", "said_call"]

T = TypeVar("T")

_MASK = "***"
#: Bytes of one message that are shown.
_SHOWN = 256


def debugging() -> bool:
    """Whether the wire is to be shown. Asks the command line, so only in the thread that reads it."""
    return bool(kept().get("debug"))


def call_hook() -> Callable[[RpcRecord], None] | None:
    """What the clients are to call after each attempt; ``None`` when nobody wants to know."""
    return _said if kept().get("verbose") or debugging() else None


def said_call(target: str, method: str, code: str, detail: str, *, elapsed_s: float, attempt: int = 1) -> None:
    """One line about one attempt of one call."""
    again = f", attempt {attempt}" if attempt > 1 else ""
    why = f" ({detail})" if detail else ""
    _stdio.say(f"{target}: {method}: {code} in {elapsed_s * 1000:.1f} ms{again}{why}")


def _said(record: RpcRecord) -> None:
    said_call(
        record.target,
        record.method,
        record.code,
        record.detail,
        elapsed_s=record.elapsed_s,
        attempt=record.attempt,
    )


class Wire:
    """What crosses the wire to one worker, for ``--debug``. The token is masked wherever it turns up."""

    def __init__(self, connection: Connection) -> None:
        self._target = connection.address.name
        self._secrets: list[str] = []
        if connection.token_file is not None:
            from vllm_cp.config import read_token
            from vllm_cp.errors import ConfigError

            with suppress(ConfigError):
                token = read_token(connection.token_file)
                self._secrets = [token, token.encode().hex()]
        self._sends_token = connection.token_file is not None
        tls = connection.tls
        how = "plaintext"
        if tls is not None:
            files = {"CA": tls.ca_file, "certificate": tls.cert_file, "key": tls.key_file}
            how = "TLS, " + ", ".join(f"{what} {path}" for what, path in files.items() if path is not None)
        name = f", server name {connection.server_name}" if connection.server_name else ""
        proxy = ", proxies honoured" if connection.proxy else ""
        token_from = f", token {_MASK} from {connection.token_file}" if self._sends_token else ""
        self._say(f"{how}{name}{token_from}{proxy}, {connection.timeout_s:g} s for each answer")

    def traced(self, call: Call[T], timeout_s: float) -> Call[T]:
        """The call, with its bytes shown as they go and come."""
        from dataclasses import replace

        self.sent(call.path, call.request, timeout_s)

        def parse(data: bytes) -> T:
            self.got(call.path, data)
            return call.parse(data)

        return replace(call, parse=parse)

    def sent(self, path: str, request: bytes, timeout_s: float) -> None:
        """A request is on its way."""
        metadata = f", authorization: Bearer {_MASK}" if self._sends_token else ""
        self._say(f"-> {path}, deadline {timeout_s:.3g} s{metadata}, {self._bytes(request)}")

    def got(self, path: str, data: bytes) -> None:
        """An answer has come."""
        self._say(f"<- {path}, {self._bytes(data)}")

    def _bytes(self, data: bytes) -> str:
        shown = data[:_SHOWN].hex() + ("..." if len(data) > _SHOWN else "")
        return f"{len(data)} bytes" + (f": {shown}" if data else "")

    def _say(self, text: str) -> None:
        for secret in self._secrets:
            text = text.replace(secret, _MASK)
        _stdio.say(f"debug: {self._target}: {text}")
