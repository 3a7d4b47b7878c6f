"""One bad value, one bad worker: what it may cost, and what it may not."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tests.exporter.pages import FORMS, page
from tests.exporter.views import FACTS, MODEL, SERVER, UP, life, snapshot, view
from vllm_cp_exporter import collector
from vllm_cp_exporter.catalog import ROWS
from vllm_cp_exporter.collector import LABEL_LIMIT, PageCollector, clean
from vllm_cp_exporter.selfmetrics import Own, SelfMetrics
from vllm_cp_exporter.snapshot import Board, Facts, WorkerView

HOSTILE = {
    "quote": 'a"b',
    "backslash": "a\\b\\",
    "newline": "a\nb",
    "backslash n": "a\\nb",
    "nothing": "",
    "10 kB": "x" * 10_000,
    "undecodable byte": "w\udcff",
    "control characters": "a\x00b\rc\x1bd\x7f\x85e\u2028f",
    "braces and commas": '{a="b",c="d"} 1 # EOF',
    "many scripts": "ünïcödé 模型 🦙",
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_b29_hostile_labels(text: str, form: str) -> None:
    """Whatever a label value holds, the page parses, and the value comes back as it was published."""
    model = replace(MODEL, model_id=text, served_model_name=text, served_model_aliases=(text,))
    facts = Facts(server=replace(SERVER, engine_version=text, instance_id=text), model=model)
    bad = view(key=text, pool=text, target=text, facts=facts)
    seen = page(snapshot(bad, view(key="good")), form=form)
    assert seen["worker_ready", "good"] == 1
    (sample,) = [s for s in seen.of("worker_model_info") if s.labels["worker"] == clean(text)]
    assert sample.labels["model_id"] == clean(text)
    assert len(sample.labels["model_id"]) <= LABEL_LIMIT


def test_clean_keeps_what_is_fine() -> None:
    """Ordinary text, newline and tab included, is published as it is; overlong text says that it was cut."""
    assert clean("ml/llama-7b\t模型\n") == "ml/llama-7b\t模型\n"
    assert clean("x" * LABEL_LIMIT) == "x" * LABEL_LIMIT
    assert clean("x" * 10_000) == "x" * (LABEL_LIMIT - 1) + "…"
    assert clean("\ud800\x00") == "\ufffd\ufffd"


class _Broken:
    """A state in which some fact cannot be read."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("a surprise")


def test_b29_a_worker_that_raises_costs_its_own_rows_only() -> None:
    """When a worker's facts cannot be read, its other rows and all other workers are there, and it is counted."""
    bad = view(key="bad", facts=Facts(server=_Broken(), model=MODEL))  # type: ignore[arg-type]
    seen = page(snapshot(bad, view(key="good", facts=FACTS)))
    assert seen["worker_kv_blocks", "good"] == 40000
    assert seen["worker_kv_blocks", "bad"] is None
    assert seen["worker_ready", "bad"] == 1
    assert seen["exporter_row_errors_total", "vllm_cp_worker_kv_blocks"] == 1
    assert seen["exporter_row_errors_total", "vllm_cp_worker_ready"] == 0


def test_b29_even_a_worker_without_a_state() -> None:
    """A worker that is wrong altogether is counted in the rows that read it, and hides nobody."""
    bad = WorkerView(key="bad", pool="chat", target="", state=_Broken())  # type: ignore[arg-type]
    seen = page(snapshot(bad, view(key="good")))
    assert seen["worker_ready", "good"] == 1
    assert seen["worker_target_info", "bad"] == 1
    assert seen["exporter_row_errors_total", "vllm_cp_worker_ready"] == 1
    assert seen["exporter_row_errors_total", "vllm_cp_pool_workers"] == 1


@pytest.mark.parametrize("number", ["many", None, 10**400])
def test_b29_no_number_is_no_sample(number: Any) -> None:
    """A value that is not a number leaves out its sample."""
    facts = Facts(server=replace(SERVER, total_kv_blocks=number, max_loras=7))
    seen = page(view(facts=facts))
    assert seen["worker_kv_blocks", "a"] is None
    assert seen["worker_max_loras", "a"] == 7


