"""FakeFleet: many fake workers in a process of their own."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection, Pipe
from types import TracebackType
from typing import Any

from vllm_cp.models.kv_source import KvEventSource
from vllm_cp.models.model import ModelInfo
from vllm_cp.models.server import ServerInfo
from vllm_cp.testing._controls import Controls

__all__ = ["FakeFleet"]

_START_S = 60.0


class FakeFleet:
    """``size`` fake workers, each on a port of its own, all in one other process.

    ::

        async with FakeFleet(200) as fleet:
            seen = await my_controller.look_at(fleet.targets)
            fleet.worker(3).die(reported=False)

    They disturb neither your event loop nor your thread counts, and hundreds are cheap. Each is controlled with the
    same verbs as a ``FakeWorker``, see ``Controls``. The process ends with ``close()``, and also when this process
    dies in whatever way.
    """

    def __init__(
        self,
        size: int,
        *,
        version: str | Sequence[str] = "0.33.0",
        ranks: int = 1,
        info: ServerInfo | None = None,
        model: ModelInfo | None = None,
        kv_sources: Sequence[KvEventSource] = (),
        tls: Any = None,
        host: str = "127.0.0.1",
    ) -> None:
        """Arguments are those of ``FakeWorker``; several versions are dealt out in turn."""
        if size < 1:
            raise ValueError(f"a fleet has 1 worker or more, not {size}")
        versions = (version,) if isinstance(version, str) else tuple(version)
        self._wanted = [
            {
                "version": versions[number % len(versions)],
                "ranks": ranks,
                "info": info,
                "model": model,
                "kv_sources": tuple(kv_sources),
                "tls": tls,
                "host": host,
            }
            for number in range(size)
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self._line: _Line | None = None
        self._workers: list[FleetWorker] = []

    @property
    def pid(self) -> int | None:
        """The process that holds the workers; ``None`` while there is none."""
        return self._process.pid if self._process is not None else None

    @property
    def targets(self) -> list[str]:
        """``host:port`` of each worker, in order."""
        return [worker.target for worker in self._workers]

    def worker(self, number: int) -> FleetWorker:
        """The controls of one worker, counted from 0."""
        return self._workers[number]

    def __iter__(self) -> Iterator[FleetWorker]:
        return iter(self._workers)

    def __len__(self) -> int:
        return len(self._wanted)

    def start(self) -> FakeFleet:
        """Start the process and open all ports; ``with`` does it for you. Takes about half a second."""
        if self._process is not None:
            raise RuntimeError("this FakeFleet has started already")
        ours, theirs = Pipe()
        try:
            self._process = subprocess.Popen(  # noqa: S603  (our own module, our own interpreter)
                [sys.executable, "-m", "vllm_cp.testing._fleet_process", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                start_new_session=True,  # Ctrl-C is the parent's business
            )
        finally:
            theirs.close()
        self._line = _Line(ours)
        try:
            targets = self._line.ask(None, "start", {"wanted": self._wanted}).result(_START_S)
        except BaseException:
            self.close()
            raise
        self._workers = [FleetWorker(self._line, number, target) for number, target in enumerate(targets)]
        return self

    def close(self) -> None:
        """End the process and wait for it. Closing twice is fine."""
        process, line = self._process, self._line
        self._process = self._line = None
        if line is not None:
            line.close()
        if process is not None:
            try:
                process.wait(5.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def __enter__(self) -> FakeFleet:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> FakeFleet:
        return await asyncio.to_thread(self.start)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)


class FleetWorker(Controls):
    """The controls of one worker of a fleet."""

    def __init__(self, line: _Line, number: int, target: str) -> None:
        self._line = line
        self._number = number
        self._target = target

    @property
    def target(self) -> str:
        """``host:port``, the same before and after a restart."""
        return self._target

    def _do(self, verb: str, /, **arguments: Any) -> Any:
        return self._line.ask(self._number, verb, arguments).result()


class _Line:
    """The pipe to the fleet's process: questions from any thread, answers matched by number."""

    def __init__(self, pipe: Connection[Any, Any]) -> None:
        self._pipe = pipe
        self._numbers = itertools.count()
        self._open: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._reader = threading.Thread(target=self._read, name="vllm-cp-fleet", daemon=True)
        self._reader.start()

    def ask(self, worker: int | None, verb: str, arguments: dict[str, Any]) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("this FakeFleet is not running")
            number = next(self._numbers)
            self._open[number] = future
            self._pipe.send((number, worker, verb, arguments))
        return future

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._pipe.send(None)
        self._reader.join()
        self._pipe.close()

    def _read(self) -> None:
        try:
            while True:
                number, good, value = self._pipe.recv()
                future = self._open.pop(number)
                if good:
                    future.set_result(value)
                else:
                    future.set_exception(value)
        except (EOFError, OSError):
            pass
        with self._lock:
            self._closed = True
            for future in self._open.values():
                future.set_exception(RuntimeError("the fleet's process has ended"))
            self._open.clear()
