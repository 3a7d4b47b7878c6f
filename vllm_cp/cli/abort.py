"""``vllm-cp abort``: end requests by their ids."""

from __future__ import annotations

import click

from vllm_cp.cli._change import Change, Changing, change, view
from vllm_cp.cli._table import Column

__all__ = ["command"]

_VIEW = view(Column("REQUEST IDS", "request_ids"))


@click.command(
    "abort",
    cls=Changing,
    examples="""
vllm-cp abort cmpl-3f2a
vllm-cp abort cmpl-3f2a cmpl-77c0 --target llama-0 --target llama-1 --all
vllm-cp abort -- -odd-id-
""",
)
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
def command(ids: tuple[str, ...]) -> int:
    """Send an abort of these request ids to every target.

    An id is the one its client gave; over HTTP it is cmpl-<X-Request-Id> or its like. Ids that a worker does not know
    are ignored, and no worker says which it knew: "sent" is all there is to report. It is sent once, never again. One
    worker is not asked about; several take --all and a confirmation.
    """
    if not all(ids):
        raise click.UsageError(
            "a request id is empty; give the id of each request to abort", click.get_current_context()
        )
    return change(
        _VIEW,
        Change(
            does=f"end {len(ids)} request{'s' if len(ids) > 1 else ''} by id",
            act=lambda client: client.abort(ids),
            done="sent",
            facts={"request_ids": list(ids)},
            asks="several",
        ),
    )
