"""Benchmarks. Each claim is a ratio to something measured in the same run; ``python -m bench`` runs them all.

A benchmark is a module here with a ``figures(quick)`` that returns a list of ``Figure`` and, at its end,
``if __name__ == "__main__": sys.exit(bench.program(__doc__, figures))``. Any other module here with a ``main()`` is run
as a program, and what it prints is taken as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["Figure", "best", "machine", "median", "program", "resident_bytes", "table"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured number."""

    name: str
    value: float
    unit: str = ""
    #: What it should be at most; ``None`` where nothing was promised.
    at_most: float | None = None
    #: What it should be at least.
    at_least: float | None = None

    @property
    def target(self) -> str:
        """The promise, for a table."""
        if self.at_most is not None:
            return f"<= {self.at_most:g}"
        return f">= {self.at_least:g}" if self.at_least is not None else ""

    @property
    def verdict(self) -> str:
        """Whether it was kept, and by how much it was missed."""
        if self.at_most is not None:
            return "ok" if self.value <= self.at_most else f"missed by {self.value / self.at_most - 1:.0%}"
        if self.at_least is not None:
            return "ok" if self.value >= self.at_least else f"missed by {1 - self.value / self.at_least:.0%}"
        return ""


def table(figures: Iterable[Figure]) -> str:
    """Figures for people."""
    rows = [(each.name, f"{each.value:,.4g}", each.unit, each.target, each.verdict) for each in figures]
    widths = [max((len(row[at]) for row in rows), default=0) for at in range(5)]
    lines = (
        f"{name:{widths[0]}}  {value:>{widths[1]}} {unit:{widths[2]}}  {target:{widths[3]}}  {verdict}"
        for name, value, unit, target, verdict in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def program(doc: str | None, figures: Callable[[bool], list[Figure]]) -> int:
    """Measure, print a table, perhaps write JSON. 1 when a promise was missed."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller runs: does it work, not how fast is it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    options = parser.parse_args()
    measured = figures(options.quick)
    print(table(measured))
    if options.json:
        options.json.write_text(json.dumps([{**asdict(each), "verdict": each.verdict} for each in measured]) + "\n")
    return int(any(each.verdict.startswith("missed") for each in measured))


def best(work: Callable[[], Any], times: int) -> tuple[float, float]:
    """The shortest of several runs, wall and CPU seconds: what the others took on top was somebody else's."""
    walls, cpus = [], []
    for _ in range(times):
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        cpus.append(time.process_time() - cpu)
        walls.append(time.perf_counter() - wall)
    return min(walls), min(cpus)


def median(numbers: Iterable[float]) -> float:
    """The middle one."""
    ordered = sorted(numbers)
    return ordered[len(ordered) // 2]


def resident_bytes(pid: int | None = None) -> int:
    """Memory of a process, this one by default."""
    pages = int(Path(f"/proc/{pid or os.getpid()}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def machine() -> dict[str, Any]:
    """Where it was measured."""
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
