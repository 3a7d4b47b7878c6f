"""``vllm-cp kv stats``: how the KV-cache events of each rank flow."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from vllm_cp.cli import _context, _stdio
from vllm_cp.cli._kv_tail import RANK_OPTION, SECONDS_OPTION, seconds_left
from vllm_cp.cli._output import Shape, json_line
from vllm_cp.cli._table import Column, View, coloured, in_order, table, terminal_width
from vllm_cp.cli._verb import Verb

if TYPE_CHECKING:
    from vllm_cp.cli._kv_listen import Heard, Listening
    from vllm_cp.kv import SourceId, SourceStats

__all__ = ["command"]

_FORMATS = ("table", "wide", "jsonl")
_VIEW = View(
    (
        Column("TARGET", "target"),
        Column("RANK", "shown_rank"),
        Column("STATE", "state", good=frozenset({"connected"})),
        Column("LAST S", "last_batch_age_s"),
        Column("BATCHES/S", "batches_per_s"),
        Column("STORED/S", "stored_per_s"),
        Column("REMOVED/S", "removed_per_s"),
        Column("LOST", "lost"),
        Column("SEQ", "last_seq", wide=True),
        Column("CLEARED", "cleared", wide=True),
        Column("REPLAYED", "replayed", wide=True),
        Column("GAPS", "gaps", wide=True),
        Column("RESTARTS", "restarts", wide=True),
        Column("UNREADABLE", "failures", wide=True),
        Column("UNKNOWN", "unknown_events", wide=True),
        Column("DETAIL", "detail", wide=True),
        Column("ADDRESS", "address", wide=True),
    ),
    lambda record: [{**record, "shown_rank": "all" if record["rank"] is None else record["rank"]}],
)


@click.command(
    "stats",
    cls=Verb,
    formats=_FORMATS,
    examples="""
vllm-cp kv stats
vllm-cp kv stats --every 10 --context prod
vllm-cp kv stats --count 1 -o jsonl
""",
)
@click.option("--every", "every_s", type=float, default=2.0, metavar="SECONDS", help="Between two looks. [default: 2]")
@click.option("--count", type=click.IntRange(min=1), metavar="N", help="End after so many looks.")
@SECONDS_OPTION
@RANK_OPTION
def command(every_s: float, count: int | None, for_s: float | None, ranks: tuple[int, ...]) -> int:
    """Show how the KV-cache events of each rank flow, until Ctrl-C.

    Rates are over the last interval: batches, and blocks stored and removed. LAST S is how long ago the last batch
    came, "-" before the first: a publisher that is connected and silent is well. LOST counts batches that are lost for
    good since the beginning. On a terminal the table stays in its place.
    """
    until = seconds_left(for_s)
    if not 0 < every_s <= _context.LONGEST_S:
        raise click.UsageError(f"--every: {every_s:g} is no number of seconds above 0 and up to a day")
    output, shape, connections = _context.output(_FORMATS), _context.shape(_VIEW), _context.connections()
    from vllm_cp.cli import _kv_listen
    from vllm_cp.kv import Settings

    sources = _kv_listen.find_sources(connections, ranks)
    code = sources.exit()
    if sources.usable:
        with _kv_listen.Listening(sources, Settings(backfill=False)) as heard:
            _run(heard, _Screen(output, shape), every_s, count, until)
    return code


def _run(
    heard: Listening, show: Callable[[list[dict[str, Any]]], None], every_s: float, count: int | None, until: Any
) -> None:
    counts = _Counts()
    due = time.monotonic() + every_s
    for each in heard:
        if each is not None:
            counts.add(each)
        now = time.monotonic()
        if now >= due:
            show(counts.look(heard, now))
            due = max(due + every_s, now)
            if count is not None:
                count -= 1
                if count <= 0:
                    return
        if until() <= 0 or _stdio.reader_left():
            return


class _Counts:
    """What came since the last look."""

    def __init__(self) -> None:
        self._at = time.monotonic()
        self._blocks: dict[SourceId, list[int]] = {}
        self._cleared: dict[SourceId, int] = {}
        self._batches: dict[SourceId, int] = {}

    def add(self, heard: Heard) -> None:
        """An item that came."""
        from vllm_cp.kv import Batch, Cleared, Removed, Stored

        if not isinstance(heard.item, Batch):
            return
        source = heard.item.source
        blocks = self._blocks.setdefault(source, [0, 0])
        for event in heard.item.events:
            if isinstance(event, Stored):
                blocks[0] += len(event.block_hashes)
            elif isinstance(event, Removed):
                blocks[1] += len(event.block_hashes)
            elif isinstance(event, Cleared):
                self._cleared[source] = self._cleared.get(source, 0) + 1

    def look(self, heard: Listening, now: float) -> list[dict[str, Any]]:
        """A record for each rank; the next interval begins."""
        seconds, self._at = max(1e-9, now - self._at), now
        blocks, self._blocks = self._blocks, {}
        records = []
        for target, stats in heard.stats().items():
            for source in stats.sources:
                stored, removed = blocks.get(source.source, (0, 0))
                batches = source.batches - self._batches.get(source.source, 0)
                self._batches[source.source] = source.batches
                rates = {
                    "batches_per_s": round(batches / seconds, 1),
                    "stored_per_s": round(stored / seconds, 1),
                    "removed_per_s": round(removed / seconds, 1),
                }
                records.append(_record(target, source, rates, self._cleared.get(source.source, 0)))
        return records


def _record(target: str, stats: SourceStats, rates: dict[str, float], cleared: int) -> dict[str, Any]:
    last = stats.last_batch_at
    return {
        "target": target,
        "rank": stats.source.rank,
        "address": stats.source.address,
        "state": stats.state.value,
        "detail": stats.detail or None,
        "last_batch_age_s": None if last is None else round(max(0.0, time.time() - last), 1),
        **rates,
        "last_seq": stats.last_seq,
        "lost": sum(stats.lost.values()),
        "lost_by_reason": {reason.value: number for reason, number in stats.lost.items()},
        "cleared": cleared,
        "replayed": stats.replayed,
        "gaps": stats.gaps,
        "restarts": stats.restarts,
        "failures": sum(stats.failures.values()),
        "failures_by_reason": {reason.value: number for reason, number in stats.failures.items()},
        "unknown_events": stats.unknown_events,
    }


class _Screen:
    """Looks, one after the other; on a terminal each in the place of the one before."""

    def __init__(self, output: str, shape: Shape) -> None:
        self._output = output
        self._shape = shape
        self._lines = 0

    def __call__(self, records: Sequence[dict[str, Any]]) -> None:
        shape = self._shape
        if shape.sort is not None:
            records = in_order(records, lambda r: next(iter(_VIEW.rows(r))), shape.sort, descending=shape.descending)
        if self._output == "jsonl":
            _stdio.emit("".join(map(json_line, records)))
            return
        wide, width = self._output == "wide", terminal_width()
        shown = shape.columns or [column for column in _VIEW.columns if wide or not column.wide]
        rows = [row for record in records for row in _VIEW.rows(record)]
        text = table(shown, rows, width=None if wide else width, colour=coloured())
        in_place = width is not None and os.environ.get("TERM", "dumb") != "dumb"
        back = f"\x1b[{self._lines}F\x1b[J" if in_place and self._lines else ""
        self._lines = text.count("\n")
        _stdio.emit(back + text)
