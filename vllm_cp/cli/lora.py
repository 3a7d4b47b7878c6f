"""``vllm-cp lora``: LoRA adapters on workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from vllm_cp.cli._change import Change, Changing, change, view
from vllm_cp.cli._table import Column, View
from vllm_cp.cli._verb import Noun, Verb, answer

if TYPE_CHECKING:
    from vllm_cp.cli._client import Client
    from vllm_cp.models.lora import LoraAdapter

__all__ = ["command"]

command = Noun(
    "lora",
    help="LoRA adapters: list, load, unload.",
    examples="""
vllm-cp lora list
vllm-cp lora load sql-v2 /adapters/sql-v2
vllm-cp lora unload sql-v1
""",
)


def _rows(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    target = record["target"]
    return [{**adapter, "target": target} for adapter in record["adapters"]] or [{"target": target}]


_LIST = View(
    (
        Column("TARGET", "target"),
        Column("NAME", "name"),
        Column("ID", "lora_id"),
        Column("PATH", "source_path"),
    ),
    _rows,
)
_CHANGE = view(Column("NAME", "name"), Column("ID", "lora_id"), Column("PATH", "source_path"))


@command.command(
    "list",
    cls=Verb,
    examples="""
vllm-cp lora list
vllm-cp lora list --target llama-0 --target llama-1 --sort name
vllm-cp lora list -o json | jq -r '.[].adapters[].name'
""",
)
def list_() -> int:
    """The adapters that are loaded now.

    The frontend answers from memory. Needs vLLM started with LoRA enabled. Since vLLM 0.29.
    """

    def ask(client: Client) -> Mapping[str, Any]:
        return {"adapters": [_facts(adapter) for adapter in client.list_loras()]}

    return answer(_LIST, ask)


@command.command(
    "load",
    cls=Changing,
    timeout_help="Longest wait for each answer. [default: 60]",
    examples="""
vllm-cp lora load sql-v2 /adapters/sql-v2
vllm-cp lora load sql-v2 /adapters/sql-v2 --context prod --all
vllm-cp lora load sql-v2 /adapters/sql-v2 --dry-run
""",
)
@click.argument("name")
@click.argument("path")
def load(name: str, path: str) -> int:
    """Load an adapter from a PATH on the worker's file system.

    vLLM takes paths under VLLM_RUNTIME_LORA_ALLOWED_PATH_PREFIXES only. A name that is loaded already is refused.
    Since vLLM 0.29.
    """
    _not_empty(name=name, path=path)
    return change(
        _CHANGE,
        Change(
            does=f"load the adapter {name!r} from {path!r}",
            act=lambda client: _facts(client.load_lora(name, path)),
            done="loaded",
            facts={"name": name, "lora_id": None, "source_path": path},
            asks="never",
            slow=True,
            late="it may still be loaded: look with 'vllm-cp lora list'",
        ),
    )


@command.command(
    "unload",
    cls=Changing,
    timeout_help="Longest wait for each answer. [default: 60]",
    examples="""
vllm-cp lora unload sql-v1
vllm-cp lora unload sql-v1 --target llama-0 --target llama-1 --all --yes
vllm-cp lora unload sql-v1 --dry-run
""",
)
@click.argument("name")
def unload(name: str) -> int:
    """Unload an adapter; requests that name it fail from then on.

    Since vLLM 0.29.
    """
    _not_empty(name=name)
    return change(
        _CHANGE,
        Change(
            does=f"unload the adapter {name!r} (requests that name it will fail)",
            act=lambda client: _facts(client.unload_lora(name)),
            done="unloaded",
            facts={"name": name, "lora_id": None, "source_path": None},
            slow=True,
            late="it may still be unloaded: look with 'vllm-cp lora list'",
        ),
    )


def _facts(adapter: LoraAdapter) -> dict[str, Any]:
    return {"name": adapter.name, "lora_id": adapter.lora_id, "source_path": adapter.source_path}


def _not_empty(**texts: str) -> None:
    for what, text in texts.items():
        if not text:
            raise click.UsageError(f"the {what} of the adapter is empty", click.get_current_context())
