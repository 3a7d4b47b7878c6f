"""Verbs that change workers: said beforehand, confirmed, sent once, reported per worker."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import click

from vllm_cp.cli import _context, _stdio
from vllm_cp.cli._exit import Exit
from vllm_cp.cli._flags import keep, kept
from vllm_cp.cli._table import Column, View
from vllm_cp.cli._text import plain
from vllm_cp.cli._verb import Verb, Verdict, conclude, explained

if TYPE_CHECKING:
    from vllm_cp.cli._client import Client

__all__ = ["DRY", "Change", "Changing", "change", "confirmed", "dry", "view"]

DRY = "dry run"
#: One answer takes this long at most where nobody chose another time: changes that move weights or wait for requests.
_SLOW_S = 60.0
_QUICK_S = 5.0
Asks = Literal["always", "several", "never"]
_FLAGS = {
    "--all": "Change all workers, where there are several.",
    "--yes": "Do not ask. Verbs that never ask take it too.",
    "--dry-run": "Say what would be done to whom; send nothing.",
}


class Change(NamedTuple):
    """One change, the same for every worker."""

    #: What it does, in the infinitive: ``pause generation (requests in flight end now)``.
    does: str
    #: Does it, and gives what the worker answered, if anything.
    act: Callable[[Client], Mapping[str, Any] | None]
    #: The word for a worker on which it worked.
    done: str
    #: What was asked for; part of each record.
    facts: Mapping[str, Any]
    #: Whether somebody has to confirm it: always, for several workers, or never.
    asks: Asks = "always"
    slow: bool = False
    #: What to know about a worker that did not answer in time.
    late: str = "it may still take effect there"


class Changing(Verb):
    """A verb that changes workers, with the three flags that all of them have."""

    def __init__(self, *args: Any, params: Sequence[click.Parameter] | None = None, **settings: Any) -> None:
        flags = [
            click.Option([flag], is_flag=True, help=text, expose_value=False, callback=keep)
            for flag, text in _FLAGS.items()
        ]
        super().__init__(*args, params=[*(params or ()), *flags], **settings)


def view(*columns: Column) -> View:
    """The table of a change, with columns of its own."""
    return View((Column("TARGET", "target"), Column("RESULT", "result"), *columns))


def change(shown: View, what: Change) -> int:
    """Say it, ask if need be, do it to each worker once, and report on each."""
    shape = _context.shape(shown)
    connections = _context.connections(default_s=_SLOW_S if what.slow else _QUICK_S)
    targets = [_context.name_of(connection) for connection in connections]
    from vllm_cp.cli import _fanout

    if dry(what.does, targets):
        verdict = Verdict({"result": DRY, **what.facts})
        return conclude(shown, shape, [_fanout.Reply(target, verdict) for target in targets])
    if not confirmed(what.does, targets, what.asks):
        return Exit.INTERRUPTED

    def act(client: Client) -> Verdict:
        from vllm_cp.errors import OutOfTime

        try:
            return Verdict({"result": what.done, **what.facts, **(what.act(client) or {})})
        except OutOfTime as error:
            error.hint = what.late
            raise

    try:
        replies = _fanout.ask_all(connections, explained(act))
    except KeyboardInterrupt:
        _stdio.say("interrupted: what was sent already is not taken back")
        return Exit.INTERRUPTED
    return conclude(shown, shape, replies)


def dry(does: str, targets: Sequence[str]) -> bool:
    """Whether nothing is to be sent; says what would have been."""
    if not kept().get("dry-run"):
        return False
    _stdio.say(f"would {does} on {_listed(targets)}; nothing was sent")
    return True


def confirmed(does: str, targets: Sequence[str], asks: Asks = "always") -> bool:
    """Whether to go on; says so if not. Raises UsageError where it takes a flag."""
    if _allowed(does, targets, asks):
        return True
    _stdio.say("not confirmed: nothing was sent")
    return False


def _allowed(does: str, targets: Sequence[str], asks: Asks) -> bool:
    here = click.get_current_context()
    verb = here.command_path.partition(" ")[2]
    several = len(targets) > 1
    if several and not kept().get("all"):
        raise click.UsageError(
            f"'{verb}' would change {_listed(targets)}: give --all if you mean all of them, or one --target", here
        )
    if kept().get("yes") or asks == "never" or (asks == "several" and not several):
        return True
    if sys.stdin is None or not sys.stdin.isatty():
        raise click.UsageError(
            f"this would {does} on {_listed(targets)}, and nobody can be asked here: give --yes to do it,"
            " or --dry-run to see it",
            here,
        )
    _stdio.say(f"this will {does} on {len(targets)} worker{'s' if several else ''}:")
    _stdio.talk("".join(f"  {plain(target)}\n" for target in targets) + "Go on? [y/N] ")
    said = sys.stdin.buffer.readline()
    if not said.endswith(b"\n"):
        _stdio.talk("\n")
    return said.strip().lower() in (b"y", b"yes")


def _listed(targets: Sequence[str]) -> str:
    names = ", ".join(map(plain, targets))
    return names if len(targets) == 1 else f"{len(targets)} workers ({names})"
