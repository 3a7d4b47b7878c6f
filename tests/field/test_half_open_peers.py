"""A peer that vanishes without closing: a host that died, a network that was cut, a process that was frozen."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator

import pytest

from tests.cli.process import ended, run, start
from tests.colours import both
from tests.exporter.process import Exporter
from tests.field.relay import Relay
from tests.field.watching import counted, ready, watching, worker
from vllm_cp import AsyncControlClient, Connection, ControlClient, HealthStatus, OutOfTime
from vllm_cp.episodes import Rules
from vllm_cp.models.ladder import Reason, Rung
from vllm_cp.readiness import AsyncLadder, Ladder
from vllm_cp.testing import FakeWorker

#: For a machine that has much else to do.
BUSY_S = 1.0


@pytest.fixture
def relay(fake: FakeWorker) -> Iterator[Relay]:
    """The worker behind a relay that can be frozen."""
    with Relay(fake.target) as running:
        yield running


# -- calls, watches, the ladder ---------------------------------------------------------------


async def test_a_call_ends_at_its_deadline(relay: Relay, colour: str) -> None:
    """On a connection that stood, a call into the void is OutOfTime at its deadline; after the thaw all goes on."""
    async with both(colour, relay.target) as client:
        await client.server_info()
        relay.freeze()
        for call in (client.server_info, client.is_paused, lambda **given: client.abort(["a"], **given)):
            began = time.monotonic()
            with pytest.raises(OutOfTime):
                await call(timeout_s=0.3)
            assert 0.25 < time.monotonic() - began < 0.3 + BUSY_S
        relay.thaw()
        assert await client.check() is HealthStatus.SERVING


async def test_a_watch_ends_within_its_bound(relay: Relay, colour: str) -> None:
    """A quiet watch notices within four times its interval; the same client watches again after the thaw."""
    async with both(colour, relay.target) as client:
        watch = client.watch(check_every_s=0.2)
        assert await anext(watch) is HealthStatus.SERVING
        relay.freeze()
        began = time.monotonic()
        with pytest.raises(OutOfTime):
            await asyncio.wait_for(anext(watch), 10)
        assert time.monotonic() - began < 4 * 0.2 + BUSY_S
        relay.thaw()
        assert await asyncio.wait_for(anext(client.watch()), 10) is HealthStatus.SERVING


def test_the_ladder_falls(relay: Relay) -> None:
    """A look at a vanished worker says unreachable, and waiting for it ends at its deadline."""
    with ControlClient(Connection(target=relay.target, timeout_s=0.3)) as client, Ladder(client) as ladder:
        assert ladder.observe().admitting.holds
        relay.freeze()
        assert ladder.observe().reachable.holds is False
        assert ladder.state.reason is Reason.UNREACHABLE
        with pytest.raises(OutOfTime):
            ladder.wait_until(Rung.ADMITTING, 0.2)
        relay.thaw()
        assert ladder.wait_until(Rung.ADMITTING, 10, every_s=0.05).admitting.holds


async def test_the_ladder_falls_in_asyncio(relay: Relay) -> None:
    """The same in the other colour."""
    async with (
        AsyncControlClient(Connection(target=relay.target, timeout_s=0.3)) as client,
        AsyncLadder(client) as ladder,
    ):
        assert (await ladder.observe()).admitting.holds
        relay.freeze()
        assert (await ladder.observe()).reachable.holds is False
        with pytest.raises(OutOfTime):
            await ladder.wait_until(Rung.ADMITTING, 0.2)
        relay.thaw()
        assert (await ladder.wait_until(Rung.ADMITTING, 10, every_s=0.05)).admitting.holds


# -- the command line -------------------------------------------------------------------------


def test_the_command_line_ends_at_its_timeout(relay: Relay, fake: FakeWorker, mute: str) -> None:
    """Frozen on the way, accepting without a word, or gone: health --timeout ends in time with 3, and 0 afterwards."""
    relay.freeze()
    for target in (relay.target, mute):
        began = time.monotonic()
        got = run("health", "--timeout", "0.5", "--target", target)
        assert (got.code, got.out) == (3, "")
        assert got.err.startswith(f"vllm-cp: {target}: Health.Check: no answer in time (DEADLINE_EXCEEDED")
        assert time.monotonic() - began < 0.5 + 3 * BUSY_S  # a start of the interpreter is in it
    relay.thaw()
    assert run("health", "--target", relay.target).code == 0
    fake.stop()
    assert run("health", "--target", relay.target).code == 3


def test_watching_on_the_command_line(relay: Relay) -> None:
    """vllm-cp watch tells that the worker vanished, and that it is back; it never just stands there."""
    flags = ("--every", "0.2", "--kind", "ready", "--count", "3", "--target", relay.target)
    process = start("watch", "-o", "jsonl", *flags)
    assert process.stdout is not None
    try:
        told = [json.loads(process.stdout.readline())]
        relay.freeze()
        began = time.monotonic()
        told.append(json.loads(process.stdout.readline()))
        # Four times the interval, and the second in which a new connection may show that all is well.
        assert time.monotonic() - began < 4 * 0.2 + 1.0 + 3 * BUSY_S
        relay.thaw()
        told.append(json.loads(process.stdout.readline()))
        assert [each["now"] for each in told] == ["ready", "unreachable", "ready"]
        assert ended(process).code == 0
    finally:
        process.kill()
        process.communicate()


# -- the daemon -------------------------------------------------------------------------------


async def test_the_daemon_counts_one_fault(relay: Relay) -> None:
    """The page says unreachable within answer_within and one interval, recovers after the thaw, counts one fault."""
    interval_s, within_s = 0.5, 1.5
    rules = Rules(answer_within_s=within_s, interval_s=interval_s, window_s=0.5)
    async with watching(worker("w", relay.target, rules), interval_s=interval_s) as daemon:
        await daemon.until(lambda page: page["worker_ready", "w"] == 1 and page["worker_kv_blocks", "w"] is not None)
        relay.freeze()
        began = time.monotonic()
        page = await daemon.until(lambda page: page["worker_rung", "w", "reachable"] == 0)
        assert time.monotonic() - began < within_s + interval_s + BUSY_S
        assert page["worker_not_ready", "w", "unreachable"] == 1
        assert page["worker_kv_blocks", "w"] is None
        await daemon.until(lambda page: counted(page, "w") == {"unreachable": 1})
        relay.thaw()
        page = await daemon.until(lambda page: counted(page, "w", "worker_fault_ends_total") == {"resumed": 1})
        assert page["worker_ready", "w"] == 1
        assert counted(page, "w") == {"unreachable": 1}
        assert page["worker_restarts_total", "w"] == 0


async def test_the_daemon_and_a_listener_that_never_speaks(mute: str, fake: FakeWorker) -> None:
    """What accepts and never speaks is unreachable, never was up and so has no fault; its neighbour is not touched."""
    rules = Rules(answer_within_s=0.5, interval_s=0.2, window_s=0.2)
    both_of_them = (worker("mute", mute, rules, timeout_s=0.3), worker("good", fake.target, rules))
    async with watching(*both_of_them, interval_s=0.2) as daemon:
        page = await daemon.until(lambda page: page["worker_not_ready", "mute", "unreachable"] == 1)
        assert page["worker_rung", "mute", "reachable"] == 0
        page = await daemon.until(ready("good"))
        assert counted(page, "mute") == counted(page, "good") == {}
        assert "the port accepts calls and answers none" in await daemon.get("/")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_daemon_literally(relay: Relay) -> None:
    """With the flags as they come: five seconds of quiet, a minute of ice, one fault."""
    with Exporter("--target", f"w={relay.target}") as exporter:
        exporter.eventually(lambda text: 'worker_ready{pool="default",worker="w"} 1.0' in text)
        time.sleep(5)
        relay.freeze()
        began = time.monotonic()
        gone = 'worker_rung{pool="default",rung="reachable",worker="w"} 0.0'
        exporter.eventually(lambda text: gone in text, timeout_s=30)
        assert time.monotonic() - began < 15 + 5 + BUSY_S
        time.sleep(60 - (time.monotonic() - began))
        relay.thaw()
        over = 'worker_fault_ends_total{kind="resumed",pool="default",worker="w"} 1.0'
        page = exporter.eventually(lambda text: over in text, timeout_s=60)
        faults = [line for line in page.splitlines() if line.startswith("vllm_cp_worker_faults_total{")]
        assert sum(float(line.rpartition(" ")[2]) for line in faults) == 1
        assert 'worker_ready{pool="default",worker="w"} 1.0' in page


@pytest.mark.slow
def test_a_frozen_host_literally(relay: Relay) -> None:
    """health --timeout 2 towards a frozen host ends after two seconds."""
    relay.freeze()
    began = time.monotonic()
    assert run("health", "--timeout", "2", "--target", relay.target).code == 3
    assert 2 <= time.monotonic() - began < 2 + 2 * BUSY_S
