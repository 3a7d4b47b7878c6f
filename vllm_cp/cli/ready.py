"""``vllm-cp ready``: the ladder of each worker, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from vllm_cp.cli import _context
from vllm_cp.cli._ladder import CANARY_OPTION, RUNGS, SERVICE_OPTION, look, told_verdict, verdict_of
from vllm_cp.cli._table import Column, View
from vllm_cp.cli._verb import Verb, Verdict, conclude, explained

__all__ = ["command"]


def _rows(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    about = {**record, "verdict": "ready" if record["ready"] else record["reason"]}
    return [{**about, **step, "step": name} for name, step in record["rungs"].items()]


_VIEW = View(
    (
        Column("TARGET", "target"),
        Column("RUNG", "step"),
        Column("HOLDS", "holds", good=frozenset({"yes"})),
        Column("PROOF", "proof"),
        Column("WHY NOT", "why"),
        Column("SINCE", "since", time=True),
        Column("PROVED AT", "proved_at", wide=True, time=True),
        Column("PROVABLE", "provable", wide=True),
        Column("VERDICT", "verdict", wide=True, good=frozenset({"ready"})),
        Column("INSTANCE", "instance_id", wide=True),
    ),
    _rows,
)


@click.command(
    "ready",
    cls=Verb,
    examples="""
vllm-cp ready
vllm-cp ready --rung warm --target llama-0
vllm-cp ready --context prod -o json | jq '.[] | {target, reason, why}'
vllm-cp ready --context prod --columns target,rung,holds,why-not
""",
)
@click.option("--rung", type=click.Choice(RUNGS), default="admitting", help="What ready means. [default: admitting]")
@SERVICE_OPTION
@CANARY_OPTION
def command(rung: str, service: str, canary: bool) -> int:
    """How far each worker is proved to be able to serve, and why not further.

    A ladder, lowest rung first. reachable: the control port answers. serving: the health service says so. answering:
    every engine made a round trip. admitting: new requests are taken. warm: a generation finished. "-" is neither
    proved nor refuted; vLLM 0.27 has no round trip, so there ready falls back to the highest rung that can be proved.
    SINCE is when this look first saw it so: one look does not know what was before. Not ready exits with 8, nobody
    there with 3.
    """
    shape = _context.shape(_VIEW)
    if _context.via()[1] is not None and not (service or canary):
        from vllm_cp.cli import _daemon

        return conclude(_VIEW, shape, _daemon.told_of_each(lambda worker: told_verdict(worker, rung)))
    connections = _context.connections()
    from vllm_cp.cli import _fanout
    from vllm_cp.cli._client import Client
    from vllm_cp.models.ladder import Rung

    wanted = Rung(rung)

    def ask(client: Client) -> Verdict:
        state = look(client, wanted, service, canary=canary or wanted is Rung.WARM, patience_s=connections[0].timeout_s)
        return verdict_of(client, state, wanted)

    return conclude(_VIEW, shape, _fanout.ask_all(connections, explained(ask)))
