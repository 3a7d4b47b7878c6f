"""``vllm-cp``: the control plane at a terminal, in an exec probe, in a CI job.

Flags become one function, that makes records, one renderer prints them, one table gives the exit code. Standard output
is data, standard error is talk. Importing this package does nothing; ``main`` is the console script.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

__all__ = ["main"]


def main(args: Sequence[str] | None = None) -> int:
    """Run one command line, ``sys.argv`` by default; returns the exit code, see ``vllm_cp.cli._exit``."""
    # Nothing is imported before this point, so that an early Ctrl-C is answered like any other.
    try:
        if os.getpid() == 1:
            # As the process of a container, SIGTERM without a handler would be lost.
            signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
        from vllm_cp.cli._app import run

        return run(args)
    except KeyboardInterrupt:
        return 130
