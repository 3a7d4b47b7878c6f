"""Targets that are written down: in code, on a command line, in a configuration file."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

from vllm_cp._target import parse_target
from vllm_cp.discovery._status import StatusKeeper
from vllm_cp.discovery.base import DEFAULT_POOL, DiscoveredTarget, DiscoveryStatus, Overrides, TargetSet
from vllm_cp.errors import ConfigError

__all__ = ["StaticDiscoverer", "static_target"]


def static_target(text: str, *, pool: str = DEFAULT_POOL, overrides: Overrides | None = None) -> DiscoveredTarget:
    """A target from ``[NAME=]HOST:PORT``, or any other form of a gRPC target after the optional name.

    The key is the name, else the target in canonical spelling. Raises ConfigError."""
    name, equals, rest = text.partition("=")
    if not equals or name.startswith(("unix:", "unix-abstract:")):
        name, rest = "", text
    elif not name or not name.isprintable() or " " in name:
        raise ConfigError(f"target {text!r} has no usable name before the '='; write NAME=HOST:PORT")
    address = parse_target(rest)
    return DiscoveredTarget(
        key=name or address.name, target=address.name, pool=pool, overrides=overrides or Overrides()
    )


class StaticDiscoverer:
    """A fixed set, until ``replace`` gives another."""

    def __init__(
        self,
        targets: Iterable[str | DiscoveredTarget],
        *,
        pool: str = DEFAULT_POOL,
        overrides: Overrides | None = None,
        name: str = "static",
    ) -> None:
        """Text is ``[NAME=]HOST:PORT``, to which ``pool`` and ``overrides`` apply. Raises ConfigError."""
        self._name = name
        self._pool = pool
        self._overrides = overrides
        self._keeper = StatusKeeper(name)
        self._readers: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()
        self.replace(targets)

    @property
    def name(self) -> str:
        """What to call it."""
        return self._name

    @property
    def status(self) -> DiscoveryStatus:
        """Always well."""
        return self._keeper.status

    def replace(self, targets: Iterable[str | DiscoveredTarget]) -> None:
        """Another set from now on. From any thread. Raises ConfigError and keeps the old one."""
        if isinstance(targets, str):
            raise ConfigError(f"give a list of targets, not the text {targets!r}")
        made = [
            static_target(target, pool=self._pool, overrides=self._overrides) if isinstance(target, str) else target
            for target in targets
        ]
        new, taken = TargetSet.of(made)
        if taken:
            raise ConfigError(f"{taken[0].key}: this worker is named twice")
        self._set = new
        self._keeper.good()
        for loop, moved in tuple(self._readers):
            loop.call_soon_threadsafe(moved.set)

    def look(self) -> TargetSet:
        """The set as of now."""
        return self._set

    async def stream(self) -> AsyncIterator[TargetSet]:
        """The set, and each that replaces it."""
        moved = asyncio.Event()
        reader = (asyncio.get_running_loop(), moved)
        self._readers.add(reader)
        try:
            while True:
                moved.clear()
                yield self._set
                await moved.wait()
        finally:
            self._readers.discard(reader)
