"""One call of the SDK against the raw stub with generated messages, sync and asyncio, in one run.

    python -m bench.calls [--quick] [--json FILE]

The worker is a fake in another process. Both sides keep a warm channel to it, give each call a deadline and decode the
answer; the SDK also builds its frozen models. Calls alternate, so that whatever else the machine does hits both alike.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

import bench
from bench import Figure
from vllm_cp import AsyncControlClient, ControlClient
from vllm_cp._proto import control_pb2, health_pb2
from vllm_cp.testing import FakeFleet

AT_MOST = 1.15
TIMEOUT_S = 30.0
#: By our name: path, request, and how the raw stub reads the answer.
CALLS: dict[str, tuple[str, Any, Callable[[bytes], Any]]] = {
    "check": (
        "/grpc.health.v1.Health/Check",
        health_pb2.HealthCheckRequest(),
        health_pb2.HealthCheckResponse.FromString,
    ),
    "is_paused": ("/vllm.Control/IsPaused", control_pb2.IsPausedRequest(), control_pb2.IsPausedResponse.FromString),
    "server_info": (
        "/vllm.Control/GetServerInfo",
        control_pb2.GetServerInfoRequest(),
        control_pb2.ServerInfo.FromString,
    ),
}


def stub(channel: Any, name: str) -> Callable[[], Any]:
    """The raw call."""
    path, request, read = CALLS[name]
    call = channel.unary_unary(path, request_serializer=type(request).SerializeToString, response_deserializer=read)
    return lambda: call(request, timeout=TIMEOUT_S)


def compared(name: str, colour: str, ours: list[float], raw: list[float]) -> list[Figure]:
    """The figures of one call in one colour."""
    mine, theirs = bench.median(ours), bench.median(raw)
    return [
        Figure(name=f"{name}, {colour}: raw stub p50", value=theirs * 1e6, unit="us"),
        Figure(name=f"{name}, {colour}: SDK p50", value=mine * 1e6, unit="us"),
        Figure(name=f"{name}, {colour}: SDK / raw", value=mine / theirs, unit="x", at_most=AT_MOST),
    ]


def sync(target: str, times: int) -> list[Figure]:
    """ControlClient."""
    found = []
    with ControlClient(target) as client, grpc.insecure_channel(target) as channel:
        for name in CALLS:
            ours, raw = getattr(client, name), stub(channel, name)
            spent: tuple[list[float], list[float]] = [], []
            for number in range(times + 50):
                for place, call in enumerate((ours, raw)):
                    began = time.perf_counter()
                    call()
                    if number >= 50:  # the first ones dial and warm up
                        spent[place].append(time.perf_counter() - began)
            found += compared(name, "sync", *spent)
    return found


async def aio(target: str, times: int) -> list[Figure]:
    """AsyncControlClient."""
    found = []
    async with AsyncControlClient(target) as client, grpc.aio.insecure_channel(target) as channel:
        for name in CALLS:
            ours: Callable[[], Awaitable[Any]] = getattr(client, name)
            raw = stub(channel, name)
            spent: tuple[list[float], list[float]] = [], []
            for number in range(times + 50):
                for place, call in enumerate((ours, raw)):
                    began = time.perf_counter()
                    await call()
                    if number >= 50:
                        spent[place].append(time.perf_counter() - began)
            found += compared(name, "asyncio", *spent)
    return found


def figures(quick: bool) -> list[Figure]:
    """Both colours."""
    times = 200 if quick else 3000
    with FakeFleet(1) as fleet:
        return [*sync(fleet.targets[0], times), *asyncio.run(aio(fleet.targets[0], times))]


if __name__ == "__main__":
    sys.exit(bench.program(__doc__, figures))
