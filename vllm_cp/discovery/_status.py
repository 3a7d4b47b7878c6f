"""The status of a source: kept, and logged when it changes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from vllm_cp.discovery.base import DiscoveryStatus

__all__ = ["StatusKeeper"]

_log = logging.getLogger("vllm_cp.discovery")


class StatusKeeper:
    """Holds the status of the source called ``name``. Whoever reads the source says here how it went."""

    def __init__(self, name: str, wall: Callable[[], float] = time.time) -> None:
        self._name = name
        self._wall = wall
        self.status = DiscoveryStatus()

    def good(self) -> None:
        """The source was read, all of it."""
        if self.status.error is not None:
            _log.info("discovery %s: well again", self._name)
        self.status = DiscoveryStatus(last_success=self._wall())

    def bad(self, error: str) -> None:
        """The source, or a part of it, could not be read."""
        if error != self.status.error:
            _log.warning("discovery %s: %s", self._name, error)
        self.status = DiscoveryStatus(last_success=self.status.last_success, error=error)
