"""``vllm-cp weights``: the weights in use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from vllm_cp.cli._change import Change, Changing, change, view
from vllm_cp.cli._flags import kept
from vllm_cp.cli._table import Column, View
from vllm_cp.cli._verb import Noun, answer

if TYPE_CHECKING:
    from vllm_cp.cli._client import Client

__all__ = ["command"]

command = Noun(
    "weights",
    help="The name of the weights in use.",
    examples="""
vllm-cp weights version
vllm-cp weights version --set step-1200
""",
)

_COLUMN = Column("WEIGHTS", "weight_version")
_VIEW = View((Column("TARGET", "target"), _COLUMN))
_CHANGE = view(_COLUMN)


@command.command(
    "version",
    cls=Changing,
    examples="""
vllm-cp weights version
vllm-cp weights version --target llama-0 --target llama-1 -o json
vllm-cp weights version --set step-1200 --context prod --all
""",
)
@click.option("--set", "name", metavar="NAME", help="Give the weights in use this name; moves no weights.")
def version(name: str | None) -> int:
    """The name of the weights in use, or a new one for them.

    Every engine is asked. It is a name that a weight update left behind, "default" until then. Since vLLM 0.28.
    """
    if name is None:
        if kept().get("dry-run"):
            raise click.UsageError("without --set nothing is changed, so there is no --dry-run of it")

        def ask(client: Client) -> Mapping[str, Any]:
            return {"weight_version": client.weight_version()}

        return answer(_VIEW, ask)
    if not name:
        raise click.UsageError("--set: the value is empty")
    return change(
        _CHANGE,
        Change(
            does=f"name the weights in use {name!r}",
            act=lambda client: client.update_weight_version(name),
            done="set",
            facts={"weight_version": name},
            asks="never",
            late="it may still take effect: look with 'vllm-cp weights version'",
        ),
    )
