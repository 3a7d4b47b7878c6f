"""A fleet that a daemon tells of: the types of a direct fleet, without asking any worker."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import bcrypt
import pytest

from tests.certs import make_certs
from tests.exporter.asking import Asker, serving, watching
from tests.exporter.views import FACTS, GONE, UP, life, view
from tests.fleet.both import BothFleet
from tests.fleet.conftest import MakeFleet, Start
from vllm_cp import (
    ClientClosed,
    ConfigError,
    Connection,
    ControlError,
    HttpConnection,
    KvEventSource,
    NotSupported,
    OutOfTime,
    Tls,
    WorkerUnreachable,
)
from vllm_cp._fleet import daemon as daemon_module
from vllm_cp.discovery import DiscoveredTarget
from vllm_cp.fleet import (
    AsyncFleet,
    Fleet,
    HealthChanged,
    InstanceChanged,
    WorkerAdded,
    WorkerChanged,
    WorkerRemoved,
)
from vllm_cp.models.health import HealthStatus
from vllm_cp_exporter.config import ExporterConfig, WorkerConfig
from vllm_cp_exporter.snapshot import Board, Facts
from vllm_cp_exporter.web import Door


class ToldFleet(BothFleet):
    """``BothFleet``, from a daemon."""

    def __init__(self, colour: str, url: str | HttpConnection) -> None:
        self.colour = colour
        self.fleet: Any = (Fleet if colour == "sync" else AsyncFleet).from_daemon(url)


def watched(*workers: tuple[str, str]) -> ExporterConfig:
    made = (WorkerConfig(key=key, pool="chat", connection=Connection.parse(target)) for key, target in workers)
    return ExporterConfig(workers=tuple(made), probe_interval_s=0.3)


async def _complete(ask: Asker) -> None:
    await ask.until("/api/v1/workers", lambda answer: answer.json["complete"])


async def test_the_same_snapshot_as_a_direct_fleet(colour: str, fleet_of: MakeFleet, start: Start) -> None:
    """Health, server, model and sources of each worker are equal, field by field; nobody is asked for it."""
    plain = start()
    events = start(version="0.29.0", kv_sources=[KvEventSource(transport="zmq", endpoint="tcp://*:5557")])
    targets = [DiscoveredTarget(key=k, target=w.target, pool="chat") for k, w in (("ml/a", plain), ("ml/b", events))]
    async with fleet_of(targets) as direct:
        expected = await direct.snapshot()
    async with watching(watched(("ml/a", plain.target), ("ml/b", events.target))) as ask:
        await _complete(ask)
        async with ToldFleet(colour, ask.url) as fleet:
            told = await fleet.snapshot(deadline_s=5)
            assert fleet.fleet.targets == tuple(worker.target for worker in told)
            assert fleet.fleet.status.error is None
    assert told.complete
    assert told.as_of >= expected.as_of
    assert [replace(worker, errors={}) for worker in told] == [replace(worker, errors={}) for worker in expected]


async def test_a_consumer_does_not_become_a_prober(colour: str) -> None:
    """map() and client() are refused, and say what to do instead."""
    async with serving() as ask, ToldFleet(colour, ask.url) as fleet:
        with pytest.raises(ConfigError, match=r"asks no worker itself: snapshot\(\) and watch\(\)"):
            await fleet.map(lambda worker: worker.server_info())
        with pytest.raises(ConfigError, match="make a fleet of the targets"):
            fleet.fleet.client("a")


async def test_what_is_unknown_says_why(colour: str) -> None:
    """A worker that is down, one without event sources, one over HTTP only: None, with the error a client would get."""
    board = Board()
    board.publish(view(life(UP, GONE), key="down"))
    board.publish(view(key="old", facts=Facts(server=FACTS.server, model=FACTS.model, sources_problem="not supported")))
    board.publish(view(key="http", target="", http_url="http://h:8000"))
    board.publish(view(life(), key="new"))
    async with serving(board) as ask, ToldFleet(colour, ask.url) as fleet:
        snapshot = await fleet.snapshot()
    down, old, http, new = snapshot
    assert not snapshot.complete
    assert {type(error) for error in down.errors.values()} == {WorkerUnreachable}
    assert "connection refused" in str(down.errors["health"])
    assert (old.health, list(old.errors)) == (HealthStatus.SERVING, ["sources"])
    assert isinstance(old.errors["sources"], NotSupported)
    assert (http.target.target, http.target.http_url) == (None, "http://h:8000")
    assert "HTTP only" in http.target.problem
    assert isinstance(new.errors["server"], ControlError)


async def test_changes_as_they_happen(colour: str, start: Start) -> None:
    """A worker falls, comes back as another instance: the same changes as of a direct fleet."""
    worker, other = start(), start()
    async with watching(watched(("a", worker.target), ("b", other.target))) as ask:
        await _complete(ask)
        async with ToldFleet(colour, ask.url).watching() as changes:
            await changes.until(lambda: len(changes.of(HealthChanged)) == 2, "both workers")
            assert [type(change) for change in changes.seen] == [WorkerAdded, HealthChanged] * 2
            assert {change.now for change in changes.of(HealthChanged)} == {HealthStatus.SERVING}
            worker.stop()
            await changes.until(lambda: len(changes.of(HealthChanged, "a")) == 2, "the fall")
            fall = changes.of(HealthChanged, "a")[1]
            assert (fall.was, fall.now) == (HealthStatus.SERVING, None)
            assert isinstance(fall.error, WorkerUnreachable)
            worker.restart(instance_id="second")
            await changes.until(lambda: bool(changes.of(InstanceChanged, "a")), "the new instance")
            assert changes.of(InstanceChanged, "a")[0].now == "second"
            assert len(changes.of(HealthChanged, "b")) == 1


async def test_who_joins_moves_and_leaves(colour: str) -> None:
    """The daemon's set of workers is the fleet's."""
    board = Board()
    board.publish(view(key="a", facts=FACTS))
    async with serving(board) as ask, ToldFleet(colour, ask.url).watching() as changes:
        await changes.until(lambda: bool(changes.of(HealthChanged, "a")))
        board.publish(view(key="b", facts=FACTS))
        await changes.until(lambda: bool(changes.of(WorkerAdded, "b")))
        board.publish(view(key="b", facts=FACTS, target="elsewhere:8001"))
        await changes.until(lambda: bool(changes.of(WorkerChanged, "b")))
        assert changes.of(WorkerChanged, "b")[0].target.target == "elsewhere:8001"
        board.remove(["b"])
        await changes.until(lambda: bool(changes.of(WorkerRemoved, "b")))


class Replaying:
    """A daemon that says what it is told to say, request by request."""

    def __init__(self, *answers: tuple[int, Any] | None) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []
        self.all_said = asyncio.Event()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.asked.append(head.split()[1])
        said = self.answers.pop(0) if self.answers else None
        if not self.answers:
            self.all_said.set()
        if said is not None:
            body = said[1] if isinstance(said[1], bytes) else json.dumps(said[1]).encode()
            writer.write(f"HTTP/1.1 {said[0]} X\r\nContent-Type: application/json\r\n".encode())
            writer.write(f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
        writer.close()

    @asynccontextmanager
    async def __call__(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()


HEAD = {"schema": 1, "as_of": "2026-01-02T03:04:05.678Z", "revision": 7}
EMPTY = {**HEAD, "complete": True, "workers": []}


async def test_a_gap_and_an_outage_are_ridden_out(colour: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown revision means reading everything again; a daemon that is away is no change of any worker."""
    monkeypatch.setattr(daemon_module, "PAUSE_S", 0.01)
    board = Board()
    board.publish(view(key="a", facts=FACTS))
    async with serving(board) as ask:
        whole = (await ask("/api/v1/workers")).json
    fallen = {**whole["workers"][0], "health": None}
    daemon = Replaying(
        (200, whole),
        (410, {"error": "read everything again"}),
        None,
        (503, {"error": "busy"}),
        (200, {**whole, "revision": 9, "workers": [fallen]}),
        (200, {**HEAD, "revision": 10, "full": False, "changed": whole["workers"], "removed": []}),
    )
    async with daemon() as url, ToldFleet(colour, url).watching() as changes:
        await changes.until(lambda: len(changes.of(HealthChanged)) == 3)
        assert [type(change) for change in changes.seen] == [WorkerAdded] + [HealthChanged] * 3
        assert [change.now for change in changes.of(HealthChanged)] == [
            HealthStatus.SERVING, None, HealthStatus.SERVING,
        ]  # fmt: skip
    revision = whole["revision"]
    assert daemon.asked[1] == f"/api/v1/watch?since={revision}&wait=20"
    assert daemon.asked[5] == "/api/v1/watch?since=9&wait=20"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((200, b"<html>"), "not the daemon's format"),
        ((200, {"workers": []}), "no answer of a daemon"),
        ((200, {**EMPTY, "schema": 2}), "update vllm-cp"),
        ((200, {**EMPTY, "workers": [{}]}), "not the daemon's format: KeyError: 'target'"),
        ((200, {**EMPTY, "as_of": 5}), "not the daemon's format"),
        ((404, b"Not Found"), "is this the base URL of a vllm-cp-exporter?"),
    ],
)
async def test_somebody_else_answers(colour: str, answer: tuple[int, Any], said: str) -> None:
    """What is no daemon, or another version of it, is an error that says so; start() finds it out at once."""
    async with Replaying(answer)() as url:
        fleet = ToldFleet(colour, url)
        with pytest.raises(ControlError) as caught:
            await fleet.__aenter__()
        await fleet.close()
    assert said in str(caught.value)


