"""Faults: what opens one, what it is called, how it ends, and that it is counted once."""

from __future__ import annotations

import pytest

from tests.unit.story import (
    DISAGREE,
    ERROR,
    LOST,
    NOT_SERVING,
    PAUSED,
    SERVICE_UNKNOWN,
    SERVING,
    UNSUPPORTED,
    WALL,
    YES,
    Story,
    engines,
    page,
)
from vllm_cp.episodes import TransitionKind
from vllm_cp.models.episode import Cause, EndKind
from vllm_cp.models.ladder import Reason
from vllm_cp.models.probe import EngineState

FAULT_KINDS = (
    TransitionKind.FAULT_OPENED,
    TransitionKind.FAULT_REOPENED,
    TransitionKind.FAULT_COUNTED,
    TransitionKind.FAULT_CLOSED,
    TransitionKind.FAULT_ENDED,
)


def test_script_a_one_outage_is_one_fault() -> None:
    """Not serving, a broken stream, refused connections and a new instance are one fault and one recovery of 20 s."""
    story = Story().up(0).lives(10)
    story.at(10.5, contact=True, health=NOT_SERVING)
    assert (story.ready, story.state.open_fault is not None) == (False, True)
    story.at(10.55, stream_ended=True).down(30.5)
    story.at(30.6, contact=True, health=SERVING, instance_id="two").at(30.7, contact=True, asked=True, round_trip=YES)
    assert story.ready
    story.lives(60)
    assert (story.faults, story.ends) == ({"engine_reported": 1}, {"replaced": 1})
    assert story.kinds(*FAULT_KINDS) == [
        TransitionKind.FAULT_OPENED,
        TransitionKind.FAULT_COUNTED,
        TransitionKind.FAULT_CLOSED,
        TransitionKind.FAULT_ENDED,
    ]
    (episode,) = story.ended
    assert (episode.cause, episode.kind, episode.instance_id) == (Cause.ENGINE_REPORTED, EndKind.REPLACED, "one")
    assert episode.duration_s == pytest.approx(20.2)
    assert episode.end is not None
    assert (episode.start - WALL, episode.end - WALL) == (pytest.approx(10.5), pytest.approx(30.7))
    assert story.state.last_recovery_s == episode.duration_s
    assert story.state.restarts == 1


def test_script_b_a_flapping_worker_has_one_fault() -> None:
    """Ten times 100 ms of not serving within the window of each other are one fault that goes on, not ten."""
    story = Story().up(0).lives(10)
    for number in range(10):
        start = 10 + 2 * number
        story.at(start, contact=True, health=NOT_SERVING)
        story.at(start + 0.1, contact=True, health=SERVING, instance_id="one")
        assert story.ready
    assert story.faults == {"engine_reported": 1}
    story.lives(60)
    assert (story.faults, story.ends) == ({"engine_reported": 1}, {"resumed": 1})
    (episode,) = story.ended
    assert episode.duration_s == pytest.approx(18.1)
    assert story.kinds(*FAULT_KINDS).count(TransitionKind.FAULT_REOPENED) == 9


def test_two_faults_further_apart_than_the_window_are_two() -> None:
    """A relapse after the end was counted is a new fault."""
    story = Story().up(0).at(10, contact=True, round_trip=ERROR).up(11).lives(20)
    story.at(21, contact=True, round_trip=ERROR).up(22).lives(40)
    assert (story.faults, story.ends) == ({"engine_error": 2}, {"resumed": 2})


def test_a_relapse_in_the_window_is_the_same_fault() -> None:
    """A worker that comes back for three seconds and falls again had one fault, from its first sign to its last."""
    story = Story().up(0).at(10, contact=True, round_trip=ERROR).up(20).at(23, contact=True, round_trip=ERROR)
    assert TransitionKind.FAULT_REOPENED in story.kinds()
    assert story.state.open_fault is not None
    assert story.state.open_fault.episode.end is None
    story.up(40).lives(60)
    assert (story.faults, story.ends) == ({"engine_error": 1}, {"resumed": 1})
    assert story.ended[0].duration_s == pytest.approx(30)


def test_script_d_first_readiness_is_no_recovery() -> None:
    """A worker that was broken when first seen has no fault, and its first readiness ends none."""
    story = Story().down(300)
    assert (story.state.reason, story.state.fault) == (Reason.UNREACHABLE, None)
    story.up(301).lives(330)
    assert story.ready
    assert (story.faults, story.ends, story.kinds(*FAULT_KINDS)) == ({}, {}, [])
    assert story.state.last_recovery_s is None


@pytest.mark.parametrize(
    "seen",
    [
        {"contact": True, "health": NOT_SERVING},
        {"contact": True, "health": SERVING, "round_trip": ERROR},
        {"contact": True, "health": SERVING, "engines": engines(EngineState.DEAD)},
        {"contact": True, "health": SERVING, "round_trip": PAUSED},
    ],
)
def test_first_seen_broken_is_no_fault(seen: dict[str, object]) -> None:
    """Whatever is wrong with a worker that was never seen to admit, nobody knows since when: no fault is counted."""
    story = Story().at(1, instance_id="one", **seen).talks(30)
    assert not story.ready
    assert (story.faults, story.state.fault) == ({}, None)


