"""The screen of ``vllm-cp top``: a frame for a size, and what the keys do to it. It neither reads nor writes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_cp.cli._table import Column, View, in_order, table
from vllm_cp.cli._text import cut, plain
from vllm_cp.cli._times import local_now

__all__ = ["VIEW", "Screen"]

_MARKS = {True: "#", False: ".", None: "?"}


def _rows(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    used = record["kv_used_ratio"]
    return [
        {
            **record,
            "ladder": "".join(_MARKS[holds] for holds in record["rungs"].values()),
            "kv_used": None if used is None else round(100 * used),
        }
    ]


VIEW = View(
    (
        Column("TARGET", "target"),
        Column("LADDER", "ladder"),
        Column("STATE", "state", good=frozenset({"ready"})),
        Column("BLOCKS", "kv_blocks"),
        Column("RUN", "running"),
        Column("WAIT", "waiting"),
        Column("KV %", "kv_used"),
        Column("FAULTS", "faults"),
        Column("RECOV S", "last_recovery_s"),
        Column("WHY", "why", wide=True),
        Column("FAULT SINCE", "fault_since", wide=True, time=True),
        Column("RESTARTS", "restarts", wide=True),
        Column("VERSION", "engine_version", wide=True),
        Column("INSTANCE", "instance_id", wide=True),
    ),
    _rows,
)
#: Columns that go on the screen where it is wide enough, beside those that always do.
_ROOMY = 110
_SORTS = tuple(column for column in VIEW.columns if not column.wide)


class Screen:
    """Order, filter and place in the list, moved by keys; frames are made of them and the records."""

    def __init__(self, *, colour: bool, sort: Column | None = None, descending: bool = False) -> None:
        self._colour = colour
        self._sort = sort
        self._descending = descending
        self._filter = ""
        self._typing: str | None = None
        self._top = 0
        self._page = 1
        self.done = False

    def press(self, key: str) -> None:
        """One key, or the name of a special one: ``up``, ``down``, ``pgup``, ``pgdn``, ``esc``, ``enter``, ``back``."""
        if self._typing is not None:
            self._type(key)
        elif key in ("q", "Q"):
            self.done = True
        elif key == "/":
            self._typing = self._filter
        elif key == "esc":
            self._filter = ""
        elif key in ("s", "S"):
            self._next_sort(1 if key == "s" else -1)
        elif key == "r":
            self._descending = not self._descending
        else:
            steps = {"up": -1, "k": -1, "down": 1, "j": 1, "pgup": -self._page, "pgdn": self._page, " ": self._page}
            self._top += steps.get(key, 0)

    def _type(self, key: str) -> None:
        assert self._typing is not None
        if key in ("enter", "esc"):
            self._filter = self._typing if key == "enter" else self._filter
            self._typing = None
        elif key == "back":
            self._typing = self._typing[:-1]
        elif len(key) == 1 and key.isprintable():
            self._typing += key

    def _next_sort(self, step: int) -> None:
        choices = [None, *_SORTS]
        place = choices.index(self._sort) if self._sort in choices else 0
        self._sort = choices[(place + step) % len(choices)]
        # Numbers are asked for to see the largest.
        self._descending = self._sort is not None and self._sort.path not in ("target", "ladder", "state")

    def frame(self, records: Sequence[Mapping[str, Any]], width: int, height: int, now: float | None = None) -> str:
        """The whole screen, ``height`` lines at most and none wider than ``width``."""
        wanted = (self._filter if self._typing is None else self._typing).casefold()
        shown = [record for record in records if wanted in f"{record['target']} {record['state']}".casefold()]
        if self._sort is not None:
            by = self._sort
            shown = in_order(shown, lambda record: _rows(record)[0], by, descending=self._descending)
        self._page = max(1, height - 3)
        self._top = max(0, min(self._top, len(shown) - self._page))
        rows = [row for record in shown for row in _rows(record)]
        columns = [column for column in VIEW.columns if not column.wide or (width >= _ROOMY and column.path == "why")]
        body = table(columns, rows, width=width, colour=self._colour).splitlines()
        # Cut after it was laid out: the columns stay where they are while one moves through the list.
        lines = [self._head(records, width, now), *body[:1], *body[1:][self._top : self._top + self._page]]
        lines += [""] * (height - 1 - len(lines))
        return "\n".join([*lines[: height - 1], self._foot(len(shown), len(records), width)])

    def _head(self, records: Sequence[Mapping[str, Any]], width: int, now: float | None) -> str:
        states: dict[str, int] = {}
        for record in records:
            states[record["state"]] = states.get(record["state"], 0) + 1
        parts = [f"{len(records)} worker{'' if len(records) == 1 else 's'}"]
        parts += [f"{count} {state}" for state, count in sorted(states.items(), key=lambda item: item[0] != "ready")]
        for name in ("running", "waiting"):
            known = [record[name] for record in records if record[name] is not None]
            # A part of the workers is not all of them.
            parts += [f"{sum(known):g} {name}" + ("" if len(known) == len(records) else "+")] if known else []
        text = f"{local_now(time.time() if now is None else now)}  {', '.join(parts)}"
        return self._strong(cut(plain(text), width, "..."))

    def _foot(self, shown: int, all_of_them: int, width: int) -> str:
        if self._typing is not None:
            return self._strong(cut(plain(f"filter: {self._typing}_   enter: keep  esc: as before"), width, "..."))
        order = "as given" if self._sort is None else self._sort.title.lower()
        text = f"q quit  s sort: {order}  r reverse  / filter"
        if self._filter:
            text += f": {self._filter} ({shown} of {all_of_them})  esc all"
        elif shown > self._page:
            text += f"  j k move: {self._top + 1}-{min(shown, self._top + self._page)} of {shown}"
        return self._strong(cut(plain(text), width, "..."))

    def _strong(self, text: str) -> str:
        return f"\x1b[7m{text}\x1b[0m" if self._colour else text
