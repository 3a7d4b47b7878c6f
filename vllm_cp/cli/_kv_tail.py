"""``vllm-cp kv tail``: KV-cache events as they come."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from vllm_cp.cli import _context, _stdio
from vllm_cp.cli._output import json_line
from vllm_cp.cli._table import terminal_width
from vllm_cp.cli._text import cut, plain
from vllm_cp.cli._verb import Verb

if TYPE_CHECKING:
    from vllm_cp.cli._kv_listen import Heard

__all__ = ["RANK_OPTION", "SECONDS_OPTION", "command", "seconds_left"]

_FORMATS = ("table", "jsonl")
_TYPES = ("stored", "removed", "cleared", "unknown", "gap", "reset")

RANK_OPTION = click.option(
    "--rank", "ranks", type=click.IntRange(min=0), multiple=True, metavar="N", help="Only this rank; repeatable."
)
SECONDS_OPTION = click.option("--for-seconds", "for_s", type=float, metavar="SECONDS", help="End after that time.")


@click.command(
    "tail",
    cls=Verb,
    formats=_FORMATS,
    examples="""
vllm-cp kv tail
vllm-cp kv tail --type stored --rank 0 --count 10 -o jsonl
vllm-cp kv tail --from-seq 0 --target llama-0 -o jsonl > events.jsonl
""",
)
@click.option("--count", type=click.IntRange(min=1), metavar="N", help="End after so many lines.")
@SECONDS_OPTION
@RANK_OPTION
@click.option("--from-seq", type=click.IntRange(min=0), metavar="N", help="Begin with batch N of each rank, by replay.")
@click.option(
    "--type", "types", type=click.Choice(_TYPES), multiple=True, metavar="TYPE", help="Only that; repeatable."
)
def command(
    count: int | None, for_s: float | None, ranks: tuple[int, ...], from_seq: int | None, types: tuple[str, ...]
) -> int:
    """Show KV-cache events of each worker, a line at a time, until Ctrl-C.

    Types: stored, removed, cleared, unknown (a kind that is not known here, kept as received), gap (batches that are
    lost for good, and why), reset (what was known of a rank is void). Gaps and resets that are not asked for are said
    on standard error: nothing is lost silently. In jsonl a block hash is text, 0x... where the engine sends bytes. A
    worker whose events are off exits with 8, one that can't be read with 7, a publisher that is silent is none of that.
    """
    until = seconds_left(for_s)
    output, connections = _context.output(_FORMATS), _context.connections()
    from vllm_cp.cli import _kv_listen
    from vllm_cp.kv import Settings

    sources = _kv_listen.find_sources(connections, ranks)
    code = sources.exit()
    show = _Lines(output, types, ranks, count, max((len(plain(target)) for target in sources.usable), default=0))
    settings = Settings(backfill=from_seq is not None, from_seq=from_seq or 0, catch_up_after_s=0.2)
    if sources.usable:
        with _kv_listen.Listening(sources, settings) as heard:
            for each in heard:
                if each is not None and show(each):
                    break
                if until() <= 0 or _stdio.reader_left():
                    break
    return code


def seconds_left(for_s: float | None) -> Any:
    """A function that gives the seconds that are left. Raises UsageError."""
    if for_s is None:
        return lambda: float("inf")
    if not 0 < for_s <= _context.LONGEST_S:
        raise click.UsageError(f"--for-seconds: {for_s:g} is no number of seconds above 0 and up to a day")
    ends = time.monotonic() + for_s
    return lambda: ends - time.monotonic()


class _Lines:
    """Items, written as they come."""

    def __init__(
        self, output: str, types: tuple[str, ...], ranks: tuple[int, ...], count: int | None, widest: int
    ) -> None:
        self._json = output == "jsonl"
        self._types = frozenset(types or _TYPES)
        self._asked = "reset" in types
        self._ranks = frozenset(ranks)
        self._left = count
        self._widest = widest

    def __call__(self, heard: Heard) -> bool:
        """Show it; whether that was the last."""
        from vllm_cp.cli._kv_records import line_of, records_of, said_of
        from vllm_cp.kv import Notice, SourceState, StateChange

        item = heard.item
        if isinstance(item, StateChange):
            if item.state is not SourceState.CONNECTING:
                detail = f": {item.detail}" if item.detail else ""
                _stdio.say(f"{heard.target}{_of(item)}: {item.state.value}{detail}")
            return False
        if isinstance(item, Notice):
            _stdio.say(f"{heard.target}{_of(item)}: {item.detail}")
            return False
        lines = []
        now = time.time()
        for record in records_of(heard.target, item):
            if self._ranks and record["rank"] is not None and record["rank"] not in self._ranks:
                continue
            # Where the view begins is no event: it goes with the events only where resets were asked for.
            begins = record["type"] == "reset" and record["begins_at"] is not None and not self._asked
            if begins or record["type"] not in self._types:
                if record["type"] in ("gap", "reset"):
                    _stdio.say(said_of(record))
                continue
            if self._json:
                lines.append(json_line({"at": None, **record}))
            else:
                text, width = line_of(record, self._widest, now), terminal_width()
                lines.append((text if width is None else cut(text, width, "...")) + "\n")
            if self._left is not None and len(lines) >= self._left:
                break
        if lines:
            _stdio.emit("".join(lines))
        if self._left is None:
            return False
        self._left -= len(lines)
        return self._left <= 0


def _of(item: Any) -> str:
    if item.source is None:
        return ""
    return " all ranks" if item.source.rank is None else f" rank {item.source.rank}"
