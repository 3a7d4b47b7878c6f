"""No KV events: off, too old, denied, of a transport nobody reads, or just quiet. Five things, told apart."""

from __future__ import annotations

import asyncio
import html
import re
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.cli.facts import source
from tests.cli.process import run
from tests.colours import both
from tests.field.watching import ready, watching, worker
from vllm_cp import CredentialsRejected, NotSupported
from vllm_cp.episodes import Rules
from vllm_cp.testing import FakeWorker

KINDS = ("off", "older", "denied", "nats", "quiet")


@pytest.fixture
def workers() -> Iterator[dict[str, FakeWorker]]:
    """A worker of each kind; health and facts are fine with all of them."""
    with ExitStack() as open_workers:
        made = {kind: open_workers.enter_context(FakeWorker()) for kind in KINDS}
        made["older"].fail("GetKvEventSources", "UNIMPLEMENTED")
        made["denied"].fail("GetKvEventSources", "PERMISSION_DENIED", "RBAC: access denied")
        made["nats"].set(kv_sources=[source("nats://broker:4222", transport="nats")])
        made["quiet"].set(kv_sources=[source("tcp://*:5557")])
        yield made


def _asked(fake: FakeWorker, method: str = "GetKvEventSources") -> int:
    return sum(call.method == f"Control.{method}" for call in fake.calls)


async def test_the_clients(workers: dict[str, FakeWorker], colour: str) -> None:
    """Nothing, two errors of their own, a source with a reason, a source: and the final ones are asked once."""
    found = {}
    for kind, fake in workers.items():
        async with both(colour, fake.target) as client:
            try:
                found[kind] = await client.kv_event_sources()
            except (NotSupported, CredentialsRejected) as error:
                found[kind] = error
    assert found["off"] == ()
    assert isinstance(found["older"], NotSupported)
    assert isinstance(found["denied"], CredentialsRejected)
    assert "RBAC: access denied" in str(found["denied"])
    (nats,), (quiet,) = found["nats"], found["quiet"]
    assert (nats.connect_to, "nats" in nats.reason) == (None, True)
    assert quiet.connect_to == "tcp://127.0.0.1:5557"
    assert {_asked(fake) for fake in workers.values()} == {1}


def test_the_command_line(workers: dict[str, FakeWorker]) -> None:
    """Five answers that read differently; what is no failure exits with 0, too old with 7, denied with 4."""
    ended = {kind: run("kv", "sources", "--target", fake.target) for kind, fake in workers.items()}
    codes = {kind: each.code for kind, each in ended.items()}
    assert codes == {"off": 0, "older": 7, "denied": 4, "nats": 0, "quiet": 0}
    said = {kind: (each.out + each.err).replace(workers[kind].target, "") for kind, each in ended.items()}
    assert len(set(said.values())) == len(KINDS)
    for kind, words in {
        "off": "events are off",
        "older": "not supported by this worker",
        "denied": "credentials rejected",
        "nats": "transport 'nats' is unknown",
        "quiet": "tcp://127.0.0.1:5557",
    }.items():
        assert words in said[kind]


async def test_the_daemon(workers: dict[str, FakeWorker]) -> None:
    """All else of the five is published; their events are five different things; the final answers bring no storm.

    They are asked for again once another instance answers.
    """
    rules = Rules(answer_within_s=5.0, interval_s=0.2, window_s=0.2)
    configured = [worker(kind, fake.target, rules) for kind, fake in workers.items()]
    async with watching(*configured, interval_s=0.2, info_s=0.1) as daemon:
        await daemon.until(ready(*KINDS))
        page = await daemon.until(
            lambda page: page.by("worker_kv_event_sources", "worker") == {"off": 0, "nats": 1, "quiet": 1}
        )
        assert set(page.by("worker_kv_blocks", "worker")) == set(KINDS)
        assert set(page.by("worker_model_info", "worker")) == set(KINDS)
        shown = {kind: _events_shown(await daemon.get("/"), kind) for kind in KINDS}
        assert (shown["off"], shown["older"], shown["denied"]) == ("off", "not supported", "credentials rejected")
        assert "transport 'nats' cannot be read" in shown["nats"]
        assert "tcp://127.0.0.1:5557" in shown["quiet"]
        for kind in ("older", "denied"):
            await asyncio.to_thread(workers[kind].wait_for_call, "GetServerInfo", count=12, timeout_s=20)
            assert _asked(workers[kind]) == 1
        workers["older"].restart(instance_id="newer")  # which forgets the failure
        await daemon.until(lambda page: page["worker_kv_event_sources", "older"] == 0)
        assert _asked(workers["denied"]) == 1


def _events_shown(page: str, worker: str) -> str:
    """What the status page says of a worker's events."""
    (row,) = [row for row in page.split("<tr") if f">{worker}<" in row]
    (cell,) = re.findall(r'data-is="KV events">(.*?)(?=<td|$)', row, re.DOTALL)
    return html.unescape(cell)
