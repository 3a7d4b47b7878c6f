"""``vllm-cp startup``: the clocks of a start."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from vllm_cp.cli import _context
from vllm_cp.cli._exit import Exit
from vllm_cp.cli._ladder import state_of, why_of
from vllm_cp.cli._progress import Progress
from vllm_cp.cli._table import Column, View
from vllm_cp.cli._times import iso
from vllm_cp.cli._verb import Verb, Verdict, conclude

if TYPE_CHECKING:
    from vllm_cp.cli._client import Client
    from vllm_cp.models.startup import Startup

__all__ = ["command"]

_DEFAULT_S = 600.0
_PHASES = ("to_socket", "to_serving", "to_warm", "to_first_response")
_VIEW = View(
    (
        Column("TARGET", "target"),
        Column("TO SOCKET", "seconds.to_socket"),
        Column("TO SERVING", "seconds.to_serving"),
        Column("TO WARM", "seconds.to_warm"),
        Column("BEGAN", "began", time=True),
        Column("FIRST RESPONSE", "seconds.to_first_response", wide=True),
        Column("INSTANCE", "instance_id", wide=True),
    )
)


@click.command(
    "startup",
    cls=Verb,
    timeout_help="Longest wait for the start. [default: 600]",
    examples="""
vllm-cp startup --target llama-0
vllm-cp startup --timeout 1200 -o json | jq '.[].seconds'
kubectl scale statefulset/llama --replicas 1 && vllm-cp startup -v
""",
)
def command() -> int:
    """Measure a start: seconds until the port opens, the server serves, and a first generation has finished.

    Run it as you start the worker, or before: the clocks run from when the port is first found closed. Of a worker that
    is up already none can be read, which exits with 8. One generation of one token is sent once the worker admits.
    """
    shape, deadline_s = _context.shape(_VIEW), _context.whole_timeout(_DEFAULT_S)
    connections = _context.connections(at_most_s=deadline_s)
    from dataclasses import replace

    from vllm_cp.cli import _fanout
    from vllm_cp.config import Retry

    # A closed port that is asked again is an open one in the end, and the start was missed.
    connections = [replace(connection, retry=Retry(attempts=1)) for connection in connections]
    progress = Progress("waiting for a start", len(connections))
    try:
        replies = _fanout.ask_all(
            connections, lambda client: _measure(client, deadline_s, progress), at_once=max(1, len(connections))
        )
    finally:
        progress.close()
    return conclude(_VIEW, shape, replies)


def _measure(client: Client, deadline_s: float, progress: Progress) -> Verdict:
    from vllm_cp.errors import OutOfTime
    from vllm_cp.models.startup import Startup
    from vllm_cp.readiness import Ladder

    with Ladder(client) as ladder:
        # Without a canary yet: one that is up and busy shall not be bothered for nothing.
        if ladder.observe().reachable.holds:
            record = _record(Startup(), ladder.state.instance_id)
            return Verdict(record, Exit.NOT_READY, "was up already: there is no start to measure")
        progress.at(client.target, "the port is closed")
        try:
            startup = ladder.measure_startup(deadline_s)
        except OutOfTime:
            last = f"{state_of(ladder.state.rungs)}, {why_of(ladder.state)}"
            record = _record(ladder.state.startup, ladder.state.instance_id)
            return Verdict(record, Exit.UNREACHABLE, f"not warm after {deadline_s:g} s; last seen: {last}")
        progress.there(client.target)
        return Verdict(_record(startup, ladder.state.instance_id))


def _record(startup: Startup, instance_id: str | None) -> dict[str, Any]:
    phases = startup.phases()
    return {
        "instance_id": instance_id,
        "began": iso(startup.began),
        "seconds": {name: round(phases[name], 3) if name in phases else None for name in _PHASES},
    }
