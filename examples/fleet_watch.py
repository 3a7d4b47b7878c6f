"""Follow a fleet that is written down in Prometheus file_sd files, and print what changes.

    python examples/fleet_watch.py '/etc/vllm-cp/targets.d/*.json'

Ends with Ctrl-C.
"""

from __future__ import annotations

import asyncio
import sys

from vllm_cp.discovery import FileDiscoverer
from vllm_cp.fleet import (
    AsyncFleet,
    FleetChange,
    HealthChanged,
    InstanceChanged,
    WorkerAdded,
    WorkerChanged,
    WorkerRemoved,
)


def sentence(change: FleetChange) -> str:
    """One change in words."""
    key = change.key
    if isinstance(change, WorkerAdded):
        return f"{key}: joined pool {change.target.pool} at {change.target.target}"
    if isinstance(change, WorkerChanged):
        return f"{key}: now at {change.target.target}"
    if isinstance(change, WorkerRemoved):
        return f"{key}: left"
    if isinstance(change, InstanceChanged):
        return f"{key}: another instance, {change.was} -> {change.now}"
    assert isinstance(change, HealthChanged)
    if change.now is None:
        return f"{key}: does not answer: {change.error or 'it ended the stream'}"
    return f"{key}: {change.now.value}"


async def main(files: list[str]) -> None:
    """Print changes for as long as there are any to come."""
    async with AsyncFleet(FileDiscoverer(files, poll_s=1.0)) as fleet:
        async for change in fleet.watch():
            print(sentence(change), flush=True)


if __name__ == "__main__":
    try:
        asyncio.run(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
