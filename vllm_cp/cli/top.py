"""``vllm-cp top``: the fleet, live."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from vllm_cp.cli import _context, _http_side, _stdio
from vllm_cp.cli._exit import Exit
from vllm_cp.cli._output import Shape
from vllm_cp.cli._table import coloured
from vllm_cp.cli._top_screen import VIEW, Screen
from vllm_cp.cli._verb import Verb, Verdict, conclude

if TYPE_CHECKING:
    from vllm_cp.config import Connection
    from vllm_cp.faults import HttpConnection

__all__ = ["command"]


@click.command(
    "top",
    cls=Verb,
    params=[_http_side.http_url_option("HTTP server of the workers; {host} in it is each target's host.")],
    examples="""
vllm-cp top
vllm-cp top --context prod --http-url http://{host}:8000
vllm-cp top --once --target llama-0 --sort -running -o json
""",
)
@click.option("--once", is_flag=True, help="Print one frame and end; -o with another format does so too.")
@click.option("--every", "every_s", type=float, default=2.0, metavar="SECONDS", help="Round trips. [default: 2]")
def command(once: bool, every_s: float, http_urls: tuple[str, ...]) -> int:
    """The fleet, live, on the whole screen.

    LADDER is the five rungs of 'vllm-cp ready': # holds, . does not, ? is not known. BLOCKS is the KV cache as the
    worker states it. RUN, WAIT and KV % come from the worker's own /metrics, where its HTTP server is given or
    discovered; elsewhere they are "-". FAULTS and RECOV S (the last one's length) count from the start of this command.
    Keys: q quits, s and S choose the order, r turns it, / filters, j, k and the arrows move. Without a terminal it
    prints one frame.
    """
    if not 0 < every_s <= _context.LONGEST_S:
        raise click.UsageError(f"--every: {every_s:g} is no number of seconds above 0 and up to a day")
    shape, connections = _context.shape(VIEW), _context.connections()
    if len(http_urls) > 1 or (http_urls and len(connections) > 1 and _http_side.HOST not in http_urls[0]):
        raise click.UsageError(f"--http-url is one URL for all targets: write {_http_side.HOST} in it")
    urls = _urls(connections, http_urls[0] if http_urls else None)
    live = not once and shape.output == "table" and shape.columns is None
    if live and not _on_terminal():
        _stdio.say("standard output is no terminal that can be painted: this is one frame")
        live = False
    if live:
        return _live(connections, urls, every_s, shape)
    return _once(connections, urls, shape)


def _urls(connections: Sequence[Connection], template: str | None) -> dict[str, HttpConnection]:
    found = {}
    for connection in connections:
        url = _http_side.url_of(connection, template)
        if url is not None:
            found[_context.name_of(connection)] = _http_side.connection_to(url, connection)
    _http_side.check_library(found.values())
    return found


def _on_terminal() -> bool:
    both = sys.stdin is not None and sys.stdin.isatty() and sys.stdout is not None and sys.stdout.isatty()
    return both and os.environ.get("TERM", "dumb") != "dumb"


def _once(connections: Sequence[Connection], urls: Mapping[str, HttpConnection], shape: Shape) -> int:
    from vllm_cp.cli import _top_live
    from vllm_cp.cli._fanout import Reply

    records = _top_live.look(connections, urls, connections[0].timeout_s)
    replies = [Reply(record.pop("target"), _judged(record)) for record in records]
    return conclude(VIEW, shape, replies)


def _judged(record: Mapping[str, Any]) -> Verdict:
    if record["rungs"]["reachable"]:
        return Verdict(record)
    return Verdict(record, Exit.UNREACHABLE, f"{record['state']}: {record['why']}" if record["why"] else "no answer")


def _live(connections: Sequence[Connection], urls: Mapping[str, HttpConnection], every_s: float, shape: Shape) -> int:
    from vllm_cp.cli import _top_live

    screen = Screen(colour=coloured(), sort=shape.sort, descending=shape.descending)
    return _top_live.run(connections, urls, every_s, screen)
