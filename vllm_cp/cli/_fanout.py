"""One question to many workers at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from vllm_cp.cli import _talk
from vllm_cp.cli._client import Client
from vllm_cp.config import Connection

__all__ = ["Reply", "ask_all"]

T = TypeVar("T")

#: Workers asked at the same time: enough for silent ones not to queue up behind each other's deadlines.
AT_ONCE = 64


class Reply(NamedTuple, Generic[T]):
    """What came of one worker: ``value``, unless there is an ``error``."""

    target: str
    value: T | None = None
    error: Exception | None = None


def ask_all(connections: Sequence[Connection], ask: Callable[[Client], T], *, at_once: int = AT_ONCE) -> list[Reply[T]]:
    """Ask every worker, in the order given. One worker's failure is its own; Ctrl-C ends all calls at once."""
    # The command line belongs to this thread, so what it says of clients is read here.
    clients = _Clients(partial(Client, on_rpc=_talk.call_hook(), wire=_talk.Wire if _talk.debugging() else None))
    if len(connections) == 1:
        return [_ask(connections[0], ask, clients)]
    from concurrent.futures import ThreadPoolExecutor

    pool = ThreadPoolExecutor(min(at_once, len(connections)), thread_name_prefix="vllm-cp")
    try:
        return list(pool.map(lambda connection: _ask(connection, ask, clients), connections))
    finally:
        clients.close()
        pool.shutdown(cancel_futures=True)


def _ask(connection: Connection, ask: Callable[[Client], T], clients: _Clients) -> Reply[T]:
    target = connection.address.name
    try:
        client = clients.open(connection)
        with client:
            return Reply(target, ask(client))
    except Exception as error:  # noqa: BLE001  (one worker's defect must not hide the others' answers)
        return Reply(target, error=error)


class _Clients:
    """The clients in use. Closing them ends their calls, and those that come later find theirs closed."""

    def __init__(self, make: Callable[[Connection], Client]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._open: list[Client] = []
        self._closed = False

    def open(self, connection: Connection) -> Client:
        client = self._make(connection)
        with self._lock:
            self._open.append(client)
            if self._closed:
                client.close()
        return client

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for client in self._open:
                client.close()
