"""What the daemon counts about itself. Plain numbers, written on the event loop; a page reads a frozen copy.

They are not the library's own counters: those take a lock at each read, carry ``_created`` series that only a
process-wide switch turns off, and would have to be registered somewhere. Here two daemons in one process share nothing.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from types import MappingProxyType

from vllm_cp import RpcRecord
from vllm_cp.models.episode import EndKind

__all__ = ["RECOVERY_BOUNDS", "RECOVERY_KINDS", "RPC_BOUNDS", "Buckets", "Own", "SelfMetrics"]

#: Seconds. A round trip to a busy engine may take a minute, and that is worth seeing.
RPC_BOUNDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0)
#: Seconds.
RECOVERY_BOUNDS = (1.0, 5.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0)
#: The ends that have a duration worth a histogram: a removed target recovered in no time, a planned stop was no fault.
RECOVERY_KINDS = (EndKind.RESUMED, EndKind.REPLACED, EndKind.RETRIED)


@dataclass(frozen=True, slots=True)
class Buckets:
    """A histogram at one moment."""

    #: Upper bounds, without the infinite one.
    bounds: tuple[float, ...]
    #: Observations up to each bound, cumulative; the last is all of them.
    counts: tuple[int, ...]
    sum: float

    @classmethod
    def empty(cls, bounds: tuple[float, ...]) -> Buckets:
        """No observation yet."""
        return cls(bounds, (0,) * (len(bounds) + 1), 0.0)


class _Histogram:
    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        if math.isnan(value):
            return
        value = max(0.0, value)
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def frozen(self) -> Buckets:
        return Buckets(self._bounds, tuple(accumulate(self._counts)), self._sum)


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """The daemon's own numbers at one moment."""

    rpc_durations: Mapping[str, Buckets] = field(default_factory=lambda: MappingProxyType({}))
    #: By method and status.
    rpc_failures: Mapping[tuple[str, str], int] = field(default_factory=lambda: MappingProxyType({}))
    #: By pool and kind.
    recoveries: Mapping[tuple[str, EndKind], Buckets] = field(default_factory=lambda: MappingProxyType({}))
    #: Unix seconds, by source.
    discovered: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    #: Unix seconds; ``None`` while nothing is watched.
    oldest_tick: float | None = None
    reload_ok: bool = True
    #: ``None`` where no state file is configured.
    state_file_ok: bool | None = None
    insecure_ports: int = 0
    #: Page guard hits, by row.
    row_errors: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))


class SelfMetrics:
    """Where the daemon's parts report to. Used on the event loop only."""

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._rpc_durations: dict[str, _Histogram] = {}
        self._rpc_failures: Counter[tuple[str, str]] = Counter()
        self._recoveries: dict[tuple[str, EndKind], _Histogram] = {}
        self._discovered: dict[str, float | None] = {}
        self._sources: Callable[[], Mapping[str, float]] = dict
        self._ticks: Callable[[], Iterable[float]] = tuple
        self._reload_ok = True
        self._state_file_ok: Callable[[], bool] | None = None
        self._insecure_ports = 0
        self._row_errors: Counter[str] = Counter()

    def rpc(self, record: RpcRecord) -> None:
        """One attempt of one call ended. Made to be a client's ``on_rpc``."""
        self._rpc_durations.setdefault(record.method, _Histogram(RPC_BOUNDS)).observe(record.elapsed_s)
        if record.code != "OK":
            self._rpc_failures[record.method, record.code] += 1

    def recovered(self, pool: str, kind: EndKind, seconds: float) -> None:
        """A fault ended. Kinds that have no recovery time are left out."""
        if kind in RECOVERY_KINDS:
            self._recoveries.setdefault((pool, kind), _Histogram(RECOVERY_BOUNDS)).observe(seconds)

    def discovered(self, source: str, at: float | None) -> None:
        """A source of targets answered at ``at``, Unix seconds; ``None`` for a fixed list, always up to date."""
        self._discovered[source] = at

    def fixed(self, sources: Iterable[str]) -> None:
        """These are the fixed lists of targets, from now on."""
        self._discovered = dict.fromkeys(sources)

    def discovering(self, successes: Callable[[], Mapping[str, float]]) -> None:
        """How to read, at the moment of a scrape, when each source last answered, Unix seconds."""
        self._sources = successes

    def watched(self, ticks: Callable[[], Iterable[float]]) -> None:
        """How to read each watcher's last sign of life, Unix seconds, at the moment of a scrape."""
        self._ticks = ticks

    def reloaded(self, ok: bool) -> None:
        """The configuration was read again, and taken over or refused."""
        self._reload_ok = ok

    def state_file(self, ok: Callable[[], bool]) -> None:
        """There is a state file; ``ok`` says at the moment of a scrape whether it does its work."""
        self._state_file_ok = ok

    def insecure_ports(self, count: int) -> None:
        """How many workers are asked in plaintext across a network."""
        self._insecure_ports = count

    def row_errors(self, errors: Mapping[str, int]) -> None:
        """A page left out samples, by row."""
        self._row_errors.update(errors)

    def freeze(self) -> Own:
        """All of it at this moment, for a page to be made elsewhere."""
        now = self._clock()
        return Own(
            rpc_durations=MappingProxyType({key: value.frozen() for key, value in self._rpc_durations.items()}),
            rpc_failures=MappingProxyType(dict(self._rpc_failures)),
            recoveries=MappingProxyType({key: value.frozen() for key, value in self._recoveries.items()}),
            discovered=MappingProxyType(
                {key: now if at is None else at for key, at in self._discovered.items()} | dict(self._sources())
            ),
            oldest_tick=min(self._ticks(), default=None),
            reload_ok=self._reload_ok,
            state_file_ok=None if self._state_file_ok is None else self._state_file_ok(),
            insecure_ports=self._insecure_ports,
            row_errors=MappingProxyType(dict(self._row_errors)),
        )
