"""One question to many workers at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from vllm_cp.cli import _context, _talk
from vllm_cp.cli._client import Client
from vllm_cp.config import Connection
from vllm_cp.errors import ControlError, WorkerUnreachable

__all__ = ["Reply", "ask_all", "ask_each"]

S = TypeVar("S")
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
    return _each(connections, lambda connection: _ask(connection, ask, clients), clients.close, at_once)


def ask_each(items: Mapping[str, S], ask: Callable[[S], T], close: Callable[[], None]) -> list[Reply[T]]:
    """The same for anything else that can be asked, by name; ``close`` ends all calls."""

    def asked(name: str) -> Reply[T]:
        try:
            return Reply(name, ask(items[name]))
        except Exception as error:  # noqa: BLE001  (as below)
            return Reply(name, error=error)

    return _each(list(items), asked, close, AT_ONCE)


def _each(items: Sequence[S], ask: Callable[[S], T], close: Callable[[], None], at_once: int) -> list[T]:
    if len(items) == 1:
        return [ask(items[0])]
    from concurrent.futures import ThreadPoolExecutor

    pool = ThreadPoolExecutor(min(at_once, len(items)), thread_name_prefix="vllm-cp")
    try:
        return list(pool.map(ask, items))
    finally:
        close()
        pool.shutdown(cancel_futures=True)


def _ask(connection: Connection, ask: Callable[[Client], T], clients: _Clients) -> Reply[T]:
    name, address = _context.name_of(connection), connection.address.name
    if problem := getattr(connection, "problem", ""):
        return Reply(name, error=WorkerUnreachable(name, "discovery", "", problem))
    try:
        client = clients.open(connection)
        with client:
            return Reply(name, ask(client))
    except ControlError as error:
        if error.target == address != name:
            error.target = f"{name} at {address}"
        return Reply(name, error=error)
    except Exception as error:  # noqa: BLE001  (one worker's defect must not hide the others' answers)
        return Reply(name, error=error)


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
