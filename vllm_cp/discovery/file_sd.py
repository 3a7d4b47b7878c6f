"""Targets from files in Prometheus' file_sd format, JSON or YAML.

::

    [{"targets": ["llama-0:8001", "llama-1:8001"], "labels": {"pool": "chat", "__http_port__": "8000"}}]

A target is the gRPC address of a worker. A file written for scraping vLLM's own page serves as well: with
``__grpc_port__`` the target's port is taken for another one. Labels:

======================== =============================================================================================
``pool``                 the failure domain
``__worker__``           the key, instead of the target as written; one target per group
``__grpc_target__``      the gRPC target, instead of the target as written; one target per group
``__grpc_port__``        the port of the gRPC target
``__http_url__``         base URL of the worker's HTTP server; one target per group
``__http_port__``        the same from the target's host and this port (``__scheme__``, else http)
``__tls__``              ``on`` or ``off``, instead of what the fleet does
``__tls_ca_file__``      and ``__tls_cert_file__``, ``__tls_key_file__``: PEM files, TLS on
``__tls_server_name__``  name to expect in the worker's certificate
``__token_file__``       file with a bearer token
``__canary__``           ``on`` or ``off``: whether generations may be sent as a proof
``__meta_kubernetes_…``  ``namespace``, ``pod_name``, ``pod_node_name``: where the worker is
others                   kept as labels; those that begin with ``__`` must be Prometheus' own
======================== =============================================================================================

Relative paths are relative to the file. Whoever writes the file decides which local files are read and where tokens
go, so guard it like the configuration.
"""

from __future__ import annotations

import asyncio
import glob
import hashlib
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_cp.discovery._sd_groups import BrokenFile, targets_of
from vllm_cp.discovery._status import StatusKeeper
from vllm_cp.discovery.base import (
    DEFAULT_POOL,
    DiscoveredTarget,
    DiscoveryFailed,
    DiscoveryStatus,
    Overrides,
    TargetSet,
)
from vllm_cp.errors import ConfigError
from vllm_cp.files import MEBIBYTE, read_file

__all__ = ["FileDiscoverer"]

_ENDINGS = (".json", ".yml", ".yaml")
_YAML_MISSING = "YAML files need PyYAML: pip install 'vllm-cp[discovery]', or write JSON"
#: So young a file may change again and keep its time: the clock of a file system ticks some hundred times a second.
_YOUNG_S = 2.0

_Stamp = tuple[int, int, int]


@dataclass
class _File:
    """What is known of one file. ``targets`` are of its last good content."""

    stamp: _Stamp | None = None
    digest: bytes = b""
    targets: list[DiscoveredTarget] | None = None
    error: str = ""


