"""Which rows have to be written again: those that read a part of the subject which is not what it was.

Parts are immutable, so one that is still the same object is what it was; one that was made anew and is equal is read
alike. Nearly all questions end at the first of the two, which is why thousands of workers are asked in milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from operator import attrgetter, is_not, ne
from typing import Any

from vllm_cp_exporter.row import Row

__all__ = ["Known", "Parts"]

#: The parts at the top of a subject, and below each of them those that rows read.
Known = list[tuple[Any, ...]]


class Parts:
    """What rows read, compared in two steps: what is below a part that is the same is not looked at."""

    def __init__(self, rows: Sequence[Row[Any]]) -> None:
        tops: dict[str, dict[str, list[int]]] = {}
        for at, row in enumerate(rows):
            for path in row.reads:
                top, _, below = path.partition(".")
                tops.setdefault(top, {}).setdefault(below, []).append(at)
        self._top = _getter(tops)
        self._places = range(len(tops))
        # Rows that read the part as a whole, and how to get at what others read of it.
        self._whole = [paths.pop("", []) for paths in tops.values()]
        self._below = [_getter(paths) if paths else None for paths in tops.values()]
        self._readers = [list(paths.values()) for paths in tops.values()]

    def look(self, subject: Any) -> Known:
        """Its parts as they are now. May raise."""
        tops = self._top(subject)
        return [tops, *(below(top) if below else () for below, top in zip(self._below, tops, strict=False))]

    def changed(self, subject: Any, known: Known) -> set[int]:
        """Places of the rows that read something new; ``known`` is brought up to date. May raise, half way."""
        due: set[int] = set()
        tops = self._top(subject)
        for at in compress(self._places, map(is_not, tops, known[0])):
            if self._whole[at] and tops[at] != known[0][at]:
                due.update(self._whole[at])
            if (below := self._below[at]) is not None:
                parts = below(tops[at])
                if parts != known[at + 1]:
                    due.update(*compress(self._readers[at], map(ne, parts, known[at + 1])))
                known[at + 1] = parts
        known[0] = tops
        return due


def _getter(paths: Iterable[str]) -> Callable[[Any], tuple[Any, ...]]:
    # Two more, for of a single path attrgetter makes no tuple.
    return attrgetter(*paths, "__class__", "__class__")
