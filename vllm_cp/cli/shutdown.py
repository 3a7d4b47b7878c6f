"""``vllm-cp shutdown``: end a frontend and its engine."""

from __future__ import annotations

import click

from vllm_cp.cli._change import Change, Changing, change, view

__all__ = ["command"]

_VIEW = view()


@click.command(
    "shutdown",
    cls=Changing,
    examples="""
vllm-cp shutdown --target llama-0
vllm-cp shutdown --yes && vllm-cp wait --for gone --timeout 60
vllm-cp shutdown --context prod --dry-run
""",
)
def command() -> int:
    """End a frontend and the engine that it started.

    The worker acknowledges before it happens; 'vllm-cp wait --for gone' sees it through. A frontend that did not start
    its engine itself refuses. Since vLLM 0.32.
    """
    return change(
        _VIEW,
        Change(
            does="shut down the server and its engine (requests in flight are lost)",
            act=lambda client: client.shutdown(),
            done="acknowledged",
            facts={},
            late="it may still end: look with 'vllm-cp wait --for gone'",
        ),
    )
