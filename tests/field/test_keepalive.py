"""Keepalive pings and servers that send away those who ping often."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.colours import both
from tests.field.plain_server import plain_server
from tests.field.watching import counted, ready, watching, worker
from vllm_cp import Connection, HealthStatus, WorkerUnreachable
from vllm_cp.episodes import Rules
from vllm_cp.testing import FakeWorker

#: A server that forgives no ping without data within an hour: one too many, and the client is out.
STRICT = {"http2__max_ping_strikes": 1, "http2__min_ping_interval_without_data_ms": 3_600_000}
#: Questions too rare to count as traffic between two pings.
RARELY_S = 8.0


async def test_the_defaults_never_ping(colour: str) -> None:
    """An idle watch and an idle channel with settings as they come outlive the strictest server; no ping is sent."""
    with plain_server(**STRICT) as server:
        async with both(colour, server.target) as client, both(colour, server.target) as idle:
            await idle.server_info()
            watch = client.watch(check_every_s=0.05)
            assert await anext(watch) is HealthStatus.SERVING
            waiting = asyncio.ensure_future(anext(watch))
            done, _ = await asyncio.wait([waiting], timeout=1.5)  # thirty Checks, and thirty chances to be sent away
            assert not done
            server.says(False)
            assert await asyncio.wait_for(waiting, 5) is HealthStatus.NOT_SERVING
            await idle.server_info()


async def test_forced_pings_are_named(colour: str) -> None:
    """A client that was told to ping too often hears which setting it is, and its next watch works."""
    with plain_server(**STRICT) as server:
        async with both(colour, Connection(target=server.target, keepalive_s=1.0)) as client:
            watch = client.watch(check_every_s=60)
            assert await anext(watch) is HealthStatus.SERVING
            with pytest.raises(WorkerUnreachable) as sent_away:
                await asyncio.wait_for(anext(watch), 15)
            assert "raise keepalive_s, or leave it out" in str(sent_away.value)
            await client.check()  # asked again where the connection that ends takes it along
            assert await asyncio.wait_for(anext(client.watch()), 5) is HealthStatus.SERVING


async def _forced(keepalive_s: float, quiet_s: float, caplog: pytest.LogCaptureFixture, **options: int) -> None:
    """A daemon that pings too often, until the server has said goodbye, and for so long afterwards."""
    with plain_server(**options) as server:
        rules = Rules(interval_s=RARELY_S, window_s=0.2)
        pinging = worker("w", server.target, rules, keepalive_s=keepalive_s)
        async with watching(pinging, interval_s=RARELY_S) as daemon:
            await daemon.until(ready("w"))
            since = daemon.state("w").rungs.reachable.since

            def broken() -> int:
                return sum("Too many pings" in str(record.__dict__) for record in caplog.records)

            caplog.set_level("DEBUG", "vllm_cp_exporter.watch")
            await daemon.eventually(lambda: broken() >= 2, 30)  # the end of the stream, and the warning
            await asyncio.sleep(quiet_s)  # gRPC pings less often from now on
            page = await daemon.until(ready("w"))
            opened = [record.fields["detail"] for record in caplog.records if record.message == "fault_opened"]
            assert (counted(page, "w"), opened) == ({}, [])
            assert daemon.state("w").fault is None
            assert daemon.state("w").rungs.reachable.since == since, "it was reachable all along"
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert [record.message for record in warnings] == ["misconfigured"]
    assert "raise keepalive_s" in warnings[0].fields["error"]  # type: ignore[attr-defined]
    assert not [record for record in caplog.records if record.message in ("fault_opened", "fault_counted")]


async def test_the_daemon_counts_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    """A worker that sends the daemon away for pinging was serving all along: one warning, a new stream, no fault."""
    await _forced(1.0, 0, caplog, **STRICT)


@pytest.mark.slow
async def test_the_daemon_counts_no_fault_literally(caplog: pytest.LogCaptureFixture) -> None:
    """The same with a ping every two seconds against a server with gRPC's own rules, and half a minute more."""
    await _forced(2.0, 30, caplog)


async def test_a_short_stall_ends_nothing(fake: FakeWorker, colour: str) -> None:
    """A server that stands still for twice the interval keeps its watches: the same stream tells what comes next."""
    async with both(colour, fake.target) as client:
        watch = client.watch(check_every_s=0.4)
        assert await anext(watch) is HealthStatus.SERVING
        fake.freeze()
        waiting = asyncio.ensure_future(anext(watch))
        done, _ = await asyncio.wait([waiting], timeout=0.8)
        assert not done
        fake.thaw()
        fake.health("NOT_SERVING")
        assert await asyncio.wait_for(waiting, 5) is HealthStatus.NOT_SERVING
    assert sum(call.method == "Health.Watch" for call in fake.calls) == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_eleven_idle_minutes(colour: str) -> None:
    """With settings as they come, against gRPC's own rules: an idle watch and an idle channel for eleven minutes."""
    with plain_server() as server:
        async with both(colour, server.target) as client, both(colour, server.target) as idle:
            await idle.server_info()
            watch = client.watch()
            assert await anext(watch) is HealthStatus.SERVING
            waiting = asyncio.ensure_future(anext(watch))
            done, _ = await asyncio.wait([waiting], timeout=660)
            assert not done
            server.says(False)
            assert await asyncio.wait_for(waiting, 5) is HealthStatus.NOT_SERVING
            await idle.server_info()


@pytest.mark.slow
async def test_a_stall_of_fifteen_seconds(fake: FakeWorker, colour: str) -> None:
    """With the interval as it comes, a server that stands still for fifteen seconds keeps its watches."""
    async with both(colour, fake.target) as client:
        watch = client.watch()
        assert await anext(watch) is HealthStatus.SERVING
        began = time.monotonic()
        fake.freeze()
        waiting = asyncio.ensure_future(anext(watch))
        done, _ = await asyncio.wait([waiting], timeout=15)
        assert not done
        assert time.monotonic() - began >= 14.9
        fake.thaw()
        fake.health("NOT_SERVING")
        assert await asyncio.wait_for(waiting, 5) is HealthStatus.NOT_SERVING
