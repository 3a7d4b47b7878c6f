"""The health service's own word, heard over a bare channel by somebody who has no part in the code under test."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Any

import grpc

from tests.real.raw import NOT_SERVING, SERVING, WATCH
from tests.real.waiting import eventually

__all__ = ["NOT_SERVING", "SERVING", "Word"]


class Word:
    """``with Word(target) as word:`` listens in a thread of its own."""

    def __init__(self, target: str) -> None:
        self._channel = grpc.insecure_channel(target, options=[("grpc.use_local_subchannel_pool", 1)])
        self._said: list[tuple[bytes, float]] = []
        self._stream: Any = None
        self._thread = threading.Thread(target=self._listen, daemon=True)

    def _listen(self) -> None:
        self._stream = self._channel.unary_stream(WATCH, bytes, bytes)(b"", wait_for_ready=True)
        try:
            for status in self._stream:
                self._said.append((status, time.monotonic()))
        except grpc.RpcError:
            pass
        # The end of the stream is a word too.
        self._said.append((b"", time.monotonic()))

    def heard(self, status: bytes, after: float = 0.0, timeout_s: float = 5.0) -> float:
        """The monotonic second at which it said so, or at which it broke off."""
        return eventually(
            lambda: next((at for said, at in self._said if said in (status, b"") and at >= after), 0.0),
            timeout_s,
            f"the health service to say {status!r}",
        )

    def __enter__(self) -> Word:
        self._thread.start()
        self.heard(SERVING)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._channel.close()
        self._thread.join()
