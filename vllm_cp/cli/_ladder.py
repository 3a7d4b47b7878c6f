"""The ladder of a worker as the command line looks at it: one verdict, as a record."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from vllm_cp.cli._exit import Exit, exit_of
from vllm_cp.cli._times import iso
from vllm_cp.cli._verb import Verdict

if TYPE_CHECKING:
    from vllm_cp.cli._client import Client
    from vllm_cp.episodes import WorkerState
    from vllm_cp.models.ladder import Rung, Rungs

__all__ = [
    "CANARY_OPTION",
    "RUNGS",
    "SERVICE_OPTION",
    "look",
    "record_of",
    "state_of",
    "told_verdict",
    "verdict_of",
    "why_of",
]

#: The names of ``vllm_cp.models.ladder.Rung``, lowest first; written out because help must not load them.
RUNGS = ("reachable", "serving", "answering", "admitting", "warm")
#: What readiness is where nobody says otherwise.
DEFAULT_RUNG = "admitting"
#: Between two looks that have not settled it, seconds.
_AGAIN_S = 0.2
#: Least patience with an engine, seconds.
_LEAST_S = 1.2

SERVICE_OPTION = click.option(
    "--service", default="", metavar="NAME", help="Health name that must be SERVING. [default: the server]"
)
CANARY_OPTION = click.option(
    "--canary", is_flag=True, help="Allow one generation of one token as a proof; warm always sends it."
)


def look(client: Client, rung: Rung, service: str, *, canary: bool, patience_s: float) -> WorkerState:
    """Look until the rung is proved, refuted or known to be unprovable, or patience is at its end."""
    from vllm_cp.episodes import Rules
    from vllm_cp.readiness import Ladder

    # One look may wait a second for the engines; only a second look can tell their silence from the port's.
    patience_s = max(patience_s, _LEAST_S)
    rules = Rules(ready_rung=rung, answer_within_s=patience_s)
    with Ladder(client, rules=rules, service=service, canary=canary) as ladder:
        # A little longer than patience: the look at its end is the one that refutes.
        deadline = time.monotonic() + patience_s + _AGAIN_S
        while True:
            ladder.observe()
            if _settled(ladder.state, rung, client) or time.monotonic() >= deadline:
                return ladder.state
            time.sleep(_AGAIN_S)


def _settled(state: WorkerState, rung: Rung, client: Client) -> bool:
    from vllm_cp.models.health import HealthStatus

    below = [step for kind, step in state.rungs if kind.height <= rung.height]
    spoke = state.evidence.health not in (None, HealthStatus.SERVING)
    return state.ready or spoke or client.unheard is not None or any(step.holds is False for step in below)


def record_of(state: WorkerState, rung: Rung) -> dict[str, Any]:
    """What was seen, as data."""
    return {
        "ready": state.ready,
        "reason": state.reason.value if state.reason else None,
        "why": "" if state.ready else why_of(state, rung.value),
        "rung": rung.value,
        "judged_by": state.rungs.provable(rung).value,
        "instance_id": state.instance_id,
        "rungs": _rungs(state.rungs),
    }


def verdict_of(client: Client, state: WorkerState, rung: Rung) -> Verdict:
    """What was seen, its exit code, and what there is to say about it."""
    record = record_of(state, rung)
    if state.ready:
        judged_by = state.rungs.provable(rung)
        if judged_by is rung:
            return Verdict(record)
        why = state.rungs[rung].why
        return Verdict(record, Exit.OK, f"judged by '{judged_by.value}', '{rung.value}' can't be proved: {why}")
    if client.unheard is not None:
        # The SDK's own word on it has the likely cause and what to do, which the ladder does not carry.
        error = client.unheard
        return Verdict(record, exit_of(error), f"not ready: {str(error).removeprefix(f'{error.target}: ')}")
    return Verdict(record, Exit.NOT_READY, f"not ready: {record['reason']}: {record['why']}")


def told_verdict(worker: Mapping[str, Any], rung: str) -> Verdict:
    """The same from a daemon's record of a worker. For the rung that readiness is by default its own word counts."""
    rungs = {name: {**step, "why": step["why"] or ""} for name, step in worker["rungs"].items() if name in RUNGS}
    way = RUNGS[: RUNGS.index(rung) + 1]
    judged_by = next((name for name in reversed(way) if rungs[name]["provable"]), RUNGS[0])
    ready = worker["ready"] if rung == DEFAULT_RUNG else bool(rungs[judged_by]["holds"])
    why = next((rungs[name]["why"] for name in way if not rungs[name]["holds"] and rungs[name]["why"]), "")
    reason = None if ready else worker["reason"] or "unknown"
    record = {
        "ready": ready,
        "reason": reason,
        "why": "" if ready else why,
        "rung": rung,
        "judged_by": judged_by,
        "instance_id": worker["instance_id"],
        "rungs": rungs,
    }
    if ready:
        return Verdict(record)
    code = Exit.NOT_READY if rungs[RUNGS[0]]["holds"] else Exit.UNREACHABLE
    return Verdict(record, code, f"not ready: {reason}: {why}" if why else f"not ready: {reason}")


def _rungs(rungs: Rungs) -> dict[str, Any]:
    return {
        rung.value: {
            "holds": step.holds,
            "provable": step.provable,
            "since": iso(step.since),
            "proved_at": iso(step.proved_at),
            "proof": step.proof if step.proof and step.proved_at is not None else None,
            "why": step.why,
        }
        for rung, step in rungs
    }


def why_of(state: WorkerState, goal: str = "warm") -> str:
    """The first thing that is missing on the way up to a rung, in words. Nothing is on the way down."""
    if goal not in RUNGS:
        return ""
    way = RUNGS[: RUNGS.index(goal) + 1]
    return next((step.why for rung, step in state.rungs if rung.value in way and not step.holds and step.why), "")


def state_of(rungs: Rungs) -> str:
    """The highest rung that is proved, or ``unreachable``."""
    return rungs.highest.value if rungs.highest is not None else "unreachable"
