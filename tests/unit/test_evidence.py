"""What is kept of what was seen, until when, and in which words it is shown."""

from __future__ import annotations

import pytest

from tests.unit.story import NOT_SERVING, SERVING, UNSUPPORTED, YES, Story, engines, page
from vllm_cp.episodes import Rules
from vllm_cp.models.episode import Cause
from vllm_cp.models.health import HealthStatus
from vllm_cp.models.ladder import Reason, Rung
from vllm_cp.models.probe import EngineMetrics, EngineState


def test_a_new_instance_starts_without_its_predecessors_evidence() -> None:
    """Fault tolerance, tokens and canaries were the old instance's; that it has no round trips holds until it has."""
    story = Story().at(0, contact=True, health=SERVING, instance_id="one", round_trip=UNSUPPORTED)
    story.at(1, contact=True, metrics=page(5.0)).at(2, contact=True, metrics=page(6.0))
    story.at(3, contact=True, engines=engines(EngineState.DEAD), canary=True)
    assert story.state.reason is Reason.FT_DEAD
    story.at(4, contact=True, instance_id="two")
    seen = story.state.evidence
    assert (seen.engines, seen.tokens, seen.tokens_moved, seen.canary, seen.generated) == ((), (), None, None, None)
    assert (seen.round_trips_unsupported, story.ready) == (True, True)
    story.at(5, contact=True, asked=True, round_trip=YES, metrics=page(3.0))
    assert (story.ready, story.holds()["warm"]) == (True, True)


def test_after_a_break_everything_is_proved_again() -> None:
    """A connection that broke takes the server's word, its answers and its proofs with it."""
    story = Story().up(0, canary=True, metrics=page(1.0)).at(1, contact=True, metrics=page(2.0))
    story.at(2, contact=True, engines=engines(EngineState.UNHEALTHY)).at(3, contact=False)
    assert story.at(4, contact=True).holds() == {
        "reachable": True,
        "serving": None,
        "answering": None,
        "admitting": None,
        "warm": None,
    }
    story.at(5, contact=True, health=SERVING)
    assert (story.holds()["serving"], story.holds()["answering"]) == (True, None)
    assert story.up(6).ready


def test_after_a_break_no_engine_counts_as_moved() -> None:
    """With two engines, both must be seen to generate again before tokens prove anything."""
    story = Story().at(0, contact=True, health=SERVING, round_trip=UNSUPPORTED)
    for second, tokens in ((1, (1.0, 1.0)), (2, (2.0, 2.0))):
        story.at(second, contact=True, metrics=EngineMetrics(tokens_by_engine=tokens))
    assert story.holds()["answering"] is True
    story.at(3, contact=False).at(4, contact=True, health=SERVING)
    story.at(5, contact=True, metrics=EngineMetrics(tokens_by_engine=(3.0, 2.0)))
    assert story.holds()["answering"] is None
    story.at(6, contact=True, metrics=EngineMetrics(tokens_by_engine=(3.0, 3.0)))
    assert story.holds()["answering"] is True


def test_a_question_dies_with_its_connection() -> None:
    """What was asked before a break is not held against whoever answers after it."""
    story = Story().up(0).at(5, contact=True, asked=True).talks(19).at(19.5, contact=False)
    story.at(20, contact=True, health=SERVING).talks(40)
    assert story.state.reason is Reason.UNKNOWN
    assert story.state.open_fault is not None
    assert story.state.open_fault.episode.cause is Cause.UNREACHABLE


def test_a_stream_that_ended_before_a_break_makes_no_drain_after_it() -> None:
    """A crash whose successor is not serving yet is a crash, although the last stream ended in order."""
    story = Story().up(0).at(5, contact=True, health=NOT_SERVING).at(5.1, stream_ended=True).at(6, contact=False)
    story.at(7, contact=True, health=NOT_SERVING).talks(20)
    assert (story.faults, story.state.reason) == ({"engine_reported": 1}, Reason.NOT_SERVING)


def test_a_token_counter_of_a_new_instance_is_not_compared_with_the_old_one() -> None:
    """A successor that has generated more than its predecessor was not seen to generate just now."""
    story = Story().up(0, "one", metrics=page(5.0)).at(1, contact=True, instance_id="two", metrics=page(900.0))
    assert story.state.evidence.tokens_moved is None
    assert story.holds()["answering"] is None


