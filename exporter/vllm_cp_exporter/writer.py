"""Lines of a page, byte for byte as prometheus_client writes them. Both forms write samples alike; headers differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, Generic, TypeVar

from prometheus_client import Metric, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from vllm_cp_exporter.collector import clean
from vllm_cp_exporter.negotiate import OPENMETRICS, TEXT, Form
from vllm_cp_exporter.row import Kind, Row

__all__ = ["Who", "Writer", "footer", "header", "number", "sample_line"]

T = TypeVar("T")
#: The label values of each of a row's points; with its bounds and how many counts it has, for a histogram.
Shape = tuple[tuple[Any, ...], ...]

# The library says it wants a registry, and only asks it to collect.
_GENERATORS: dict[Form, Callable[[Any], bytes]] = {TEXT: generate_latest, OPENMETRICS: generate_openmetrics}
#: Shapes that a row has are few, unless labels hold free text; then none of them is worth keeping for long.
_LAYOUTS = 256
#: Stands for what differs; no label value holds it.
_GAP = "\0"


class Who:
    """The labels that say which subject it is, as they are written."""

    __slots__ = ("apart", "whole")

    def __init__(self, identity: Iterable[str], values: Iterable[str]) -> None:
        pairs = sorted(zip(identity, values, strict=True))
        #: One text for each, in the order of their names.
        self.apart = tuple(f'{label}="{_escaped(value)}"' for label, value in pairs)
        #: All of them in one.
        self.whole = (",".join(self.apart),)


class _Families(list[Metric]):
    """What the library takes for a registry."""

    def collect(self) -> Iterable[Metric]:
        return self


@lru_cache(maxsize=512)
def header(family: str, text: str, kind: Kind, form: Form) -> bytes:
    """The lines above a family's samples."""
    return _GENERATORS[form](_Families([Metric(family, text, kind)])).removesuffix(footer(form))


@lru_cache(maxsize=8)
def footer(form: Form) -> bytes:
    """The end of a page."""
    return _GENERATORS[form](_Families())


def number(value: float) -> str:
    """A value. Quick for small numbers and for the Unix times of this age; the library knows the rest."""
    if -1e6 < value < 1e6:
        return repr(value + 0.0)  # a negative zero is a zero
    if 1e9 <= value < 1e10:
        digits = repr(value)
        if digits[-1] != "0":
            return f"{digits[0]}.{digits[1:10]}{digits[11:]}e+09"
    known: str = floatToGoString(value)  # type: ignore[no-untyped-call]
    return known


def _escaped(text: str) -> str:
    """A label value between its quotes."""
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def sample_line(sample: Sample) -> str:
    """One sample, whatever it is."""
    labels = ",".join(f'{name}="{_escaped(value)}"' for name, value in sorted(sample.labels.items()))
    return (
        f"{sample.name}{{{labels}}} {number(sample.value)}\n" if labels else f"{sample.name} {number(sample.value)}\n"
    )


class Writer(Generic[T]):
    """Writes one row of many subjects of one kind, the quick way: it knows the text around what differs."""

    def __init__(self, row: Row[T], identity: tuple[str, ...]) -> None:
        self._row = row
        self._read = row.read
        self._histogram = row.kind == "histogram"
        self._identity = identity
        among = sorted((*identity, *row.labels, *(("le",) if self._histogram else ())))
        # Where no other label comes between them, those of the subject are one piece of text.
        self._whole = bool(identity) and tuple(sorted(identity)) == tuple(
            among[among.index(min(identity)) : among.index(max(identity)) + 1]
        )
        #: The text of a row's points by their labels, with gaps in it for the subject and the number of each.
        self._layouts: dict[Shape, list[str]] = {}

    def lines(self, subject: T, who: Who) -> bytes | None:
        """Its lines; ``None`` where anything is out of the ordinary: what to make of that is for the collector."""
        try:
            shape: list[tuple[Any, ...]] = []
            values: list[Any] = []
            for labels, value in self._read(subject):
                shape.append(labels)
                values.append(value)
            if not shape:
                return b""
            if self._histogram:
                shape, values = _spread(shape, values)
            kept = tuple(shape)
            text = (self._layouts.get(kept) or self._laid_out(kept)).copy()
            parts = who.whole if self._whole else who.apart
            count, step, gap = len(values), 2 * len(parts) + 2, 1
            for part in parts:
                text[gap::step] = (part,) * count
                gap += 2
            text[gap::step] = map(number, map(float, values))
            return "".join(text).encode()
        except Exception:  # noqa: BLE001  (whatever it is)
            return None

    def _laid_out(self, shape: Shape) -> list[str]:
        lines: list[str] = []
        taken: set[tuple[str, ...]] = set()
        for point in shape:
            labels, bounds, counts = point if point and isinstance(point[0], tuple) else (point, None, 0)
            named = tuple(map(clean, labels))
            if named in taken:
                raise ValueError("two points have the same labels")
            taken.add(named)
            own = dict(zip(self._row.labels, named, strict=True))
            if bounds is None:
                lines.append(self._line("", own))
                continue
            each = [*map(number, bounds), "+Inf"]
            lines += (self._line("_bucket", {**own, "le": le}) for le, _ in zip(each, range(counts), strict=True))
            lines += (self._line("_count", own), self._line("_sum", own))
        texts = "".join(lines).split(_GAP)
        layout = [""] * (2 * len(texts) - 1)
        layout[::2] = texts
        if len(self._layouts) >= _LAYOUTS:
            self._layouts.clear()
        self._layouts[shape] = layout
        return layout

    def _line(self, suffix: str, own: dict[str, str]) -> str:
        texts = {label: f'{label}="{_escaped(value)}"' for label, value in own.items()}
        # A label that stands for all of the subject's, or each for itself.
        texts |= dict.fromkeys((min(self._identity),) if self._whole else self._identity, _GAP)
        labels = ",".join(text for _, text in sorted(texts.items()))
        return f"{self._row.name}{suffix}{{{labels}}} {_GAP}\n" if labels else f"{self._row.name}{suffix} {_GAP}\n"


def _spread(shape: list[tuple[Any, ...]], values: list[Any]) -> tuple[list[tuple[Any, ...]], list[Any]]:
    """The same of histograms: each is a point for every line that it has."""
    shapes = [(labels, each.bounds, len(each.counts)) for labels, each in zip(shape, values, strict=True)]
    return shapes, [number for each in values for number in (*each.counts, each.counts[-1], each.sum)]
