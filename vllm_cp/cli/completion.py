"""``vllm-cp completion``: a script that completes this command line in a shell."""

from __future__ import annotations

import click

from vllm_cp.cli import _stdio
from vllm_cp.cli._exit import Exit
from vllm_cp.cli._verb import Verb

__all__ = ["VARIABLE", "command", "complete"]

#: Set by the script when it wants candidates.
VARIABLE = "_VLLM_CP_COMPLETE"
_SHELLS = ("bash", "zsh", "fish")
_BASH_GUARD = """\
if [ "${{BASH_VERSINFO[0]:-0}}" -lt 4 ] || {{ [ "${{BASH_VERSINFO[0]}}" -eq 4 ] && [ "${{BASH_VERSINFO[1]}}" -lt 4 ]; }}
then
    echo "vllm-cp: completion takes bash 4.4 or later, and this is $BASH_VERSION" >&2
else
{script}
fi
"""


@click.command(
    "completion",
    cls=Verb,
    connects=False,
    formats=(),
    examples="""
vllm-cp completion bash > ~/.local/share/bash-completion/completions/vllm-cp
vllm-cp completion zsh > "${fpath[1]}/_vllm-cp"
vllm-cp completion fish > ~/.config/fish/completions/vllm-cp.fish
""",
)
@click.argument("shell", type=click.Choice(_SHELLS))
def command(shell: str) -> int:
    """Print a script that completes nouns, verbs, flags and contexts.

    For bash 4.4 and later, zsh and fish. To try it, evaluate its output: eval "$(vllm-cp completion bash)". Completing
    asks no worker.
    """
    from click.shell_completion import ShellComplete, get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    completer = kind(click.get_current_context().find_root().command, {}, "vllm-cp", VARIABLE)
    # Not the method of the kind: bash's own runs a bash to learn its version, which is not the one that will read this.
    script = ShellComplete.source(completer)
    _stdio.emit(_BASH_GUARD.format(script=script.rstrip()) if shell == "bash" else script)
    return Exit.OK


def complete(root: click.Command, instruction: str) -> int:
    """Answer a shell's question for candidates; an unknown one is a usage error."""
    from click.shell_completion import get_completion_class

    shell, _, what = instruction.partition("_")
    kind = get_completion_class(shell)
    if kind is None or what != "complete":
        return Exit.USAGE
    found = kind(root, {}, "vllm-cp", VARIABLE).complete()
    _stdio.emit(f"{found}\n" if found else "")
    return Exit.OK
