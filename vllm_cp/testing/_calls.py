"""Calls and where they come from."""

from __future__ import annotations

from typing import Protocol, TypeVar

from google.protobuf.message import DecodeError, Message

from vllm_cp.testing._bell import Refusal

__all__ = ["Call", "Host", "read"]

M = TypeVar("M", bound=Message)


class Call(Protocol):
    """One call, as a transport hands it over."""

    path: str
    metadata: tuple[tuple[str, str], ...]
    #: Seconds left when it arrived.
    deadline_s: float | None
    request: bytes

    async def send(self, data: bytes) -> None:
        """Send one message."""


class Host(Protocol):
    """A transport: opens a port and feeds calls to ``Frontend.serve``."""

    async def open(self) -> None:
        """Listen, on the same port each time."""

    async def close(self) -> None:
        """Refuse connections; when it returns, nothing of it is left."""


def read(kind: type[M], data: bytes) -> M:
    """The request. Raises Refusal when it is none."""
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError:
        raise Refusal("INTERNAL", "failed to decode Protobuf message: invalid varint") from None
    return message
