"""``vllm-cp diff``: how workers differ from a lock."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vllm_cp.cli._exit import Exit
from vllm_cp.cli._table import Column, View
from vllm_cp.cli._verb import Verb, answer

if TYPE_CHECKING:
    from vllm_cp.client import ControlClient

__all__ = ["command"]


def _rows(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    target = record["target"]
    if not record["drift"]:
        return [{"target": target, "fact": "as locked"}]
    # Null stands for a word of the worker's that is missing: an empty cell would be neither here nor there.
    return [
        {**drift, "target": target, "locked": _cell(drift["locked"]), "live": _cell(drift["live"])}
        for drift in record["drift"]
    ]


def _cell(value: object) -> object:
    return "not reported" if value is None else "none" if value == [] else value


_VIEW = View(
    (
        Column("TARGET", "target"),
        Column("FACT", "fact"),
        Column("LOCKED", "locked"),
        Column("NOW", "live"),
        Column("DRIFT", "kind", wide=True),
        Column("ALLOWED", "allowed", wide=True),
    ),
    _rows,
)


def _judge(record: Mapping[str, Any]) -> tuple[Exit, str]:
    drift, skipped = len(record["drift"]), record["not_compared"]
    said = []
    if drift:
        said.append(f"{drift} fact{'s' if drift > 1 else ''} differ{'' if drift > 1 else 's'} from {record['lock']}")
    if skipped:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in skipped)
        said.append(f"not compared: {', '.join(skipped)}; no worker tells, give {flags}")
    return Exit.NOT_READY if drift else Exit.OK, "; ".join(said)


@click.command(
    "diff",
    cls=Verb,
    examples="""
vllm-cp diff certified.lock --target llama-0
vllm-cp diff certified.lock --target llama-0 --target llama-1 -o wide
vllm-cp diff certified.lock --driver 570.133 -o json | jq '.[].drift'
""",
)
@click.argument("file", metavar="FILE")
@click.option("--image-digest", metavar="DIGEST", help="The image that runs, to be compared too.")
@click.option("--driver", metavar="VERSION", help="The GPU driver, to be compared too.")
def command(file: str, image_digest: str | None, driver: str | None) -> int:
    """Compare every target with the lock in FILE, fact by fact.

    Only what the lock's rules do not allow is shown. "not reported" is not zero: a fact that one side does not report
    is drift, unless a rule allows null or any. A fact that has no line in the lock is not compared. Drift exits with 8
    (6 where only some of the targets differ), so this is a gate for CI: runs here what was certified?
    """
    from vllm_cp.errors import ConfigError
    from vllm_cp.profile import capture, compare, load, not_compared

    try:
        lock = load(Path(file))
    except ConfigError as error:
        raise click.UsageError(str(error), click.get_current_context()) from None

    def ask(client: ControlClient) -> Mapping[str, Any]:
        live = capture(client, instance_id=True, image_digest=image_digest, driver=driver)
        drift = [
            {
                "fact": one.name,
                "kind": one.kind.value,
                "locked": _plain(one.locked),
                "live": _plain(one.live),
                "allowed": one.allowed,
            }
            for one in compare(lock, live)
        ]
        skipped = list(not_compared(lock, live))
        return {"lock": file, "result": "drift" if drift else "same", "drift": drift, "not_compared": skipped}

    return answer(_VIEW, ask, judge=_judge)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
