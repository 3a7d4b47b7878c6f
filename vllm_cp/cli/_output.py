"""The one renderer: what each target said, in the format that was asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vllm_cp.cli._exit import Exit, exit_of
from vllm_cp.cli._table import View, coloured, table, terminal_width
from vllm_cp.errors import ControlError

__all__ = ["FORMATS", "Report", "render", "report_of_failure"]

FORMATS = ("table", "wide", "json", "yaml", "name")


class Report(NamedTuple):
    """One target's part of the answer: ``record`` or ``error``."""

    target: str
    exit: Exit
    record: Mapping[str, Any] | None = None
    error: Mapping[str, Any] | None = None

    @property
    def data(self) -> dict[str, Any]:
        """The object that ``-o json`` and ``-o yaml`` show."""
        if self.record is None:
            return {"target": self.target, "error": dict(self.error or {})}
        return {"target": self.target, **self.record}


def report_of_failure(target: str, error: Exception) -> Report:
    """A failed target. ``kind`` is the name of the error's class in ``vllm_cp.errors``."""
    code = exit_of(error)
    facts: dict[str, str | None]
    if isinstance(error, ControlError):
        facts = {"code": error.code, "method": error.method, "detail": error.detail, "hint": error.hint}
        message = str(error)
    else:
        defect = code is Exit.UNEXPECTED
        hint = "this is a defect: please report it" if defect else ""
        facts = {"code": None, "method": None, "detail": str(error), "hint": hint}
        message = f"{target}: unexpected {type(error).__name__}: {error}; {hint}" if defect else f"{target}: {error}"
    return Report(target, code, error={"kind": type(error).__name__, **facts, "message": message})


def render(reports: Sequence[Report], view: View, output: str) -> str:
    """The text for standard output. Tables and names show the targets that answered, json and yaml show all."""
    if output == "json":
        import json

        # ASCII only: right in every locale, and nothing in it can move a cursor.
        return json.dumps([r.data for r in reports], indent=2).replace("\x7f", "\\u007f") + "\n"
    if output == "yaml":
        from vllm_cp.cli._yaml import block_yaml

        return block_yaml([r.data for r in reports])
    answered = [r for r in reports if r.record is not None]
    if output == "name":
        return "".join(f"{r.target}\n" for r in answered)
    wide = output == "wide"
    width = None if wide else terminal_width()
    return table(view, [r.data for r in answered], wide=wide, width=width, colour=coloured())
