"""What a row of the metric table is, and the usual ways to read one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from vllm_cp_exporter.selfmetrics import Buckets

__all__ = ["Kind", "Point", "Points", "Row", "gauge", "info", "names", "one_of", "row", "value", "word"]

T = TypeVar("T")
Kind = Literal["gauge", "counter", "histogram"]
#: Label values in the order of ``Row.labels``, and the number.
Point = tuple[tuple[str, ...], "float | Buckets"]
Points = Iterable[Point]


@dataclass(frozen=True, slots=True)
class Row(Generic[T]):
    """One metric."""

    #: As on the page, ``_total`` of counters included.
    name: str
    help: str
    kind: Kind
    #: The labels beside those of the subject (``worker`` and ``pool``, ``pool``, or none).
    labels: tuple[str, ...]
    read: Callable[[T], Points]
    #: The parts of the subject that ``read`` looks at, as dotted paths. While all of them are the same or equal, so are
    #: the points: whoever keeps them may keep them. None declared: read for each page.
    reads: tuple[str, ...] = ()

    @property
    def family(self) -> str:
        """The name without ``_total``."""
        return self.name.removesuffix("_total")

    @property
    def sample_names(self) -> tuple[str, ...]:
        """The names of its samples."""
        if self.kind == "histogram":
            return tuple(f"{self.name}{suffix}" for suffix in ("_bucket", "_sum", "_count"))
        return (self.name,)


def row(  # noqa: PLR0917  (the columns of the table, in their order)
    name: str, kind: Kind, text: str, labels: str, read: Callable[[T], Points], reads: str = ""
) -> Row[T]:
    """A row; labels and parts are separated by spaces."""
    return Row(f"vllm_cp_{name}", text, kind, tuple(labels.split()), read, tuple(reads.split()))


def gauge(name: str, text: str, read: Callable[[T], float | None], reads: str = "") -> Row[T]:
    """A row of one number, absent where it is ``None``."""
    return row(name, "gauge", text, "", lambda subject: value(read(subject)), reads)


def value(number: float | None) -> Points:
    """One number, or none."""
    return () if number is None else (((), number),)


def info(*values: str) -> Points:
    """Facts in the labels; the number says nothing."""
    return ((values, 1.0),)


def one_of(closed: Iterable[str], chosen: str | None) -> Points:
    """A closed set, whole: one 1, or none."""
    return [((each,), float(each == chosen)) for each in closed]


def word(flag: bool | None) -> str:
    """A yes or no as a label value."""
    return "unknown" if flag is None else str(flag).lower()


def names(closed: Iterable[Any]) -> list[str]:
    """The values of an enum, as label values."""
    return [member.value for member in closed]
