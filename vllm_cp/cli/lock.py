"""``vllm-cp lock``: write down what a worker says it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vllm_cp.cli import _context, _stdio
from vllm_cp.cli._table import Column, View
from vllm_cp.cli._verb import Verb, conclude, explained

if TYPE_CHECKING:
    from vllm_cp.client import ControlClient
    from vllm_cp.profile import Profile

__all__ = ["command"]

# No rows: what people read is the file.
_VIEW = View((Column("TARGET", "target"),), lambda _: [])


@click.command(
    "lock",
    cls=Verb,
    examples="""
vllm-cp lock --target llama-0 > certified.lock
vllm-cp lock --driver 570.133 --note "load test of May" --out certified.lock
vllm-cp lock --target llama-0 --instance-id -o json
""",
)
@click.option("--out", metavar="FILE", help="Write this file, whole or not at all. Rules in it stay in force.")
@click.option("--image-digest", metavar="DIGEST", help="Write down the image that runs; no worker knows its own.")
@click.option("--driver", metavar="VERSION", help="Write down the GPU driver.")
@click.option("--note", "notes", metavar="TEXT", multiple=True, help="A note for people; repeatable.")
@click.option("--instance-id", is_flag=True, help="Write down the instance too, which changes with every start.")
def command(
    out: str | None, image_digest: str | None, driver: str | None, notes: tuple[str, ...], **chosen: Any
) -> int:
    """Write down what one worker says it is: version, model, parallelism, limits, KV cache and its events.

    The file has one fact a line and is meant to be reviewed, edited and kept; "vllm-cp diff" compares workers with it.
    What may differ from it stands below "allow:", such as "engine_version: 0.32.*" or "total_kv_blocks:
    40000..42000". Written over an older lock, the rules of that one are kept. Table and wide are the file itself.
    """
    context = click.get_current_context()
    shape, connections = _context.shape(_VIEW), _context.connections()
    if len(connections) != 1:
        raise click.UsageError(f"a lock is of one worker and {len(connections)} were given", context)
    for what, told in (("--image-digest", image_digest), ("--driver", driver), ("--out", out)):
        if told == "":
            raise click.UsageError(f"{what}: the value is empty", context)
    path = Path(out) if out is not None else None
    older = _older(path, context) if path is not None and path.exists() else None
    from vllm_cp.cli import _fanout
    from vllm_cp.profile import capture, dumps, save

    made: list[Profile] = []

    def ask(client: ControlClient) -> Mapping[str, Any]:
        profile = capture(client, image_digest=image_digest, driver=driver, notes=notes, **chosen)
        made.append(profile if older is None else replace(profile, allow=older.allow))
        return _record(made[0])

    replies = _fanout.ask_all(connections, explained(ask))
    for profile in made:
        if path is None:
            if shape.output in ("table", "wide"):
                _stdio.emit(dumps(profile))
            continue
        try:
            save(profile, path)
        except OSError as error:
            raise _context.LocalError(f"cannot write {path}: {error.strerror}") from None
        _stdio.say(f"{path}: {len(profile.facts)} facts of {replies[0].target}")
    return conclude(_VIEW, shape, replies)


def _older(path: Path, context: click.Context) -> Profile:
    """The lock that is to be replaced. Anything else is left alone."""
    from vllm_cp.errors import ConfigError
    from vllm_cp.profile import load

    if not path.is_file():
        raise click.UsageError(f"--out: {path} is no regular file", context)
    try:
        return load(path)
    except ConfigError as error:
        raise click.UsageError(f"--out would replace what is no lock in order: {error}", context) from None


def _record(profile: Profile) -> Mapping[str, Any]:
    return {
        "facts": {name: list(value) if isinstance(value, tuple) else value for name, value in profile.facts.items()},
        "allow": {name: rule.text for name, rule in profile.allow.items()},
        "notes": list(profile.notes),
    }
