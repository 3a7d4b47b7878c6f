"""``vllm-cp episodes``: faults and recoveries, from a daemon that has watched, or as they happen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from vllm_cp.cli import _context, _stdio
from vllm_cp.cli._exit import Exit
from vllm_cp.cli._output import FORMATS, json_line
from vllm_cp.cli._table import Column, View, terminal_width
from vllm_cp.cli._text import cut, plain
from vllm_cp.cli._times import iso, local
from vllm_cp.cli._verb import Verb, conclude

if TYPE_CHECKING:
    from vllm_cp.episodes import Transition
    from vllm_cp.models.episode import Episode

__all__ = ["command", "record_of"]

_LIVE = ("table", "jsonl")
_FIELDS = ("cause", "start", "end", "kind", "duration_s", "instance_id", "detail")
_VIEW = View(
    (
        Column("TARGET", "target"),
        Column("CAUSE", "cause"),
        Column("START", "start", time=True),
        Column("ENDED AS", "ended", good=frozenset({"resumed", "replaced", "retried", "planned"})),
        Column("SECONDS", "duration_s"),
        Column("DETAIL", "detail"),
        Column("END", "end", wide=True, time=True),
        Column("POOL", "pool", wide=True),
        Column("INSTANCE", "instance_id", wide=True),
    ),
    lambda record: [{**record, "ended": record["kind"] or "open"}],
)


@click.command(
    "episodes",
    cls=Verb,
    examples="""
vllm-cp episodes --via http://exporter:9645
vllm-cp episodes --via http://exporter:9645 --pool chat --sort -seconds
vllm-cp episodes --context prod -o jsonl >> faults.jsonl
""",
)
@click.option("--open", "only_open", is_flag=True, help="Only faults that go on.")
@click.option("--count", type=click.IntRange(min=1), metavar="N", help="The newest N; live: end after so many lines.")
@click.option("--for-seconds", "for_s", type=float, metavar="SECONDS", help="Live: end after that time.")
def command(only_open: bool, count: int | None, for_s: float | None) -> int:
    """Faults of the workers, and how they ended.

    With --via the last ones that a vllm-cp-exporter has seen, newest first. Without, they are watched from now on: a
    line when a fault opens and another when it is over, until Ctrl-C. ENDED AS: resumed (the same instance answers
    again), replaced (a new one does), retried (by fault tolerance), gone, planned (it was no fault), or open.
    """
    if for_s is not None and not 0 < for_s <= _context.LONGEST_S:
        raise click.UsageError(f"--for-seconds: {for_s:g} is no number of seconds above 0 and up to a day")
    source, daemon = _context.via()
    if daemon is None:
        return _live(only_open, count, for_s)
    if for_s is not None:
        raise click.UsageError(f"--for-seconds is about watching, and {source} asks a daemon for what was")
    shape = _context.shape(_VIEW)
    from vllm_cp.cli import _daemon
    from vllm_cp.cli._fanout import Reply
    from vllm_cp.errors import ControlError

    try:
        found, _ = _daemon.chosen(_daemon.ask("episodes"))
    except ControlError as error:
        return conclude(_VIEW, shape, [Reply(error.target, error=error)])
    shown = [record for record in found if not only_open or record["end"] is None][:count]
    return conclude(_VIEW, shape, [Reply(record["worker"], _known(record)) for record in shown])


def record_of(episode: Episode) -> dict[str, Any]:
    """One fault, as data."""
    return {
        "cause": episode.cause.value,
        "start": iso(episode.start),
        "end": iso(episode.end),
        "kind": episode.kind.value if episode.kind is not None else None,
        "duration_s": None if episode.duration_s is None else round(episode.duration_s, 3),
        "instance_id": episode.instance_id,
        "detail": episode.detail or None,
    }


def _known(record: Mapping[str, Any]) -> Mapping[str, Any]:
    duration = record["duration_s"]
    return {
        "pool": record["pool"],
        **{field: record[field] for field in _FIELDS},
        "duration_s": None if duration is None else round(duration, 3),
        "detail": record["detail"] or None,
    }


def _live(only_open: bool, count: int | None, for_s: float | None) -> int:
    output = _context.output(FORMATS)
    if output not in _LIVE:
        raise click.UsageError(f"-o {output}: watched live it is {' or '.join(_LIVE)}; give --via for the rest")
    connections = _context.connections()
    from vllm_cp.cli import _watching
    from vllm_cp.cli._talk import call_hook

    left = count

    def show(target: str, transition: Transition) -> None:
        nonlocal left
        episode = transition.episode
        if episode is None or not transition.kind.value.startswith("fault_"):
            return
        if only_open and episode.end is not None:
            return
        record = {"target": target, "pool": None, **record_of(episode)}
        _stdio.emit(json_line(record) if output == "jsonl" else _line(record))
        if left is not None:
            left -= 1
            if left <= 0:
                raise _watching.Stop

    _watching.watch_all(
        connections,
        show,
        _watching.Pace("", 5.0, for_s),
        ended=_stdio.reader_left,
        on_rpc=call_hook(),
    )
    return Exit.OK


def _line(record: Mapping[str, Any]) -> str:
    how = record["kind"] or "open"
    if record["duration_s"] is not None:
        how += f" after {record['duration_s']:g} s"
    text = f"{local(record['end'] or record['start'])}  {record['target']}  {record['cause']}  {how}"
    text = plain(f"{text}  ({record['detail']})" if record["detail"] and record["end"] is None else text)
    width = terminal_width()
    return (text if width is None else cut(text, width, "...")) + "\n"
