"""Tables: what each cell says, and how wide it may be."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from vllm_cp.cli._text import columns, cut, plain

__all__ = ["Column", "View", "coloured", "table", "terminal_width"]

_GAP = "  "
#: Text columns are not cut below this.
_LEAST = 10


class Column(NamedTuple):
    """One column of a table."""

    title: str
    #: Where the value is in a row: keys joined by dots, ``parallelism.world_size``.
    path: str
    #: Shown by ``-o wide`` only.
    wide: bool = False
    #: With colours: values in here are green, all others red.
    good: frozenset[str] = frozenset()


class View(NamedTuple):
    """How the records of a verb become a table; ``rows`` makes several rows of one record."""

    columns: Sequence[Column]
    rows: Callable[[Mapping[str, Any]], Iterable[Mapping[str, Any]]] = lambda record: [record]


def table(view: View, records: Iterable[Mapping[str, Any]], *, wide: bool, width: int | None, colour: bool) -> str:
    """The records as text; "" for none. ``width`` is what the terminal has, ``None`` is no limit."""
    shown = [column for column in view.columns if wide or not column.wide]
    rows = [[_value(row, column.path) for column in shown] for record in records for row in view.rows(record)]
    if not rows:
        return ""
    numeric = [
        any(map(_is_number, values)) and all(value is None or _is_number(value) for value in values)
        for values in zip(*rows, strict=True)
    ]
    cells = [[column.title for column in shown], *([_cell(value) for value in row] for row in rows)]
    widths = [max(map(columns, values)) for values in zip(*cells, strict=True)]
    if width is not None:
        widths = _fitted(widths, numeric, [len(column.title) for column in shown], width)
    lines = []
    for number, row in enumerate(cells):
        line = [
            _painted(_aligned(text, size, right), number, column if colour else None, text)
            for text, size, right, column in zip(row, widths, numeric, shown, strict=False)
        ]
        lines.append(_GAP.join(line).rstrip())
    return "\n".join(lines) + "\n"


def coloured() -> bool:
    """Whether standard output gets colours: a terminal that can, or FORCE_COLOR; NO_COLOR wins over both."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR", "0") not in ("", "0", "false"):
        return True
    return _on_terminal() and os.environ.get("TERM", "dumb") != "dumb"


def terminal_width() -> int | None:
    """Columns of the terminal behind standard output; ``None`` in a pipe or file, where nothing may be cut."""
    if not _on_terminal():
        return None
    import shutil

    return shutil.get_terminal_size().columns


def _on_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()


def _value(row: Mapping[str, Any], path: str) -> Any:
    value: Any = row
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell(value: Any) -> str:
    if value is None or value in ("", [], ()):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ",".join(_cell(item) for item in value)
    return plain(str(value))


def _fitted(widths: list[int], numeric: list[bool], titles: list[int], limit: int) -> list[int]:
    """Widths that fit: the widest text column gives way first, numbers are never cut, last columns go if they must."""
    fitted = list(widths)
    while sum(fitted) + len(_GAP) * (len(fitted) - 1) > limit:
        candidates = [
            (size, -index)
            for index, size in enumerate(fitted)
            if not numeric[index] and size > max(_LEAST, titles[index])
        ]
        if candidates:
            fitted[-max(candidates)[1]] -= 1
        elif len(fitted) > 1:
            fitted.pop()
        else:
            break
    return fitted


def _aligned(text: str, width: int, right: bool) -> str:
    text = cut(text, width, "..." if not _takes_ellipsis() else "\N{HORIZONTAL ELLIPSIS}")
    space = " " * (width - columns(text))
    return space + text if right else text + space


def _takes_ellipsis() -> bool:
    return sys.stdout is not None and "utf" in (sys.stdout.encoding or "").lower()


def _painted(text: str, number: int, column: Column | None, value: str) -> str:
    if column is None:
        return text
    if number == 0:
        return f"\x1b[1m{text}\x1b[0m"
    if not column.good or value == "-":
        return text
    return f"\x1b[{32 if value in column.good else 31}m{text}\x1b[0m"
