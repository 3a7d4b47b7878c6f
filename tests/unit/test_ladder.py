"""How evidence is judged: which rungs hold, and why a worker is not ready."""

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
from vllm_cp import ConfigError
from vllm_cp.episodes import Rules
from vllm_cp.models.health import HealthStatus
from vllm_cp.models.ladder import Expect, Reason, Rung, Rungs, RungState
from vllm_cp.models.probe import EngineMetrics, EngineState

YES_NO = {True: "1", False: "0", None: "-"}


def ladder(story: Story) -> str:
    """The five rungs as 1 proved, 0 refuted, - neither."""
    return "".join(YES_NO[holds] for holds in story.holds().values())


def test_nothing_seen_is_starting_and_proves_nothing() -> None:
    """A worker that was only discovered is starting, and no rung is claimed either way."""
    story = Story().at(1)
    assert (ladder(story), story.state.reason) == ("-----", Reason.STARTING)


def test_a_healthy_worker_is_ready() -> None:
    """A worker whose port, health and engines answer is ready; warm is unprovable without a view of generations."""
    story = Story().up(1)
    assert (ladder(story), story.ready) == ("1111-", True)
    assert story.state.rungs.warm.provable is False
    assert story.state.rungs.highest is Rung.ADMITTING
    assert story.state.first_ready == WALL + 1


@pytest.mark.parametrize(
    ("seen", "reason", "rungs"),
    [
        ({"contact": False}, Reason.UNREACHABLE, "00000"),
        ({"contact": True, "health": SERVICE_UNKNOWN}, Reason.NOT_SERVING, "10000"),
        ({"contact": True, "health": NOT_SERVING}, Reason.NOT_SERVING, "10000"),
        ({"contact": True}, Reason.STARTING, "1----"),
        ({"contact": True, "health": HealthStatus.UNKNOWN}, Reason.STARTING, "1----"),
        ({"contact": True, "health": SERVING}, Reason.STARTING, "11---"),
        ({"contact": True, "health": SERVING, "asked": True}, Reason.STARTING, "11---"),
        ({"contact": True, "health": SERVING, "round_trip": YES}, None, "1111-"),
        ({"contact": True, "health": SERVING, "round_trip": PAUSED}, Reason.SUSPENDED, "11100"),
        ({"contact": True, "health": SERVING, "round_trip": DISAGREE}, Reason.RANKS_DISAGREE, "11100"),
        ({"contact": True, "health": SERVING, "round_trip": ERROR}, Reason.ENGINE_ERROR, "11000"),
        ({"contact": True, "health": SERVING, "round_trip": YES, "deleted": True}, Reason.DRAINING, "11100"),
        ({"contact": True, "health": NOT_SERVING, "round_trip": YES, "deleted": True}, Reason.DRAINING, "10000"),
        (
            {"contact": True, "health": SERVING, "round_trip": YES, "engines": engines(EngineState.UNHEALTHY)},
            Reason.FT_UNHEALTHY,
            "11100",
        ),
        (
            {
                "contact": True,
                "health": SERVING,
                "round_trip": YES,
                "engines": engines(EngineState.UNHEALTHY, EngineState.DEAD),
            },
            Reason.FT_DEAD,
            "11100",
        ),
    ],
)
def test_one_look(seen: dict[str, object], reason: Reason | None, rungs: str) -> None:
    """What one look at a new worker shows: the rungs up to the first that fails, and that one's reason."""
    story = Story().at(1, **seen)
    assert (story.state.reason, ladder(story)) == (reason, rungs)


def test_ready_comes_only_at_the_documented_point() -> None:
    """Port open, name unregistered, not serving, serving and answering are five moments, and only the last is ready."""
    story = Story()
    seen = []
    phases = [
        {"contact": True},
        {"contact": True, "health": SERVICE_UNKNOWN},
        {"contact": True, "health": NOT_SERVING},
        {"contact": True, "health": SERVING, "asked": True},
        {"contact": True, "round_trip": YES},
    ]
    for number, phase in enumerate(phases):
        story.at(3 * number + 1, **phase)
        seen.append((story.ready, story.state.reason))
    assert seen == [
        (False, Reason.STARTING),
        (False, Reason.NOT_SERVING),
        (False, Reason.NOT_SERVING),
        (False, Reason.STARTING),
        (True, None),
    ]
    assert (story.faults, story.ends) == ({}, {})


