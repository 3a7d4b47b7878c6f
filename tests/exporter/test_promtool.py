"""What Prometheus' own linter says about a page, and what the README says."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from tests.exporter.views import FACTS, GONE, KV, UP, WALL, life, snapshot, view
from vllm_cp import RpcRecord
from vllm_cp.models.probe import EngineHealth, EngineState
from vllm_cp_exporter import docs
from vllm_cp_exporter.catalog import CHECKS, ROWS
from vllm_cp_exporter.collector import PageCollector
from vllm_cp_exporter.selfmetrics import SelfMetrics
from vllm_cp_exporter.snapshot import Snapshot


def _full() -> tuple[Snapshot, SelfMetrics]:
    """A page on which every row has a sample."""
    metrics = SelfMetrics()
    metrics.discovered("flags", WALL)
    metrics.watched(lambda: [WALL])
    metrics.state_file(lambda: True)
    metrics.rpc(RpcRecord(target="t", method="Health.Check", code="UNAVAILABLE", detail="", elapsed_s=0.1, attempt=1))
    engines = (EngineHealth(engine=0, state=EngineState.UNHEALTHY),)
    again = {**UP, "instance_id": "second"}
    busy = life(GONE, {}, UP, GONE, *[{}] * 9, again, *[again] * 10, {"engines": engines})
    proofs = dict.fromkeys(CHECKS, WALL)
    full = view(busy, facts=FACTS, proofs=proofs, round_trip_s=0.1, gives_up_at={1: WALL}, kv=KV)
    turns = view(life(UP, again, UP), key="turns")
    return snapshot(full, turns, view(key='na"me\\ \n'), view(life(), key="new"), min_ready={"chat": 2}), metrics


def test_every_row_can_be_filled() -> None:
    """There is a life of a worker in which every row of the table has a sample."""
    shot, metrics = _full()
    empty = {metric.name for metric in PageCollector(shot, metrics.freeze()).collect() if not metric.samples}
    assert not empty


@pytest.mark.parametrize("full", [True, False], ids=["full", "empty"])
@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_promtool_finds_nothing(full: bool) -> None:
    """promtool check metrics has nothing to say about a page, full or empty."""
    shot, metrics = _full() if full else (snapshot(), SelfMetrics())
    page = generate_latest(PageCollector(shot, metrics.freeze()))
    checked = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, timeout=30, check=False)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


def test_the_readme_is_written_from_the_table() -> None:
    """The README lists every metric and flag as they are; python -m vllm_cp_exporter.docs writes it."""
    assert docs.main(["--check"]) == 0
    text = docs.README.read_text("utf-8")
    assert not [row.name for row in ROWS if f"| `{row.name}` | {row.kind} |" not in text]


def test_an_old_readme_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A README whose table is not the catalogue's fails the check, and is mended by writing it."""
    readme = tmp_path / "README.md"
    readme.write_text(docs.README.read_text("utf-8").replace("vllm_cp_worker_ready", "vllm_cp_worker_fine"), "utf-8")
    monkeypatch.setattr(docs, "README", readme)
    assert docs.main(["--check"]) == 1
    assert docs.main([]) == 0
    assert docs.main(["--check"]) == 0
    with pytest.raises(ValueError, match="lacks a marker"):
        docs.with_tables("nothing")
