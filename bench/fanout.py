"""Fan-out over many workers against raw ``asyncio.gather`` over stub calls, in one run.

    python bench/fanout.py [--workers 200] [--rounds 50] [--json FILE]

The workers are fakes in a second process. Both sides ask every worker for GetServerInfo over a warm channel of its own
and decode the answer; rounds alternate, so that whatever else the machine does hits both alike. ``all at once`` lets
the fleet ask as many at once as gather does; ``64 at once`` is its default bound.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc.aio

from vllm_cp import AsyncControlClient
from vllm_cp._proto import control_pb2
from vllm_cp.fleet import AsyncFleet
from vllm_cp.testing import FakeFleet

TARGET_RATIO = 1.25
TIMEOUT_S = 30.0


async def measure(workers: int, rounds: int) -> dict[str, float]:
    """Seconds per fan-out, the median of the rounds, by contestant; and the fleet's median ratios to raw gather."""
    async with FakeFleet(workers) as fakes, AsyncFleet(fakes.targets) as fleet:
        channels = [grpc.aio.insecure_channel(target) for target in fakes.targets]
        stubs = [
            channel.unary_unary(
                "/vllm.Control/GetServerInfo",
                request_serializer=control_pb2.GetServerInfoRequest.SerializeToString,
                response_deserializer=control_pb2.ServerInfo.FromString,
            )
            for channel in channels
        ]

        async def ask(worker: AsyncControlClient) -> object:
            return await worker.server_info(timeout_s=TIMEOUT_S)

        async def raw() -> None:
            request = control_pb2.GetServerInfoRequest()
            await asyncio.gather(*(stub(request, timeout=TIMEOUT_S) for stub in stubs))

        async def all_at_once() -> None:
            check(await fleet.map(ask, at_once=workers))

        async def bounded() -> None:
            check(await fleet.map(ask))

        def check(outcomes: list) -> None:  # type: ignore[type-arg]
            if bad := [one.error for one in outcomes if not one.ok]:
                raise RuntimeError(f"{len(bad)} of {workers} workers failed: {bad[0]}")

        contestants: dict[str, Callable[[], Awaitable[None]]] = {
            "raw gather": raw,
            "fleet, all at once": all_at_once,
            "fleet, 64 at once": bounded,
        }
        seconds: dict[str, list[float]] = {name: [] for name in contestants}
        for number in range(rounds + 3):
            for name, contestant in contestants.items():
                gc.collect()
                began = time.perf_counter()
                await contestant()
                if number >= 3:  # the first rounds dial
                    seconds[name].append(time.perf_counter() - began)
        for channel in channels:
            await channel.close(None)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    # Round by round: what slows the machine for a while slows both sides of one ratio.
    ratios = {
        f"{name} / raw": statistics.median(mine / raw for mine, raw in zip(times, seconds["raw gather"], strict=True))
        for name, times in list(seconds.items())[1:]
    }
    return {**medians, **ratios}


def main() -> int:
    """Measure, print a table, perhaps write JSON. 1 when the default bound misses its target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    figures = asyncio.run(measure(args.workers, args.rounds))
    for name, value in figures.items():
        sys.stdout.write(f"{name:28} {value:8.3f}\n" if "/" in name else f"{name:28} {value * 1000:8.2f} ms\n")
    if args.json:
        args.json.write_text(json.dumps({"workers": args.workers, "rounds": args.rounds, **figures}, indent=2) + "\n")
    return int(figures["fleet, 64 at once / raw"] > TARGET_RATIO)


if __name__ == "__main__":
    sys.exit(main())