def test_a_waiting_question_is_judged_by_its_age() -> None:
    """Rule 1: an engine is silent when a round trip has waited for longer than answer_within, and not before."""
    story = Story().up(0).at(5, contact=True, asked=True).talks(20)
    assert story.ready
    story.at(20.1, contact=True)
    assert (ladder(story), story.state.reason) == ("11000", Reason.ENGINE_SILENT)
    assert story.state.rungs.answering.why == "a round trip has been waiting for 15.1 s"
    assert story.state.rungs.serving.holds


def test_failures_are_not_counted() -> None:
    """Rule 1: lost questions refute nothing by their number, and do not start the wait anew."""
    story = Story().up(0)
    for second in range(1, 15):
        story.at(second, contact=True, asked=True, round_trip=LOST)
    assert story.ready
    story.at(17, contact=True, asked=True)
    assert story.state.reason is Reason.ENGINE_SILENT


@pytest.mark.parametrize("tokens_move", [False, True])
@pytest.mark.parametrize("asked", [0.1, 2.5, 4.9])
def test_a_busy_engine_is_not_accused(asked: float, tokens_move: bool) -> None:
    """One step of 12 s, begun just before the question, with an answer before it that is old: no fault, ready stays."""
    story = Story().up(0).lives(60)
    begins = 60 + 6.0 - asked
    story.at(66, contact=True, asked=True)
    for second in range(67, int(begins + 12)):
        story.at(second, contact=True, metrics=page(100.0 + second if tokens_move else 100.0))
        assert story.ready, story.state.rungs.answering
    story.at(begins + 12, contact=True, round_trip=YES).lives(120)
    assert story.ready
    assert (story.faults, story.ends, story.state.fault) == ({}, {}, None)


def test_a_question_that_comes_late_does_not_refute_the_answer_before_it() -> None:
    """Where questions are asked more rarely than answer_within, an answer is good until the next question is late."""
    story = Story(Rules(interval_s=30.0))
    for start in range(0, 300, 30):
        story.up(start)
        story.at(start + 29)
        assert story.ready


def test_tokens_that_move_corroborate() -> None:
    """Rule 2: generated tokens prove answering and warm while a round trip is overdue, until they stop for as long."""
    story = Story().up(0, metrics=page(100.0)).at(5, contact=True, asked=True)
    for second in range(6, 60):
        story.at(second, contact=True, metrics=page(100.0 + second))
    assert (ladder(story), story.ready) == ("11111", True)
    assert story.state.rungs.answering.proof == "tokens"
    story.talks(74)
    assert story.ready
    story.talks(76)
    assert story.state.reason is Reason.ENGINE_SILENT


def test_a_question_asked_anew_after_proof_is_young() -> None:
    """When tokens proved the engines after a question was lost, the next question waits from when it was asked."""
    story = Story().up(0, metrics=page(1.0)).at(5, contact=True, asked=True)
    story.at(10, contact=True, round_trip=LOST)
    story.at(40, contact=True, metrics=page(2.0))
    story.at(50, contact=True, asked=True).talks(60)
    assert story.ready
    story.talks(66)
    assert story.state.reason is Reason.ENGINE_SILENT


def test_maintenance_is_no_silence_until_a_ceiling() -> None:
    """Rule 2: while a weight update is in flight nobody is accused, for ten minutes."""
    story = Story().up(0).at(5, contact=True, asked=True, metrics=page(1.0, maintenance=1.0)).talks(21)
    assert (ladder(story), story.state.reason) == ("11---", Reason.MAINTENANCE)
    story.talks(605)
    assert (story.state.reason, story.state.fault) == (Reason.MAINTENANCE, None)
    story.talks(606)
    assert story.state.reason is Reason.ENGINE_SILENT
    assert story.state.open_fault is not None


def test_after_maintenance_the_engines_must_answer() -> None:
    """A question that waited for an update to end may wait as long again as any other, and then accuses."""
    story = Story().up(0).at(5, contact=True, asked=True, metrics=page(1.0, maintenance=2.0)).talks(30)
    story.at(31, contact=True, metrics=page(1.0)).talks(46)
    assert (ladder(story), story.state.reason) == ("11---", Reason.MAINTENANCE)
    story.talks(47)
    assert story.state.reason is Reason.ENGINE_SILENT


def test_ranks_that_disagree_all_answer() -> None:
    """Rule 3: different answers prove that every engine answers; nothing is admitted, and it is no fault."""
    story = Story().up(0).lives(10).at(15, contact=True, asked=True, round_trip=DISAGREE).talks(30)
    assert (ladder(story), story.state.reason) == ("11100", Reason.RANKS_DISAGREE)
    assert story.state.rungs.admitting.why.startswith("inconsistent results")
    assert story.state.fault is None


