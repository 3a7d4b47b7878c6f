"""Where the simulated engines live: in a thread, in a process per rank, or launched by the frontend itself."""

from __future__ import annotations

import abc
import asyncio
import concurrent.futures
import json
import os
import shlex
import socket
import sys
import threading
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tests.real.ports import HOST
from tests.real.processes import Child, Process
from tests.real.sim import EngineFacts, Fleet
from tests.real.sim.commands import Answer, Commands
from tests.real.sim.fleet import PerRank

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[2]
COMMAND_TIMEOUT = 15.0  # seconds; a sentinel death may linger for four


class CommandFailed(Exception):
    """An engine could not do what it was told, or could not be told."""


@dataclass(kw_only=True)
class Deployment:
    """What the engines need to know; ``directory`` takes their logs."""

    handshake_port: int
    size: int
    facts: EngineFacts
    per_rank: PerRank = field(default_factory=dict)
    directory: Path

    @property
    def handshake(self) -> str:
        """The frontend's handshake address."""
        return f"tcp://{HOST}:{self.handshake_port}"

    @property
    def facts_json(self) -> str:
        """The facts as the simulator's command line takes them."""
        return json.dumps(self.facts.as_dict())

    @property
    def per_rank_json(self) -> str:
        """The same for what differs by rank."""
        return json.dumps({str(rank): dict(changes) for rank, changes in self.per_rank.items()})


class Engines(abc.ABC):
    """The engines of one frontend process; a restart makes new ones."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self.ranks = range(deployment.size)

    @property
    def frontend_arguments(self) -> list[str]:
        """The part of ``vllm-rs serve`` that says where its engines come from."""
        arguments = ["--data-parallel-size", str(self.deployment.size)]
        return [*arguments, "--data-parallel-size-local", "0", "--handshake-port", str(self.deployment.handshake_port)]

    @property
    def frontend_env(self) -> dict[str, str]:
        """What the frontend's environment has to say for its engines."""
        return {}

    @property
    def processes(self) -> dict[int, Process]:
        """By rank, the process that can be killed or frozen; none for a thread."""
        return {}

    @abc.abstractmethod
    def start(self) -> None:
        """Let them join the frontend; returns at once."""

    @abc.abstractmethod
    def joined(self) -> bool:
        """Whether all have joined; raises when they never will."""

    @abc.abstractmethod
    def command(self, name: str, rank: int | None, arguments: dict[str, Any]) -> list[Answer]:
        """Run a command of sim/commands.py: one answer per rank."""

    @abc.abstractmethod
    def stop(self) -> None:
        """End them all."""


class ThreadEngines(Engines):
    """All ranks in one thread with an event loop of its own, so that they never wait for the code under test."""

    def __init__(self, deployment: Deployment) -> None:
        super().__init__(deployment)
        self._fleet: Fleet | None = None
        self._joining: asyncio.Task[None] | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="engine-sim", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            asyncio.set_event_loop(None)

    def _call(self, work: Coroutine[Any, Any, T], timeout: float = COMMAND_TIMEOUT) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise TimeoutError(f"the engines did not answer within {timeout} s") from None

    def start(self) -> None:
        self._call(self._start())

    async def _start(self) -> None:
        wanted = self.deployment
        self._fleet = Fleet(wanted.handshake, wanted.size, wanted.facts, wanted.per_rank)
        self._joining = asyncio.create_task(self._fleet.join())

    def joined(self) -> bool:
        if self._joining is None or not self._joining.done():
            return False
        self._joining.result()
        return True

    def command(self, name: str, rank: int | None, arguments: dict[str, Any]) -> list[Answer]:
        if self._fleet is None:
            raise CommandFailed("the engines have not been started")
        try:
            return self._call(Commands(self._fleet).run(name, rank, **arguments))
        except Exception as error:
            raise CommandFailed(f"{type(error).__name__}: {error}") from error

    def stop(self) -> None:
        try:
            self._call(self._stop())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _stop(self) -> None:
        if self._joining:
            self._joining.cancel()
            await asyncio.gather(self._joining, return_exceptions=True)
        if self._fleet:
            await self._fleet.close()
        await self._loop.shutdown_default_executor()


class _Remote:
    """Engines behind a control port that they announced in a file."""

    def __init__(self, announced: dict[str, int]) -> None:
        self.pid = announced["pid"]
        self.port = announced["control_port"]

    @classmethod
    def find(cls, announcement: Path) -> _Remote | None:
        """None as long as they have said nothing."""
        return cls(json.loads(announcement.read_text())) if announcement.exists() else None

    def command(self, name: str, rank: int | None, arguments: dict[str, Any]) -> list[Answer]:
        line = json.dumps({"cmd": name, "rank": rank, **arguments}).encode() + b"\n"
        try:
            with socket.create_connection((HOST, self.port), timeout=COMMAND_TIMEOUT) as sock, sock.makefile("rb") as f:
                sock.sendall(line)
                answer = json.loads(f.readline() or b'{"ok": false, "error": "the engine hung up"}')
        except OSError as error:
            raise CommandFailed(f"no word from engine process {self.pid}: {error}") from error
        if not answer["ok"]:
            raise CommandFailed(answer["error"])
        result: list[Answer] = answer["result"]
        return result

    def joined(self) -> bool:
        return all(status["state"] == "joined" for status in self.command("status", None, {}))


