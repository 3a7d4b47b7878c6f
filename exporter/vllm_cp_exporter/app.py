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
    prepared = _prepared(args)
    if isinstance(prepared, int):
        for number, handler in before.items():
            signal.signal(number, handler)
        return prepared

    import asyncio

    from vllm_cp_exporter.daemon import run

    settings, sockets = prepared
    asyncio.run(run(settings, sockets, signals=before))
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
    logs.set_up(settings.log_format, settings.log_level)
    return settings.exporter, sockets


def _settings(args: Sequence[str] | None) -> Settings | int:
    """The settings, or the exit code when there is nothing to run."""
    import click

    from vllm_cp import ConfigError
    from vllm_cp_exporter.flags import Settings, command

    try:
        chosen = command.main(args, prog_name="vllm-cp-exporter", standalone_mode=False)
    except (click.ClickException, ConfigError) as error:
        said = error.format_message() if isinstance(error, click.ClickException) else str(error)
        return _refuse(f"{said} (see --help)", 2)
    return chosen if isinstance(chosen, Settings) else 0  # --help and --version have said it all


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
