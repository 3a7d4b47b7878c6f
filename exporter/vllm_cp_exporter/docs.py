"""Write the README's tables of metrics and flags: ``python -m vllm_cp_exporter.docs [--check]``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from vllm_cp_exporter.catalog import OWN_ROWS, POOL_ROWS, ROW_ERRORS, WORKER_ROWS, Row
from vllm_cp_exporter.flags import command
from vllm_cp_exporter.probe import PROBE_ROWS

__all__ = ["README", "main", "with_tables"]

README = Path(__file__).parents[1] / "README.md"


def with_tables(text: str) -> str:
    """The README with the tables as they should be. Raises ValueError when a marker is missing."""
    for name, table in (("metrics", _metrics()), ("flags", _flags())):
        begin, end = f"<!-- {name}: written by python -m vllm_cp_exporter.docs -->", f"<!-- /{name} -->"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise ValueError(f"the README lacks a marker: {begin} … {end}")
        text = f"{before}{begin}\n\n{table}\n\n{end}{after}"
    return text


def _metrics() -> str:
    parts: list[tuple[str, tuple[str, ...], tuple[Row[Any], ...]]] = [
        ("Per worker", ("worker", "pool"), WORKER_ROWS),
        ("Per pool", ("pool",), POOL_ROWS),
        ("The exporter itself", (), (*OWN_ROWS, ROW_ERRORS)),
        ("On the page of `/probe`, before the worker's rows", (), PROBE_ROWS),
    ]
    return "\n\n".join(_rows(*part) for part in parts)


def _rows(title: str, identity: tuple[str, ...], rows: tuple[Row[Any], ...]) -> str:
    everywhere = f"Every row carries {_labels(identity)}.\n\n" if identity else ""
    lines = [f"| `{row.name}` | {row.kind} | {_labels(row.labels)} | {row.help} |" for row in rows]
    head = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
    return f"### {title}\n\n{everywhere}" + "\n".join([*head, *lines])


def _labels(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _flags() -> str:
    lines = ["| flag | default | meaning |", "|---|---|---|"]
    for option in command.params:
        assert isinstance(option, click.Option)
        value = option.metavar or ("|".join(option.type.choices) if isinstance(option.type, click.Choice) else "")
        default = f"`{option.default}`" if isinstance(option.default, str) else ""
        shown = f"{option.opts[0]} {value}".strip().replace("|", r"\|")
        lines.append(f"| `{shown}` | {default} | {option.help or ''} |")
    return "\n".join(lines)


def main(args: list[str]) -> int:
    """Write, or with ``--check`` compare; 1 when they differ."""
    now = README.read_text("utf-8")
    right = with_tables(now)
    if args == ["--check"]:
        if now != right:
            sys.stderr.write("exporter/README.md: the tables are old; run python -m vllm_cp_exporter.docs\n")
        return int(now != right)
    README.write_text(right, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
