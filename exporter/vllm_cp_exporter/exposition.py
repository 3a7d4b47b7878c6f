"""The page from lines that are kept from one page to the next: byte for byte what prometheus_client would write.

A view and all in it are immutable, so while a part is the same, the lines made of it are too. The rows declare their
parts (``Row.reads``): a look at a worker that brought nothing new moves its time stamps only, and only the rows of
those are written again. What is kept is one copy of the page, cut by row; a worker that leaves is cut out.

Watchers are never held up: what is locked here is the cache alone, and only pages wait for one another. Two of them at
once would share one interpreter anyway. A page of an older snapshot than the one before it is right as well, for
nothing counts but what the parts are.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

from vllm_cp_exporter.collector import PageCollector, Section, clean
from vllm_cp_exporter.column import Column
from vllm_cp_exporter.negotiate import Form
from vllm_cp_exporter.parts import Known, Parts
from vllm_cp_exporter.row import Row
from vllm_cp_exporter.writer import Who, Writer, footer, header, sample_line

__all__ = ["Exposition"]

Key = tuple[str, ...]
_NONE: frozenset[int] = frozenset()


class Exposition:
    """Makes pages. One belongs to one server; any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tables: dict[str, _Table] = {}

    def render(self, page: PageCollector, form: Form) -> bytes:
        """The page; what could not be read is in ``page.errors``, as after ``page.collect()``."""
        pieces: list[bytes] = []
        for section in page.sections():
            families = self._families(page, section)
            for row, lines in zip(section.rows, families, strict=True):
                if page.wants(row):
                    pieces += (header(row.family, row.help, row.kind, form), lines)
        return b"".join((*pieces, footer(form)))

    def _families(self, page: PageCollector, section: Section) -> list[bytes]:
        name = section.rows[0].name
        with self._lock:
            table = self._tables.pop(name, None)
            if table is None or table.rows != section.rows:
                table = _Table(section.rows, section.identity)
            families = table.refreshed(page, section.subjects)
            # Put back only now: one that was left half way would pass old lines for new ones.
            self._tables[name] = table
        return families


class _Table:
    """The rows of one section, kept."""

    def __init__(self, rows: Sequence[Row[Any]], identity: tuple[str, ...]) -> None:
        self.rows = rows
        self._labels = [(*identity, *row.labels) for row in rows]
        self._identity = identity
        self._writers = [Writer(row, identity) for row in rows]
        self._columns = [Column() for _ in rows]
        self._parts = Parts(rows)
        self._undeclared = frozenset(at for at, row in enumerate(rows) if not row.reads)
        self._keys: list[Key] = []
        self._who: list[Who] = []
        #: Each subject as it was on the page before; ``None``: look at it again, be it the same or not.
        self._subjects: list[Any] = []
        #: Its parts; ``None``: nothing is known to be as it was.
        self._known: list[Known | None] = []
        #: Rows to be read again, be their parts the same or not.
        self._again: dict[int, frozenset[int]] = {}
        #: Places of subjects that are published under the same labels: which of them is, depends on the others.
        self._alike: set[int] = set()

    def refreshed(self, page: PageCollector, subjects: Sequence[tuple[Key, Any]]) -> list[bytes]:
        """The lines of each row."""
        keys = [key for key, _ in subjects]
        if keys != self._keys:
            self._arrange(keys)
        writers = self._writers
        fresh: list[dict[int, bytes]] = [{} for _ in self.rows]
        taken: list[set[Key]] = [set() for _ in self.rows]
        for place, ((key, subject), before) in enumerate(zip(subjects, self._subjects, strict=True)):
            if subject is before:
                continue
            who = None if place in self._alike else self._who[place]
            unread = self._undeclared
            for at in self._due(place, subject):
                lines = None if who is None else writers[at].lines(subject, who)
                if lines is None:
                    lines = self._read(page, at, key, subject, taken[at] if who is None else set())
                if lines is None:
                    unread |= {at}
                fresh[at][place] = lines or b""
            self._subjects[place] = None if unread or who is None else subject
            if unread:
                self._again[place] = unread
        for column, changed in zip(self._columns, fresh, strict=True):
            column.put(changed)
        return [column.lines for column in self._columns]

    def _due(self, place: int, subject: Any) -> Iterable[int]:
        """The rows to be written."""
        known, again = self._known[place], self._again.pop(place, _NONE)
        self._known[place] = None
        try:
            if known is None or place in self._alike:
                self._known[place] = self._parts.look(subject)
                return range(len(self.rows))
            due = self._parts.changed(subject, known)
        except Exception:  # noqa: BLE001  (some of it can't be read; each row finds out for itself)
            return range(len(self.rows))
        self._known[place] = known
        return due | again if again else due

    def _read(self, page: PageCollector, at: int, key: Key, subject: Any, taken: set[Key]) -> bytes | None:
        """One row of one subject as the collector has it; ``None``: it could not be read, or nobody wants it."""
        if not page.wants(self.rows[at]):
            return None
        samples = page.read(self.rows[at], self._labels[at], key, subject, taken)
        return None if samples is None else "".join(map(sample_line, samples)).encode()

    def _arrange(self, keys: list[Key]) -> None:
        """Take what is known of subjects that stay to their new places, and forget the others."""
        before = {key: place for place, key in enumerate(self._keys)}
        places = [before.get(key) for key in keys]
        cleaned = [tuple(map(clean, key)) for key in keys]
        first: dict[Key, int] = {}
        alike: set[int] = set()
        for place, named in enumerate(cleaned):
            if first.setdefault(named, place) != place:
                alike |= {first[named], place}
        was = [None if place in self._again else place for place in places]
        self._subjects = [None if place is None else self._subjects[place] for place in was]
        self._known = [None if place is None else self._known[place] for place in was]
        for place in alike:
            self._subjects[place] = None
        self._keys, self._again, self._alike = keys, {}, alike
        self._who = [Who(self._identity, named) for named in cleaned]
        for column in self._columns:
            column.arrange(places)
