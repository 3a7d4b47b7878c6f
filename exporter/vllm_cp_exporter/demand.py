"""What a pool is asked for, joined from its workers' own /metrics, and what it was asked for when that was last known.

A worker that falls over takes its queue out of every sum, just when its load moves to the others: an autoscaler that
reads the sum scales down in an outage. So a sum that lacks a worker is never shown as it is.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from vllm_cp_exporter.snapshot import Snapshot, WorkerView

__all__ = ["FLOOR_S", "Demand", "Demands"]

#: How long the last complete demand stands in for one that is not.
FLOOR_S = 600.0
#: Starts of which the lead time is kept, per pool.
_STARTS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Requests and cache use of one pool. ``None`` is unknown."""

    running: float | None = None
    waiting: float | None = None
    #: Mean over the workers, weighted by their KV blocks where all of them tell.
    kv_used_ratio: float | None = None
    #: Workers in the sums.
    covers: int = 0
    #: Age of the oldest page in the sums, seconds.
    age_s: float | None = None
    #: Nobody is missing that could tell.
    complete: bool = False
    #: The last complete demand, or more where more is seen.
    held: bool = False
    #: Workers that ought to be in the sums and are not.
    missing: tuple[str, ...] = ()
    #: Workers whose /metrics is not known: what they are asked for is in no sum, ever.
    blind: tuple[str, ...] = ()
    #: Somebody is missing, and what was last known is too old to stand in.
    lost: bool = False


class Demands:
    """Remembers. ``tick`` it every few seconds on the event loop; any thread may read."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._wall = wall
        self._complete: dict[str, tuple[float, Demand]] = {}
        self._starts: dict[str, deque[float]] = {}
        #: The start of each worker that was noted last.
        self._noted: dict[str, float] = {}

    def tick(self, snapshot: Snapshot) -> None:
        """Note what is known now; forget pools that are gone."""
        pools = snapshot.pools()
        for name, views in pools.items():
            demand = _sum(views, self._wall())
            if demand.complete:
                self._complete[name] = (self._clock(), demand)
            self._note_starts(name, views)
        self._complete = {name: known for name, known in self._complete.items() if name in pools}
        self._starts = {name: known for name, known in self._starts.items() if name in pools}
        self._noted = {key: began for key, began in self._noted.items() if key in snapshot.workers}

    def of(self, pool: str, views: Sequence[WorkerView]) -> Demand:
        """The demand of a pool, by its workers as they are now."""
        now = _sum(views, self._wall())
        if now.complete:
            return now
        since, last = self._complete.get(pool, (-math.inf, None))
        age = self._clock() - since
        if last is not None and age <= FLOOR_S:
            return replace(
                last,
                running=_most(now.running, last.running),
                waiting=_most(now.waiting, last.waiting),
                kv_used_ratio=_most(now.kv_used_ratio, last.kv_used_ratio),
                covers=now.covers,
                age_s=round(age + (last.age_s or 0.0), 3),
                complete=False,
                held=True,
                missing=now.missing,
                blind=now.blind,
            )
        # A sum that somebody is missing from is no demand, and a floor that ran out is none either.
        return Demand(missing=now.missing, blind=now.blind, lost=bool(now.missing))

    def startups(self, pool: str) -> list[float]:
        """Seconds from the beginning of a start to SERVING, of the last starts that were seen, shortest first."""
        return sorted(self._starts.get(pool, ()))

    def _note_starts(self, pool: str, views: Iterable[WorkerView]) -> None:
        for view in views:
            began, took = view.state.startup.began, view.state.startup.phases().get("to_serving")
            if began is not None and took is not None and self._noted.get(view.key) != began:
                self._noted[view.key] = began
                self._starts.setdefault(pool, deque(maxlen=_STARTS)).append(took)


def _sum(views: Sequence[WorkerView], wall: float) -> Demand:
    reporting = [view for view in views if view.http_url]
    # One that never was ready has no queue yet, and one that drains gets nothing new. The page of one that fell over
    # is no evidence: a server may well count no requests because it lost them.
    owing = [view for view in reporting if view.pool_state not in ("starting", "draining")]
    telling = [view for view in reporting if _tells(view)]
    missing = tuple(view.key for view in owing if not _tells(view))
    blind = tuple(view.key for view in views if not view.http_url)
    if not telling:
        return Demand(missing=missing, blind=blind)
    ages = [wall - view.proofs["engine_metrics"] for view in telling if "engine_metrics" in view.proofs]
    pages = [view.metrics for view in telling if view.metrics is not None]
    return Demand(
        running=math.fsum(page.running or 0.0 for page in pages),
        waiting=math.fsum(page.waiting or 0.0 for page in pages),
        kv_used_ratio=_used(telling),
        covers=len(telling),
        age_s=round(max(0.0, *ages), 3) if ages else None,
        complete=not missing,
        missing=missing,
        blind=blind,
    )


def _tells(view: WorkerView) -> bool:
    page = view.metrics
    told = page is not None and page.running is not None and page.waiting is not None
    return told and view.state.open_fault is None


def _used(views: Sequence[WorkerView]) -> float | None:
    used = []
    for view in views:
        ratio = view.metrics.kv_cache_usage_ratio if view.metrics else None
        blocks = view.facts.server.total_kv_blocks if view.facts.server else None
        if ratio is None:
            return None
        used.append((ratio, blocks))
    weights = [float(blocks) if blocks else 0.0 for _, blocks in used]
    if not all(weights):
        weights = [1.0] * len(used)
    return math.fsum(ratio * weight for (ratio, _), weight in zip(used, weights, strict=True)) / math.fsum(weights)


def _most(one: float | None, other: float | None) -> float | None:
    known = [value for value in (one, other) if value is not None]
    return max(known) if known else None
