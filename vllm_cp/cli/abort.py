"""``vllm-cp abort``: end requests by their ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from vllm_cp.cli._table import Column, View
from vllm_cp.cli._verb import Verb, answer

if TYPE_CHECKING:
    from vllm_cp.client import ControlClient

__all__ = ["command"]

_VIEW = View((Column("TARGET", "target"), Column("RESULT", "result"), Column("REQUEST IDS", "request_ids")))


@click.command(
    "abort",
    cls=Verb,
    examples="""
vllm-cp abort cmpl-3f2a
vllm-cp abort cmpl-3f2a cmpl-77c0 --target llama-0 --target llama-1
vllm-cp abort -- -odd-id-
""",
)
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
def command(ids: tuple[str, ...]) -> int:
    """Send an abort of these request ids to every target.

    An id is the one its client gave; over HTTP it is cmpl-<X-Request-Id> or its like. Ids that a worker does not know
    are ignored, and no worker says which it knew: "sent" is all there is to report. It is sent once, never again.
    """
    if not all(ids):
        raise click.UsageError(
            "a request id is empty; give the id of each request to abort", click.get_current_context()
        )

    def ask(client: ControlClient) -> Mapping[str, Any]:
        client.abort(ids)
        return {"result": "sent", "request_ids": list(ids)}

    return answer(_VIEW, ask)
