"""Loopback ports held for one stack, from a range that no other pytest-xdist worker uses."""

from __future__ import annotations

import os
import random
import re
import socket
from contextlib import ExitStack

HOST = "127.0.0.1"

# Linux hands out ephemeral ports from 32768 on.  A frontend binds its ports only once the engines are ready; an
# ephemeral one could be taken meanwhile by any outgoing connection of the machine, even by the poll for that very port.
FIRST, WIDTH, RANGES = 15_000, 1_000, 17


def worker_range() -> range:
    """The ports of this xdist worker (or of a run without xdist)."""
    worker = re.fullmatch(r"gw(\d+)", os.environ.get("PYTEST_XDIST_WORKER", ""))
    index = (int(worker[1]) + 1) % RANGES if worker else 0
    return range(FIRST + index * WIDTH, FIRST + (index + 1) * WIDTH)


def _hold(port: int) -> ExitStack:
    """Keep ``port`` from others while a server that sets SO_REUSEADDR can still listen on it.

    Bound with that option and not listening, a socket lets a listener in beside it and refuses connections while there
    is none; it does not mind connections of an earlier test in TIME_WAIT.  It would let in a second holder as well, so
    a name among the abstract Unix sockets, which only one process can have, says whose the port is.
    """
    with ExitStack() as held:
        name = held.enter_context(socket.socket(socket.AF_UNIX))
        name.bind(f"\0vllm-cp-test-port-{port}")
        bound = held.enter_context(socket.socket())
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((HOST, port))
        return held.pop_all()


class Ports:
    """Ports that stay ours until ``release``, whether or not something listens on them."""

    def __init__(self) -> None:
        self._held = ExitStack()

    def take(self, count: int = 1) -> list[int]:
        """``count`` consecutive free ports (vLLM counts upwards from rank 0's)."""
        candidates = worker_range()
        starts = list(candidates[: len(candidates) - count + 1])
        random.shuffle(starts)
        for start in starts:
            run = list(range(start, start + count))
            with ExitStack() as attempt:
                try:
                    for port in run:
                        attempt.enter_context(_hold(port))
                except OSError:
                    continue
                self._held.push(attempt.pop_all())
                return run
        raise RuntimeError(f"no {count} free ports in a row between {candidates.start} and {candidates.stop}")

    def release(self) -> None:
        """Let the ports go."""
        self._held.close()

    def __enter__(self) -> Ports:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


def accepts(port: int) -> bool:
    """Whether something listens on ``port`` now."""
    try:
        socket.create_connection((HOST, port), timeout=1.0).close()
    except OSError:
        return False
    return True
