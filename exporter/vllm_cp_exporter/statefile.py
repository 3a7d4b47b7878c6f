"""What outlives the daemon: open faults, the last episodes, instances, first-ready times. Never a counter.

A restored counter would read as a reset and invent increases. The file is small JSON, replaced atomically; one that
cannot be read is set aside with one warning, and one that cannot be written is a metric, not an outage.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_cp.episodes import Memory, remember
from vllm_cp.files import MEBIBYTE, read_file
from vllm_cp.models.episode import Cause, EndKind, Episode
from vllm_cp_exporter.snapshot import Snapshot

__all__ = ["Remembered", "StateFile"]

log = logging.getLogger("vllm_cp_exporter.statefile")

_FORMAT = "vllm-cp-exporter-state"
_VERSION = 1
#: Characters of what is kept of what was said.
_LONGEST_DETAIL = 500
#: Unix seconds; the year 2286.
_LATEST = 1e10


@dataclass(frozen=True, slots=True, kw_only=True)
class Remembered:
    """What is kept of one worker."""

    memory: Memory = field(default_factory=Memory)
    #: Its last episodes that are over, oldest first.
    episodes: tuple[Episode, ...] = ()


class StateFile:
    """The file, and whether it does its work."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written = b""
        # The last save of all may come while one is still under way in its thread.
        self._one_at_a_time = threading.Lock()
        #: Workers that were not discovered yet since the start. They stay in the file until it is sure who is there.
        self._unclaimed: dict[str, Remembered] = {}
        #: Whether the last reading and the last writing succeeded; told as ``state_file_ok``.
        self.ok = True

    def start(self) -> None:
        """Load the file, and hold what is in it for ``claim``."""
        self._unclaimed = self.load()

    def claim(self, key: str) -> Remembered | None:
        """What was kept of a worker that has been discovered; ``None`` the second time."""
        return self._unclaimed.pop(key, None)

    def forget_unclaimed(self) -> None:
        """Everybody who is there was discovered: the others are gone."""
        self._unclaimed.clear()

    def load(self) -> dict[str, Remembered]:
        """What was kept, by worker key. Empty for a first start, and for a file that had to be set aside."""
        try:
            return _workers(json.loads(read_file(self._path, limit=64 * MEBIBYTE)))
        except FileNotFoundError:
            return {}
        except OSError as error:
            self.ok = False
            log.warning("cannot read the state file; starting without it", extra=_fields(self._path, error.strerror))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            aside = self._path.with_name(f"{self._path.name}.unreadable-{int(time.time())}")
            with contextlib.suppress(OSError):
                self._path.replace(aside)
            log.warning("the state file was not ours or damaged; it is set aside", extra=_fields(aside, str(error)))
        return {}

    def save(self, snapshot: Snapshot) -> None:
        """Write what is worth keeping. Does nothing when nothing changed; never raises."""
        with self._one_at_a_time:
            self._save(snapshot)

    def _save(self, snapshot: Snapshot) -> None:
        document = _document(snapshot)
        kept = {key: _kept(one.memory, one.episodes) for key, one in tuple(self._unclaimed.items())}
        document["workers"] = kept | document["workers"]
        data = json.dumps(document, indent=1).encode()
        if data == self._written and self.ok:
            return
        try:
            _replace(self._path, data)
        except OSError as error:
            if self.ok:
                log.warning("cannot write the state file; going on without", extra=_fields(self._path, error.strerror))
            self.ok = False
            return
        self._written = data
        self.ok = True

    async def keep(self, read: Callable[[], Snapshot], every_s: float = 1.0) -> None:
        """Save on a timer until cancelled, and once more then."""
        try:
            while True:
                await asyncio.sleep(every_s)
                await asyncio.to_thread(self.save, read())
        finally:
            self.save(read())


def _replace(path: Path, data: bytes) -> None:
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with scratch.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
    # The rename itself is only safe once the directory is.
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _fields(path: Path, error: str | None) -> dict[str, Any]:
    return {"fields": {"path": str(path), "error": error or ""}}


def _document(snapshot: Snapshot) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "version": _VERSION,
        "workers": {key: _kept(remember(view.state), view.episodes) for key, view in snapshot.workers.items()},
    }


def _kept(memory: Memory, episodes: tuple[Episode, ...]) -> dict[str, Any]:
    return {
        "instance_id": memory.instance_id,
        "first_ready": memory.first_ready,
        "was_admitting": memory.was_admitting,
        "open_fault": _episode(memory.open_fault) if memory.open_fault else None,
        "counted": memory.counted,
        "episodes": [_episode(episode) for episode in episodes if episode.end is not None],
    }


def _episode(episode: Episode) -> dict[str, Any]:
    return {
        "cause": episode.cause.value,
        "start": episode.start,
        "end": episode.end,
        "kind": episode.kind.value if episode.kind else None,
        "duration_s": episode.duration_s,
        "instance_id": episode.instance_id,
        "detail": episode.detail,
    }


def _workers(document: Mapping[str, Any]) -> dict[str, Remembered]:
    if document["format"] != _FORMAT or document["version"] != _VERSION:
        raise ValueError(f"format {document['format']!r} version {document['version']!r}, not {_FORMAT!r} {_VERSION}")
    return {
        key: Remembered(
            memory=Memory(
                instance_id=_text(saved["instance_id"]),
                first_ready=_number(saved["first_ready"]),
                was_admitting=bool(saved["was_admitting"]),
                open_fault=_read_episode(saved["open_fault"]) if saved["open_fault"] else None,
                counted=bool(saved["counted"]),
            ),
            episodes=tuple(_read_episode(episode) for episode in saved["episodes"]),
        )
        for key, saved in document["workers"].items()
    }


def _read_episode(saved: Mapping[str, Any]) -> Episode:
    return Episode(
        cause=Cause(saved["cause"]),
        start=_moment(saved["start"]),
        end=_number(saved["end"]),
        kind=EndKind(saved["kind"]) if saved["kind"] else None,
        duration_s=_number(saved["duration_s"]),
        instance_id=_text(saved["instance_id"]),
        detail=str(saved["detail"])[:_LONGEST_DETAIL],
    )


def _moment(value: Any) -> float:
    """Unix seconds of this age of the world; a fault that began at the dawn of time would last for ever."""
    at = _finite(value)
    if not 0 <= at <= _LATEST:
        raise ValueError(f"{at} is no moment in Unix seconds")
    return at


def _number(value: Any) -> float | None:
    return None if value is None else _finite(value)


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{value} is no time")
    return number


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
