"""``vllm-cp watch``: each change of each worker, as it happens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from vllm_cp.cli import _context, _stdio
from vllm_cp.cli._exit import Exit
from vllm_cp.cli._ladder import SERVICE_OPTION
from vllm_cp.cli._output import json_line
from vllm_cp.cli._table import coloured, terminal_width
from vllm_cp.cli._talk import call_hook
from vllm_cp.cli._text import cut, plain
from vllm_cp.cli._times import iso, local_now
from vllm_cp.cli._verb import Verb
from vllm_cp.cli.episodes import record_of

if TYPE_CHECKING:
    from vllm_cp.episodes import Transition

__all__ = ["command"]

_FORMATS = ("table", "jsonl")
#: The names of ``vllm_cp.episodes.TransitionKind``; written out because help must not load them.
_KINDS = (
    "health",
    "rung",
    "ready",
    "instance",
    "shared_name",
    "fault_opened",
    "fault_closed",
    "fault_reopened",
    "fault_counted",
    "fault_ended",
)
_GREEN, _RED = "\x1b[32m", "\x1b[31m"


@click.command(
    "watch",
    cls=Verb,
    formats=_FORMATS,
    examples="""
vllm-cp watch
vllm-cp watch --context prod --kind ready --kind fault_opened
vllm-cp watch -o jsonl --for-seconds 3600 >> transitions.jsonl
""",
)
@click.option("--count", type=click.IntRange(min=1), metavar="N", help="End after so many lines.")
@click.option("--for-seconds", "for_s", type=float, metavar="SECONDS", help="End after that time.")
@click.option(
    "--kind", "kinds", type=click.Choice(_KINDS), multiple=True, metavar="KIND", help="Only that; repeatable."
)
@click.option(
    "--every", "every_s", type=float, default=5.0, metavar="SECONDS", help="Pace of round trips. [default: 5]"
)
@SERVICE_OPTION
def command(count: int | None, for_s: float | None, kinds: tuple[str, ...], every_s: float, service: str) -> int:
    """Show each change of each worker, a line at a time, until Ctrl-C.

    It follows the health stream, and asks the engines for a sign of life every few seconds. The first lines tell how
    things stand. Kinds: health, rung (of the ladder in 'vllm-cp ready'), ready, instance, fault_opened, fault_closed
    (recovered), fault_reopened, fault_counted (no planned stop after all), fault_ended. A reader that leaves ends it.
    """
    for flag, seconds in (("--for-seconds", for_s), ("--every", every_s)):
        if seconds is not None and not 0 < seconds <= _context.LONGEST_S:
            raise click.UsageError(f"{flag}: {seconds:g} is no number of seconds above 0 and up to a day")
    output, connections = _context.output(_FORMATS), _context.connections()
    from vllm_cp.cli import _watching

    widest = max((len(plain(_context.name_of(connection))) for connection in connections), default=0)
    show = _Lines(output, kinds, count, widest)
    _watching.watch_all(
        connections,
        show,
        _watching.Pace(service, every_s, for_s),
        ended=_stdio.reader_left,
        on_rpc=call_hook(),
    )
    return Exit.OK


class _Lines:
    """Transitions, written as they come."""

    def __init__(self, output: str, kinds: tuple[str, ...], count: int | None, widest: int) -> None:
        self._output = output
        self._kinds = frozenset(kinds)
        self._left = count
        self._widest = widest
        self._colour = coloured()
        self._last = ("", "", "")

    def __call__(self, target: str, transition: Transition) -> None:
        if self._kinds and transition.kind.value not in self._kinds:
            return
        record = _record(target, transition)
        _stdio.emit(json_line(record) if self._output == "jsonl" else self._line(record, transition.wall))
        if self._left is not None:
            self._left -= 1
            if self._left <= 0:
                from vllm_cp.cli._watching import Stop

                raise Stop

    def _line(self, record: dict[str, Any], wall: float) -> str:
        what = " -> ".join(text for text in (record["was"], record["now"]) if text)
        if record["rung"]:
            what = f"{record['rung']} {what}"
        episode = record["episode"] or {}
        if episode.get("duration_s") is not None:
            what += f" after {episode['duration_s']:g} s"
        detail = record["detail"] or episode.get("detail")
        # One cause brings down several rungs at once: it is told with the first.
        told, self._last = self._last, (record["target"], record["at"], detail or "")
        if told == self._last:
            detail = None
        text = f"{local_now(wall)}  {plain(record['target']):{self._widest}}  {record['kind']:14}  {what}"
        text = plain(f"{text}  ({detail})" if detail else text)
        width = terminal_width()
        if width is not None and len(text) > width:
            text = cut(text, width, "...")
        colour = _colour_of(record) if self._colour else ""
        return f"{colour}{text}\x1b[0m\n" if colour else f"{text}\n"


def _colour_of(record: dict[str, Any]) -> str:
    kind = record["kind"]
    if kind == "ready":
        return _GREEN if record["now"] == "ready" else _RED
    return {"fault_opened": _RED, "fault_reopened": _RED, "fault_closed": _GREEN}.get(kind, "")


def _record(target: str, transition: Transition) -> dict[str, Any]:
    rung, was, now = None, transition.was, transition.now
    if transition.kind.value == "rung":
        # "serving=yes" in the SDK.
        rung, _, was = was.partition("=")
        now = now.partition("=")[2]
    return {
        "at": iso(transition.wall),
        "target": target,
        "kind": transition.kind.value,
        "rung": rung,
        "was": was or None,
        "now": now or None,
        "detail": transition.detail or None,
        "episode": record_of(transition.episode) if transition.episode is not None else None,
    }