def test_two_workers_that_would_share_their_labels() -> None:
    """Two names that are published alike don't make a page that a scraper refuses: the first one has it."""
    seen = page(snapshot(view(key="w\udc80"), view(key="w\udc81", state=life())))
    assert [s.value for s in seen.of("worker_ready")] == [1]
    assert seen["exporter_row_errors_total", "vllm_cp_worker_ready"] == 1


def test_errors_add_up_over_pages() -> None:
    """The count on a page holds the errors of the pages before and its own."""
    metrics = SelfMetrics()
    shot = snapshot(view(facts=Facts(server=_Broken())))  # type: ignore[arg-type]
    for number in (1, 2, 3):
        made = PageCollector(shot, metrics.freeze())
        (samples,) = [m.samples for m in made.collect() if m.name == "vllm_cp_exporter_row_errors"]
        (count,) = [s.value for s in samples if s.labels["row"] == "vllm_cp_worker_kv_blocks"]
        assert count == number
        assert "a surprise" in made.problems["vllm_cp_worker_kv_blocks"]
        metrics.row_errors(made.errors)


def test_registering_reads_nothing() -> None:
    """The collector may be registered with prometheus_client: that asks for names, not for samples."""
    registry = CollectorRegistry()
    made = PageCollector(snapshot(view(state=_Broken())), Own())  # type: ignore[arg-type]
    registry.register(made)
    assert not made.errors
    assert b"vllm_cp_worker_target_info{" in generate_latest(registry)
    assert made.errors


@pytest.mark.parametrize(
    ("names", "families"),
    [
        ({"vllm_cp_worker_ready"}, ["vllm_cp_worker_ready"]),
        ({"vllm_cp_worker_faults_total"}, ["vllm_cp_worker_faults"]),
        ({"vllm_cp_worker_faults"}, ["vllm_cp_worker_faults"]),
        ({"vllm_cp_rpc_duration_seconds_bucket"}, ["vllm_cp_rpc_duration_seconds"]),
        ({"vllm_cp_exporter_row_errors_total"}, ["vllm_cp_exporter_row_errors"]),
        ({"nonsense", ""}, []),
        (set(), []),
    ],
)
def test_some_names_only(names: set[str], families: list[str]) -> None:
    """A page may be asked for some metrics only, by family or by sample name; a family comes whole."""
    made = PageCollector(snapshot(view()), Own(), frozenset(names))
    assert [metric.name for metric in made.collect()] == families


def test_no_created_series() -> None:
    """No counter or histogram carries a _created series, in either form."""
    metrics = SelfMetrics()
    for form in FORMS:
        seen = page(snapshot(view(facts=FACTS)), metrics.freeze(), form)
        assert not [sample.name for sample in seen.samples if sample.name.endswith("_created")]


def test_b29_pages_while_workers_come_and_go() -> None:
    """Pages are made in threads while the board changes under them: each is whole, and says one thing of a worker."""
    board = Board()

    def read(shot: Any) -> None:
        made = page(shot)
        ready = {s.labels["worker"]: s.value for s in made.of("worker_ready")}
        assert ready["stays"] == 1
        for key, value in ready.items():
            assert sum(s.value for s in made.of("worker_not_ready") if s.labels["worker"] == key) == 1 - value

    down, up = life(), life(UP)
    board.publish(view(up, key="stays"))
    with ThreadPoolExecutor(8) as pool:
        pages = []
        for number in range(50):
            board.publish(view(down if number % 2 else up, key=f"w{number % 7}"))
            board.remove([f"w{(number + 3) % 7}"])
            pages.append(pool.submit(read, board.snapshot))
        for each in pages:
            each.result(timeout=60)


def test_a_row_may_be_added_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that always raises hides no other row."""
    rows = list(collector.WORKER_ROWS)
    broken: Callable[..., Any] = _raise
    rows[0] = replace(rows[0], read=broken)
    monkeypatch.setattr(collector, "WORKER_ROWS", tuple(rows))
    seen = page(snapshot(view(), view(key="b")))
    assert len(seen.families) == len(ROWS)
    assert seen["exporter_row_errors_total", rows[0].name] == 2


def _raise(_: Any) -> Any:
    raise ValueError("no")
