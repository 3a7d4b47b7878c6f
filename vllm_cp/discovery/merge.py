"""Several sources as one, and what changed between two sets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from vllm_cp.discovery._status import StatusKeeper
from vllm_cp.discovery.base import DiscoveredTarget, Discoverer, DiscoveryStatus, TargetSet
from vllm_cp.errors import ConfigError

__all__ = ["Changes", "Merged", "diff"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """From one set to the next."""

    added: tuple[DiscoveredTarget, ...] = ()
    #: Same key, anything else different: (as it was, as it is).
    changed: tuple[tuple[DiscoveredTarget, DiscoveredTarget], ...] = ()
    #: As they last were.
    removed: tuple[DiscoveredTarget, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.added or self.changed or self.removed)


def diff(old: TargetSet, new: TargetSet) -> Changes:
    """What changed from ``old`` to ``new``, by key."""
    before, after = old.by_key, new.by_key
    return Changes(
        added=tuple(target for key, target in after.items() if key not in before),
        changed=tuple(
            (before[key], target) for key, target in after.items() if key in before and before[key] != target
        ),
        removed=tuple(target for key, target in before.items() if key not in after),
    )


class Merged:
    """Several sources as one Discoverer.

    A key that more than one of them gives belongs to the first of them in the order given, and ``status`` says so. A
    set comes as soon as any source has one; ``synced`` tells whether all have.
    """

    def __init__(self, sources: Sequence[Discoverer], *, name: str = "merged") -> None:
        """Raises ConfigError when there is no source, or two have one name."""
        names = [source.name for source in sources]
        if not names or len(set(names)) != len(names):
            raise ConfigError(f"sources must be one or more, each with a name of its own, not {names}")
        self._sources = tuple(sources)
        self._name = name
        self._clash = StatusKeeper(name)
        self._latest: list[TargetSet | None] = [None] * len(names)

    @property
    def name(self) -> str:
        """What to call all of them together."""
        return self._name

    @property
    def statuses(self) -> dict[str, DiscoveryStatus]:
        """The status of each source by its name."""
        return {source.name: source.status for source in self._sources}

    @property
    def status(self) -> DiscoveryStatus:
        """All in one: the oldest of the last successes, ``None`` while any source has none, and every error."""
        statuses = self.statuses
        times = [status.last_success for status in statuses.values()]
        known = [at for at in times if at is not None]
        errors = [f"{name}: {status.error}" for name, status in statuses.items() if status.error]
        if self._clash.status.error:
            errors.append(self._clash.status.error)
        return DiscoveryStatus(
            last_success=min(known) if len(known) == len(times) else None, error="; ".join(errors) or None
        )

    @property
    def synced(self) -> bool:
        """Whether every source has brought a set."""
        return None not in self._latest

    async def stream(self) -> AsyncIterator[TargetSet]:
        """The merged set after each change of any source."""
        self._latest = [None] * len(self._sources)
        moved = asyncio.Event()
        readers = [asyncio.ensure_future(self._read(index, moved)) for index in range(len(self._sources))]
        waiting: asyncio.Future[Any] = asyncio.ensure_future(moved.wait())
        last: TargetSet | None = None
        try:
            while True:
                live = [reader for reader in readers if not reader.done()]
                await asyncio.wait([*live, waiting], return_when=asyncio.FIRST_COMPLETED)
                for reader in readers:
                    if reader.done():
                        reader.result()  # a source that ended keeps its last set; one that raised has a defect
                if not waiting.done():
                    continue
                moved.clear()
                waiting = asyncio.ensure_future(moved.wait())
                merged = self._merge()
                if merged != last:
                    last = merged
                    yield merged
        finally:
            tasks: list[asyncio.Future[Any]] = [*readers, waiting]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, index: int, moved: asyncio.Event) -> None:
        async with reading(self._sources[index]) as sets:
            async for targets in sets:
                self._latest[index] = targets
                moved.set()

    def _merge(self) -> TargetSet:
        merged, taken = TargetSet.of(target for part in self._latest if part for target in part.targets)
        if taken:
            self._clash.bad(f"{_some([target.key for target in taken])}: given by more than one source, first one used")
        else:
            self._clash.good()
        return merged


@asynccontextmanager
async def reading(source: Discoverer) -> AsyncIterator[AsyncIterator[TargetSet]]:
    """The stream of a source, closed at the end if it can be."""
    sets = source.stream()
    try:
        yield sets
    finally:
        close = getattr(sets, "aclose", None)
        if close is not None:
            await close()


def _some(keys: Sequence[str], most: int = 3) -> str:
    more = f" and {len(keys) - most} more" if len(keys) > most else ""
    return ", ".join(keys[:most]) + more