class ProcessEngines(Engines):
    """One process per rank, so that one can be killed or frozen without the others."""

    def __init__(self, deployment: Deployment) -> None:
        super().__init__(deployment)
        self._children: dict[int, Child] = {}
        self._remotes: dict[int, _Remote] = {}

    @property
    def processes(self) -> dict[int, Process]:
        return dict(self._children)

    def start(self) -> None:
        for rank in self.ranks:
            announcement = self._announcement(rank)
            announcement.unlink(missing_ok=True)
            command = [sys.executable, "-m", "tests.real.sim", "--handshake", self.deployment.handshake]
            command += ["--engines", str(self.deployment.size), "--ranks", str(rank)]
            command += ["--facts", self.deployment.facts_json, "--per-rank", self.deployment.per_rank_json]
            command += ["--announce", str(announcement), "--watch", str(os.getpid())]
            self._children[rank] = Child(command, self._log(rank), cwd=ROOT)

    def _announcement(self, rank: int) -> Path:
        return self.deployment.directory / f"engine-{rank}.json"

    def _log(self, rank: int) -> Path:
        return self.deployment.directory / f"engine-{rank}.log"

    def joined(self) -> bool:
        for rank, child in self._children.items():
            if child.exit_code is not None:
                said = self._log(rank).read_text()
                raise CommandFailed(f"engine process of rank {rank} ended with {child.exit_code}:\n{said}")
            if rank not in self._remotes:
                remote = _Remote.find(self._announcement(rank))
                if remote is None:
                    return False
                self._remotes[rank] = remote
        return all(remote.joined() for remote in self._remotes.values())

    def command(self, name: str, rank: int | None, arguments: dict[str, Any]) -> list[Answer]:
        ranks = self.ranks if rank is None else [rank]
        return [answer for each in ranks for answer in self._remotes[each].command(name, each, arguments)]

    def stop(self) -> None:
        for child in self._children.values():
            child.stop()
        self._children.clear()


class ManagedEngines(Engines):
    """All ranks in one process that the frontend launches as its Python and looks after."""

    def __init__(self, deployment: Deployment) -> None:
        super().__init__(deployment)
        self._announcement = deployment.directory / "managed.json"
        self._announcement.unlink(missing_ok=True)
        self._remote: _Remote | None = None
        self._process: Process | None = None

    @property
    def frontend_arguments(self) -> list[str]:
        arguments = ["--data-parallel-size", str(self.deployment.size), "--python", str(self._script())]
        return [*arguments, "--handshake-port", str(self.deployment.handshake_port)]

    @property
    def frontend_env(self) -> dict[str, str]:
        return {
            "VLLM_CP_SIM_FACTS": self.deployment.facts_json,
            "VLLM_CP_SIM_PER_RANK": self.deployment.per_rank_json,
            "VLLM_CP_SIM_ANNOUNCE": str(self._announcement),
            "VLLM_CP_SIM_WATCH": str(os.getpid()),
        }

    def _script(self) -> Path:
        """The executable given as ``--python``; ``exec`` keeps the pid the frontend knows."""
        script = self.deployment.directory / "managed-python"
        module = f"{shlex.quote(sys.executable)} -m tests.real.sim.managed"
        script.write_text(f'#!/bin/sh\ncd {shlex.quote(str(ROOT))} && exec {module} "$@"\n')
        script.chmod(0o755)
        return script

    @property
    def processes(self) -> dict[int, Process]:
        return dict.fromkeys(self.ranks, self._process) if self._process else {}

    def start(self) -> None:
        """Nothing to do: the frontend starts them."""

    def _find(self) -> bool:
        if self._remote is None:
            self._remote = _Remote.find(self._announcement)
            if self._remote:
                self._process = Process(self._remote.pid)
        return self._remote is not None

    def joined(self) -> bool:
        return self._find() and self._remote is not None and self._remote.joined()

    def command(self, name: str, rank: int | None, arguments: dict[str, Any]) -> list[Answer]:
        if self._remote is None:
            raise CommandFailed("the managed engine has not announced itself")
        return self._remote.command(name, rank, arguments)

    def stop(self) -> None:
        # The frontend is gone by now; an engine it left behind is ours to end.
        try:
            self._find()
        except ProcessLookupError:
            return
        if self._process:
            self._process.stop()
            self._process = None


MODES: dict[str, type[Engines]] = {"thread": ThreadEngines, "process": ProcessEngines, "managed": ManagedEngines}
