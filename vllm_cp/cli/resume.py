"""``vllm-cp resume``: go on generating."""

from __future__ import annotations

import click

from vllm_cp.cli._change import Change, Changing, change, view

__all__ = ["command"]

_VIEW = view()


@click.command(
    "resume",
    cls=Changing,
    timeout_help="Longest wait for each answer. [default: 60]",
    examples="""
vllm-cp resume
vllm-cp resume --target llama-0 --target llama-1 --all
vllm-cp resume --timeout 10 && vllm-cp wait --for admitting --timeout 30
""",
)
def command() -> int:
    """Go on generating after a pause.

    Does nothing to a worker that is not paused, and does not wake one that sleeps. It waits behind a pause that is
    still under way. Since vLLM 0.28.
    """
    return change(
        _VIEW,
        Change(
            does="resume generation",
            act=lambda client: client.resume(),
            done="resumed",
            facts={},
            asks="never",
            slow=True,
            late="it waits behind a pause that is under way, and may still take effect: look with 'vllm-cp ready'",
        ),
    )
