"""ZeroMQ sockets with every option set: IPv6, keepalive, heartbeats, capped back-off, no lingering."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import zmq

from vllm_cp.kv.settings import Settings

__all__ = ["CONNECTED", "FAILED", "LOST", "lease", "monitor_event", "replay_socket", "subscription"]

#: Monitor events: a publisher can be heard; it is gone; an attempt failed.
CONNECTED = zmq.EVENT_HANDSHAKE_SUCCEEDED
LOST = zmq.EVENT_DISCONNECTED
FAILED = zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL

_lock = threading.Lock()
_context: zmq.Context[zmq.Socket[bytes]] | None = None
_owner = 0
_leases = 0


@contextmanager
def lease() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    """The context that all subscribers of this process share. The last one to leave ends it, so nothing stays behind.

    Every socket made in it has to be closed before the lease ends.
    """
    global _context, _owner, _leases  # noqa: PLW0603  (one per process is the point)
    with _lock:
        if _context is None or _owner != os.getpid():
            # A forked child cannot use, and must not end, its parent's context.
            _context, _owner, _leases = zmq.Context(), os.getpid(), 0
        context = _context
        _leases += 1
    try:
        yield context
    finally:
        with _lock:
            _leases -= 1
            if not _leases:
                _context = None
                context.term()


def subscription(
    context: zmq.Context[zmq.Socket[bytes]], topic: bytes, settings: Settings
) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """A SUB socket and the PAIR that reports what happens to its connections."""
    socket = context.socket(zmq.SUB)
    _common(socket, settings)
    # What libzmq holds beyond what we read at once; the reader never waits for the consumer, so it stays short.
    socket.set(zmq.RCVHWM, 10_000)
    socket.set(zmq.SUBSCRIBE, topic)
    monitor = socket.get_monitor_socket(CONNECTED | LOST | FAILED)
    monitor.set(zmq.LINGER, 0)
    return socket, monitor


def replay_socket(
    context: zmq.Context[zmq.Socket[bytes]], address: str, expected: int, settings: Settings
) -> zmq.Socket[bytes]:
    """A DEALER connected to a replay address, with room for all the batches that may come at once."""
    socket = context.socket(zmq.DEALER)
    _common(socket, settings)
    socket.set(zmq.RCVHWM, expected)
    with suppress(zmq.ZMQError):  # an address that is none: nobody will answer
        socket.connect(address)
    return socket


def monitor_event(monitor: zmq.Socket[bytes]) -> int | None:
    """The next thing that happened, one of the groups above; ``None`` when nothing more did."""
    try:
        frames = monitor.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None
    return int.from_bytes(frames[0][:2], sys.byteorder)


def _common(socket: zmq.Socket[bytes], settings: Settings) -> None:
    socket.set(zmq.LINGER, 0)
    # Without it an IPv6 address connects without an error and never hears anything.
    socket.set(zmq.IPV6, 1)
    socket.set(zmq.MAXMSGSIZE, settings.max_message_bytes)
    socket.set(zmq.RECONNECT_IVL, _ms(settings.reconnect_s))
    socket.set(zmq.RECONNECT_IVL_MAX, max(_ms(settings.reconnect_max_s), _ms(settings.reconnect_s)))
    socket.set(zmq.HANDSHAKE_IVL, _ms(settings.handshake_s))
    # A peer that vanished without a word: heartbeats see it in seconds, the kernel's keepalive in half a minute.
    socket.set(zmq.HEARTBEAT_IVL, _ms(settings.heartbeat_s))
    socket.set(zmq.HEARTBEAT_TIMEOUT, 2 * _ms(settings.heartbeat_s))
    socket.set(zmq.TCP_KEEPALIVE, 1)
    socket.set(zmq.TCP_KEEPALIVE_IDLE, 10)
    socket.set(zmq.TCP_KEEPALIVE_INTVL, 5)
    socket.set(zmq.TCP_KEEPALIVE_CNT, 4)


def _ms(seconds: float) -> int:
    return max(1, round(1000 * seconds))
