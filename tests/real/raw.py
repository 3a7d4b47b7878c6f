"""A bare channel on method paths: for tests of the infrastructure, so that nothing of the code under test has a part.

A health answer is short enough to read by hand: ``status`` is varint field 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from tests.real.stack import Stack

CHECK = "/grpc.health.v1.Health/Check"
WATCH = "/grpc.health.v1.Health/Watch"
SERVER_INFO = "/vllm.Control/GetServerInfo"
IS_PAUSED = "/vllm.Control/IsPaused"
SERVING, NOT_SERVING = b"\x08\x01", b"\x08\x02"


@contextmanager
def channel_to(stack: Stack, credentials: grpc.ChannelCredentials | None = None) -> Iterator[grpc.Channel]:
    """A channel to the stack's frontend, closed afterwards."""
    channel = grpc.secure_channel(stack.target, credentials) if credentials else grpc.insecure_channel(stack.target)
    with channel:
        yield channel


def ask(channel: grpc.Channel, method: str, payload: bytes = b"", timeout: float = 2.0) -> bytes:
    """The bytes of the answer to one call."""
    answer: bytes = channel.unary_unary(method, bytes, bytes)(payload, timeout=timeout)
    return answer


def code_of(channel: grpc.Channel, method: str, timeout: float) -> grpc.StatusCode:
    """The status code with which one call fails."""
    with pytest.raises(grpc.RpcError) as caught:
        ask(channel, method, timeout=timeout)
    call: Any = caught.value  # what a channel raises is the call itself
    code: grpc.StatusCode = call.code()
    return code
