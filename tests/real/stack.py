"""A genuine ``vllm-rs`` frontend with simulated engines behind it, started and broken at a test's word."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tests.real.engines import MODES, CommandFailed, Deployment, Engines
from tests.real.fetch import binary_path
from tests.real.ports import HOST, Ports, accepts
from tests.real.processes import Child, Process
from tests.real.sim import EngineFacts, KvEventsFacts, Moment
from tests.real.sim.facts import NEWEST
from tests.real.sim.fleet import PerRank
from tests.real.sim.model import make_model
from tests.real.waiting import eventually

QUIET = {"NO_COLOR": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


class Stack:
    """One frontend process and its engines.

        with Stack("0.33.0", engines=2, facts=EngineFacts(max_loras=4)) as s:
            channel = grpc.insecure_channel(s.target)
            s.die(0)

    Every method is synchronous and thread-safe enough for a test: engines run in a thread of their own, or in
    processes, so they never wait for the code under test.  In an event loop use ``async with Stack(...)`` and
    ``await asyncio.to_thread(s.die, 0)``; a direct call works too, but holds up the loop for its milliseconds.

    ``mode``: "thread" (default), "process" (one per rank, see ``engine_pids``), "managed" (the frontend launches and
    looks after one process that holds all ranks).  ``kv_events`` publishes on ports of this stack's own, one per rank;
    ``EngineFacts.kv_events`` instead is taken verbatim.  ``facts`` without a ``vllm_version`` report ``version``.
    """

    def __init__(
        self,
        version: str = NEWEST,
        *,
        engines: int = 1,
        facts: EngineFacts | None = None,
        per_rank: PerRank | None = None,
        kv_events: KvEventsFacts | bool = False,
        mode: str = "thread",
        frontend_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        model: Path | None = None,
        directory: Path | None = None,
    ) -> None:
        self.version = version
        self.size = engines
        self.facts = facts or EngineFacts()
        self.per_rank = per_rank or {}
        self.mode = mode
        self.frontend_args = list(frontend_args)
        self.env = dict(env or {})
        self.moments: list[Moment] = []  # what was done to engines and frontend, in order
        self.ready_after = 0.0  # seconds from starting the frontend to serving, last time
        self.ports = Ports()
        self.handshake_port, self.grpc_port, self.http_port = self.ports.take(3)
        self._kv_port = self.ports.take(2 * engines)[0] if kv_events else 0
        if kv_events:
            self.facts = dataclasses.replace(self.facts, kv_events=self._own_kv_ports(kv_events))
        self._made = None if directory else Path(tempfile.mkdtemp(prefix="vllm-cp-stack-"))
        self.directory = self._made or directory or Path()
        self.model = model or make_model(self.directory / "model")
        self._log = ""
        self._restarts = 0
        self._frontend: Child | None = None
        self._engines: Engines | None = None

    def _own_kv_ports(self, kv_events: KvEventsFacts | bool) -> KvEventsFacts:
        return dataclasses.replace(
            kv_events if isinstance(kv_events, KvEventsFacts) else KvEventsFacts(),
            endpoint=f"tcp://*:{self._kv_port}",
            replay_endpoint=f"tcp://*:{self._kv_port + self.size}",
        )

    # -- addresses and what can be read

    @property
    def target(self) -> str:
        """The gRPC address; ports stay the same over a restart."""
        return f"{HOST}:{self.grpc_port}"

    @property
    def http_url(self) -> str:
        """The HTTP address, without a slash at the end."""
        scheme = "https" if "--ssl-certfile" in self.frontend_args else "http"
        return f"{scheme}://{HOST}:{self.http_port}"

    def kv_endpoint(self, rank: int = 0) -> str:
        """Where a subscriber finds the KV events of a rank (with ``kv_events``)."""
        return f"tcp://{HOST}:{self._kv_port + rank}"

    def kv_replay(self, rank: int = 0) -> str:
        """Where it can ask for missed ones."""
        return f"tcp://{HOST}:{self._kv_port + self.size + rank}"

    @property
    def pid(self) -> int:
        """The frontend's process id."""
        return self._child.pid

    @property
    def engine_pids(self) -> dict[int, int]:
        """By rank, the engine's process id; empty in "thread" mode."""
        return {rank: process.pid for rank, process in self._host.processes.items()}

    @property
    def log(self) -> str:
        """What the frontend has said so far, over restarts; readable after ``stop`` as well."""
        path = self.directory / "frontend.log"
        return path.read_text(errors="replace") if path.exists() else self._log

    def moment(self, kind: str, rank: int | None = None) -> Moment:
        """The last time ``kind`` was done (to ``rank``, if given)."""
        for moment in reversed(self.moments):
            if moment.kind == kind and rank in (None, moment.rank):
                return moment
        raise LookupError(f"no {kind!r} of rank {rank} in {self.moments}")

    def _record(self, kind: str, rank: int | None = None, detail: str = "") -> None:
        self.moments.append(Moment(kind=kind, rank=rank, detail=detail))

    @property
    def _child(self) -> Child:
        if self._frontend is None:
            raise RuntimeError("the stack is not running")
        return self._frontend

    @property
    def _host(self) -> Engines:
        if self._engines is None:
            raise RuntimeError("the stack is not running")
        return self._engines

    # -- starting and stopping

    def start(self, *, wait: bool = True, timeout: float = 20.0) -> Stack:
        """Start frontend and engines; ``wait=False`` returns before the frontend serves (see ``wait_ready``)."""
        facts = dataclasses.replace(self.facts, vllm_version=self.facts.vllm_version or self.version)
        self._engines = MODES[self.mode](
            Deployment(
                handshake_port=self.handshake_port,
                size=self.size,
                facts=facts,
                per_rank=self.per_rank,
                directory=self.directory,
            )
        )
        command = [str(binary_path(self.version)), "serve", str(self.model), *self._engines.frontend_arguments]
        command += ["--grpc-port", str(self.grpc_port), "--port", str(self.http_port), *self.frontend_args]
        env = os.environ | QUIET | self._engines.frontend_env | self.env
        try:
            self._record("start", detail=self.version)
            self._frontend = Child(command, self.directory / "frontend.log", env)
            self._engines.start()
            if wait:
                self.wait_ready(timeout)
        except BaseException:
            self.stop()
            raise
        return self

    def wait_ready(self, timeout: float = 20.0) -> None:
        """Return once all engines have joined and both ports accept; raise as soon as they never will."""

        def ready() -> bool:
            code = self._child.exit_code
            if code is not None:
                raise RuntimeError(f"the frontend ended with {code}")
            return accepts(self.grpc_port) and accepts(self.http_port) and self._host.joined()

        try:
            eventually(ready, timeout, "the stack to serve")
        except Exception as error:
            raise RuntimeError(f"{error}; the frontend said:\n{self.log[-3000:]}") from error
        self.ready_after = time.monotonic() - self.moment("start").monotonic

    def stop(self) -> None:
        """End everything and let the ports go; the log stays readable."""
        try:
            self._end()
        finally:
            self.ports.release()
            if self._made:
                self._log = self.log
                shutil.rmtree(self._made, ignore_errors=True)

    def _end(self) -> None:
        with contextlib.ExitStack() as both:
            if self._engines:
                both.callback(self._engines.stop)
            if self._frontend:
                both.callback(self._frontend.stop, grace=2.0)
            self._engines = self._frontend = None

    def restart(
        self,
        *,
        instance_id: str | None = None,
        version: str | None = None,
        per_rank: PerRank | None = None,
        timeout: float = 20.0,
        wait: bool = True,
        **facts: Any,
    ) -> None:
        """A new frontend on the same ports with fresh engines, of a new ``instance_id`` and maybe other ``facts``.

        What still runs is ended first (SIGTERM), as a rolling update does.
        """
        self._end()
        self._restarts += 1
        new_id = instance_id or f"{self.facts.instance_id.partition('#')[0]}#{self._restarts}"
        self.facts = dataclasses.replace(self.facts, instance_id=new_id, **facts)
        self.version = version or self.version
        self.per_rank = self.per_rank if per_rank is None else per_rank
        self.start(wait=wait, timeout=timeout)

    def __enter__(self) -> Stack:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    async def __aenter__(self) -> Stack:
        return await asyncio.to_thread(self.start)

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.to_thread(self.stop)

    # -- the frontend process

    def terminate(self) -> None:
        """SIGTERM the frontend."""
        self._record("terminate")
        self._child.signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL the frontend; a managed engine stays behind until ``stop``."""
        self._record("kill")
        self._child.signal(signal.SIGKILL)

    def freeze_frontend(self) -> None:
        """SIGSTOP the frontend; returns once it stands still."""
        self._record("freeze")
        self._child.freeze()

    def thaw_frontend(self) -> None:
        """SIGCONT it."""
        self._record("thaw")
        self._child.thaw()

    def wait_exit(self, timeout: float = 5.0) -> int:
        """The frontend's exit code (negative: the signal that ended it), as soon as it has ended."""
        code = self._child.wait_exit(timeout)
        self._record("exit", detail=str(code))
        return code

    # -- engine processes ("process" and "managed" mode)

    def _engine(self, rank: int) -> Process:
        return self._host.processes[rank]

    def kill_engine(self, rank: int) -> None:
        """SIGKILL the process a rank lives in; returns once it is gone."""
        self._record("kill-engine", rank)
        self._engine(rank).kill()

    def freeze_engine(self, rank: int) -> None:
        """SIGSTOP it; returns once it stands still."""
        self._record("freeze-engine", rank)
        self._engine(rank).freeze()

    def thaw_engine(self, rank: int) -> None:
        """SIGCONT it."""
        self._record("thaw-engine", rank)
        self._engine(rank).thaw()

    # -- engines, in every mode; ``rank=None`` means all

    def command(self, name: str, rank: int | None = None, **arguments: Any) -> list[Any]:
        """Any command of sim/commands.py: one answer per rank; CommandFailed when one could not."""
        return self._host.command(name, rank, arguments)

    def _deed(self, name: str, rank: int | None, **arguments: Any) -> list[Moment]:
        moments = [Moment(**answer) for answer in self.command(name, rank, **arguments)]
        self.moments += moments
        return moments

    def die(self, rank: int | None = None, mode: str = "sentinel") -> Moment:
        """An engine dies: "sentinel" (announced), "abrupt" (silent), "corrupt" (sends nonsense); see ``SimEngine``."""
        return self._deed("die", rank, mode=mode)[0]

    def hang(self, rank: int | None = None) -> Moment:
        """An engine stops answering; its sockets stay open."""
        return self._deed("hang", rank)[0]

    def unhang(self, rank: int | None = None) -> Moment:
        """It answers again, what was left waiting first."""
        return self._deed("unhang", rank)[0]

    def rejoin(self, rank: int, timeout: float = 10.0) -> None:
        """Replace a rank by a fresh engine that runs the handshake again, whether or not the frontend wants it."""
        self.command("rejoin", rank, timeout=timeout)

    def pace(self, rank: int | None = None, **pace: float) -> None:
        """Set ``token_interval`` (s), ``tokens_per_step``, ``prefill_delay`` (s)."""
        self.command("pace", rank, **pace)

    def utility(
        self,
        rank: int | None = None,
        *,
        fail: Mapping[str, str] | None = None,
        mute: Iterable[str] = (),
        delay: float | None = None,
        clear: bool = False,
    ) -> None:
        """Make utility calls fail with a message, never answer, or answer late; ``clear`` forgets earlier orders."""
        self.command("utility", rank, fail=dict(fail or {}), mute=list(mute), delay=delay, clear=clear)

    def set(self, rank: int | None = None, **values: Any) -> None:
        """Set ``weight_version``, ``paused``, ``asleep`` or ``fail_next`` behind the frontend's back."""
        self.command("set", rank, **values)

    def publish(
        self, rank: int = 0, *, tokens: Sequence[int] | None = None, events: Sequence[Any] | None = None
    ) -> int | None:
        """Publish raw KV events, or those of storing ``tokens``; the sequence number, None if nothing changed."""
        seq: int | None = self.command("publish", rank, tokens=tokens, events=events)[0]
        return seq

    def drop(self, count: int, rank: int = 0) -> None:
        """Keep the next batches off the publisher; a replay still has them."""
        self.command("drop", rank, count=count)

    def received(self, rank: int = 0) -> list[dict[str, Any]]:
        """What the frontend sent to an engine: add, abort, utility, each with its time."""
        received: list[dict[str, Any]] = self.command("received", rank)[0]
        return received

    def status(self) -> dict[int, dict[str, Any]]:
        """By rank, the engine's own view; ``{"state": "gone"}`` for a process that is no more."""
        return {rank: self._status(rank) for rank in self._host.ranks}

    def _status(self, rank: int) -> dict[str, Any]:
        try:
            status: dict[str, Any] = self.command("status", rank)[0]
        except CommandFailed:
            process = self._host.processes.get(rank)
            if process is None or not process.gone(1.0):
                raise
            return {"rank": rank, "state": "gone"}
        return status


class StackFactory(Protocol):
    """What the ``stack`` fixture gives."""

    def __call__(self, version: str = NEWEST, *, model: str = "plain", wait: bool = True, **options: Any) -> Stack:
        """A started stack; ``model`` is plain, moe or multimodal, ``options`` are those of ``Stack``."""


__all__ = ["CommandFailed", "EngineFacts", "KvEventsFacts", "Moment", "Stack", "StackFactory"]
