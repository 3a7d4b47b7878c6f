"""What answers mean to whoever watches: which of them accuse a worker, and which only say that we cannot know."""

from __future__ import annotations

import pytest

from vllm_cp import ControlError, CredentialsRejected, HealthStatus, OutOfTime, Refused, ServerInfo
from vllm_cp.episodes import Rules
from vllm_cp.models.ladder import Reason
from vllm_cp.models.probe import EngineHealth, EngineState
from vllm_cp.observer import Clock, Observer


class Hands:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def clock(self) -> Clock:
        """The clock."""
        return Clock(monotonic=lambda: self.now, wall=lambda: self.now)


@pytest.fixture
def hands() -> Hands:
    """The hands of the observer's clock."""
    return Hands()


@pytest.fixture
def observer(hands: Hands) -> Observer:
    """An observer of a worker that is ready."""
    observer = Observer(rules=Rules(), clock=hands.clock())
    observer.health(HealthStatus.SERVING)
    observer.server_info(ServerInfo(instance_id="one"))
    observer.asked()
    observer.round_trip(False, began=hands.now)
    assert observer.state.ready
    return observer


def denied(*, sent: bool) -> CredentialsRejected:
    """A call that was not allowed; one that never left us when ``sent`` is off."""
    error = CredentialsRejected("w:1", "Health.Check", "UNAUTHENTICATED", "no")
    error.sent = sent
    return error


def watch_for(observer: Observer, hands: Hands, seconds: int, answer: ControlError) -> None:
    """Ask for health and for a round trip every five seconds, and get the same answer to both."""
    for second in range(seconds):
        hands.now += 1
        if second % 5 == 0:
            observer.health(answer)
            observer.asked()
            observer.round_trip(answer, began=hands.now)
        observer.tick()


@pytest.mark.parametrize("sent", [True, False])
def test_rejected_credentials_are_no_fault_of_the_worker(observer: Observer, hands: Hands, sent: bool) -> None:
    """When we may not ask, or cannot read our token, the worker is not ready for all we know, and is not accused."""
    watch_for(observer, hands, 120, denied(sent=sent))
    state = observer.state
    assert state.reason is (Reason.UNPROVABLE if sent else Reason.UNKNOWN)
    assert state.rungs.reachable.holds is (True if sent else None)
    assert [state.rungs.serving.holds, state.rungs.answering.holds] == [None, None]
    assert state.fault is None
    assert sum(state.faults.values()) == 0


def test_it_is_ready_again_once_we_may_ask(observer: Observer, hands: Hands) -> None:
    """A token that is put right ends the blindness."""
    watch_for(observer, hands, 60, denied(sent=False))
    observer.health(HealthStatus.SERVING)
    observer.asked()
    observer.round_trip(False, began=hands.now)
    assert observer.state.ready


def test_a_round_trip_that_is_not_for_us_accuses_nobody(observer: Observer, hands: Hands) -> None:
    """Where a mesh lets health through and not IsPaused, answering is unprovable, and ready falls back to serving."""
    for _ in range(60):
        hands.now += 1
        observer.health(HealthStatus.SERVING)
        observer.asked()
        observer.round_trip(Refused("w:1", "Control.IsPaused", "ABORTED"), began=hands.now)
    hands.now += 1
    observer.tick()
    assert observer.state.ready
    assert observer.wants_round_trip
    assert sum(observer.state.faults.values()) == 0


def test_one_canary_per_instance_also_when_it_fails(observer: Observer) -> None:
    """A canary that came to nothing is not sent again to the same instance."""
    assert observer.wants_canary
    observer.canary(OutOfTime("w:1", "Inference.Generate", "DEADLINE_EXCEEDED"))
    assert not observer.wants_canary
    observer.server_info(ServerInfo(instance_id="two"))
    observer.health(HealthStatus.SERVING)
    observer.asked()
    observer.round_trip(False, began=0.0)
    assert observer.wants_canary


def test_what_fault_tolerance_said_grows_old(observer: Observer, hands: Hands) -> None:
    """An unhealthy engine of which nothing more is heard is not unhealthy for ever."""
    observer.fault_tolerance((EngineHealth(engine=0, state=EngineState.UNHEALTHY),))
    assert observer.state.reason is Reason.FT_UNHEALTHY
    for _ in range(40):
        hands.now += 1
        observer.health(HealthStatus.SERVING)
        observer.asked()
        observer.round_trip(False, began=hands.now)
    assert observer.state.ready
    assert observer.state.open_fault is None
