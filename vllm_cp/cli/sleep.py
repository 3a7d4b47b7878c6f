"""``vllm-cp sleep``: free a worker's GPU memory."""

from __future__ import annotations

import click

from vllm_cp.cli._change import Change, Changing, change, view
from vllm_cp.cli._table import Column
from vllm_cp.cli.pause import MODES

__all__ = ["command"]

_LEVELS = {
    "0": "the scheduler stops",
    "1": "weights move to host memory, the KV cache is dropped",
    "2": "weights and KV cache are dropped",
}
_VIEW = view(Column("LEVEL", "level"), Column("MODE", "mode"))


@click.command(
    "sleep",
    cls=Changing,
    timeout_help="Longest wait for each answer. [default: 60]",
    examples="""
vllm-cp sleep --level 1 --mode wait
vllm-cp sleep --level 2 --mode abort --target llama-0 --yes
vllm-cp sleep --level 1 --mode abort --dry-run
""",
)
@click.option(
    "--level",
    type=click.Choice(list(_LEVELS)),
    required=True,
    help="0: stop scheduling; 1: weights to host memory; 2: drop them.",
)
@click.option("--mode", type=click.Choice(list(MODES)), required=True, help="What becomes of requests in flight.")
def command(level: str, mode: str) -> int:
    """Free a worker's GPU memory, until a wake.

    Level 1 keeps the weights in host memory; after level 2 they have to be loaded again. The KV cache is lost either
    way. Needs vLLM started with --enable-sleep-mode. Since vLLM 0.28.
    """
    from vllm_cp.models.pause import PauseMode

    return change(
        _VIEW,
        Change(
            does=f"put to sleep at level {level} ({_LEVELS[level]}; {MODES[mode]})",
            act=lambda client: client.sleep(level=int(level), mode=PauseMode(mode)),
            done="asleep",
            facts={"level": int(level), "mode": mode},
            slow=True,
            late="it may still fall asleep: look with 'vllm-cp ready', undo with 'vllm-cp wake'",
        ),
    )