def test_a_drain_ends_with_the_instance_that_drained() -> None:
    """A successor that does not serve yet is not serving; it does not drain."""
    story = Story().up(0, "one").at(5, contact=True, health=NOT_SERVING).at(5.1, stream_ended=True).at(9)
    assert story.state.reason is Reason.DRAINING
    story.at(10, contact=True, instance_id="two").at(20, contact=True)
    assert story.state.reason is Reason.NOT_SERVING


def test_a_worker_that_serves_again_no_longer_drains() -> None:
    """Serving takes back a drain, and the stream that ended before it; the next death is one."""
    story = Story().up(0).at(5, contact=True, health=NOT_SERVING).at(5.1, stream_ended=True).at(9)
    story.up(10)
    assert story.ready
    story.lives(20).at(21, contact=True, health=NOT_SERVING).talks(40)
    assert (story.state.reason, story.faults) == (Reason.NOT_SERVING, {"engine_reported": 1})


def test_a_stream_that_ends_while_serving_is_no_drain() -> None:
    """Servers and proxies may end a stream; only one that ended after not serving says anything."""
    story = Story().up(0).at(1, stream_ended=True).lives(30)
    assert story.ready


def test_a_worker_upgraded_in_place_learns_round_trips() -> None:
    """A server without a name that answers a round trip at last has them, and is judged by them."""
    story = Story().at(0, contact=True, health=SERVING, round_trip=UNSUPPORTED).up(5, None)
    story.at(10, contact=True, asked=True).talks(26)
    assert story.state.reason is Reason.ENGINE_SILENT


def test_a_page_without_a_token_counter_says_nothing_of_warm() -> None:
    """Where the page does not count tokens, warm stays unprovable instead of being refuted for ever."""
    story = Story(Rules(ready_rung=Rung.WARM)).up(0, metrics=page(None))
    assert (story.holds()["warm"], story.state.rungs.warm.provable, story.ready) == (None, False, True)


def test_warm_is_asked_for_last() -> None:
    """A worker that must be warm and has not even answered is starting, not cold."""
    story = Story(Rules(ready_rung=Rung.WARM)).at(0, canaries=True).at(1, contact=True)
    assert story.state.reason is Reason.STARTING


@pytest.mark.parametrize(
    ("seen", "rung", "why"),
    [
        ({}, Rung.REACHABLE, "not asked yet"),
        ({"contact": False}, Rung.REACHABLE, "the connection was refused or broke"),
        ({"contact": False, "detail": "refused"}, Rung.WARM, "refused"),
        ({"contact": True}, Rung.SERVING, "health said nothing yet"),
        ({"contact": True, "health": HealthStatus.UNKNOWN}, Rung.SERVING, "health says UNKNOWN"),
        ({"contact": True, "health": NOT_SERVING}, Rung.ADMITTING, "health says NOT_SERVING"),
        ({"contact": True, "health": SERVING}, Rung.ANSWERING, "not asked yet"),
        (
            {"contact": True, "health": SERVING, "round_trip": UNSUPPORTED},
            Rung.ANSWERING,
            "this worker's version has no round trip; a canary or its /metrics could prove it",
        ),
        (
            {"contact": True, "health": SERVING, "round_trip": YES},
            Rung.WARM,
            "nothing here sees generations: give an HTTP URL or allow a canary",
        ),
        (
            {"contact": True, "health": SERVING, "round_trip": YES, "canaries": True},
            Rung.WARM,
            "no generation was seen to finish on this instance",
        ),
    ],
)
def test_a_rung_says_why_it_does_not_hold(seen: dict[str, object], rung: Rung, why: str) -> None:
    """Each rung that is not proved says why in words, those above the first with its reason."""
    assert Story().at(1, **seen).state.rungs[rung].why == why


def test_a_stale_proof_is_called_one() -> None:
    """When nobody asked for longer than a proof lasts, that is what the rung says."""
    story = Story().up(0).talks(30)
    assert (story.holds()["answering"], story.state.rungs.answering.why) == (None, "the proof is stale")
    assert story.state.reason is Reason.UNKNOWN
