"""``vllm-cp wait``: until workers reach a state."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from vllm_cp.cli import _context
from vllm_cp.cli._exit import Exit
from vllm_cp.cli._ladder import CANARY_OPTION, RUNGS, SERVICE_OPTION, state_of, why_of
from vllm_cp.cli._progress import Progress
from vllm_cp.cli._table import Column, View
from vllm_cp.cli._verb import Verb, Verdict, conclude

if TYPE_CHECKING:
    from vllm_cp.cli._client import Client
    from vllm_cp.episodes import WorkerState
    from vllm_cp.readiness import Ladder

__all__ = ["command"]

_GOALS = (*RUNGS, "drained", "gone")
_DEFAULT_S = 300.0
_EVERY_S = 0.5
_VIEW = View(
    (
        Column("TARGET", "target"),
        Column("GOAL", "goal"),
        Column("REACHED", "reached", good=frozenset({"yes"})),
        Column("SECONDS", "seconds"),
        Column("STATE", "state"),
        Column("WHY NOT", "why"),
        Column("REASON", "reason", wide=True),
        Column("INSTANCE", "instance_id", wide=True),
    )
)


@click.command(
    "wait",
    cls=Verb,
    timeout_help="Longest wait in all. [default: 300]",
    examples="""
vllm-cp wait --for admitting --timeout 600
vllm-cp wait --for warm --target llama-0 --target llama-1
vllm-cp wait --for gone --target llama-0 --timeout 60 && echo "it has stopped"
""",
)
@click.option("--for", "goal", type=click.Choice(_GOALS), required=True, help="The state to wait for.")
@SERVICE_OPTION
@CANARY_OPTION
def command(goal: str, service: str, canary: bool) -> int:
    """Wait until every target has reached a state.

    The rungs are those of 'vllm-cp ready'; drained: the worker stops taking calls on its way out, or is gone; gone:
    its port is closed. A worker that is not there yet is waited for. On a terminal a line on standard error shows how
    it goes. When the time is up the last state seen is shown, and the exit code is 3; a rung that this worker can never
    prove is 7 at once.
    """
    shape, deadline_s = _context.shape(_VIEW), _context.whole_timeout(_DEFAULT_S)
    connections = _context.connections(at_most_s=deadline_s)
    from vllm_cp.cli import _fanout
    from vllm_cp.readiness import Ladder

    progress = Progress(f"waiting for {goal}", len(connections))

    def ask(client: Client) -> Verdict:
        with Ladder(client, service=service, canary=canary or goal == "warm") as ladder:
            return _wait(client, ladder, goal, deadline_s, progress)

    try:
        replies = _fanout.ask_all(connections, ask, at_once=max(1, len(connections)))
    finally:
        progress.close()
    return conclude(_VIEW, shape, replies)


def _wait(client: Client, ladder: Ladder, goal: str, deadline_s: float, progress: Progress) -> Verdict:
    from vllm_cp.errors import NotSupported, OutOfTime

    began = time.monotonic()

    def looked(_: object) -> None:
        progress.at(client.target, _last(client, ladder.state, goal))

    try:
        ladder.wait_until(goal, deadline_s, looked, every_s=_EVERY_S)
    except OutOfTime:
        record = _record(goal, False, began, ladder.state)
        last = _last(client, ladder.state, goal)
        return Verdict(record, Exit.UNREACHABLE, f"not {goal} after {record['seconds']:g} s; last seen: {last}")
    except NotSupported as error:
        error.hint = "vLLM has the round trip for it since 0.28; with --canary a generation of one token may prove it"
        raise
    progress.there(client.target)
    return Verdict(_record(goal, True, began, ladder.state))


def _record(goal: str, reached: bool, began: float, state: WorkerState) -> dict[str, Any]:
    return {
        "goal": goal,
        "reached": reached,
        "seconds": round(time.monotonic() - began, 3),
        "state": state_of(state.rungs),
        "reason": state.reason.value if state.reason else None,
        "why": "" if reached else why_of(state, goal),
        "instance_id": state.instance_id,
    }


def _last(client: Client, state: WorkerState, goal: str) -> str:
    """The last state seen, in words; what the worker's port failed with says more than the ladder."""
    if client.unheard is not None:
        return str(client.unheard).removeprefix(f"{client.unheard.target}: ")
    why = why_of(state, goal)
    return f"{state_of(state.rungs)}, {why}" if why else state_of(state.rungs)
