"""Pages as Prometheus would read them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import Metric, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from tests.exporter.views import snapshot
from vllm_cp_exporter.collector import PageCollector
from vllm_cp_exporter.selfmetrics import Own
from vllm_cp_exporter.snapshot import Snapshot, WorkerView

#: How each form is made, and read.
FORMS: dict[str, tuple[Callable[[Any], bytes], Callable[[str], Iterable[Metric]]]] = {
    "text": (generate_latest, parse_text),
    "openmetrics": (generate_openmetrics, parse_openmetrics),
}


class Page:
    """What is on a page: ``page["vllm_cp_worker_ready", "a"]`` is a number, or ``None`` where the sample is absent."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self.families = list(families)
        self.samples = [sample for family in self.families for sample in family.samples]

    def __getitem__(self, asked: tuple[str, ...]) -> float | None:
        name, *values = asked
        found = [s.value for s in self.of(name) if set(values) <= set(s.labels.values())]
        assert len(found) < 2, f"{asked} is ambiguous"
        return found[0] if found else None

    def of(self, name: str) -> list[Any]:
        """The samples of that name, with or without our prefix."""
        full = name if name.startswith("vllm_cp_") else f"vllm_cp_{name}"
        return [sample for sample in self.samples if sample.name == full]

    def by(self, name: str, label: str) -> dict[str, float]:
        """The samples of that name by one label."""
        return {sample.labels[label]: sample.value for sample in self.of(name)}

    def series(self, worker: str) -> int:
        """How many series a worker has."""
        return sum(sample.labels.get("worker") == worker for sample in self.samples)


def page(what: Snapshot | WorkerView, own: Own | None = None, form: str = "text") -> Page:
    """The page of a snapshot, or of one worker, written and read back."""
    shot = snapshot(what) if isinstance(what, WorkerView) else what
    generate, parse = FORMS[form]
    return Page(parse(generate(PageCollector(shot, own or Own())).decode()))
