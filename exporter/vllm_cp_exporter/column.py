"""The lines of one row on a page: all subjects' in one piece, which is cheap to put on a page and small to keep."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from itertools import accumulate

__all__ = ["Column"]


class Column:
    """Lines by place. Made anew when one of them changes; the old piece stays as it is for whoever has it."""

    def __init__(self) -> None:
        #: All of them, in the order of the places.
        self.lines = b""
        self._sizes = array("Q")

    def put(self, changed: Mapping[int, bytes]) -> None:
        """Put in lines at their places, given in ascending order."""
        if not changed:
            return
        if len(changed) == len(self._sizes):
            pieces: list[bytes | memoryview] = list(changed.values())
        else:
            ends, old, done = self._ends(), memoryview(self.lines), 0
            pieces = []
            for place, lines in changed.items():
                pieces += (old[done : ends[place]], lines)
                done = ends[place + 1]
            pieces.append(old[done:])
        for place, lines in changed.items():
            self._sizes[place] = len(lines)
        self.lines = b"".join(pieces)

    def arrange(self, places: Sequence[int | None]) -> None:
        """Have at each place what was at the given one before, nothing for ``None``."""
        ends, old = self._ends(), memoryview(self.lines)
        self.lines = b"".join([old[ends[place] : ends[place + 1]] for place in places if place is not None])
        self._sizes = array("Q", [0 if place is None else self._sizes[place] for place in places])

    def _ends(self) -> list[int]:
        """Where the lines of each place begin, and where the last ones end."""
        return list(accumulate(self._sizes, initial=0))
