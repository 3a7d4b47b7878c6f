"""Stand-in for the Python of ``vllm-rs serve --python``: the frontend launches this as its managed headless engine.

The frontend gives the command line of ``vllm serve --headless``, of which address, port and size matter here.  The rest
comes from the environment: ``VLLM_CP_SIM_FACTS`` and ``VLLM_CP_SIM_PER_RANK`` (JSON), ``VLLM_CP_SIM_ANNOUNCE`` (a file
that gets the pid and the control port), ``VLLM_CP_SIM_WATCH`` (the process to outlive no longer than).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from tests.real.sim import control


def option(arguments: Sequence[str], name: str) -> str | None:
    """The value of ``--name value`` or ``--name=value``."""
    for index, argument in enumerate(arguments):
        if argument == name and index + 1 < len(arguments):
            return arguments[index + 1]
        if argument.startswith(f"{name}="):
            return argument.partition("=")[2]
    return None


def main(arguments: Sequence[str]) -> int:
    """Translate the engine's command line into the simulator's."""
    host = option(arguments, "--data-parallel-address") or "127.0.0.1"
    port = option(arguments, "--data-parallel-rpc-port") or option(arguments, "--handshake-port")
    argv = ["--handshake", f"tcp://{host}:{port}", "--engines", option(arguments, "--data-parallel-size") or "1"]
    argv += ["--facts", os.environ.get("VLLM_CP_SIM_FACTS", "{}")]
    argv += ["--per-rank", os.environ.get("VLLM_CP_SIM_PER_RANK", "{}")]
    for name in ("ANNOUNCE", "WATCH"):
        value = os.environ.get(f"VLLM_CP_SIM_{name}")
        if value:
            argv += [f"--{name.lower()}", value]
    return control.main(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
