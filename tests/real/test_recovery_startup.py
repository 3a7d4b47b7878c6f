"""The clocks of a start, of a genuine frontend that is started after somebody began to look."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.colours import COLOURS
from tests.real.conftest import require_binary
from tests.real.fetch import VERSIONS
from tests.real.stack import EngineFacts, Stack, StackFactory
from tests.recovery.ladders import ladder_to
from tests.recovery.pace import EXACT_S, PATIENCE_S, RETURN_S
from tests.recovery.watched import Watched
from vllm_cp import OutOfTime
from vllm_cp_exporter.config import Canary

#: Loading the model, seconds.
LOADING_S = 0.5
PHASES = ("to_socket", "to_serving", "to_warm", "to_first_response")


def _late(stack: StackFactory, version: str) -> Stack:
    """A stack that was up and is stopped, so that its ports are known and closed."""
    s = stack(version, facts=EngineFacts(ready_delay=LOADING_S))
    s.kill()
    s.wait_exit()
    return s


@pytest.mark.parametrize(("version", "colour"), [(VERSIONS[0], "async"), *((VERSIONS[-1], each) for each in COLOURS)])
async def test_measure_startup(stack: StackFactory, version: str, colour: str) -> None:
    """From a closed port to the first token: each clock is there, in order, and as the simulator has it."""
    require_binary(version)
    s = await asyncio.to_thread(_late, stack, version)
    async with ladder_to(colour, s.target) as ladder:
        begun = time.time()
        measuring = asyncio.create_task(ladder.measure_startup(PATIENCE_S, every_s=0.05))
        await asyncio.to_thread(s.restart)
        startup = await measuring
        phases = startup.phases()
        assert tuple(phases) == PHASES
        assert list(phases.values()) == sorted(phases.values())
        assert startup.began is not None
        # A port that refuses is dialled three times before that is believed, in three quarters of a second.
        assert 0 <= startup.began - begun < 0.75 + EXACT_S
        served = s.moment("start").wall + s.ready_after
        assert startup.socket is not None
        assert -EXACT_S < startup.socket - served < RETURN_S
        assert startup.warm is not None
        assert startup.warm - s.moment("start").wall > LOADING_S


async def test_measure_startup_out_of_time(stack: StackFactory) -> None:
    """Nothing comes up: out of time, with what was seen last."""
    s = await asyncio.to_thread(_late, stack, VERSIONS[-1])
    async with ladder_to("async", s.target) as ladder:
        with pytest.raises(OutOfTime, match=r"wait for warm.*efused"):
            await ladder.measure_startup(0.5, every_s=0.05)


async def test_the_clocks_of_a_watched_start(stack: StackFactory) -> None:
    """The daemon has the same clocks of an instance whose start it saw; a canary makes them complete."""
    s = await asyncio.to_thread(_late, stack, VERSIONS[-1])
    async with Watched(s.target, http=s.http_url, canary=Canary.ONCE) as w:
        await w.falls("unreachable")
        assert w.view.state.startup.phases() == {}
        await asyncio.to_thread(s.restart)
        await w.until(lambda view: len(view.state.startup.phases()) == len(PHASES))
        startup = w.view.state.startup
        served = s.moment("start").wall + s.ready_after
        assert startup.serving is not None
        assert -EXACT_S < startup.serving - served < RETURN_S
        assert list(startup.phases().values()) == sorted(startup.phases().values())
        assert not w.faults
