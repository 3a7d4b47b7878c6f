"""The command table over a port, and the command line: engines in a process of their own.

    python -m tests.real.sim --handshake tcp://127.0.0.1:5550 --engines 2 --control-port 6000
    echo '{"cmd": "die", "rank": 0}' | nc 127.0.0.1 6000

One process per rank (``--ranks 1``) lets a test SIGKILL an engine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.real.sim.commands import Commands
from tests.real.sim.facts import EngineFacts
from tests.real.sim.fleet import Fleet

log = logging.getLogger(__name__)


class ControlServer:
    """JSON lines over TCP: one object in (``cmd``, optional ``rank``, arguments), one answer object out.

    The commands are those of commands.py, and ``quit``, which ends the process.
    """

    def __init__(self, fleet: Fleet) -> None:
        self.commands = Commands(fleet)
        self.quit = asyncio.Event()
        self._server: asyncio.Server | None = None

    async def start(self, port: int) -> int:
        """Listen on loopback and return the port (0 picks one)."""
        self._server = await asyncio.start_server(self._client, "127.0.0.1", port)
        return int(self._server.sockets[0].getsockname()[1])

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                try:
                    answer = {"ok": True, "result": await self._run(json.loads(line))}
                except Exception as error:  # noqa: BLE001 - the one who asked gets the error
                    answer = {"ok": False, "error": f"{type(error).__name__}: {error}"}
                writer.write(json.dumps(answer, default=repr).encode() + b"\n")
                await writer.drain()
        writer.close()

    async def _run(self, command: dict[str, Any]) -> Any:
        name = command.pop("cmd")
        if name == "quit":
            self.quit.set()
            return None
        return await self.commands.run(name, **command)

    async def close(self) -> None:
        """Stop listening."""
        if self._server:
            self._server.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tests.real.sim", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--handshake", required=True, help="the frontend's address, e.g. tcp://127.0.0.1:5550")
    parser.add_argument("--engines", type=int, default=1, help="data-parallel size of the deployment")
    parser.add_argument("--ranks", help="comma-separated ranks to run in this process (default: all)")
    parser.add_argument("--facts", default="{}", help="JSON object of EngineFacts fields, or @file")
    parser.add_argument("--per-rank", default="{}", help='JSON: {"1": {fact: value}}')
    parser.add_argument("--control-port", type=int, default=0, help="JSON-lines control port (0: any free one)")
    parser.add_argument("--announce", type=Path, help="write {pid, control_port} here once commands are taken")
    parser.add_argument("--watch", type=int, metavar="PID", help="leave when this process is gone")
    parser.add_argument("--verbose", action="store_true", help="log what is done")
    return parser


def announce(path: Path, control_port: int) -> None:
    """Say who we are in a file that is either whole or absent."""
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps({"pid": os.getpid(), "control_port": control_port}))
    draft.replace(path)


@contextlib.contextmanager
def _watching(pid: int | None, gone: asyncio.Event) -> Iterator[None]:
    """Set ``gone`` when process ``pid`` ends, so that a killed test run leaves no engines behind."""
    if pid is None:
        yield
        return
    descriptor = os.pidfd_open(pid)
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, gone.set)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


async def _serve(args: argparse.Namespace) -> int:
    text = args.facts[1:] if args.facts.startswith("@") else None
    facts = await asyncio.to_thread(Path(text).read_text) if text else args.facts
    fleet = Fleet(
        args.handshake,
        args.engines,
        EngineFacts.from_dict(json.loads(facts)),
        {int(rank): changes for rank, changes in json.loads(args.per_rank).items()},
        [int(rank) for rank in args.ranks.split(",")] if args.ranks else None,
    )
    control = ControlServer(fleet)
    port = await control.start(args.control_port)
    log.warning("commands are taken on 127.0.0.1:%d", port)
    if args.announce:
        announce(args.announce, port)
    joining = asyncio.create_task(fleet.join())
    quitting = asyncio.create_task(control.quit.wait())
    try:
        with _watching(args.watch, control.quit):
            await asyncio.wait([joining, quitting], return_when=asyncio.FIRST_COMPLETED)
            if joining.done():
                joining.result()
                await quitting
    finally:
        for task in (joining, quitting):
            task.cancel()
        await asyncio.gather(joining, quitting, return_exceptions=True)
        await control.close()
        await fleet.close()
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run engines until ``quit`` or a signal."""
    args = _parser().parse_args(argv)
    logging.basicConfig(
        level=logging.INFO if args.verbose else logging.WARNING,
        stream=sys.stderr,
        format="%(asctime)s engine-sim %(levelname)s %(message)s",
    )
    return asyncio.run(_serve(args))
