"""Ports and certificates of fake workers."""

from __future__ import annotations

import random
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

__all__ = ["Listening", "TlsFiles", "server_options"]

_RANGE = (10_000, 14_999)


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files of a server that speaks TLS. Anything with these attributes will do."""

    cert: Path
    key: Path
    #: The CA that client certificates must come from.
    ca: Path | None = None
    #: mTLS: refuse clients without a certificate.
    require_client_cert: bool = False


def _credentials(tls: Any) -> grpc.ServerCredentials:
    """Server credentials from the files."""
    pair = (Path(tls.key).read_bytes(), Path(tls.cert).read_bytes())
    required = bool(getattr(tls, "require_client_cert", False))
    ca = getattr(tls, "ca", None)
    root = Path(ca).read_bytes() if ca is not None and required else None
    return grpc.ssl_server_credentials([pair], root, required)


def server_options() -> list[tuple[str, int]]:
    """Options that make a C-core server behave as the real one where it can."""
    return [
        # Limits are the frontend's, with the real server's words.
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", 1024 * 1024),
        ("grpc.absolute_max_metadata_size", 1024 * 1024),
        # Else a second server takes the same port without a word.
        ("grpc.so_reuseport", 0),
        # The real server never sends away a client for pinging.
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        # gzip is refused, with UNIMPLEMENTED.
        ("grpc.compression_enabled_algorithms_bitset", 1),
    ]


class HeldPort:
    """A free port that stays ours while nothing listens on it.

    It lies below those that the kernel gives out: one of its range can be taken by anybody's outgoing connection while
    the worker is down, even by the connection attempt of a client that wants to reach it.
    """

    def __init__(self, host: str) -> None:
        """Raises OSError when none is to be had."""
        refused: OSError | None = None
        for _ in range(100):
            holder = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
            try:
                # Bound alone, then opened for a listener beside it; a connection is refused while there is none.
                holder.bind((host, random.randint(*_RANGE)))  # noqa: S311  (not a secret)
                holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            except OSError as error:
                holder.close()
                refused = error
                continue
            self._holder = holder
            self.number: int = holder.getsockname()[1]
            return
        raise OSError(f"no free port on {host}: {refused}")

    def release(self) -> None:
        """Let it go."""
        self._holder.close()


class Listening:
    """What both colours of server need to know to listen."""

    def __init__(self, host: str, port: int, tls: Any) -> None:
        self.host = f"[{host}]" if ":" in host else host
        self._bare = host
        self._wanted = port
        self._tls = tls
        self._held: HeldPort | None = None

    @property
    def port(self) -> int:
        """The port, 0 while there is none."""
        return self._wanted or (self._held.number if self._held else 0)

    @property
    def target(self) -> str:
        """``host:port``."""
        return f"{self.host}:{self.port}"

    def bind(self, server: Any) -> None:
        """Give a gRPC server the port. Raises OSError when it is taken."""
        if not self.port:
            self._held = HeldPort(self._bare)
        try:
            if self._tls is None:
                bound = server.add_insecure_port(self.target)
            else:
                bound = server.add_secure_port(self.target, _credentials(self._tls))
        except RuntimeError as error:
            raise OSError(f"cannot listen on {self.target}: {error}") from None
        if not bound:
            raise OSError(f"cannot listen on {self.target}: is it taken?")

    def release(self) -> None:
        """Let the port go."""
        if self._held is not None:
            self._held.release()
            self._held = None
