"""One question to many workers: order, bound, and a clean end."""

from __future__ import annotations

import threading

import pytest

from vllm_cp import ClientClosed, Connection, ControlClient
from vllm_cp.cli._fanout import ask_all


def _connections(count: int) -> list[Connection]:
    return [Connection(target=f"127.0.0.1:{port}") for port in range(1, count + 1)]


def test_order_is_kept_and_no_more_than_so_many_at_once() -> None:
    """Answers come back in the order of the question, with at most so many workers asked at a time."""
    meeting = threading.Barrier(3, timeout=10)
    lock = threading.Lock()
    now, most = 0, 0

    def ask(client: ControlClient) -> str:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        meeting.wait()
        with lock:
            now -= 1
        return client.target

    connections = _connections(9)
    replies = ask_all(connections, ask, at_once=3)
    assert [reply.value for reply in replies] == [c.target for c in connections]
    assert [reply.target for reply in replies] == [c.target for c in connections]
    assert most == 3


def test_a_failure_is_its_own() -> None:
    """One worker's error stands in its own reply."""

    def ask(client: ControlClient) -> int:
        return 1 // (client.target != "127.0.0.1:2")

    replies = ask_all(_connections(3), ask)
    assert [reply.value for reply in replies] == [1, None, 1]
    assert isinstance(replies[1].error, ZeroDivisionError)


def test_interrupt_closes_every_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the waiting is interrupted, calls in flight end and those that have not begun find their client closed."""
    began = threading.Event()
    late: list[BaseException] = []

    def ask(client: ControlClient) -> None:
        began.set()
        while True:
            try:
                client.check(timeout_s=0.01)
            except ClientClosed as error:
                late.append(error)
                raise
            except Exception:  # noqa: BLE001  (nobody listens there)
                continue

    from concurrent.futures import ThreadPoolExecutor

    real = ThreadPoolExecutor.map

    def interrupted(self: ThreadPoolExecutor, *args: object) -> object:
        real(self, *args)  # type: ignore[arg-type]
        began.wait(10)
        raise KeyboardInterrupt

    monkeypatch.setattr(ThreadPoolExecutor, "map", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ask_all(_connections(3), ask)
    assert late
