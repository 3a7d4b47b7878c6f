"""One worker under the daemon's watcher: what the transport does must not be taken for what the worker does."""

from __future__ import annotations

import asyncio
import logging
import socket
import time

import pytest

from tests.recovery.pace import EXACT_S, FAST, PATIENCE_S, Pace
from tests.recovery.watched import Watched
from vllm_cp import Connection
from vllm_cp.episodes import Rules
from vllm_cp.testing import FakeWorker
from vllm_cp_exporter.dials import Dials


async def test_b23_keepalive_pings_are_no_fault(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A server with gRPC's own defaults sends away a client that pings every second: one warning that names the
    setting, a new connection, and no fault of a worker that served all the time."""
    monkeypatch.setattr("vllm_cp.testing._ports.server_options", lambda: [("grpc.so_reuseport", 0)])
    monkeypatch.setattr("vllm_cp.testing._server.server_options", lambda: [("grpc.so_reuseport", 0)])
    caplog.set_level(logging.WARNING, logger="vllm_cp_exporter")
    with FakeWorker() as worker:
        # Answers on the way reset the server's patience, so nothing else may be said.
        quiet = Pace("quiet", Rules(answer_within_s=20.0, interval_s=10.0, window_s=1.0), outage_s=0.0)
        connection = Connection(target=worker.target, keepalive_s=1.0)
        async with Watched(connection, quiet) as w:
            await w.ready_and_idle()
            deadline = time.monotonic() + 2 * PATIENCE_S
            while len([call for call in worker.calls if call.method == "Health.Watch"]) < 2:
                assert time.monotonic() < deadline, "the server never sent it away"
                await asyncio.sleep(0.05)
            await w.stays(lambda view: view.state.ready and view.state.fault is None, quiet.rules.window_s)
            assert (w.faults, w.ends) == ({}, {})
    (warning,) = [record for record in caplog.records if record.name.startswith("vllm_cp")]
    assert warning.getMessage() == "misconfigured"
    assert "keepalive_s" in warning.__dict__["fields"]["error"]


async def test_one_question_at_a_time() -> None:
    """A frozen engine is asked once and no more, however long it takes, and asked again when it has answered."""
    with FakeWorker() as worker:
        async with Watched(worker.target) as w:
            await w.ready_and_idle()
            worker.hang()
            await w.falls("engine_silent")
            asked = [call for call in worker.calls if call.method == "Control.IsPaused"]
            assert [call.code for call in asked].count(None) == 1
            await w.stays(lambda view: not view.state.ready, 5 * FAST.rules.interval_s)
            assert len([call for call in worker.calls if call.method == "Control.IsPaused"]) == len(asked)
            worker.unhang()
            await w.ready()
            await w.next_round_trip()


async def test_a_black_hole_delays_nobody() -> None:
    """Ports that accept and never answer cost the others nothing: their rows are there as soon as ever."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as hole, FakeWorker() as worker:
        target = f"127.0.0.1:{hole.getsockname()[1]}"
        dials = Dials()
        holes = [Watched(Connection(target=target, timeout_s=1.0), dials=dials) for _ in range(20)]
        for black in holes:
            await black.__aenter__()
        try:
            begun = time.monotonic()
            async with Watched(worker.target, dials=dials) as w:
                ready = await w.ready()
                assert ready.monotonic - begun < 1.0 + EXACT_S
                worker.health("NOT_SERVING")
                said = time.monotonic()
                fell = await w.falls("not_serving")
                assert fell.monotonic - said < EXACT_S
            for black in holes:
                await black.falls("unreachable", since=0.0)
                assert not black.faults
        finally:
            for black in holes:
                await black.__aexit__(None, None, None)


async def test_a_crash_right_after_a_start_is_seen_at_once() -> None:
    """A worker that dies a moment after it came up is down at once, and not only when the next look is due."""
    with FakeWorker() as worker:
        async with Watched(worker.target) as w:
            await w.ready()
            killed = time.monotonic()
            await asyncio.to_thread(worker.stop)
            fell = await w.falls("unreachable")
            assert fell.monotonic - killed < EXACT_S


async def test_a_worker_of_another_version_takes_the_place() -> None:
    """Where 0.27 is replaced by a version that has round trips, they are asked for from then on; and the reverse."""
    with FakeWorker(version="0.27.0") as old:
        port = int(old.target.rpartition(":")[2])
        async with Watched(old.target) as w:
            await w.ready_and_idle()
            await w.until(lambda view: view.state.evidence.round_trips_unsupported)
            await asyncio.to_thread(old.stop)
            await w.falls("unreachable")
            with FakeWorker(version="0.33.0", port=port) as new:
                await w.until(lambda view: view.state.restarts == 1 and view.state.rungs.admitting.holds)
                await asyncio.to_thread(new.stop)
                await w.falls("unreachable")
            await asyncio.to_thread(old.restart)
            await w.until(lambda view: view.state.restarts == 2 and view.state.ready)
            await w.stays(lambda view: view.state.ready, 3 * FAST.rules.interval_s)
            assert w.rungs() == {"reachable": True, "serving": True}
