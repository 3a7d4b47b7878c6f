"""Addresses that an engine advertises for its events: usable ones beside them, whatever form the target has."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.facts import source
from tests.cli.process import run
from tests.colours import both
from tests.field.relay import Relay
from vllm_cp.testing import FakeWorker

WILDCARDS = ("tcp://*:5557", "tcp://0.0.0.0:5558", "tcp://[::]:5559")
VERBATIM = ("tcp://127.0.0.1:5560", "tcp://10.9.9.9:5561", "tcp://[::1]:5562", "tcp://[fd00::7]:5563", "ipc:///tmp/kv")
USELESS = {"inproc://kv": "inside the engine's process only", "": "advertises no address"}
ADVERTISED = (*WILDCARDS, *VERBATIM, *USELESS)


@contextmanager
def _reached(form: str, directory: Path) -> Iterator[tuple[str, str | None]]:
    """A worker that advertises them all: the target in that form, and the host that wildcards stand for."""
    sources = [source(endpoint, endpoint, rank=rank) for rank, endpoint in enumerate(ADVERTISED)]
    with FakeWorker(kv_sources=sources, host="::1" if form == "ipv6" else "127.0.0.1") as worker:
        port = worker.target.rpartition(":")[2]
        if form == "unix":
            with Relay(worker.target, unix=directory / "worker.sock") as relay:
                yield relay.target, None
        else:
            yield {
                "name": (f"localhost:{port}", "localhost"),
                "dns": (f"dns:///localhost:{port}", "localhost"),
                "ipv4": (f"127.0.0.1:{port}", "127.0.0.1"),
                "ipv6": (f"[::1]:{port}", "[::1]"),
            }[form]


def _expected(host: str | None) -> dict[str, str | None]:
    """What to connect to, by what is advertised; ``None`` where nobody can."""
    usable: dict[str, str | None] = dict.fromkeys(ADVERTISED)
    usable |= {endpoint: endpoint for endpoint in VERBATIM}
    if host is not None:
        usable |= {endpoint: f"tcp://{host}:{endpoint.rpartition(':')[2]}" for endpoint in WILDCARDS}
    return usable


@pytest.mark.parametrize("form", ["name", "dns", "ipv4", "ipv6", "unix"])
async def test_the_clients(form: str, colour: str, tmp_path: Path) -> None:
    """Only wildcards get the host of the target, live and replay alike; behind a socket file that has a reason."""
    with _reached(form, tmp_path) as (target, host):
        async with both(colour, target) as client:
            found = await client.kv_event_sources()
    assert {each.endpoint: each.connect_to for each in found} == _expected(host)
    for each in found:
        assert each.replay.connect_to == each.connect_to
        assert (each.reason is None) == (each.connect_to is not None)
        assert USELESS.get(each.endpoint, "") in (each.reason or "")
        if host is None and each.endpoint in WILDCARDS:
            assert "unix" in (each.reason or "")


@pytest.mark.parametrize("form", ["dns", "ipv6", "unix"])
def test_the_command_line(form: str, tmp_path: Path) -> None:
    """kv sources shows the usable address beside the advertised one, and the reason where there is none."""
    with _reached(form, tmp_path) as (target, host):
        ended = run("kv", "sources", "--target", target, "-o", "json")
        table = run("kv", "sources", "--target", target)
    (row,) = json.loads(ended.out)
    assert (ended.code, row["target"]) == (0, target)
    assert {each["endpoint"]: each["connect_to"] for each in row["sources"]} == _expected(host)
    assert {each["replay_endpoint"]: each["replay_connect_to"] for each in row["sources"] if each["endpoint"]} == {
        endpoint: usable for endpoint, usable in _expected(host).items() if endpoint
    }
    assert [bool(each["reason"]) for each in row["sources"]] == [each["connect_to"] is None for each in row["sources"]]
    for reason in USELESS.values():
        assert reason in table.out
