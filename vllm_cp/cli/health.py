"""``vllm-cp health``: what the server reports about itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from vllm_cp.cli._exit import Exit
from vllm_cp.cli._table import Column, View
from vllm_cp.cli._text import plain
from vllm_cp.cli._verb import Verb, answer

if TYPE_CHECKING:
    from vllm_cp.client import ControlClient

__all__ = ["command"]

_SERVICES = ("", "vllm.Control", "vllm.Inference")
_REMARKS = {
    "NOT_SERVING": "the server reports NOT_SERVING: an engine failed or it is shutting down;"
    " that is final for this process, look for its successor",
    "UNKNOWN": "the server reports UNKNOWN: it has not made up its mind",
}


def _rows(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [{**record, "service": record["service"] or "(server)"}]


_VIEW = View(
    (
        Column("TARGET", "target"),
        Column("SERVICE", "service"),
        Column("REPORTS", "status", good=frozenset({"SERVING"})),
    ),
    _rows,
)


def _judge(record: Mapping[str, Any]) -> tuple[Exit, str]:
    service, status = record["service"], record["status"]
    if status == "SERVING":
        return Exit.OK, ""
    if status != "SERVICE_UNKNOWN":
        return Exit.NOT_READY, _REMARKS.get(status, "")
    if service in _SERVICES:
        return Exit.NOT_READY, "the server does not know its own service any more: it is probably draining"
    return (
        Exit.NOT_READY,
        f"the server knows no service '{plain(service)}'; vLLM has vllm.Control and vllm.Inference, or give none",
    )


@click.command(
    "health",
    cls=Verb,
    examples="""
vllm-cp health
vllm-cp health vllm.Inference --target llama-0:8001
vllm-cp health --timeout 2 >/dev/null || echo "not serving"
vllm-cp health --target llama-0 --target llama-1 -o json
""",
)
@click.argument("service", default="")
def command(service: str) -> int:
    """What the server reports about itself, or about one SERVICE of it.

    SERVING is the frontend's own word. It is no proof of inference: it stays when an engine is frozen or gone without
    a word. Any other word exits with 8.
    """

    def ask(client: ControlClient) -> Mapping[str, Any]:
        return {"service": service, "status": client.check(service).value}

    def told(worker: Mapping[str, Any]) -> Mapping[str, Any]:
        from vllm_cp.cli._daemon import fact

        return {"service": service, "status": fact(worker, "health")}

    # Of a single service a daemon knows nothing.
    return answer(_VIEW, ask, judge=_judge, told=None if service else told)
