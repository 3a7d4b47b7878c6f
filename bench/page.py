"""The page: kept lines against prometheus_client's ``generate_latest`` over the same collector, in one run.

    python -m bench.page [--quick] [--json FILE]

The workers live real lives: their states are stepped through observations, as the daemon does it. "Nothing changed" is
a second page of the same snapshot; "all moved" is a page after another look at every worker, which moves each of their
time stamps and round trips. Ratios are of CPU time, which neighbours on the machine disturb least.
"""

from __future__ import annotations

import gc
import gzip
import sys
from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

import bench
from bench import Figure
from vllm_cp import HealthStatus, KvEventSource, ModelInfo, Parallelism, RlCapabilities, ServerInfo
from vllm_cp.observer import Clock, Observer
from vllm_cp_exporter.collector import PageCollector
from vllm_cp_exporter.exposition import Exposition
from vllm_cp_exporter.negotiate import OPENMETRICS, TEXT, Form
from vllm_cp_exporter.selfmetrics import SelfMetrics
from vllm_cp_exporter.snapshot import Facts, Snapshot, WorkerView

LIBRARY: dict[Form, Callable[[Any], bytes]] = {TEXT: generate_latest, OPENMETRICS: generate_openmetrics}
NAMES = {TEXT: "text", OPENMETRICS: "OpenMetrics"}


class Time:
    """A clock that is moved by hand."""

    now = 1000.0

    def clock(self) -> Clock:
        return Clock(monotonic=lambda: self.now, wall=lambda: 1_700_000_000.123456 + self.now)


class Worker:
    """One worker's life."""

    def __init__(self, number: int, time: Time) -> None:
        self._time = time
        self._observer = Observer(clock=time.clock())
        pod = f"llama-70b-decode-{number}"
        server = ServerInfo(
            engine_version="0.33.0",
            api_version="vllm",
            instance_id=f"{number * 2654435761 % 2**64:016x}",
            parallelism=Parallelism(
                tensor_parallel_size=8, pipeline_parallel_size=1, data_parallel_size=1, world_size=8
            ),
            max_model_len=131072,
            kv_block_size=16,
            total_kv_blocks=40000 + number % 7,
            max_running_requests=256,
            max_batched_tokens=8192,
            max_loras=4,
            rl_capabilities=RlCapabilities(sleep_mode_enabled=True),
            proto_version="0.6.0",
            effective_attention_block_size=16,
        )
        self.look()
        self._observer.server_info(server)
        self._view = WorkerView(
            key=f"ml-prod/{pod}",
            pool=f"pool-{number // 100}",
            target=f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}:8001",
            namespace="ml-prod",
            pod=pod,
            node=f"node-{number // 8}",
            facts=Facts(
                server=server,
                model=ModelInfo(model_id="/models/llama-70b", served_model_name="llama-70b"),
                sources=(KvEventSource(transport="zmq"),),
            ),
            state=self._observer.state,
        )

    def look(self) -> None:
        """Ask it again, and find it well."""
        seen = self._observer
        seen.health(HealthStatus.SERVING)
        seen.asked()
        began = self._time.now
        self._time.now += 0.0013
        seen.round_trip(False, began=began)

    @property
    def view(self) -> WorkerView:
        """It now. What a look does not bring is the same as before, as in the daemon."""
        seen = self._observer
        proofs = MappingProxyType(dict(seen.proofs))
        self._view = replace(self._view, state=seen.state, proofs=proofs, round_trip_s=seen.round_trip_s)
        return self._view


class Best:
    """The shortest of several runs, in seconds."""

    wall = cpu = float("inf")

    def take(self, work: Callable[[], Any]) -> None:
        """Run it once more."""
        wall, cpu = bench.best(work, 1)
        self.wall, self.cpu = min(self.wall, wall), min(self.cpu, cpu)


class Fleet:
    """Many of them."""

    def __init__(self, size: int) -> None:
        time = Time()
        self._workers = [Worker(number, time) for number in range(size)]

    def snapshot(self) -> Snapshot:
        return Snapshot(workers=MappingProxyType({view.key: view for view in (each.view for each in self._workers)}))

    def look(self) -> Snapshot:
        """Another look at every worker."""
        for worker in self._workers:
            worker.look()
        return self.snapshot()


def pages(fleet: Fleet, size: int, form: Form, times: int) -> list[Figure]:
    """One size in one form."""
    exposition, own = Exposition(), SelfMetrics().freeze()
    before = bench.resident_bytes()
    shot = fleet.snapshot()

    def page() -> bytes:
        return exposition.render(PageCollector(shot, own), form)

    def theirs() -> bytes:
        return LIBRARY[form](PageCollector(shot, own))

    first, _ = bench.best(page, 1)
    kept = bench.resident_bytes() - before
    same, moved, library = Best(), Best(), Best()
    for turn in range(times):
        # In turns, so that whatever else the machine does hits all of them alike.
        shot = fleet.look()
        gc.collect()
        moved.take(page)
        same.take(page)
        if size <= 1000 or turn == 0:
            library.take(theirs)
    if page() != theirs():
        raise RuntimeError("the pages differ")
    body = page()
    packed, _ = bench.best(lambda: gzip.compress(body, compresslevel=4, mtime=0), 2)
    what = f"{size} workers, {NAMES[form]}:"
    promised = 50 if size == 1000 else None
    return [
        Figure(name=f"{what} size", value=len(body) / 1e6, unit="MB"),
        Figure(name=f"{what} library", value=library.wall * 1000, unit="ms"),
        Figure(name=f"{what} nothing changed", value=same.wall * 1000, unit="ms"),
        Figure(name=f"{what} all moved", value=moved.wall * 1000, unit="ms", at_most=150 if size == 10_000 else None),
        Figure(name=f"{what} all moved, CPU", value=moved.cpu * 1000, unit="ms"),
        Figure(name=f"{what} library / nothing changed", value=library.cpu / same.cpu, unit="x", at_least=promised),
        Figure(name=f"{what} library / all moved", value=library.cpu / moved.cpu, unit="x", at_least=promised),
        Figure(name=f"{what} the first page", value=first * 1000, unit="ms"),
        Figure(name=f"{what} kept, per worker", value=kept / size / 1000, unit="kB"),
        Figure(name=f"{what} gzip on top", value=packed * 1000, unit="ms"),
    ]


def figures(quick: bool) -> list[Figure]:
    """All sizes, both forms."""
    found = []
    for size in (100, 1000) if quick else (100, 1000, 10_000):
        fleet = Fleet(size)
        for form in LIBRARY:
            found += pages(fleet, size, form, 2 if quick else 7)
    return found


if __name__ == "__main__":
    sys.exit(bench.program(__doc__, figures))