def test_an_engine_error_stands_until_the_next_round_trip() -> None:
    """Rule 3: an engine's error refutes answering at once; tokens of another engine do not take it back."""
    story = Story().up(0, metrics=page(1.0)).at(5, contact=True, asked=True, round_trip=ERROR)
    assert (ladder(story), story.state.reason) == ("11000", Reason.ENGINE_ERROR)
    story.at(6, contact=True, metrics=page(2.0)).at(7, contact=True, metrics=page(3.0))
    assert story.state.reason is Reason.ENGINE_ERROR
    assert story.up(10).ready


@pytest.mark.parametrize(("expect", "ready"), [(Expect.SERVING, False), (Expect.SUSPENDED, True), (Expect.ANY, True)])
@pytest.mark.parametrize("rung", [Rung.ADMITTING, Rung.WARM])
def test_suspension_where_it_is_expected(expect: Expect, ready: bool, rung: Rung) -> None:
    """Rule 4: paused and asleep look alike; a pool that may be suspended is ready then, and it is never a fault."""
    story = Story(Rules(expect=expect, ready_rung=rung)).up(0, canary=True)
    assert story.ready
    story.at(5, contact=True, asked=True, round_trip=PAUSED).talks(10)
    assert story.ready is ready
    assert story.state.reason is (None if ready else Reason.SUSPENDED)
    assert story.state.fault is None


def test_a_canary_proves_warm_once_per_instance() -> None:
    """Rule 5: warm is refuted until a generation finished, then it holds for as long as the instance lives."""
    story = Story(Rules(ready_rung=Rung.WARM)).at(0, canaries=True).up(1)
    assert (ladder(story), story.state.reason) == ("11110", Reason.NOT_WARM)
    story.at(2, contact=True, canary=True)
    assert (ladder(story), story.ready, story.state.rungs.warm.proof) == ("11111", True, "canary")
    story.lives(600)
    assert story.ready
    story.at(601, contact=False).up(640, "two")
    assert (ladder(story), story.state.reason) == ("11110", Reason.NOT_WARM)


def test_tokens_on_the_page_make_a_worker_warm() -> None:
    """Real traffic makes a canary unnecessary: tokens were generated, so the instance is warm."""
    story = Story(Rules(ready_rung=Rung.WARM)).up(0, metrics=page(0.0))
    assert story.state.reason is Reason.NOT_WARM
    assert story.at(5, contact=True, metrics=page(7.0)).ready


def test_a_token_counter_that_fell_is_another_process() -> None:
    """A counter that starts anew takes warm with it, until the new process generates."""
    story = Story().up(0, metrics=page(50.0)).at(1, contact=True, metrics=page(0.0))
    assert story.holds()["warm"] is False
    assert story.at(2, contact=True, metrics=page(1.0)).holds()["warm"] is True


def test_without_round_trips_ready_falls_back_to_serving() -> None:
    """On vLLM 0.27 without a canary the upper rungs are absent, and ready means serving."""
    story = Story().at(0, contact=True, health=SERVING, asked=True, round_trip=UNSUPPORTED)
    assert (ladder(story), story.ready) == ("11---", True)
    assert not story.state.rungs.answering.provable
    assert story.state.rungs.provable(Rung.ADMITTING) is Rung.SERVING
    story.talks(120)
    assert story.ready
    story.at(121, contact=True, health=NOT_SERVING)
    assert story.state.reason is Reason.NOT_SERVING
    assert story.state.open_fault is not None


def test_without_round_trips_tokens_prove_what_they_can() -> None:
    """On 0.27 or over HTTP alone, tokens that move prove answering; when they rest the worker is idle, not broken."""
    story = Story().at(0, contact=True, health=SERVING, round_trip=UNSUPPORTED, metrics=page(0.0))
    assert (ladder(story), story.ready) == ("11--0", True)
    story.at(5, contact=True, metrics=page(9.0))
    assert (ladder(story), story.ready) == ("11111", True)
    story.talks(300)
    assert (ladder(story), story.ready) == ("11--1", True)
    assert (story.faults, story.state.fault) == ({}, None)


