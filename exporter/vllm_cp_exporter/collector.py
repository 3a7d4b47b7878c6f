"""A page: the metric table walked over one snapshot, for prometheus_client. Guards each row; never raises."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from prometheus_client import Metric
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from vllm_cp_exporter.catalog import OWN_ROWS, POOL_ROWS, ROW_ERRORS, ROWS, WORKER_ROWS, PoolView, Row
from vllm_cp_exporter.selfmetrics import Buckets, Own
from vllm_cp_exporter.snapshot import Snapshot

__all__ = ["LABEL_LIMIT", "PageCollector", "Section", "clean"]

T = TypeVar("T")

#: Characters of a label value. A Kubernetes namespace/pod has up to 317.
LABEL_LIMIT = 512

# What no scraper can be trusted with: lone surrogates can't be encoded, and some parsers end a line or the page at
# other control characters than the newline, which is escaped.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def clean(text: str) -> str:
    """A label value of any origin as it may be published: unsafe characters replaced, overlong text cut short."""
    if len(text) > LABEL_LIMIT:
        text = text[: LABEL_LIMIT - 1] + "…"
    return _UNSAFE.sub("\ufffd", text)


class Section(NamedTuple):
    """Rows that are read of the same subjects."""

    rows: Sequence[Row[Any]]
    #: The labels that say which subject it is.
    identity: tuple[str, ...]
    #: The values of those labels, and the subject.
    subjects: Sequence[tuple[tuple[str, ...], Any]]


class PageCollector:
    """One page as a prometheus_client collector. Made for one snapshot and used once, in any thread."""

    def __init__(self, snapshot: Snapshot, own: Own, names: frozenset[str] | None = None) -> None:
        """``names``: the families or samples wanted; ``None`` is all."""
        self._snapshot = snapshot
        self._own = own
        self._names = names
        #: Samples left out, by row.
        self.errors: Counter[str] = Counter()
        #: The first problem of each such row, for a log line.
        self.problems: dict[str, str] = {}

    def describe(self) -> Iterable[Metric]:
        """The families without their samples, so that registering reads nothing."""
        return [_family(row) for row in ROWS]

    def collect(self) -> Iterator[Metric]:
        """The families that are wanted; one without samples is still named."""
        for rows, identity, subjects in self.sections():
            for row in filter(self.wants, rows):
                family = _family(row)
                taken: set[tuple[str, ...]] = set()
                for key, subject in subjects:
                    family.samples.extend(self.read(row, (*identity, *row.labels), key, subject, taken) or ())
                yield family

    def sections(self) -> Iterator[Section]:
        """What is on the page, in its order. Take each section when the ones before it have been read."""
        workers = [((view.key, view.pool), view) for view in self._snapshot.workers.values()]
        yield Section(WORKER_ROWS, ("worker", "pool"), workers)
        min_ready = self._snapshot.min_ready
        pools = [
            ((name,), PoolView(name=name, workers=tuple(views), min_ready=min_ready.get(name), own=self._own))
            for name, views in self._snapshot.pools().items()
        ]
        yield Section(POOL_ROWS, ("pool",), pools)
        yield Section(OWN_ROWS, (), [((), self._own)])
        # Read last, so that it knows of every error on its own page.
        counted = Counter(self._own.row_errors)
        counted.update(self.errors)
        yield Section((ROW_ERRORS,), (), [((), replace(self._own, row_errors=counted))])

    def wants(self, row: Row[Any]) -> bool:
        """Whether the row was asked for."""
        return self._names is None or not self._names.isdisjoint((row.name, row.family, *row.sample_names))

    def read(
        self, row: Row[T], labels: tuple[str, ...], key: tuple[str, ...], subject: T, taken: set[tuple[str, ...]]
    ) -> list[Sample] | None:
        """One row of one subject, whole or not at all: half a closed set would be a lie. ``None``: it raised.

        ``taken`` holds the label values that are on the page, and gets those that are added.
        """
        found: list[Sample] = []
        try:
            for values, number in row.read(subject):
                named = tuple(map(clean, (*key, *values)))
                found += _samples(row.name, dict(zip(labels, named, strict=True)), number)
                _take(named, taken)
        except Exception as error:  # noqa: BLE001  (what is wrong with one worker must not cost others their page)
            self.errors[row.name] += 1
            self.problems.setdefault(row.name, f"{'/'.join(key)}: {type(error).__name__}: {error}")
            return None
        return found


def _take(named: tuple[str, ...], taken: set[tuple[str, ...]]) -> None:
    if named in taken:
        raise ValueError("its labels are on the page already")
    taken.add(named)


def _family(row: Row[Any]) -> Metric:
    return Metric(row.family, row.help, row.kind)


def _samples(name: str, labels: dict[str, str], number: float | Buckets) -> list[Sample]:
    if not isinstance(number, Buckets):
        return [Sample(name, labels, _float(number))]
    bounds = [*map(floatToGoString, number.bounds), "+Inf"]
    counts = zip(bounds, number.counts, strict=True)
    return [
        *(Sample(f"{name}_bucket", {**labels, "le": bound}, _float(count)) for bound, count in counts),
        Sample(f"{name}_count", labels, _float(number.counts[-1])),
        Sample(f"{name}_sum", labels, _float(number.sum)),
    ]


def _float(number: float) -> float:
    """A negative zero is a zero, on the page as everywhere."""
    return float(number) + 0.0
