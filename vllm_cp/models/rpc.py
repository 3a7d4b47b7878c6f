"""The record of one call, for hooks."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RpcRecord"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcRecord:
    """One attempt of one call, handed to ``on_rpc`` when it ended. Holds no message, metadata or token."""

    target: str
    #: ``Control.GetServerInfo``.
    method: str
    #: gRPC status name; ``OK`` when it worked.
    code: str
    #: Status text as received; may be empty.
    detail: str
    #: Seconds from sending to the end.
    elapsed_s: float
    #: 1 for the first attempt.
    attempt: int
