"""Recovering a group of ranks over HTTP, in both colours."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.faults.colours import Both, recover
from tests.faults.conftest import Connect
from vllm_cp.models.probe import EngineState
from vllm_cp.models.recovery import RankRecovery
from vllm_cp.models.recovery import RecoveryOutcome as Outcome
from vllm_cp.testing._http import FakeGroup, FakeHttp

SOON = 0.02
APPLY = "/fault_tolerance/apply"


@pytest.fixture
def group() -> Iterator[list[FakeHttp]]:
    """Four ranks that act together, each behind a server of its own."""
    with ExitStack() as stack:
        together = FakeGroup()
        yield [stack.enter_context(FakeHttp(engines=[rank], group=together)) for rank in range(4)]


def told(server: FakeHttp) -> int:
    """How often it was given an instruction."""
    return sum(call.path.endswith(APPLY) for call in server.calls)


def outcomes(report: tuple[RankRecovery, ...]) -> list[Outcome]:
    return [rank.outcome for rank in report]


async def test_all_ranks_fall_ill_and_come_back(group: list[FakeHttp], connect: Connect) -> None:
    """Every rank's server is told once, all recover together, and each is reported with its own id."""
    for server in group:
        server.fall_ill()
    report = await recover([connect(server.url) for server in group], deadline_s=10, poll_s=SOON)
    assert outcomes(report) == [Outcome.RECOVERED] * 4
    assert [rank.engine for rank in report] == [0, 1, 2, 3]
    assert [rank.target for rank in report] == [server.url for server in group]
    assert len({rank.request_id for rank in report}) == 4
    assert all(rank.seconds is not None and 0 <= rank.seconds < 5 for rank in report)
    assert [told(server) for server in group] == [1, 1, 1, 1]


async def test_one_slow_server_does_not_keep_the_others_from_being_told(
    group: list[FakeHttp], connect: Connect
) -> None:
    """All are told before any is waited for: a server that answers late is told late, and the others long before."""
    for server in group:
        server.fall_ill()
    group[0].delay("/fault_tolerance/status", 0.5, times=1)
    began = time.monotonic()
    report = await recover([connect(server.url) for server in group], deadline_s=10, poll_s=SOON)
    assert outcomes(report) == [Outcome.RECOVERED] * 4
    tells = [next(call.at_s for call in server.calls if call.path == APPLY) - began for server in group]
    assert tells[0] >= 0.5 > max(tells[1:])


async def test_healthy_ranks_are_left_alone(connect: Connect) -> None:
    """A rank that is well is not told anything."""
    with FakeHttp(engines=[0]) as well, FakeHttp(engines=[1]) as ill:
        ill.fall_ill()
        report = await recover([connect(well.url), connect(ill.url)], deadline_s=10, poll_s=SOON)
        assert outcomes(report) == [Outcome.NOT_NEEDED, Outcome.RECOVERED]
        assert (told(well), told(ill)) == (0, 1)


async def test_nothing_to_do_is_done_at_once(group: list[FakeHttp], connect: Connect) -> None:
    """A group that is well costs one look per rank, whatever the interval."""
    report = await recover([connect(server.url) for server in group], deadline_s=60, poll_s=50)
    assert outcomes(report) == [Outcome.NOT_NEEDED] * 4
    assert [len(server.calls) for server in group] == [1, 1, 1, 1]


async def test_no_ranks_no_report(colour: str) -> None:
    """An empty group is recovered already."""
    assert await recover([], deadline_s=1, poll_s=1) == ()


async def test_a_peer_that_falls_ill_later_is_told_then(group: list[FakeHttp], connect: Connect) -> None:
    """Peers notice a fault only when their communication times out; the collective needs them all the same."""
    for server in group[:3]:
        server.fall_ill()
    ranks = [connect(server.url) for server in group]
    running = asyncio.ensure_future(recover(ranks, deadline_s=10, poll_s=SOON))
    await asyncio.to_thread(group[3].wait_for_call, "/fault_tolerance/status", count=3)
    assert not running.done()
    group[3].fall_ill()
    assert outcomes(await running) == [Outcome.RECOVERED] * 4


async def test_dead_is_dead(connect: Connect) -> None:
    """A dead rank is not told; with it the collective can't complete, and the others run out of time."""
    together = FakeGroup()
    with FakeHttp(engines=[0], group=together) as ill, FakeHttp(engines=[1], group=together) as dead:
        ill.fall_ill()
        dead.die(info="out of memory")
        report = await recover([connect(ill.url), connect(dead.url)], deadline_s=0.4, poll_s=SOON)
        assert outcomes(report) == [Outcome.OUT_OF_TIME, Outcome.DEAD]
        assert report[1].error == "out of memory"
        assert told(dead) == 0


