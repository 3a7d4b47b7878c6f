"""``vllm-cp wake``: wake a sleeping worker."""

from __future__ import annotations

import click

from vllm_cp.cli._change import Change, Changing, change, view
from vllm_cp.cli._table import Column

__all__ = ["command"]

_VIEW = view(Column("TAGS", "tags"))


@click.command(
    "wake",
    cls=Changing,
    timeout_help="Longest wait for each answer. [default: 60]",
    examples="""
vllm-cp wake
vllm-cp wake weights
vllm-cp wake weights kv_cache --target llama-0 --target llama-1 --all
""",
)
@click.argument("tags", metavar="[TAG]...", nargs=-1)
def command(tags: tuple[str, ...]) -> int:
    """Wake a sleeping worker, or only some parts of it.

    vLLM's tags are weights and kv_cache; without any, all of it wakes. Generation goes on once nothing sleeps any
    more. Needs vLLM started with --enable-sleep-mode. Since vLLM 0.28.
    """
    if not all(tags):
        raise click.UsageError("a tag is empty; vLLM has weights and kv_cache", click.get_current_context())
    return change(
        _VIEW,
        Change(
            does=f"wake {', '.join(tags)}" if tags else "wake all that sleeps",
            act=lambda client: client.wake_up(tags),
            done="awake",
            facts={"tags": list(tags)},
            asks="never",
            slow=True,
            late="it may still wake up: look with 'vllm-cp ready'",
        ),
    )
