"""When nobody needs to step: until then, time alone changes nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.story import MONOTONIC, UNSUPPORTED, WALL, YES
from tests.unit.test_episodes_properties import LIVES, MEMORIES, RULES
from vllm_cp.episodes import Memory, Observation, Rules, WorkerState, begin, quiet_until, step
from vllm_cp.models.health import HealthStatus

UP = {"contact": True, "health": HealthStatus.SERVING, "instance_id": "one", "round_trip": YES}


def passed(state: WorkerState, seconds: float) -> WorkerState:
    """The state after that time, in which nothing may have happened."""
    seen = Observation(at=state.at + seconds, wall=WALL + state.at - MONOTONIC + seconds)
    after, transitions = step(state, seen)
    assert transitions == ()
    return after


@settings(max_examples=300, deadline=None)
@given(LIVES, RULES, st.none() | MEMORIES, st.floats(0, 1))
def test_nothing_happens_while_it_is_quiet(
    life: list[tuple[float, float, dict[str, Any]]], rules: Rules, memory: Memory | None, part: float
) -> None:
    """A step that is left out while it is quiet is not missed: it would have changed nothing but the time."""
    at, wall = MONOTONIC, WALL
    state = begin(at=at, wall=wall, rules=rules, memory=memory)
    for seconds, clock_step, seen in life:
        at += seconds
        wall += seconds + clock_step
        state, _ = step(state, Observation(at=at, wall=wall, **seen))
        quiet = quiet_until(state) - state.at
        assert 0 <= quiet <= rules.interval_s
        # What rounds the wrong way in the last digit is nobody's concern.
        if (later := quiet * part - 1e-6) > 0:
            after = passed(state, later)
            assert replace(after, at=state.at, watched=state.watched) == state
            assert after.watched == pytest.approx(state.watched + later)


def state_after(*seen: dict[str, Any]) -> WorkerState:
    state = begin(at=0.0, wall=WALL)
    for number, fields in enumerate(seen, 1):
        state, _ = step(state, Observation(at=float(number), wall=WALL + number, **fields))
    return state


@pytest.mark.parametrize(
    ("seen", "quiet_s"),
    [
        ([UP], 5.0),
        ([UP, {"asked": True}], 5.0),
        ([UP, *[{"contact": True, "asked": True}] * 13], 3.0),
        ([UP, *[{"contact": True, "asked": True}] * 17], 0.0),
        ([UP, {"contact": False}], 0.0),
        ([UP, {"contact": True, "health": HealthStatus.NOT_SERVING}], 0.0),
        ([{**UP, "round_trip": UNSUPPORTED}], 5.0),
        ([], 0.0),
    ],
)
def test_how_long_it_is_quiet(seen: list[dict[str, Any]], quiet_s: float) -> None:
    """A healthy worker is quiet for an interval, one that is asked until its answer is overdue, a faulty one never."""
    state = state_after(*seen)
    assert quiet_until(state) - state.at == quiet_s
