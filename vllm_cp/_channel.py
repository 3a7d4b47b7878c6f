"""Channels in both colours: options, TLS, tokens, and the question why a connection broke."""

from __future__ import annotations

import os
import socket
import ssl
import threading
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from vllm_cp import __version__
from vllm_cp.config import Connection, Tls, read_token
from vllm_cp.errors import ConfigError

__all__ = ["aio_channel", "call_metadata", "channel", "why_tls_fails"]

MESSAGE_LIMIT = 32 * 1024 * 1024
_DIAGNOSIS_S = 1.0

Metadata = tuple[tuple[str, str], ...]


def channel(connection: Connection) -> grpc.Channel:
    """A synchronous channel; it dials on its first call."""
    address, options = connection.address.grpc, _options(connection)
    if connection.tls is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, _credentials(connection, connection.tls), options=options)


def aio_channel(connection: Connection) -> grpc.aio.Channel:
    """A channel of the running event loop; it dials on its first call."""
    address, options = connection.address.grpc, _options(connection)
    if connection.tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, _credentials(connection, connection.tls), options=options)


def _options(connection: Connection) -> list[tuple[str, Any]]:
    options: list[tuple[str, Any]] = [
        # Else a new client inherits the back-off of another client of the same target.
        ("grpc.use_local_subchannel_pool", 1),
        # The default of two minutes finds a worker that came back half a minute late.
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 1500),
        # gRPC's name for the time it gives one connection attempt.
        ("grpc.min_reconnect_backoff_ms", 5000),
        ("grpc.dns_min_time_between_resolutions_ms", 1000),
        ("grpc.enable_http_proxy", int(connection.proxy)),
        # Messages here are small: no need to measure, with a ping for every few calls, how much fits on the way.
        ("grpc.http2.bdp_probe", 0),
        # Retrying is ours: we know which calls are safe.
        ("grpc.enable_retries", 0),
        ("grpc.service_config_disable_resolution", 1),
        ("grpc.max_receive_message_length", MESSAGE_LIMIT),
        ("grpc.max_send_message_length", MESSAGE_LIMIT),
        ("grpc.primary_user_agent", f"vllm-cp/{__version__}"),
    ]
    if connection.server_name is not None:
        options.append(("grpc.ssl_target_name_override", connection.server_name))
    if connection.keepalive_s is not None:
        options += [
            ("grpc.keepalive_time_ms", int(connection.keepalive_s * 1000)),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
        ]
    return options


def _credentials(connection: Connection, tls: Tls) -> grpc.ChannelCredentials:
    ca, key, certificate = tls.read()
    credentials = grpc.ssl_channel_credentials(ca, key, certificate)
    if connection.token_file is None:
        return credentials
    token = grpc.metadata_call_credentials(_TokenPlugin(_Token(connection)), name="bearer")
    return grpc.composite_channel_credentials(credentials, token)


class _Token:
    """The token of a file, read again when the file changes."""

    def __init__(self, connection: Connection) -> None:
        assert connection.token_file is not None
        self._path = connection.token_file
        self._lock = threading.Lock()
        self._seen: tuple[int, int] | None = None
        self._value = ""

    def header(self) -> str:
        """The ``authorization`` value. Raises ConfigError, without the token in it."""
        with self._lock:
            try:
                stat = os.stat(self._path)
            except OSError as error:
                raise ConfigError(f"cannot read token file {os.fspath(self._path)!r}: {error.strerror}") from None
            now = (stat.st_mtime_ns, stat.st_ino)
            if now != self._seen:
                self._value = read_token(self._path)
                self._seen = now
            return f"Bearer {self._value}"


class _TokenPlugin(grpc.AuthMetadataPlugin):
    """Hands the token to gRPC, which sends it over TLS only."""

    def __init__(self, token: _Token) -> None:
        self._token = token

    def __call__(self, context: grpc.AuthMetadataContext, callback: grpc.AuthMetadataPluginCallback) -> None:
        try:
            callback((("authorization", self._token.header()),), None)
        except ConfigError as error:
            callback((), error)


def call_metadata(connection: Connection) -> Callable[[int | None], Metadata]:
    """The function that gives the metadata of one call, for the rank it is meant for.

    Only a token that may cross plaintext travels here: gRPC refuses call credentials on such a channel.
    """
    insecure = connection.token_file is not None and connection.tls is None
    token = _Token(connection) if insecure else None

    def metadata(rank: int | None) -> Metadata:
        pairs: Metadata = ()
        if rank is not None:
            if rank < 0:
                raise ValueError(f"a rank is 0 or more, not {rank}")
            pairs += (("x-data-parallel-rank", str(rank)),)
        if token is not None:
            pairs += (("authorization", token.header()),)
        return pairs

    return metadata


def why_tls_fails(connection: Connection, timeout_s: float) -> str | None:
    """Ask the port itself: the TLS text behind a connection that broke, or ``None`` when TLS is not the cause.

    gRPC reports "Socket closed" alike for a plaintext client on a TLS port and for a missing client certificate.
    Blocks for ``timeout_s`` at most (and one second at most).
    """
    address = connection.address
    if address.host is None or address.port is None:
        return None
    budget = min(timeout_s, _DIAGNOSIS_S)
    if budget <= 0:
        return None
    try:
        context = _diagnosis_context(connection)
        with socket.create_connection((address.host, address.port), timeout=budget) as raw:
            raw.settimeout(budget)
            name = connection.server_name or address.host
            with context.wrap_socket(raw, server_hostname=name) as secure:
                if connection.tls is None:
                    return "the port speaks TLS and this client does not"
                # TLS 1.3 refuses a client certificate only after the handshake, on the first read.
                secure.settimeout(min(0.3, budget))
                # Some servers send the alert, others (C-core) hang up without a word; a content one speaks or waits.
                if secure.recv(1) == b"":
                    if connection.tls.cert_file is None:
                        return "hung up after the handshake: certificate required, it seems"
                    return "hung up after the handshake: client certificate not accepted, it seems"
    except ssl.SSLError as error:
        if connection.tls is None and "CERTIFICATE_REQUIRED" not in str(error).upper():
            return None
        return error.reason or str(error)
    except (OSError, ValueError):
        return None
    return None


def _diagnosis_context(connection: Connection) -> ssl.SSLContext:
    tls = connection.tls
    context = ssl.create_default_context(cafile=os.fspath(tls.ca_file) if tls and tls.ca_file else None)
    context.set_alpn_protocols(["h2"])
    if tls is None:
        # Nothing is sent over this connection; it only tells whether the port speaks TLS at all.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif tls.cert_file and tls.key_file:
        context.load_cert_chain(tls.cert_file, tls.key_file)
    return context
