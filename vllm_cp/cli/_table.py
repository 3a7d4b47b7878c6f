"""Tables: what each cell says, and how wide it may be."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from vllm_cp.cli._text import columns, cut, plain

__all__ = ["Column", "View", "coloured", "in_order", "table", "terminal_width"]

T = TypeVar("T")

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
    #: The value is a time, in ISO 8601; people see it in their own zone.
    time: bool = False


class View(NamedTuple):
    """How the records of a verb become a table; ``rows`` makes several rows of one record."""

    columns: Sequence[Column]
    rows: Callable[[Mapping[str, Any]], Iterable[Mapping[str, Any]]] = lambda record: [record]

    def find(self, name: str) -> Column:
        """A column by its title, in any case and with - or _ for spaces, or by its path. Raises LookupError."""
        wanted = _folded(name)
        for column in self.columns:
            if wanted in (_folded(column.title), _folded(column.path)):
                return column
        known = ", ".join(column.title.lower().replace(" ", "-") for column in self.columns)
        raise LookupError(f"no column is called '{plain(name)}': there are {known}")


def table(shown: Sequence[Column], rows: Iterable[Mapping[str, Any]], *, width: int | None, colour: bool) -> str:
    """The rows as text; "" for none. ``width`` is what the terminal has, ``None`` is no limit."""
    values = [[_value(row, column.path) for column in shown] for row in rows]
    if not values:
        return ""
    numeric = [
        any(map(_is_number, each)) and all(value is None or _is_number(value) for value in each)
        for each in zip(*values, strict=True)
    ]
    cells = [[column.title for column in shown]]
    cells += [[_cell(value, column) for value, column in zip(row, shown, strict=True)] for row in values]
    widths = [max(map(columns, each)) for each in zip(*cells, strict=True)]
    if width is not None:
        whole = [number or column.time for number, column in zip(numeric, shown, strict=True)]
        widths = _fitted(widths, whole, [len(column.title) for column in shown], width)
    lines = []
    for number, row in enumerate(cells):
        line = [
            _painted(_aligned(text, size, right), number, column if colour else None, text)
            for text, size, right, column in zip(row, widths, numeric, shown, strict=False)
        ]
        lines.append(_GAP.join(line).rstrip())
    return "\n".join(lines) + "\n"


def in_order(items: Iterable[T], row: Callable[[T], Mapping[str, Any]], by: Column, *, descending: bool) -> list[T]:
    """The items by the value in that column of their rows: numbers before words, what is unknown last either way."""
    keyed = [(_value(row(item), by.path), item) for item in items]
    known = [(value, item) for value, item in keyed if value is not None]
    known.sort(key=lambda pair: _rank(pair[0]), reverse=descending)
    return [item for _, item in known] + [item for value, item in keyed if value is None]


def _rank(value: Any) -> tuple[int, float, str]:
    return (0, value, "") if isinstance(value, int | float) else (1, 0, _cell(value))


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


def _folded(name: str) -> str:
    return name.strip().casefold().replace(" ", "_").replace("-", "_")


def _cell(value: Any, column: Column | None = None) -> str:
    if value is None or value in ("", [], ()):
        return "-"
    if column is not None and column.time:
        from vllm_cp.cli._times import local

        return local(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ",".join(_cell(item) for item in value)
    return plain(str(value))


def _fitted(widths: list[int], whole: list[bool], titles: list[int], limit: int) -> list[int]:
    """Widths that fit: the widest text column gives way first, what must stay whole is never cut, and the last columns
    go if they must."""
    fitted = list(widths)
    while sum(fitted) + len(_GAP) * (len(fitted) - 1) > limit:
        candidates = [
            (size, -index)
            for index, size in enumerate(fitted)
            if not whole[index] and size > max(_LEAST, titles[index])
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
