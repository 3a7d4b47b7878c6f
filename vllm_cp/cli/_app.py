"""The command line as a whole: the nouns, and what becomes of everything that can go wrong."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import click

from vllm_cp import __version__
from vllm_cp.cli import _stdio
from vllm_cp.cli._context import LocalError, decoded
from vllm_cp.cli._exit import MEANINGS, Exit
from vllm_cp.cli._verb import Noun

__all__ = ["NOUNS", "run"]

#: Noun and what it is about. Each lives in the module of its name, imported when it is used.
NOUNS = {
    "abort": "End requests by their ids.",
    "audit": "What an outsider can do to a worker.",
    "completion": "A script that completes this command line in a shell.",
    "context": "Named fleets: targets, TLS and token files under one name.",
    "diff": "How workers differ from a lock file.",
    "episodes": "Faults and recoveries: the last ones, or as they happen.",
    "ft": "Fault tolerance: state of the engines, and bringing them back.",
    "health": "Whether the server reports that it serves.",
    "info": "Version, KV-cache blocks, limits and parallelism.",
    "kv": "KV cache: its events, and which worker holds a prompt.",
    "lock": "Write down what a worker says it is.",
    "lora": "LoRA adapters: list, load, unload.",
    "model": "The model, its names and capabilities.",
    "pause": "Stop generation.",
    "probe": "One word about one worker, for exec probes.",
    "ready": "How far each worker is proved to be able to serve, and why.",
    "resume": "Go on generating.",
    "shutdown": "End a frontend and its engine.",
    "sleep": "Free a worker's GPU memory.",
    "startup": "Measure a start, from closed port to first token.",
    "top": "The fleet, live.",
    "wait": "Wait until workers reach a state.",
    "wake": "Wake a sleeping worker.",
    "watch": "Each change of each worker, as it happens.",
    "weights": "The name of the weights in use.",
}

_EXAMPLES = """
vllm-cp health                                 # localhost:8001
vllm-cp info --target llama-0:8001 --target llama-1:8001
vllm-cp --tls-ca ca.pem --target llama-0 kv sources -o json
vllm-cp ready --context prod
vllm-cp pause --mode wait --keep-cache --target llama-0
VLLM_CP_TARGET="llama-0 llama-1" vllm-cp model -o yaml
"""


class _Root(Noun):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(NOUNS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in NOUNS:
            return None
        command: click.Command = import_module(f"vllm_cp.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # From the table: help imports no noun.
        with formatter.section("Nouns"):
            formatter.write_dl(sorted(NOUNS.items()))

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Environment"):
            formatter.write_text(
                "Every connection flag has its variable: VLLM_CP_TARGET (several: spaces or commas between them),"
                " VLLM_CP_TIMEOUT, VLLM_CP_TLS_CA, ... A flag wins over its variable, its variable over the context,"
                " and a flag after the verb over one before it. A context that is not named on the command line"
                " is in force for its own workers only. NO_COLOR and FORCE_COLOR are honoured."
            )
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code.value), text) for code, text in MEANINGS.items()])


def _show_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        _stdio.emit(f"vllm-cp {__version__}\n")
        ctx.exit()


def _root() -> click.Command:
    version = click.Option(
        ["--version"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_show_version,
        help="Show the version and exit.",
    )
    return _Root(
        "vllm-cp",
        params=[version],
        subcommand_metavar="NOUN [VERB] [ARGS]...",
        examples=_EXAMPLES,
        help="Ask vLLM workers, over their gRPC control port, what they are and whether they serve, and steer them.",
    )


def run(args: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code; nothing but KeyboardInterrupt comes through."""
    _stdio.guard_descriptors()
    # gRPC's own log would mix with ours: its errors come back to us as statuses anyway.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        return _invoke(list(sys.argv[1:] if args is None else args))
    except _stdio.OutputFailedError as error:
        if error.reader_left:
            return Exit.OK
        _stdio.say(str(error))
        return Exit.UNEXPECTED
    except KeyboardInterrupt:
        _stdio.say("interrupted")
        if args is None:
            # This process is ours to end, at once: a second Ctrl-C while the interpreter winds down would change how.
            os._exit(Exit.INTERRUPTED)
        return Exit.INTERRUPTED
    except Exception as error:  # noqa: BLE001  (a defect is one line too; the exit code tells it apart)
        _stdio.say(f"unexpected {type(error).__name__}: {error}; this is a defect: please report it")
        return Exit.UNEXPECTED


def _invoke(args: list[str]) -> int:
    root = _root()
    if instruction := os.environ.get("_VLLM_CP_COMPLETE"):
        from vllm_cp.cli.completion import complete

        return complete(root, instruction)
    try:
        arguments = [decoded("the argument", argument) for argument in args]
        with root.make_context("vllm-cp", arguments) as context:
            code: Any = root.invoke(context)
            return int(code)
    except click.exceptions.Exit as end:
        return end.exit_code
    except LocalError as error:
        _stdio.say(error.message)
        return error.code
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx is not None else "vllm-cp"
        message = " ".join(error.format_message().split()).rstrip(".")
        _stdio.say(f"{message}; see '{command} --help'")
        return Exit.USAGE
