"""What watching costs: memory and CPU of the daemon per watched worker, while nothing happens.

    python -m bench.watching [--quick] [--json FILE]

The workers are fakes in another process, the intervals are the defaults: every 5 s a Check and a round trip to the
engines of each worker, a health stream all the time, facts every minute. Beside it, the same questions at the same pace
over raw stubs: what is left when there is no daemon around them.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import time
from contextlib import AsyncExitStack

import grpc.aio

import bench
from bench import Figure
from vllm_cp import AsyncControlClient, Connection
from vllm_cp._proto import control_pb2, health_pb2
from vllm_cp.testing import FakeFleet
from vllm_cp_exporter.config import ExporterConfig, Listen, WorkerConfig
from vllm_cp_exporter.daemon import Daemon
from vllm_cp_exporter.listen import bind

INTERVAL_S = ExporterConfig().probe_interval_s


async def idle(seconds: float) -> float:
    """The share of one core that this process uses meanwhile."""
    cpu, wall = time.process_time(), time.monotonic()
    await asyncio.sleep(seconds)
    return (time.process_time() - cpu) / (time.monotonic() - wall)


async def warmed_up(target: str) -> int:
    """Memory once everything is imported and has run once."""
    async with AsyncControlClient(target) as client:
        await client.check()
        await client.is_paused()
    gc.collect()
    return bench.resident_bytes()


async def watched(targets: list[str], seconds: float) -> tuple[float, float]:
    """Memory of the daemon in bytes, and its share of a core."""
    before = await warmed_up(targets[0])
    workers = tuple(WorkerConfig(key=target, connection=Connection(target=target)) for target in targets)
    settings = ExporterConfig(workers=workers)
    async with Daemon(settings, bind(Listen("127.0.0.1", 0))) as daemon:
        # Until all are known, and the first round with its reading of facts is over.
        while any(not view.state.ready for view in daemon.board.snapshot.workers.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.2)
        await asyncio.sleep(2 * INTERVAL_S)
        used = await idle(seconds)
        missing = [view.key for view in daemon.board.snapshot.workers.values() if not view.state.ready]
        if missing:
            raise RuntimeError(f"{len(missing)} workers are not ready at the end: {missing[:3]}")
        gc.collect()
        return bench.resident_bytes() - before, used


async def raw(targets: list[str], seconds: float) -> tuple[float, float]:
    """The same of raw stubs, with one loop per worker that asks what the daemon asks."""
    before = await warmed_up(targets[0])

    async def ask(target: str, late: float) -> None:
        async with grpc.aio.insecure_channel(target, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            watch = channel.unary_stream(
                "/grpc.health.v1.Health/Watch",
                request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
                response_deserializer=health_pb2.HealthCheckResponse.FromString,
            )(health_pb2.HealthCheckRequest())
            check = channel.unary_unary(
                "/grpc.health.v1.Health/Check",
                request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
                response_deserializer=health_pb2.HealthCheckResponse.FromString,
            )
            paused = channel.unary_unary(
                "/vllm.Control/IsPaused",
                request_serializer=control_pb2.IsPausedRequest.SerializeToString,
                response_deserializer=control_pb2.IsPausedResponse.FromString,
            )
            await asyncio.sleep(late)
            await watch.read()
            while True:
                await check(health_pb2.HealthCheckRequest(), timeout=INTERVAL_S)
                await paused(control_pb2.IsPausedRequest(), timeout=INTERVAL_S)
                await asyncio.sleep(INTERVAL_S)

    async with AsyncExitStack() as stack:
        tasks = [asyncio.create_task(ask(each, at * INTERVAL_S / len(targets))) for at, each in enumerate(targets)]
        stack.callback(lambda: [task.cancel() for task in tasks])
        await asyncio.sleep(3 * INTERVAL_S)
        used = await idle(seconds)
        gc.collect()
        kept = bench.resident_bytes() - before
    await asyncio.gather(*tasks, return_exceptions=True)
    return kept, used


def figures(quick: bool) -> list[Figure]:
    """A fleet of a thousand, or of a hundred."""
    size, seconds = (100, 10.0) if quick else (1000, 60.0)
    logging.disable(logging.CRITICAL)
    with FakeFleet(size) as fleet:
        targets = fleet.targets
        ours, used = asyncio.run(watched(targets, seconds))
        theirs, spent = asyncio.run(raw(targets, seconds))
    return [
        Figure(name=f"{size} workers: memory per worker", value=ours / size / 1000, unit="kB", at_most=100),
        Figure(name=f"{size} workers: memory per raw channel", value=theirs / size / 1000, unit="kB"),
        Figure(name=f"{size} workers: share of one core", value=used * 100, unit="%", at_most=15 * size / 1000),
        Figure(name=f"{size} workers: share of one core, raw stubs", value=spent * 100, unit="%"),
        Figure(name=f"{size} workers: CPU, daemon / raw stubs", value=used / spent, unit="x"),
    ]


if __name__ == "__main__":
    sys.exit(bench.program(__doc__, figures))
