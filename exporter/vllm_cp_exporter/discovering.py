"""The sources being read: each by a task of its own, so that a new configuration disturbs none that stays the same."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from vllm_cp import ConfigError
from vllm_cp.discovery import DiscoveredTarget, Discoverer, TargetSet
from vllm_cp_exporter.sources import Source

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

__all__ = ["Discovering"]

log = logging.getLogger("vllm_cp_exporter.discovery")

#: After a source broke down, which is a defect.
_AGAIN_S = 5.0


@dataclass
class _Reading:
    source: Source
    discoverer: Discoverer
    #: Its newest set; at first that of the source it takes the place of, so that nobody vanishes in between.
    targets: TargetSet | None = None
    #: It brought a set of its own.
    synced: bool = False
    task: asyncio.Task[None] | None = None


class Discovering:
    """Reads sources until it is closed. ``changed`` is called after each new set."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._readings: dict[str, _Reading] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def use(self, sources: Iterable[Source]) -> None:
        """Read these from now on: one that is configured as before goes on, undisturbed.

        Raises ConfigError when one cannot be built; then nothing has changed."""
        old, readings = self._readings, {}
        for source in sources:
            known = old.get(source.name)
            if known is not None and known.source == source:
                readings[source.name] = known
                continue
            try:
                built = source.build()
            except ImportError as error:
                raise ConfigError(str(error)) from None
            readings[source.name] = _Reading(source, built, known.targets if known else None)
        self._readings = readings
        for reading in old.values():
            if readings.get(reading.source.name) is not reading:
                self._end(reading)
        for reading in readings.values():
            if reading.task is None:
                reading.task = asyncio.create_task(self._read(reading))

    @property
    def found(self) -> list[tuple[Source, tuple[DiscoveredTarget, ...]]]:
        """The newest targets of each source, in their order."""
        return [(one.source, one.targets.targets if one.targets else ()) for one in self._readings.values()]

    @property
    def successes(self) -> dict[str, float]:
        """Unix seconds of the last success of each source that had one."""
        times = {name: reading.discoverer.status.last_success for name, reading in self._readings.items()}
        return {name: at for name, at in times.items() if at is not None}

    def waiting(self) -> str | None:
        """Which source has brought no set yet, and why; ``None`` when all have."""
        for name, reading in self._readings.items():
            if not reading.synced:
                why = reading.discoverer.status.error
                return f"{name} has brought no targets yet" + (f": {why}" if why else "")
        return None

    def close(self) -> set[asyncio.Task[None]]:
        """Stop reading. Returns the tasks that are about to end."""
        for reading in self._readings.values():
            self._end(reading)
        return self._ending

    def _end(self, reading: _Reading) -> None:
        if reading.task is not None:
            reading.task.cancel()
            self._ending.add(reading.task)
            reading.task.add_done_callback(self._ending.discard)

    async def _read(self, reading: _Reading) -> None:
        while True:
            try:
                sets = cast("AsyncGenerator[TargetSet, None]", reading.discoverer.stream())
                async with aclosing(sets):
                    async for targets in sets:
                        reading.targets, reading.synced = targets, True
                        self._changed()
            except Exception:
                log.exception("source_failed", extra={"fields": {"source": reading.source.name}})
            await asyncio.sleep(_AGAIN_S)