def test_a_ten_minute_recovery() -> None:
    """A recovery of ten minutes is measured to the second, in a millisecond."""
    story = Story().up(0).lives(10).down(610)
    assert (story.ready, story.faults) == (False, {"unreachable": 1})
    story.up(611, "two").lives(630)
    assert story.ended[0].duration_s == pytest.approx(600)
    assert (story.faults, story.ends) == ({"unreachable": 1}, {"replaced": 1})


def test_a_45_s_outage_of_the_network_is_resumed() -> None:
    """The same instance that answers again after a partition resumed; nothing was restarted."""
    story = Story().up(0).lives(10).at(11, contact=False, detail="Connection reset").down(56).up(57).lives(80)
    assert (story.faults, story.ends, story.state.restarts) == ({"unreachable": 1}, {"resumed": 1}, 0)
    assert story.ended[0].duration_s == pytest.approx(46)
    assert story.ended[0].detail == "Connection reset"


def test_overlapping_signals_are_one_fault_named_by_the_first() -> None:
    """A silent engine whose process then dies and whose port then refuses is one fault: it was silent first."""
    story = Story().up(0).at(5, contact=True, asked=True).talks(25)
    story.at(26, contact=True, health=NOT_SERVING).down(60).up(61, "two").lives(80)
    assert (story.faults, story.ends) == ({"engine_silent": 1}, {"replaced": 1})
    assert story.ended[0].duration_s == pytest.approx(56)


def test_a_silent_engine_failed_when_it_was_asked() -> None:
    """A frozen engine's fault starts with the question it did not answer, and ends with the answer after the thaw."""
    story = Story().up(0).lives(10).at(15, contact=True, asked=True).talks(40)
    assert story.state.open_fault is not None
    assert story.state.open_fault.episode.start - WALL == pytest.approx(15)
    story.at(40.5, contact=True, round_trip=YES).lives(60)
    (episode,) = story.ended
    assert (episode.cause, episode.kind) == (Cause.ENGINE_SILENT, EndKind.RESUMED)
    assert episode.duration_s == pytest.approx(25.5)


def test_ready_falls_within_answer_within_and_one_interval() -> None:
    """An engine that freezes right after an answer is not ready 20 s later, although health says serving."""
    story = Story().up(0).at(5, contact=True, asked=True).talks(20.01)
    assert not story.ready
    assert story.holds()["serving"]


def test_an_engine_error_is_a_fault_of_its_own_name() -> None:
    """A round trip answered with an engine's error opens a fault at once."""
    story = Story().up(0).at(5, contact=True, asked=True, began=4.0, round_trip=ERROR).up(8).lives(30)
    assert (story.faults, story.ends) == ({"engine_error": 1}, {"resumed": 1})
    assert story.ended[0].detail == "is_paused failed: transport error"


def test_a_question_that_broke_off_starts_no_fault_before_the_last_answer() -> None:
    """A question asked a minute ago that breaks with the connection does not date the fault back to it."""
    story = Story().up(0).talks(60)
    story.at(61, began=5000.0 + 1, contact=False, round_trip=LOST)
    assert story.state.open_fault is not None
    assert story.state.open_fault.episode.start - WALL == pytest.approx(60)


def test_a_silent_port_failed_after_its_last_answer() -> None:
    """A host that vanished without a word failed after the last answer anybody had from it."""
    story = Story().up(0).lives(10).at(12, contact=True).at(15, asked=True).at(31)
    assert story.state.open_fault is not None
    assert story.state.open_fault.episode.cause is Cause.UNREACHABLE
    assert story.state.open_fault.episode.start - WALL == pytest.approx(12)


def test_fault_tolerance_retries() -> None:
    """An engine that fault tolerance calls unhealthy is a fault, and the same instance healthy again was retried."""
    story = Story().at(0, contact=True, health=SERVING, round_trip=UNSUPPORTED)
    story.at(5, contact=True, engines=engines(EngineState.HEALTHY, EngineState.HEALTHY))
    for second in range(10, 42, 4):
        story.at(second, contact=True, engines=engines(EngineState.HEALTHY, EngineState.UNHEALTHY))
    assert (story.faults, story.state.reason) == ({"ft_unhealthy": 1}, Reason.FT_UNHEALTHY)
    story.at(42, contact=True, engines=engines(EngineState.HEALTHY, EngineState.HEALTHY)).talks(60)
    assert story.ends == {"retried": 1}
    assert story.ended[0].duration_s == pytest.approx(32)
    assert story.ready


def test_fault_tolerance_declares_death() -> None:
    """A dead engine is its own cause, and its replacement is one."""
    story = Story().up(0, engines=engines(EngineState.HEALTHY)).at(5, engines=engines(EngineState.DEAD)).talks(15)
    assert story.faults == {"ft_dead": 1}
    story.at(16, contact=False).up(60, "two").lives(80)
    assert story.ends == {"replaced": 1}


