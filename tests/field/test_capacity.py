"""What KV capacity means, from the worker's answer to the sum that an autoscaler acts on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.cli.process import run
from tests.field.watching import ready, watching, worker
from vllm_cp.testing import FakeWorker

FACTS: dict[str, dict[str, Any]] = {
    "four-ranks": {"total_kv_blocks": 40000, "data_parallel_size": 4, "data_parallel_size_local": 4},
    "not-reported": {"total_kv_blocks": 0, "kv_block_size": 0},
    "hybrid": {"total_kv_blocks": 1000, "kv_block_size": 4, "effective_attention_block_size": 256},
    "largest": {"total_kv_blocks": 2**64 - 1},
    "no-parallelism": {"total_kv_blocks": 7, "parallelism": None},
}


@pytest.fixture
def workers() -> Iterator[dict[str, FakeWorker]]:
    """A worker for each answer."""
    with ExitStack() as open_workers:
        made = {name: open_workers.enter_context(FakeWorker(ranks=4 if name == "four-ranks" else 1)) for name in FACTS}
        for name, facts in FACTS.items():
            made[name].set(**facts)
        yield made


async def test_the_daemon(workers: dict[str, FakeWorker]) -> None:
    """One sample for each worker: the sum as reported, nothing where nothing was reported, both block sizes."""
    configured = [worker(name, fake.target) for name, fake in workers.items()]
    async with watching(*configured) as daemon:
        await daemon.until(ready(*FACTS))
        page = await daemon.until(lambda page: len(page.of("worker_info")) == len(FACTS))
    summed: dict[str, float] = {}  # sum by (worker)
    for sample in page.of("worker_kv_blocks"):
        summed[sample.labels["worker"]] = summed.get(sample.labels["worker"], 0) + sample.value
    assert summed == {"four-ranks": 40000, "hybrid": 1000, "largest": float(2**64 - 1), "no-parallelism": 7}
    assert page["worker_kv_block_size_tokens", "hybrid"] == 4
    assert page["worker_effective_attention_block_size_tokens", "hybrid"] == 256
    assert page["worker_kv_block_size_tokens", "not-reported"] is None
    assert page["worker_parallelism", "four-ranks", "data"] == 4
    assert not [s for s in page.of("worker_parallelism") if s.labels["worker"] == "no-parallelism"]
    sizes = {s.name for s in page.samples if s.labels.get("worker") == "hybrid" and "kv" in s.name}
    assert sizes == {"vllm_cp_worker_kv_blocks", "vllm_cp_worker_kv_block_size_tokens"} | {
        "vllm_cp_worker_kv_event_sources"
    }, "nobody multiplies them"


def test_the_command_line(workers: dict[str, FakeWorker]) -> None:
    """info says the same: whole numbers in JSON, null and "-" for what was not reported."""
    flags = [part for fake in workers.values() for part in ("--target", fake.target)]
    ended, table = run("info", *flags, "-o", "json"), run("info", *flags)
    assert (ended.code, table.code) == (0, 0)
    rows = dict(zip(FACTS, json.loads(ended.out), strict=True))
    assert {name: row["total_kv_blocks"] for name, row in rows.items()} == {
        "four-ranks": 40000,
        "not-reported": None,
        "hybrid": 1000,
        "largest": 2**64 - 1,
        "no-parallelism": 7,
    }
    assert (rows["hybrid"]["kv_block_size"], rows["hybrid"]["effective_attention_block_size"]) == (4, 256)
    assert rows["no-parallelism"]["parallelism"] is None
    lines = {name: line.split() for name, line in zip(FACTS, table.out.splitlines()[1:], strict=True)}
    assert "40000" in lines["four-ranks"]
    assert "-" in lines["not-reported"]
    assert "0" not in lines["not-reported"]
    assert str(2**64 - 1) in lines["largest"]
