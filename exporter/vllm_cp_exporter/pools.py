"""A pool as a JSON record: what an autoscaler may build on, and when it must not scale down."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from vllm_cp_exporter.collector import clean
from vllm_cp_exporter.demand import Demand, Demands
from vllm_cp_exporter.snapshot import POOL_STATES, WorkerView

__all__ = ["pool_record"]

#: Workers named in a reason.
_NAMED = 3


def pool_record(
    name: str, views: Sequence[WorkerView], min_ready: int | None, demands: Demands
) -> tuple[dict[str, Any], bool]:
    """The record, without what all answers have in front; and whether the demand is lost, so that it is no answer."""
    demand = demands.of(name, views)
    states = [view.pool_state for view in views]
    counts = {state: states.count(state) for state in POOL_STATES}
    observed = sum(view.state.rungs.reachable.holds is not None for view in views)
    ready = [view for view in views if view.state.ready]
    supply, sized = _supply(ready)
    why = _why_held(views, demand, min_ready, observed)
    starts = demands.startups(name)
    record = {
        "complete": observed == len(views) and sized == len(ready) and demand.complete and not demand.blind,
        "pool": clean(name),
        "workers": {"expected": len(views), "observed": observed, **counts},
        "min_ready": min_ready,
        "demand": {
            "running": demand.running,
            "waiting": demand.waiting,
            "kv_used_ratio": demand.kv_used_ratio,
            "covers": demand.covers,
            "age_s": demand.age_s,
            "held": demand.held,
        },
        "supply": supply,
        "startup_s": {"p50": _quantile(starts, 0.5), "p90": _quantile(starts, 0.9), "n": len(starts)},
        "hold": {"scale_down": bool(why), "why": "; ".join(why) or None},
        # None while scaling down is held: who overlooks the hold finds nobody to take.
        "victims": [] if why else _victims(ready),
    }
    return record, demand.lost


def _supply(ready: Sequence[WorkerView]) -> tuple[dict[str, Any], int]:
    """What the ready workers can take, and of how many of them it is known."""
    servers = [view.facts.server for view in ready if view.facts.server is not None]
    blocks = [server.total_kv_blocks for server in servers if server.total_kv_blocks is not None]
    running = []
    for server in servers:
        spread = server.parallelism
        # Per rank: without the number of ranks behind this frontend it is no number of the worker's.
        ranks = (spread.data_parallel_size_local or spread.data_parallel_size) if spread else None
        if server.max_running_requests is not None and ranks is not None:
            running.append(server.max_running_requests * ranks)
    some = len(ready) > 0
    record = {
        "kv_blocks_ready": sum(blocks) if blocks or not some else None,
        "max_running_ready": sum(running) if running or not some else None,
        "covers": len(blocks),
    }
    return record, min(len(blocks), len(running))


def _why_held(views: Sequence[WorkerView], demand: Demand, min_ready: int | None, observed: int) -> list[str]:
    why = []
    for state in ("faulted", "starting", "unknown"):
        if found := [view.key for view in views if view.pool_state == state]:
            why.append(f"{len(found)} {state}: {_some(found)}")
    if observed < len(views):
        why.append(f"{len(views) - observed} of {len(views)} not observed")
    if demand.missing:
        kind = "demand unknown" if demand.lost else "demand held"
        why.append(f"{kind}, no word from {_some(demand.missing)}")
    elif demand.running is None:
        why.append("demand unknown: no worker's /metrics is read")
    elif demand.blind:
        why.append(f"demand partly unknown, no HTTP URL of {_some(demand.blind)}")
    ready = sum(view.state.ready for view in views)
    if min_ready is not None and ready <= min_ready:
        why.append(f"{ready} ready, {min_ready} wanted")
    return why


def _some(keys: Sequence[str]) -> str:
    return ", ".join(map(clean, keys[:_NAMED])) + (", …" if len(keys) > _NAMED else "")


def _victims(ready: Sequence[WorkerView]) -> list[dict[str, Any]]:
    """Those that are missed least, first: fewest requests, then least in the cache. Who doesn't tell isn't offered."""
    known: list[tuple[tuple[float, float, str], dict[str, Any]]] = []
    for view in ready:
        page = view.metrics
        if page is None or page.running is None or page.waiting is None:
            continue
        used = page.kv_cache_usage_ratio
        order = (page.running + page.waiting, 1.0 if used is None else used, view.key)
        record = {"running": page.running, "waiting": page.waiting, "kv_used_ratio": used}
        known.append((order, {"worker": clean(view.key), **record}))
    return [record for _, record in sorted(known, key=lambda each: each[0])]


def _quantile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that so many are not above; ``None`` of nothing."""
    return round(values[max(0, math.ceil(share * len(values)) - 1)], 3) if values else None
