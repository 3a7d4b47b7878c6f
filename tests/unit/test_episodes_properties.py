"""What holds for every life a worker could lead, however senseless."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.story import (
    DISAGREE,
    ERROR,
    LOST,
    MONOTONIC,
    PAUSED,
    UNSUPPORTED,
    WALL,
    YES,
    Story,
    engines,
    page,
)
from vllm_cp.episodes import (
    Memory,
    Observation,
    Rules,
    Transition,
    TransitionKind,
    WorkerState,
    begin,
    remember,
    step,
)
from vllm_cp.models.episode import Cause, EndKind, Episode
from vllm_cp.models.health import HealthStatus
from vllm_cp.models.ladder import Expect, Rung
from vllm_cp.models.probe import EngineMetrics, EngineState

SECONDS = st.sampled_from([0.0, 0.01, 0.5, 1.0, 1.0, 4.9, 5.0, 6.0, 15.1, 60.0, 700.0, -0.5])
CLOCK_STEPS = st.sampled_from([0.0] * 20 + [3600.0, -3600.0])
FACTS: dict[str, st.SearchStrategy[Any]] = {
    "contact": st.sampled_from([True, True, False]),
    "health": st.sampled_from(HealthStatus),
    "stream_ended": st.booleans(),
    "instance_id": st.sampled_from(["one", "two", "three"]),
    "asked": st.booleans(),
    "round_trip": st.sampled_from([YES, PAUSED, DISAGREE, ERROR, UNSUPPORTED, LOST]),
    "metrics": st.one_of(
        st.builds(page, st.floats(0, 1e6), maintenance=st.sampled_from([0.0, 2.0])), st.just(EngineMetrics())
    ),
    "canaries": st.booleans(),
    "canary": st.booleans(),
    "engines": st.lists(st.sampled_from(EngineState), max_size=2).map(lambda states: engines(*states)),
    "deleted": st.booleans(),
    "removed": st.sampled_from([False] * 9 + [True]),
    "detail": st.text(max_size=5),
}
SEEN = st.fixed_dictionaries({}, optional=FACTS)
#: Looks that make sense, so that workers come up often enough to have something to lose.
SENSIBLE = st.sampled_from(
    [
        {},
        {"contact": True},
        {"contact": False},
        {"contact": True, "health": HealthStatus.SERVING, "instance_id": "one", "asked": True, "round_trip": YES},
        {"contact": True, "health": HealthStatus.SERVING, "instance_id": "two", "asked": True, "round_trip": YES},
        {"contact": True, "health": HealthStatus.NOT_SERVING},
        {"contact": True, "asked": True},
        {"contact": True, "round_trip": ERROR},
        {"stream_ended": True},
    ]
)
LIVES = st.lists(st.tuples(SECONDS, CLOCK_STEPS, st.one_of(SENSIBLE, SEEN)), max_size=60)
RULES = st.builds(
    Rules,
    window_s=st.sampled_from([0.5, 5.0, 30.0]),
    ready_rung=st.sampled_from(Rung),
    expect=st.sampled_from(Expect),
)
EPISODES = st.builds(Episode, cause=st.sampled_from(Cause), start=st.sampled_from([WALL - 100, WALL + 100]))
MEMORIES = st.builds(
    Memory,
    instance_id=st.sampled_from([None, "one"]),
    was_admitting=st.booleans(),
    open_fault=st.none() | EPISODES,
    counted=st.booleans(),
)


@settings(max_examples=150, deadline=None)
@given(LIVES, RULES, st.none() | MEMORIES)
def test_every_life_keeps_the_rules(
    life: list[tuple[float, float, dict[str, Any]]], rules: Rules, memory: Memory | None
) -> None:
    """Counters only rise, one episode is open at most, nothing is negative, and transitions tell the whole story."""
    at, wall = MONOTONIC, WALL
    state = begin(at=at, wall=wall, rules=rules, memory=memory)
    book = Book(state)
    for seconds, clock_step, seen in life:
        at += seconds
        wall += seconds + clock_step
        state, transitions = step(state, Observation(at=at, wall=wall, **seen))
        book.check(state, transitions)


class Book:
    """Keeps the accounts of one life from its transitions alone."""

    def __init__(self, state: WorkerState) -> None:
        self.before = state
        self.rungs = {rung.value: "unknown" for rung in Rung}
        self.ready = False
        self.health = "no_answer"
        self.restarts = 0
        #: Where the episode stands: none, open, or closed and not settled.
        self.stage = "open" if state.fault else "none"
        self.counted = state.fault.counted if state.fault else False
        self.restored = int(self.counted)
        self.faults = dict.fromkeys(Cause, 0)
        self.ends = dict.fromkeys(EndKind, 0)

    def check(self, state: WorkerState, transitions: tuple[Transition, ...]) -> None:
        for transition in transitions:
            self.read(transition)
        self.state_is_consistent(state)
        self.story_is_the_state(state)
        self.before = state

    def read(self, transition: Transition) -> None:
        kind, episode = transition.kind, transition.episode
        assert (episode is not None) == kind.value.startswith("fault")
        if kind is TransitionKind.RUNG:
            rung, _, was = transition.was.partition("=")
            assert self.rungs[rung] == was
            self.rungs[rung] = transition.now.partition("=")[2]
        elif kind is TransitionKind.READY:
            assert (transition.was == "ready") is self.ready
            self.ready = transition.now == "ready"
        elif kind is TransitionKind.HEALTH:
            assert transition.was == self.health
            self.health = transition.now
        elif kind is TransitionKind.INSTANCE:
            assert transition.was != transition.now
            self.restarts += 1
        elif episode is not None:
            self.read_fault(kind, episode)

    def read_fault(self, kind: TransitionKind, episode: Episode) -> None:
        assert episode.duration_s is None or episode.duration_s >= 0
        unseen = episode.cause is Cause.REPLACED_UNSEEN
        if kind is TransitionKind.FAULT_OPENED:
            assert self.stage == "none"
            self.stage, self.counted = "open", False
        elif kind is TransitionKind.FAULT_CLOSED:
            assert self.stage == "open"
            assert episode.kind in (EndKind.RESUMED, EndKind.REPLACED, EndKind.RETRIED)
            assert episode.duration_s is not None
            self.stage = "closed"
        elif kind is TransitionKind.FAULT_REOPENED:
            assert self.stage == "closed"
            assert (episode.end, episode.kind, episode.duration_s) == (None, None, None)
            self.stage = "open"
        elif kind is TransitionKind.FAULT_COUNTED:
            assert not self.counted
            self.counted = True
            self.faults[episode.cause] += 1
        else:
            assert kind is TransitionKind.FAULT_ENDED
            assert episode.kind is not None
            assert episode.end is not None
            assert self.stage != "none" or unseen
            assert self.counted is (episode.kind is not EndKind.PLANNED)
            self.ends[episode.kind] += 1
            self.stage, self.counted = "none", False

    def story_is_the_state(self, state: WorkerState) -> None:
        words = {True: "yes", False: "no", None: "unknown"}
        assert self.rungs == {rung.value: words[state.rungs[rung].holds] for rung in Rung}
        assert self.ready is state.ready
        assert self.health == (state.evidence.health.value if state.evidence.health else "no_answer")
        assert self.restarts == state.restarts
        assert (self.faults, self.ends) == (dict(state.faults), dict(state.ends))
        assert (self.stage == "open") is (state.open_fault is not None)
        assert (self.stage == "none") is (state.fault is None)
        # Each fault counted has ended, or is the one that goes on; one from before a restart was counted there.
        ended = sum(n for kind, n in self.ends.items() if kind is not EndKind.PLANNED)
        going_on = int(state.fault is not None and state.fault.counted)
        assert sum(self.faults.values()) + self.restored == ended + going_on

    def state_is_consistent(self, state: WorkerState) -> None:
        before = self.before
        assert all(state.faults[cause] >= before.faults[cause] for cause in Cause)
        assert all(state.ends[kind] >= before.ends[kind] for kind in EndKind)
        assert state.watched >= before.watched
        assert state.at >= before.at
        assert state.restarts >= before.restarts
        assert state.last_recovery_s is None or state.last_recovery_s >= 0
        assert before.first_ready is None or state.first_ready == before.first_ready
        assert state.ready is (state.reason is None)
        self.ladder_is_a_ladder(state)
        assert begin(at=0.0, wall=0.0, memory=remember(state)).faults[Cause.UNKNOWN] == 0

    def ladder_is_a_ladder(self, state: WorkerState) -> None:
        below_holds: list[bool | None] = []
        for _, rung in state.rungs:
            if rung.holds:
                assert False not in below_holds
            if rung.holds is None:
                assert rung.why
            below_holds.append(rung.holds)
        wanted = state.rungs.provable(state.rules.ready_rung)
        if state.rungs[wanted].holds:
            assert state.ready
        if state.ready and state.rules.expect is Expect.SERVING:
            assert state.rungs[wanted].holds


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.1, 6.0), st.floats(0.0, 14.9), st.booleans()), min_size=1, max_size=20),
    st.booleans(),
)
def test_no_engine_that_answers_in_time_is_ever_accused(
    questions: list[tuple[float, float, bool]], page_known: bool
) -> None:
    """However long each answer takes below the limit, and whenever it is asked, there is no fault and ready stays."""
    story = Story().up(0)
    tokens = 0.0
    for idle, busy, moves in questions:
        story.at(story.now + idle, contact=True, asked=True)
        answer_at = story.now + busy
        while story.now + 1 < answer_at:
            tokens += moves
            story.at(story.now + 1, contact=True, **({"metrics": page(tokens)} if page_known else {}))
        story.at(answer_at, contact=True, round_trip=YES)
    assert all(state.ready and state.fault is None for state in story.history[2:])


@settings(max_examples=100, deadline=None)
@given(
    st.floats(0.0, 29.0),
    st.sampled_from([{"contact": False}, {"contact": True, "health": HealthStatus.NOT_SERVING}]),
    st.sampled_from([{"deleted": True}, {"removed": True}]),
    st.floats(0.0, 600.0),
)
def test_no_shutdown_that_discovery_tells_of_in_time_is_a_fault(
    told_after: float, sign: dict[str, Any], told: dict[str, Any], away: float
) -> None:
    """Whenever in the window the deletion is read, and however long the pod takes to go, no fault is counted."""
    story = Story(Rules(window_s=30.0)).up(0).at(5, **sign).at(5 + told_after, **told)
    assert (story.faults, story.ends) == ({}, {"planned": 1})
    story.down(story.now + away)
    assert (story.faults, story.ends) == ({}, {"planned": 1})


@settings(max_examples=100, deadline=None)
@given(st.floats(0.1, 600.0), st.integers(0, 30), st.booleans())
def test_every_crash_is_exactly_one_fault_of_its_own_length(outage: float, retries: int, replaced: bool) -> None:
    """One crash is one fault and one end, as long as the outage, however often the port was tried meanwhile."""
    story = Story().up(0).lives(10).at(11, contact=False)
    for number in range(retries):
        story.at(11 + outage * number / (retries + 1), contact=False)
    story.up(11 + outage, "two" if replaced else "one").lives(11 + outage + 30)
    assert story.faults == {"unreachable": 1}
    assert story.ends == {"replaced" if replaced else "resumed": 1}
    duration = story.ended[0].duration_s
    assert duration is not None
    assert abs(duration - outage) < 1e-6
