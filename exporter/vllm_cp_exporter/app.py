"""The composition root: flags, sockets, watchers, server, in that order; and the way back down.

Exit codes: 0 stopped as asked, 1 cannot start, 2 a flag is wrong. A worker that cannot be reached is no failure: it is
what the page is for.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from socket import socket
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from vllm_cp_exporter.config import ExporterConfig
    from vllm_cp_exporter.flags import Settings

__all__ = ["main"]

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def main(args: Sequence[str] | None = None) -> int:
    """Run the daemon until a signal; ``sys.argv`` by default. Returns the exit code."""
    # Nothing else is imported before this point: as process 1, a signal without a handler would be lost.
    on_signals = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, _leave) for number in _SIGNALS} if on_signals else {}
    if on_signals:
        # Told to reload before there is anything to reload, it must not end.
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # gRPC writes lines of its own between ours, one per failed handshake; its errors come back to us as statuses.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    prepared = _prepared(args)
    if isinstance(prepared, int):
        for number, handler in before.items():
            signal.signal(number, handler)
        return prepared

    import asyncio

    from vllm_cp_exporter.daemon import run

    settings, sockets = prepared
    asyncio.run(run(settings, sockets, signals=before, read=lambda: _read(args).exporter))
    return 0


def _prepared(args: Sequence[str] | None) -> tuple[ExporterConfig, list[socket]] | int:
    """All that can go wrong before anything runs: settings and sockets, or the exit code."""
    from vllm_cp_exporter import logs
    from vllm_cp_exporter.listen import CannotListen, bind

    settings = _settings(args)
    if isinstance(settings, int):
        return settings
    try:
        sockets = bind(settings.exporter.listen)
    except CannotListen as error:
        return _refuse(str(error), 1)
    logs.set_up(settings.exporter.log_format, settings.exporter.log_level)
    return settings.exporter, sockets


def _settings(args: Sequence[str] | None) -> Settings | int:
    """The settings, or the exit code when there is nothing to run."""
    from vllm_cp import ConfigError
    from vllm_cp_exporter.lined import Mistakes

    try:
        settings = _read(args)
    except Mistakes as mistakes:
        for line in mistakes.lines:
            _refuse(line, 2)
        return 2
    except ConfigError as error:
        return _refuse(f"{error} (see --help)", 2)
    except _SaidAll:
        return 0
    if settings.check:
        exporter = settings.exporter
        sys.stdout.write(f"ok: {len(exporter.workers)} targets, {len(exporter.sources)} discovery sources\n")
        return 0
    return settings


class _SaidAll(Exception):
    """--help and --version have nothing to run."""


def _read(args: Sequence[str] | None) -> Settings:
    """What command line, environment and file say now. Raises ConfigError."""
    import click

    from vllm_cp import ConfigError
    from vllm_cp_exporter.flags import Settings, command

    try:
        chosen = command.main(args, prog_name="vllm-cp-exporter", standalone_mode=False)
    except click.ClickException as error:
        raise ConfigError(error.format_message()) from None
    if not isinstance(chosen, Settings):
        raise _SaidAll
    return chosen


def _refuse(why: str, code: int) -> int:
    """One line for people, on standard error."""
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in " ".join(why.split()))
    if sys.stderr is not None:
        sys.stderr.write(f"vllm-cp-exporter: {line}\n")
    return code


def _leave(_: int, __: FrameType | None) -> NoReturn:
    """A signal while the daemon is still starting: there is nothing to clean up."""
    if sys.stderr is not None:
        sys.stderr.flush()
    os._exit(0)