def test_without_round_trips_a_canary_is_waited_for_once() -> None:
    """On 0.27 with a canary, ready waits for its first answer; later an idle worker does not lose it again."""
    story = Story().at(0, canaries=True).at(1, contact=True, health=SERVING, round_trip=UNSUPPORTED)
    assert (ladder(story), story.state.reason) == ("11---", Reason.STARTING)
    story.at(2, contact=True, canary=True)
    assert (ladder(story), story.ready) == ("11111", True)
    story.talks(600)
    assert story.ready
    story.at(601, contact=False).at(602, contact=True, health=SERVING).talks(610)
    assert story.ready
    assert story.faults == {"unreachable": 1}


def test_over_http_alone_fault_tolerance_and_deletion_are_known() -> None:
    """Where nothing can prove that a worker admits, what refutes it still counts."""
    story = Story().at(0, contact=True, health=SERVING, round_trip=UNSUPPORTED)
    story.at(1, contact=True, engines=engines(EngineState.HEALTHY, EngineState.UNHEALTHY))
    assert (story.state.reason, story.holds()["admitting"]) == (Reason.FT_UNHEALTHY, False)
    story.at(2, contact=True, engines=engines(EngineState.HEALTHY, EngineState.HEALTHY))
    assert story.ready
    story.at(3, deleted=True)
    assert story.state.reason is Reason.DRAINING


def test_a_silent_port_is_unreachable_not_a_silent_engine() -> None:
    """When nothing at all answers, it is the port that is silent, and the engine is not accused."""
    story = Story().up(0).at(5, contact=True, asked=True).at(20.5)
    assert (ladder(story), story.state.reason) == ("00000", Reason.UNREACHABLE)
    assert story.state.rungs.reachable.why == "no answer for 15.5 s"


def test_an_operator_chooses_the_rung_and_faults_do_not_care() -> None:
    """A pool may call a serving worker ready; a silent engine is a fault there all the same."""
    story = Story(Rules(ready_rung=Rung.SERVING)).up(0).at(5, contact=True, asked=True).talks(30)
    assert story.ready
    assert story.faults == {"engine_silent": 1}


def test_a_new_instance_has_proved_nothing() -> None:
    """When another instance answers and no break was seen, the old one's round trip says nothing of it."""
    story = Story().up(0, "one", canary=True).at(1, contact=True, instance_id="two")
    assert (ladder(story), story.ready) == ("11---", False)
    assert story.up(2, "two").ready


def test_since_says_how_long() -> None:
    """Each rung says since when it holds or not, and when it was proved last."""
    story = Story().up(0).lives(30)
    answering = story.state.rungs.answering
    assert (answering.since, answering.proved_at, answering.proof) == (WALL, WALL + 30, "round trip")
    story.at(31, contact=True, round_trip=ERROR).talks(40)
    assert story.state.rungs.answering.since == WALL + 31


@pytest.mark.parametrize("name", ["answer_within_s", "window_s", "maintenance_s", "interval_s", "drain_after_s"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_rules_refuse_what_is_no_time(name: str, value: float) -> None:
    """A rule that is no positive number of seconds is refused by name."""
    with pytest.raises(ConfigError, match=f"^{name} must be a positive number of seconds, not {value}$"):
        Rules(**{name: value})


def test_the_ladder_as_a_value() -> None:
    """A ladder iterates lowest first, names its highest proved rung, and falls back past what is unprovable."""
    yes, unprovable = RungState(holds=True), RungState(provable=False)
    rungs = Rungs(reachable=yes, serving=yes, answering=unprovable, admitting=unprovable, warm=unprovable)
    assert [rung.value for rung, _ in rungs] == ["reachable", "serving", "answering", "admitting", "warm"]
    assert [rung.height for rung in Rung] == [0, 1, 2, 3, 4]
    assert (rungs.highest, rungs.provable(Rung.WARM)) == (Rung.SERVING, Rung.SERVING)
    assert Rungs().highest is None
    assert Rungs(reachable=unprovable, serving=unprovable).provable(Rung.SERVING) is Rung.REACHABLE


def test_tokens_of_one_engine_do_not_vouch_for_another() -> None:
    """Rule 2 speaks of all engines: a rank that generates hides nothing of one that is gone."""
    story = Story().up(0).at(5, contact=True, asked=True)
    for second in range(6, 40):
        tokens = EngineMetrics(generation_tokens=100.0 + second, tokens_by_engine=(50.0 + second, 50.0))
        story.at(second, contact=True, metrics=tokens)
    assert story.state.reason is Reason.ENGINE_SILENT
