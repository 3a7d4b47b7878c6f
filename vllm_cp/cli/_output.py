"""The one renderer: what each target said, in the format that was asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from vllm_cp.cli._exit import Exit, exit_of
from vllm_cp.cli._table import Column, View, coloured, in_order, table, terminal_width
from vllm_cp.errors import ControlError

__all__ = ["FORMATS", "Report", "Shape", "json_line", "render", "report_of_failure"]

FORMATS = ("table", "wide", "json", "jsonl", "yaml", "name")


class Report(NamedTuple):
    """One target's part of the answer: ``record`` or ``error``."""

    target: str
    exit: Exit
    record: Mapping[str, Any] | None = None
    error: Mapping[str, Any] | None = None
    #: What ``target`` is called in data.
    key: str = "target"

    @property
    def data(self) -> dict[str, Any]:
        """The object that ``-o json`` and its like show."""
        if self.record is None:
            return {self.key: self.target, "error": dict(self.error or {})}
        return {self.key: self.target, **self.record}


class Shape(NamedTuple):
    """How an answer is shown."""

    output: str = "table"
    #: ``None``: those of the view.
    columns: Sequence[Column] | None = None
    sort: Column | None = None
    descending: bool = False


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


def render(reports: Sequence[Report], view: View, shape: Shape) -> str:
    """The text for standard output. Tables and names show the targets that answered, the others show all."""
    if shape.output in ("table", "wide"):
        rows = [row for r in reports if r.record is not None for row in view.rows(r.data)]
        if shape.sort is not None:
            rows = in_order(rows, lambda row: row, shape.sort, descending=shape.descending)
        wide = shape.output == "wide"
        shown = shape.columns or [column for column in view.columns if wide or not column.wide]
        return table(shown, rows, width=None if wide else terminal_width(), colour=coloured())
    if shape.sort is not None:
        reports = in_order(reports, lambda r: _first_row(r, view), shape.sort, descending=shape.descending)
    if shape.output == "name":
        return "".join(f"{r.target}\n" for r in reports if r.record is not None)
    return _data((r.data for r in reports), shape.output)


def json_line(value: object) -> str:
    """The value as one line of JSON, for a stream of them."""
    import json

    return _harmless(json.dumps(value)) + "\n"


def _data(objects: Iterable[Mapping[str, Any]], output: str) -> str:
    if output == "jsonl":
        return "".join(map(json_line, objects))
    if output == "json":
        import json

        return _harmless(json.dumps(list(objects), indent=2)) + "\n"
    from vllm_cp.cli._yaml import block_yaml

    return block_yaml(list(objects))


def _harmless(text: str) -> str:
    # JSON in ASCII: right in every locale. With this no character in it can move a cursor either.
    return text.replace("\x7f", "\\u007f")


def _first_row(report: Report, view: View) -> Mapping[str, Any]:
    if report.record is None:
        return {}
    return next(iter(view.rows(report.data)), {})
