"""Many workers at once: ``Fleet`` for threads, ``AsyncFleet`` for asyncio.

::

    with Fleet(["llama-0:8001", "llama-1:8001"]) as fleet:
        for worker in fleet.snapshot(deadline_s=2):
            print(worker.key, worker.health, worker.server and worker.server.total_kv_blocks)

Every question has one answer per worker, a value or an error, see ``Outcome``; one silent worker neither hides the
others nor delays them beyond the deadline. Where the workers come from is the business of ``vllm_cp.discovery``.
"""

from __future__ import annotations

from vllm_cp._fleet.aio import AsyncFleet
from vllm_cp._fleet.changes import (
    FleetChange,
    HealthChanged,
    InstanceChanged,
    WorkerAdded,
    WorkerChanged,
    WorkerRemoved,
)
from vllm_cp._fleet.snapshot import FleetSnapshot, WorkerSnapshot
from vllm_cp._fleet.threads import Fleet
from vllm_cp.models.outcome import Outcome

__all__ = [
    "AsyncFleet",
    "Fleet",
    "FleetChange",
    "FleetSnapshot",
    "HealthChanged",
    "InstanceChanged",
    "Outcome",
    "WorkerAdded",
    "WorkerChanged",
    "WorkerRemoved",
    "WorkerSnapshot",
]
