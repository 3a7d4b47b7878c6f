"""The channels behind ``/probe``."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.exporter.asking import until
from vllm_cp import Connection
from vllm_cp.models.ladder import Rung
from vllm_cp.testing import FakeWorker
from vllm_cp_exporter.look import Busy, Lookers


async def test_channels_are_kept_for_a_while() -> None:
    """A second probe uses the first one's connection; an idle one is closed; there are never more than so many."""
    lookers = Lookers(lambda _: None, at_most=2, idle_s=0.2, sweep_s=0.02)

    async def look(fake: FakeWorker) -> None:
        await lookers.look(Connection.parse(fake.target), Rung.SERVING, time.monotonic() + 5)

    with FakeWorker() as one, FakeWorker() as two, FakeWorker() as three:
        for _ in range(2):
            await look(one)
        assert len(lookers) == 1
        for fake in (two, three):
            await look(fake)
        assert len(lookers) == 2

        async def empty() -> bool:
            return len(lookers) == 0

        await until(empty)
    await lookers.close()


async def test_busy_channels_are_not_taken_away() -> None:
    """When all are in use the next probe is refused, and those under way end well."""
    lookers = Lookers(lambda _: None, at_most=1)
    with FakeWorker() as one, FakeWorker() as two:
        one.delay("Check", 0.5)
        first = asyncio.create_task(lookers.look(Connection.parse(one.target), Rung.SERVING, time.monotonic() + 5))
        await asyncio.to_thread(one.wait_for_call, "Check")
        with pytest.raises(Busy):
            await lookers.look(Connection.parse(two.target), Rung.SERVING, time.monotonic() + 5)
        assert (await first).observer.state.rungs.serving.holds
    await lookers.close()
