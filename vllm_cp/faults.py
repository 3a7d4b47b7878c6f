"""Fault tolerance and elastic scaling over HTTP, and the health of workers that have no gRPC.

    from vllm_cp import FaultTolerance, recover

    ranks = [FaultTolerance(f"http://llama-{n}:8000") for n in range(4)]
    for rank in recover(ranks, deadline_s=60):
        print(rank.target, rank.engine, rank.outcome.value, rank.error or "")

It needs the ``http`` extra: ``pip install "vllm-cp[http]"``. Source: the HTTP routes of vLLM's Python server started
with ``--enable-fault-tolerance``; ``health`` and the page that ``vllm_cp.engine_page`` reads are on the Rust frontend
too.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from vllm_cp import _faults
from vllm_cp._http import AsyncHttpClient, HttpClient
from vllm_cp._http_connection import HttpConnection
from vllm_cp._recovery import Recovery
from vllm_cp.errors import ControlError
from vllm_cp.models.fault_status import FaultStatus
from vllm_cp.models.health import HealthStatus
from vllm_cp.models.recovery import RankRecovery
from vllm_cp.models.scaling import ScalingState

__all__ = ["AsyncFaultTolerance", "FaultTolerance", "HttpConnection", "recover", "recover_async"]

_THREADS = 64
#: A look with less time than this says more about the clock than about the worker, seconds.
_LEAST = 0.1

R = TypeVar("R", bound=HttpClient | AsyncHttpClient)


class FaultTolerance(HttpClient):
    """One worker's HTTP server. Thread-safe; not usable in a forked child; close it, or use ``with``.

    Every call has a deadline (``timeout_s`` seconds, the connection's by default). Reads are asked again when the
    connection breaks, inside that deadline; ``apply`` never is. Failures are ``ControlError`` by meaning, see
    ``vllm_cp.errors``; NotAdmitting means that the worker is committing a change of size and refuses everything.
    """

    def status(self, *, timeout_s: float | None = None) -> FaultStatus:
        """The state of each engine behind this server.

        Raises NotSupported on a server without fault tolerance.
        Source: GET /fault_tolerance/status of the Python server, under /v1 in some versions."""
        return self.run(_faults.status(), timeout_s)

    def apply(
        self, instruction: str, params: Mapping[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> str | None:
        """Give the engines an instruction, ``retry`` or whatever this version knows; passed on as it is, never retried.

        Returns the server's id of it, ``None`` if it gives none, as soon as it is accepted: whether it worked shows in
        ``status()``, where ``last_request_id`` is that id and ``error`` says what went wrong. An instruction that all
        ranks carry out together is not carried out by any before every rank's server was told: use ``recover``.
        Raises InvalidArgument for an instruction or params that the server does not take.
        Source: POST /fault_tolerance/apply of the Python server, under /v1 in some versions."""
        return self.run(_faults.apply(instruction, params), timeout_s)

    def scaling(self, *, timeout_s: float | None = None) -> ScalingState:
        """Whether the worker is being scaled. Raises NotSupported where it can't be.

        Source: POST /is_scaling_elastic_ep of the Python server."""
        return self.run(_faults.scaling(), timeout_s)

    def health(self, *, timeout_s: float | None = None) -> HealthStatus:
        """SERVING or NOT_SERVING: the frontend's word about itself, no proof that an engine answers.

        Source: GET /health of both servers, 200 or 503."""
        return self.run(_faults.health(), timeout_s)


class AsyncFaultTolerance(AsyncHttpClient):
    """One worker's HTTP server for asyncio: the same names and signatures as ``FaultTolerance``.

    It may be made anywhere and used from several event loops, one after another or side by side: each loop gets its own
    connections. Not usable in a forked child. Close it, or use ``async with``.
    """

    async def status(self, *, timeout_s: float | None = None) -> FaultStatus:
        """The state of each engine behind this server.

        Raises NotSupported on a server without fault tolerance.
        Source: GET /fault_tolerance/status of the Python server, under /v1 in some versions."""
        return await self.run(_faults.status(), timeout_s)

    async def apply(
        self, instruction: str, params: Mapping[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> str | None:
        """Give the engines an instruction, ``retry`` or whatever this version knows; passed on as it is, never retried.

        Returns the server's id of it, ``None`` if it gives none, as soon as it is accepted: whether it worked shows in
        ``status()``, where ``last_request_id`` is that id and ``error`` says what went wrong. An instruction that all
        ranks carry out together is not carried out by any before every rank's server was told: use ``recover_async``.
        Raises InvalidArgument for an instruction or params that the server does not take.
        Source: POST /fault_tolerance/apply of the Python server, under /v1 in some versions."""
        return await self.run(_faults.apply(instruction, params), timeout_s)

    async def scaling(self, *, timeout_s: float | None = None) -> ScalingState:
        """Whether the worker is being scaled. Raises NotSupported where it can't be.

        Source: POST /is_scaling_elastic_ep of the Python server."""
        return await self.run(_faults.scaling(), timeout_s)

    async def health(self, *, timeout_s: float | None = None) -> HealthStatus:
        """SERVING or NOT_SERVING: the frontend's word about itself, no proof that an engine answers.

        Source: GET /health of both servers, 200 or 503."""
        return await self.run(_faults.health(), timeout_s)


def recover(
    ranks: Iterable[FaultTolerance],
    *,
    deadline_s: float = 120.0,
    poll_s: float = 1.0,
    instruction: str = "retry",
    params: Mapping[str, Any] | None = None,
) -> tuple[RankRecovery, ...]:
    """Bring the unhealthy ranks of one group back, and report on each; raises no ControlError.

    ``ranks`` are clients of *all* servers of the group: the instruction is carried out by none of them before every
    unhealthy one was told, so each is told as soon as it is seen unhealthy, without waiting for any other. Each is
    told once. A healthy rank is not told; it is watched meanwhile, and told if it falls ill too. Dead is dead.

    Looks every ``poll_s`` seconds until every rank is settled, at most for ``deadline_s`` seconds (vLLM's engines give
    up 120 s after they fell ill by default).
    """
    _faults.apply(instruction, params)  # what JSON can't say is found before anybody is asked
    clients = _unique(ranks)
    recovery = Recovery([client.target for client in clients])
    plan = _Pace(deadline_s, poll_s)
    lock = threading.Lock()

    def visit(number: int) -> None:
        client = clients[number]
        seen: FaultStatus | ControlError
        try:
            seen = client.status(timeout_s=plan.limit(client))
        except ControlError as error:
            seen = error
        with lock:
            recovery.looked(number, seen, time.monotonic())
            due = number in recovery.to_tell()
        if not due:
            return
        answer: str | ControlError | None
        try:
            answer = client.apply(instruction, params, timeout_s=plan.limit(client))
        except ControlError as error:
            answer = error
        with lock:
            recovery.told(number, answer, time.monotonic())

    with ThreadPoolExecutor(min(len(clients), _THREADS) or 1, thread_name_prefix="vllm-cp-recover") as pool:
        while True:
            list(pool.map(visit, recovery.to_look()))
            pause = None if recovery.done else plan.pause()
            if pause is None:
                return recovery.report()
            time.sleep(pause)


async def recover_async(
    ranks: Iterable[AsyncFaultTolerance],
    *,
    deadline_s: float = 120.0,
    poll_s: float = 1.0,
    instruction: str = "retry",
    params: Mapping[str, Any] | None = None,
) -> tuple[RankRecovery, ...]:
    """``recover`` for asyncio: the same arguments, the same report."""
    _faults.apply(instruction, params)  # what JSON can't say is found before anybody is asked
    clients = _unique(ranks)
    recovery = Recovery([client.target for client in clients])
    plan = _Pace(deadline_s, poll_s)

    async def visit(number: int) -> None:
        client = clients[number]
        seen: FaultStatus | ControlError
        try:
            seen = await client.status(timeout_s=plan.limit(client))
        except ControlError as error:
            seen = error
        recovery.looked(number, seen, time.monotonic())
        if number not in recovery.to_tell():
            return
        answer: str | ControlError | None
        try:
            answer = await client.apply(instruction, params, timeout_s=plan.limit(client))
        except ControlError as error:
            answer = error
        recovery.told(number, answer, time.monotonic())

    while True:
        await asyncio.gather(*(visit(number) for number in recovery.to_look()))
        pause = None if recovery.done else plan.pause()
        if pause is None:
            return recovery.report()
        await asyncio.sleep(pause)


class _Pace:
    """How long each step of a recovery may take."""

    def __init__(self, deadline_s: float, poll_s: float) -> None:
        for name, value in (("deadline_s", deadline_s), ("poll_s", poll_s)):
            if not 0 < value < float("inf"):
                raise ValueError(f"{name} must be a positive number of seconds, not {value}")
        self._until = time.monotonic() + deadline_s
        self._poll_s = poll_s
        self._least = min(_LEAST, deadline_s / 10)

    def limit(self, client: HttpClient | AsyncHttpClient) -> float:
        """Seconds that one call may take."""
        return max(self._least, min(client.connection.timeout_s, self._until - time.monotonic()))

    def pause(self) -> float | None:
        """Seconds until the next look; ``None``: there is no time for one."""
        left = self._until - time.monotonic() - self._least
        return None if left <= 0 else min(self._poll_s, left)


def _unique(ranks: Iterable[R]) -> Sequence[R]:
    """One client per server: the same server must not be told twice."""
    return list({client.target: client for client in reversed(list(ranks))}.values())[::-1]
