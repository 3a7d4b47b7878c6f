"""``vllm-cp pause``: stop generation."""

from __future__ import annotations

import click

from vllm_cp.cli._change import Change, Changing, change, view
from vllm_cp.cli._table import Column

__all__ = ["MODES", "command"]

#: What each mode does to requests in flight. The names are those of ``vllm_cp.PauseMode``.
MODES = {
    "abort": "requests in flight end now, as aborted",
    "wait": "requests in flight finish first",
    "keep": "requests in flight stay where they are and go on after a resume",
}
_VIEW = view(Column("MODE", "mode"), Column("CACHE CLEARED", "clear_cache"))


def _chosen(ctx: click.Context, parameter: click.Parameter, value: bool | None) -> bool | None:
    # click takes a pair of flags that was left out for a no, even where it is required.
    given = ctx.get_parameter_source(parameter.name or "") is click.core.ParameterSource.COMMANDLINE
    if not (given or ctx.resilient_parsing):
        raise click.UsageError("say what becomes of the prefix cache: --clear-cache or --keep-cache", ctx)
    return value


@click.command(
    "pause",
    cls=Changing,
    timeout_help="Longest wait for each answer. [default: 60]",
    examples="""
vllm-cp pause --mode wait --keep-cache
vllm-cp pause --mode keep --keep-cache --target llama-0 --yes
vllm-cp pause --mode abort --clear-cache --context prod --all --dry-run
""",
)
@click.option("--mode", type=click.Choice(list(MODES)), required=True, help="What becomes of requests in flight.")
@click.option(
    "--clear-cache/--keep-cache", default=None, callback=_chosen, help="What becomes of the prefix cache.  [required]"
)
def command(mode: str, clear_cache: bool) -> int:
    """Stop generation, until a resume.

    Both choices are yours to make: the server's own defaults end requests and drop the cache. New requests queue, or
    are refused by vLLM 0.33 and later unless the mode is keep. The worker goes on saying SERVING; 'vllm-cp ready' shows
    it as suspended. With --mode wait the answer comes when the last request has finished, and a wait that runs out of
    time leaves the worker paused. Since vLLM 0.28.
    """
    from vllm_cp.models.pause import PauseMode

    cache = "the prefix cache is dropped" if clear_cache else "the prefix cache is kept"
    return change(
        _VIEW,
        Change(
            does=f"pause generation ({MODES[mode]}; {cache})",
            act=lambda client: client.pause(mode=PauseMode(mode), clear_cache=clear_cache),
            done="paused",
            facts={"mode": mode, "clear_cache": clear_cache},
            slow=True,
            late="it is probably paused all the same: look with 'vllm-cp ready', undo with 'vllm-cp resume'",
        ),
    )