@pytest.mark.parametrize(
    ("seen", "reason"),
    [(PAUSED, Reason.SUSPENDED), (DISAGREE, Reason.RANKS_DISAGREE)],
)
def test_a_worker_that_answers_otherwise_has_no_fault(seen: object, reason: Reason) -> None:
    """Paused, asleep or in disagreement for an hour: not ready, and no fault at all."""
    story = Story().up(0)
    for second in range(5, 3600, 5):
        story.at(second, contact=True, asked=True, round_trip=seen)
    assert story.state.reason is reason
    story.up(3600)
    assert story.ready
    assert (story.faults, story.ends, story.kinds(*FAULT_KINDS)) == ({}, {}, [])


def test_a_weight_sync_window_is_no_fault() -> None:
    """Paused, updating for five minutes without an answer, resumed: no fault."""
    story = Story().up(0).at(5, contact=True, asked=True, round_trip=PAUSED)
    story.at(10, contact=True, asked=True, metrics=page(5.0, maintenance=1.0))
    for second in range(15, 310, 5):
        story.at(second, contact=True, metrics=page(5.0, maintenance=1.0))
    story.at(310, contact=True, round_trip=YES, metrics=page(5.0)).lives(330)
    assert story.ready
    assert (story.faults, story.kinds(*FAULT_KINDS)) == ({}, [])


def test_a_replacement_that_nobody_saw() -> None:
    """Another instance answers and no break was seen: counted at once, without a duration that nobody measured."""
    story = Story().up(0, "one").lives(10).at(11, contact=True, instance_id="two").up(12, "two").lives(40)
    assert (story.faults, story.ends) == ({"replaced_unseen": 1}, {"replaced": 1})
    assert story.ended[0].duration_s is None
    assert story.state.last_recovery_s is None
    assert story.ready


@pytest.mark.parametrize("late", [0.5, 12.0, 60.0])
def test_one_crash_is_counted_once_however_late_the_instance_is_read(late: float) -> None:
    """A crash whose successor names itself only later is still one fault."""
    story = Story().up(0, "one").at(5, contact=False).down(8)
    story.at(9, contact=True, health=SERVING, asked=True, round_trip=YES).lives(9 + late)
    story.at(9 + late + 0.1, contact=True, instance_id="two").lives(120)
    assert story.faults == {"unreachable": 1}
    assert sum(story.ends.values()) == 1
    assert story.ended[0].duration_s == pytest.approx(4)
    if late < story.rules.window_s:
        assert story.ends == {"replaced": 1}


def test_after_not_serving_the_instance_is_read_again_before_the_end_is_named() -> None:
    """A worker that serves again without a seen break may be another one: the end waits for its name."""
    story = Story().up(0, "one").at(5, contact=True, health=NOT_SERVING)
    story.at(8, contact=True, health=SERVING, asked=True, round_trip=YES)
    assert story.ready
    assert story.state.open_fault is not None
    story.at(9, contact=True, instance_id="two").up(10, "two").lives(30)
    assert (story.faults, story.ends) == ({"engine_reported": 1}, {"replaced": 1})


def test_a_worker_that_falls_again_before_it_is_named_was_not_back() -> None:
    """The end is when the worker came back to stay, not when it flickered and nobody knew yet who it was."""
    story = Story().up(0, "one").at(5, contact=False)
    story.at(8, contact=True, health=SERVING, asked=True, round_trip=YES).at(9, contact=False)
    story.up(20, "two").lives(40)
    assert (story.faults, story.ends) == ({"unreachable": 1}, {"replaced": 1})
    assert story.ended[0].duration_s == pytest.approx(15)


def test_a_server_without_a_name_resumes() -> None:
    """Where no instance is told, nobody can say that it was replaced, and nothing is waited for."""
    story = Story().up(0, None).at(5, contact=False).up(8, None)
    assert story.state.open_fault is None
    story.lives(30)
    assert (story.faults, story.ends) == ({"unreachable": 1}, {"resumed": 1})


def test_a_name_that_comes_late_is_no_replacement() -> None:
    """A fault of an instance that was never named ends as resumed: nothing says that it is another one."""
    story = Story().up(0, None).at(5, contact=False).up(8, "one").lives(30)
    assert story.ends == {"resumed": 1}
    assert story.state.restarts == 0


def test_a_new_process_that_does_not_know_its_name_yet_is_no_drain() -> None:
    """A crash stays a fault when the successor comes up with its services unregistered for a while."""
    story = Story().up(0, "one").at(5, contact=False).at(6, contact=True, health=SERVICE_UNKNOWN).talks(20)
    assert story.faults == {"unreachable": 1}
    assert story.state.reason is Reason.NOT_SERVING
    story.up(21, "two").lives(40)
    assert story.ends == {"replaced": 1}


def test_states_are_exactly_one_and_sets_are_whole() -> None:
    """After any life every cause and end has its number, and a worker not ready has exactly one reason."""
    story = Story()
    for life in range(1000):
        story.up(4.0 * life, f"instance {life}").at(4.0 * life + 2, contact=False)
    assert set(story.state.faults) == set(Cause)
    assert set(story.state.ends) == set(EndKind)
    assert story.state.restarts == 999
    assert story.state.reason is Reason.UNREACHABLE
