"""``kv sources`` (B08, B10, B11): usable addresses beside advertised ones, and four different kinds of none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cli.conftest import Cli
from tests.cli.facts import source
from vllm_cp.testing import FakeWorker

ADDRESSES = [
    ("tcp://*:5557", "tcp://{host}:5557", None),
    ("tcp://0.0.0.0:5558", "tcp://{host}:5558", None),
    ("tcp://[::]:5559", "tcp://{host}:5559", None),
    ("tcp://127.0.0.1:5560", "tcp://127.0.0.1:5560", None),
    ("tcp://10.9.9.9:5561", "tcp://10.9.9.9:5561", None),
    ("ipc:///tmp/kv", "ipc:///tmp/kv", None),
    ("inproc://kv", None, "inside the engine's process only"),
    ("", None, "advertises no address"),
    ("tcp://*:0", None, "the real port is not known"),
]


def _rows(cli: Cli, *args: str) -> list[dict[str, Any]]:
    ended = cli("kv", "sources", *args, "-o", "json")
    rows: list[dict[str, Any]] = json.loads(ended.out)
    return rows


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("localhost", "localhost"), ("::1", "[::1]")])
def test_wildcard_becomes_the_workers_host(host: str, shown: str, cli: Cli) -> None:
    """Only the three wildcards get the host of the target, bracketed for IPv6; ports and other addresses stay."""
    sources = [source(endpoint, endpoint, rank=rank) for rank, (endpoint, _, _) in enumerate(ADDRESSES)]
    with FakeWorker(kv_sources=sources, host="::1" if ":" in host else "127.0.0.1") as worker:
        port = worker.target.rpartition(":")[2]
        (row,) = _rows(cli, "--target", f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    assert row["events"] == "on"
    assert [s["data_parallel_rank"] for s in row["sources"]] == list(range(len(ADDRESSES)))
    for got, (endpoint, usable, reason) in zip(row["sources"], ADDRESSES, strict=True):
        expected = usable.format(host=shown) if usable else None
        assert (got["endpoint"], got["connect_to"], got["replay_connect_to"]) == (endpoint, expected, expected)
        assert got["replay_endpoint"] == (endpoint or None)
        assert (got["reason"] or "").find(reason or "") >= 0
        assert (got["reason"] is None) == (reason is None)


def test_publisher_that_connects(cli: Cli) -> None:
    """An address of another machine is one that the publisher connects to: the table says to bind there."""
    with FakeWorker(kv_sources=[source("tcp://10.9.9.9:5561")]) as worker:
        ended = cli("kv", "sources", "--target", worker.target)
    assert "bind there: the publisher connects" in ended.out


def test_ranks(cli: Cli) -> None:
    """Rank 0 is a rank, no rank is one source for all of them, and the order is the worker's."""
    sources = [source("tcp://*:2", rank=1), source("tcp://*:1", rank=0), source("tcp://*:3", rank=None)]
    with FakeWorker(kv_sources=sources) as worker:
        (row,) = _rows(cli, "--target", worker.target)
        table = cli("kv", "sources", "--target", worker.target).out.splitlines()
    assert [s["data_parallel_rank"] for s in row["sources"]] == [1, 0, None]
    assert [line.split()[1] for line in table] == ["RANK", "1", "0", "all"]


def test_four_kinds_of_no_events(cli: Cli) -> None:
    """Off, not supported, denied and an unreadable transport are four words and codes; nothing else is touched."""
    with FakeWorker() as off, FakeWorker() as older, FakeWorker() as denied, FakeWorker() as nats:
        older.fail("GetKvEventSources", "UNIMPLEMENTED")
        denied.fail("GetKvEventSources", "PERMISSION_DENIED", "RBAC: access denied")
        nats.set(kv_sources=[source("tcp://broker:4222", "tcp://broker:4223", transport="nats")])
        ended = [cli("kv", "sources", "--target", worker.target) for worker in (off, older, denied, nats)]
        assert [e.code for e in ended] == [0, 7, 4, 0]
        assert "events are off" in ended[0].out
        assert "--kv-events-config" in ended[0].err
        assert "not supported by this worker (UNIMPLEMENTED)" in ended[1].err
        assert "credentials rejected (PERMISSION_DENIED RBAC: access denied)" in ended[2].err
        assert "transport 'nats' is unknown" in ended[3].out
        assert len({e.out + e.err for e in ended}) == 4

        targets = [part for w in (off, older, denied, nats) for part in ("--target", w.target)]
        rows = _rows(cli, *targets)
        assert [row.get("events") for row in rows] == ["off", None, None, "on"]
        assert rows[0]["sources"] == []
        assert (rows[3]["sources"][0]["connect_to"], rows[3]["sources"][0]["replay_connect_to"]) == (None, None)
        assert [row["error"]["kind"] for row in rows[1:3]] == ["NotSupported", "CredentialsRejected"]
        # Terminal answers: each was asked once per run.
        assert len([c for c in older.calls if c.method.endswith("GetKvEventSources")]) == 2
        assert cli("health", *targets).code == 0