async def test_nobody_answers(colour: str) -> None:
    """snapshot() raises; a watch that never had an answer does too."""
    async with serving() as ask:
        url = ask.url
    told = ToldFleet(colour, url)
    with pytest.raises(WorkerUnreachable):
        await told.snapshot()
    first = asyncio.to_thread(next, iter(told.fleet.watch())) if colour == "sync" else anext(told.fleet.watch())
    with pytest.raises((WorkerUnreachable, OutOfTime)):
        await first
    await told.close()
    with pytest.raises(ClientClosed):
        await told.snapshot()


async def test_new_fields_do_no_harm(colour: str) -> None:
    """A daemon that is newer says more: what is not known here is passed over."""
    board = Board()
    board.publish(view(key="a", facts=FACTS))
    async with serving(board) as ask:
        whole = (await ask("/api/v1/workers")).json
    worker = whole["workers"][0]
    worker |= {"new": 1, "server": worker["server"] | {"new": 1}, "model": worker["model"] | {"new": []}}
    async with Replaying((200, {**whole, "new": {}}), (200, whole))() as url, ToldFleet(colour, url) as fleet:
        (seen,) = await fleet.snapshot()
    assert seen.server == FACTS.server


async def test_behind_tls_and_a_password(colour: str, tmp_path: Path) -> None:
    """The daemon's door opens for a password file over TLS; a password over plaintext has to be asked for."""
    certs = make_certs(tmp_path / "certs")
    password, web = tmp_path / "password", tmp_path / "web.yml"
    hashed = bcrypt.hashpw(b"secret:x", bcrypt.gensalt(4)).decode()
    password.write_text("me:secret:x\n")
    web.write_text(
        f"tls_server_config: {{cert_file: {certs.server_cert}, key_file: {certs.server_key}}}\n"
        f"basic_auth_users: {{me: {hashed}}}\n"
    )
    with pytest.raises(ConfigError, match="a password for http://h would cross the network in plaintext"):
        HttpConnection(url="http://h", basic_auth_file=password)
    async with serving(door=Door(web)) as ask:
        url = f"https://127.0.0.1:{ask.port}"
        connection = HttpConnection(url=url, tls=Tls(ca_file=certs.ca), basic_auth_file=password)
        async with ToldFleet(colour, connection) as fleet:
            assert len(await fleet.snapshot()) == 0