class FileDiscoverer:
    """Files, looked at every ``poll_s`` seconds and read when their content changes.

    A file that can't be read or understood keeps the targets of its last good content, and so does one that was named
    and is gone (write ``[]`` for no targets); ``status.error`` says so. A file that a pattern matched and that is gone
    takes its targets with it. Not for several threads or tasks at once.
    """

    def __init__(
        self,
        files: Iterable[str | Path],
        *,
        poll_s: float = 5.0,
        pool: str = DEFAULT_POOL,
        overrides: Overrides | None = None,
        name: str = "file_sd",
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """
        Args:
            files: names or patterns (``*``, ``?``, ``[…]``) that end in .json, .yml or .yaml.
            poll_s: seconds between two looks.
            pool, overrides: for targets whose labels don't say otherwise.
            name: what to call this source.
            sleep, now, wall: where time comes from.

        Raises ConfigError for names that could never be read, ImportError for YAML without PyYAML.
        """
        self._patterns = [os.fspath(file) for file in ([files] if isinstance(files, str | Path) else files)]
        if not self._patterns:
            raise ConfigError("file_sd needs one file name or pattern at least")
        for pattern in self._patterns:
            if not pattern.endswith(_ENDINGS):
                raise ConfigError(f"file_sd: {pattern!r} must end in {', '.join(_ENDINGS)}")
        if any(not pattern.endswith(".json") for pattern in self._patterns):
            _yaml()
        if not poll_s > 0:
            raise ConfigError(f"file_sd poll_s must be a positive number of seconds, not {poll_s}")
        self._poll_s, self._sleep, self._now, self._wall = poll_s, sleep, now, wall
        self._pool, self._overrides = pool, overrides
        self._name = name
        self._keeper = StatusKeeper(name, wall)
        self._files: dict[str, _File] = {}
        self._set: TargetSet | None = None
        self._next_look = 0.0

    @property
    def name(self) -> str:
        """What to call it."""
        return self._name

    @property
    def status(self) -> DiscoveryStatus:
        """How it fares."""
        return self._keeper.status

    def look(self) -> TargetSet:
        """The set as of now, at most ``poll_s`` old. Raises DiscoveryFailed while nothing was readable yet."""
        now = self._now()
        if self._set is None or now >= self._next_look:
            self._next_look = now + self._poll_s
            self._set = self._read()
        if self._set is None:
            raise DiscoveryFailed(f"{self._name}: {self.status.error}")
        return self._set

    async def stream(self) -> AsyncIterator[TargetSet]:
        """The set after each change of the files."""
        last: TargetSet | None = None
        while True:
            # A network file system may take its time, which is not the event loop's.
            self._set = await asyncio.to_thread(self._read)
            if self._set is not None and self._set != last:
                last = self._set
                yield last
            await self._sleep(self._poll_s)

    def _read(self) -> TargetSet | None:
        """All files, as far as they are readable; ``None`` when not one was, ever."""
        present: dict[str, _File] = {}
        for pattern in self._patterns:
            names = sorted(glob.glob(pattern)) if glob.has_magic(pattern) else [pattern]
            for name in names:
                if name not in present:
                    present[name] = self._look_at(name, self._files.get(name) or _File())
        self._files = present
        good = [file.targets for file in present.values() if file.targets is not None]
        errors = [f"{name!r}: {file.error}" for name, file in present.items() if file.error]
        merged, taken = TargetSet.of(target for targets in good for target in targets)
        if taken:
            errors.append(f"{taken[0].key}: named more than once, first one used")
        if errors:
            self._keeper.bad("; ".join(errors))
        else:
            self._keeper.good()
        # A part of the files is not all of them: an empty set would be a lie while none could be read.
        return merged if good or not present else None

    def _look_at(self, name: str, file: _File) -> _File:
        try:
            seen = os.stat(name)
            stamp = (seen.st_mtime_ns, seen.st_size, seen.st_ino)
            # What a label names (a certificate, a token) may have come or gone meanwhile.
            settled = file.targets is not None and not any(target.problem for target in file.targets)
            if stamp == file.stamp and settled:
                return file
            content = read_file(Path(name), limit=64 * MEBIBYTE)
        except OSError as error:
            return _File(targets=file.targets, error=f"cannot read it: {error.strerror}")
        digest = hashlib.sha256(content).digest()
        kept = stamp if self._wall() - seen.st_mtime > _YOUNG_S else None
        if digest == file.digest and settled:
            file.stamp = kept
            return file
        try:
            targets = targets_of(
                _load(name, content), directory=Path(name).parent, pool=self._pool, overrides=self._overrides
            )
        except BrokenFile as broken:
            return _File(stamp=None, digest=b"", targets=file.targets, error=str(broken))
        return _File(stamp=kept, digest=digest, targets=targets)


def _load(name: str, content: bytes) -> object:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BrokenFile("it is not UTF-8") from None
    if not text.strip():
        return None
    try:
        return _json(text) if name.endswith(".json") else _yaml_document(text)
    except RecursionError:
        raise BrokenFile("it is nested too deeply") from None


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise BrokenFile(f"it is not JSON: {error}") from None


def _yaml_document(text: str) -> object:
    yaml = _yaml()
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise BrokenFile(f"it is not YAML: {' '.join(str(error).split())}") from None


def _yaml() -> Any:
    try:
        import yaml
    except ImportError:
        raise ImportError(_YAML_MISSING, name="yaml") from None
    return yaml