async def test_engines_that_give_up_while_we_wait_are_dead(connect: Connect) -> None:
    """The recovery ends when the engines' own time does, not at our deadline."""
    together = FakeGroup()
    hasty = FakeHttp(engines=[0], group=together, engine_recovery_timeout_s=0.2)
    with hasty as ill, FakeHttp(engines=[1], group=together) as dead:
        ill.fall_ill()
        dead.die()
        report = await recover([connect(ill.url), connect(dead.url)], deadline_s=30, poll_s=SOON)
    assert outcomes(report) == [Outcome.DEAD, Outcome.DEAD]


async def test_a_refusal_in_the_status_is_reported_in_its_words(server: FakeHttp, connect: Connect) -> None:
    """What the engine says of our instruction, under our id, is the end of it."""
    server.fall_ill()
    server.fail(APPLY, 202, {"message": "ok", "request_id": "r-1"})
    engine = {"id": 0, "status": "unhealthy", "last_ft_request_id": "r-1", "ft_error": "no quorum"}
    server.fail("/fault_tolerance/status", 200, {"schema_version": 1, "total_engines": 1, "engines": [engine]})
    (rank,) = await recover([connect(server.url)], deadline_s=10, poll_s=SOON)
    assert (rank.outcome, rank.error, rank.request_id) == (Outcome.REFUSED, "no quorum", "r-1")
    assert rank.state is EngineState.UNHEALTHY


async def test_an_instruction_the_server_does_not_know_is_refused(server: FakeHttp, connect: Connect) -> None:
    """A 400 is the server's last word; other instructions than retry are passed through."""
    server.fall_ill()
    (rank,) = await recover(
        [connect(server.url)], deadline_s=10, poll_s=SOON, instruction="scale_down", params={"removed_dp_ranks": [1]}
    )
    assert rank.outcome is Outcome.REFUSED
    assert rank.error is not None
    assert "scale_down" in rank.error
    assert b'"removed_dp_ranks": [1]' in next(call.body for call in server.calls if call.path == APPLY)


async def test_ranks_that_cannot_be_asked(server: FakeHttp, connect: Connect) -> None:
    """Nobody there, no fault tolerance, no credentials: each is its own outcome, and the rest recovers."""
    server.fall_ill()
    with FakeHttp(kind="rust") as rust, FakeHttp(prefix="/v1", api_key="k") as guarded, FakeHttp() as gone:
        gone.stop()
        ranks = [connect(one.url) for one in (server, rust, guarded, gone)]
        report = await recover(ranks, deadline_s=10, poll_s=SOON)
    assert outcomes(report) == [Outcome.RECOVERED, Outcome.NOT_SUPPORTED, Outcome.FAILED, Outcome.UNREACHABLE]
    assert all(rank.error for rank in report[1:])


async def test_a_server_named_twice_is_told_once(server: FakeHttp, connect: Connect) -> None:
    """Two clients of one server are one rank."""
    server.fall_ill()
    ranks = [connect(server.url), connect(f"{server.url}/")]
    assert outcomes(await recover(ranks, deadline_s=10, poll_s=SOON)) == [Outcome.RECOVERED]
    assert told(server) == 1


async def test_a_silent_rank_does_not_outlast_the_deadline(server: FakeHttp, connect: Connect, colour: str) -> None:
    """A server that answers nothing costs the time given and no more."""
    server.delay("*", 3600)
    began = time.monotonic()
    report = await recover([connect(server.url)], deadline_s=0.3, poll_s=SOON)
    assert outcomes(report) == [Outcome.OUT_OF_TIME]
    assert time.monotonic() - began < 3


@pytest.mark.parametrize("settings", [{"deadline_s": 0}, {"poll_s": -1}, {"deadline_s": float("inf")}])
async def test_times_are_positive_numbers(server: FakeHttp, connect: Connect, settings: dict[str, float]) -> None:
    """A recovery without an end is refused before anybody is asked."""
    rank: Both = connect(server.url)
    with pytest.raises(ValueError, match="positive number of seconds"):
        await recover([rank], **settings)
    assert server.calls == []


async def test_params_that_json_cannot_say_are_found_first(server: FakeHttp, connect: Connect) -> None:
    """Not when half of the group was told."""
    server.fall_ill()
    with pytest.raises(TypeError, match="JSON"):
        await recover([connect(server.url)], params={"ranks": {1, 2}})
    assert server.calls == []
