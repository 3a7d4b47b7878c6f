"""Names and labels that other people build on: what is written down is on a live page, and the other way round."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.exporter.pages import FORMS
from tests.field.watching import LONG_S, Watching, ready, watching, worker
from vllm_cp.testing import FakeWorker

ROOT = Path(__file__).parents[2]
#: Labels that a scraper, its relabelling or an operator's ServiceMonitor puts on every series.
SCRAPERS = {"job", "instance", "namespace", "pod", "container", "node", "service", "endpoint", "cluster", "env", "zone"}
#: A metric's name in prose, tables, queries or rules; not the module, the client of a call, or a file.
NAME = re.compile(r"\bvllm_cp_(?!exporter\b)[a-z_]+[a-z](?![\w./]|\()")
SUFFIXES = ("_bucket", "_count", "_sum")


def _written() -> dict[str, set[str]]:
    """Names in what people read and install, each with the files that have it."""
    found: dict[str, set[str]] = {}
    for directory, pattern in ((ROOT, "*.md"), (ROOT / "examples", "*.py"), (ROOT / "exporter", "**/*")):
        for path in directory.glob(pattern):
            if path.suffix not in (".md", ".py", ".json", ".yaml", ".yml") or "vllm_cp_exporter" in path.parts:
                continue
            for name in NAME.findall(path.read_text()):
                found.setdefault(name, set()).add(str(path.relative_to(ROOT)))
    return found


async def _families(daemon: Watching, target: str) -> dict[str, str]:
    """Names on both pages as they come over the wire, with their types."""
    pages = [await daemon.get(path) for path in ("/metrics", f"/probe?target={target}")]
    return dict(re.findall(r"^# TYPE (\S+) (\S+)$", "\n".join(pages), re.MULTILINE))


async def test_every_name_that_is_written_is_on_a_live_page(fake: FakeWorker) -> None:
    """What README, examples, dashboards and rules name exists; what the page has is in the table, with its type."""
    async with watching(worker("w", fake.target)) as daemon:
        await daemon.until(ready("w"))
        live = await _families(daemon, fake.target)
    written = _written()
    assert len(written) > 30
    unknown = {
        name: files
        for name, files in written.items()
        if name not in live and not any(name == f"{family}{suffix}" for family in live for suffix in SUFFIXES)
    }
    assert unknown == {}
    table = dict(
        re.findall(r"^\| `(vllm_cp_\w+)` \| (\w+) \|", (ROOT / "exporter/README.md").read_text(), re.MULTILINE)
    )
    assert {name: kind for name, kind in live.items() if name.startswith("vllm_cp_")} == table


@pytest.mark.parametrize("form", FORMS)
async def test_labels_of_a_live_page(form: str, fake: FakeWorker) -> None:
    """No series has a label that scrapers own; the worker's label is its name, before and after a new instance."""
    async with watching(worker("ml/llama-7b-0", fake.target)) as daemon:
        page = await daemon.until(ready("ml/llama-7b-0"))
        for sample in page.samples:
            assert not SCRAPERS & set(sample.labels), sample.name
            if "_worker_" in sample.name and sample.name not in ("vllm_cp_pool_workers",):
                assert sample.labels["worker"] == "ml/llama-7b-0"
                assert sample.labels["pool"] == "default"
        fake.restart(instance_id="another")
        again = await daemon.until(
            lambda page: ready("ml/llama-7b-0")(page) and page["worker_restarts_total", "ml/llama-7b-0"] == 1,
            2 * LONG_S,
        )
        assert set(again.by("worker_ready", "worker")) == {"ml/llama-7b-0"}


async def test_units_are_in_the_names(fake: FakeWorker) -> None:
    """Every live name ends in its unit or counts things; times are in seconds."""
    async with watching(worker("w", fake.target)) as daemon:
        live = await _families(daemon, fake.target)
    ours = [name for name in live if name.startswith("vllm_cp_")]
    assert not [name for name in ours if re.search(r"_(ms|millis|minutes|bytes_total_total|kb|mb|percent)(_|$)", name)]
    for name in ours:
        if re.search(r"duration|timestamp|round_trip|startup", name):
            assert name.endswith("_seconds"), name
        if live[name] == "counter":
            assert name.endswith("_total"), name
