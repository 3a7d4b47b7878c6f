"""Recovery as a function of what is seen: an hour of it takes no time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_cp import errors as e
from vllm_cp._recovery import Recovery
from vllm_cp.models.fault_status import FaultStatus
from vllm_cp.models.probe import EngineHealth, EngineState
from vllm_cp.models.recovery import RecoveryOutcome as Outcome

WELL, ILL, DEAD, UNKNOWN = EngineState.HEALTHY, EngineState.UNHEALTHY, EngineState.DEAD, EngineState.UNKNOWN
ARGS = ("http://w", "GET /fault_tolerance/status", "HTTP 0", "so it is")
GONE, LATE, FOREIGN = e.WorkerUnreachable(*ARGS), e.OutOfTime(*ARGS), e.CredentialsRejected(*ARGS)
BUSY, NONE, BROKEN = e.NotAdmitting(*ARGS), e.NotSupported(*ARGS), e.EngineFailed(*ARGS)


def status(*states: EngineState, first: int = 0, **facts: str | None) -> FaultStatus:
    return FaultStatus(engines=tuple(EngineHealth(engine=n, state=s, **facts) for n, s in enumerate(states, first)))


def outcomes(recovery: Recovery) -> list[Outcome]:
    return [rank.outcome for rank in recovery.report()]


def test_every_unhealthy_rank_is_told_and_only_they() -> None:
    """Two of four are ill: those two are told, and the end is reported rank by rank."""
    recovery = Recovery([f"http://{n}" for n in range(4)])
    for n, state in enumerate((ILL, WELL, ILL, DEAD)):
        recovery.looked(n, status(state, first=n), 0.0)
    assert recovery.to_tell() == [0, 2]
    recovery.told(0, "a", 1.0)
    recovery.told(2, "b", 1.5)
    assert recovery.to_tell() == []
    assert not recovery.done
    recovery.looked(0, status(WELL, first=0, last_request_id="a"), 3.0)
    assert not recovery.done
    recovery.looked(2, status(WELL, first=2, last_request_id="b"), 3.0)
    assert recovery.done
    assert outcomes(recovery) == [Outcome.RECOVERED, Outcome.NOT_NEEDED, Outcome.RECOVERED, Outcome.DEAD]
    report = recovery.report()
    assert [rank.engine for rank in report] == [0, 1, 2, 3]
    assert [rank.seconds for rank in report] == [2.0, None, 1.5, None]
    assert [rank.request_id for rank in report] == ["a", None, "b", None]
    assert [rank.ok for rank in report] == [True, True, True, False]


def test_all_healthy_is_done_at_once() -> None:
    """Nobody is told, nothing is waited for."""
    recovery = Recovery(["http://a"])
    recovery.looked(0, status(WELL), 0.0)
    assert recovery.done
    assert outcomes(recovery) == [Outcome.NOT_NEEDED]


def test_a_rank_that_falls_ill_late_is_told_late() -> None:
    """A peer notices the fault only after its time-out; the collective waits for it, and so it must be told."""
    recovery = Recovery(["http://a", "http://b"])
    recovery.looked(0, status(ILL), 0.0)
    recovery.looked(1, status(WELL, first=1), 0.0)
    recovery.told(0, "a", 0.0)
    assert recovery.to_look() == [0, 1]
    recovery.looked(0, status(ILL), 5.0)
    recovery.looked(1, status(ILL, first=1), 5.0)
    assert recovery.to_tell() == [1]
    recovery.told(1, "b", 5.0)
    recovery.looked(0, status(WELL), 6.0)
    recovery.looked(1, status(WELL, first=1), 6.0)
    assert outcomes(recovery) == [Outcome.RECOVERED, Outcome.RECOVERED]


def test_a_rank_that_comes_back_is_told_then() -> None:
    """A server that could not be reached at first is asked again as long as others wait, and told when it is ill."""
    recovery = Recovery(["http://a", "http://b"])
    recovery.looked(0, status(ILL), 0.0)
    recovery.looked(1, GONE, 0.0)
    recovery.told(0, "a", 0.0)
    assert recovery.to_look() == [0, 1]
    recovery.looked(1, status(ILL, first=1), 1.0)
    assert recovery.to_tell() == [1]


def test_an_unreachable_rank_holds_up_nobody() -> None:
    """When the others are well there is nothing to wait for."""
    recovery = Recovery(["http://a", "http://b"])
    recovery.looked(0, status(WELL), 0.0)
    recovery.looked(1, GONE, 0.0)
    assert recovery.done
    assert outcomes(recovery) == [Outcome.NOT_NEEDED, Outcome.UNREACHABLE]
    assert recovery.report()[1].engine is None


def test_a_refusal_counts_only_under_our_id() -> None:
    """An error left by somebody's earlier instruction is not the answer to ours."""
    recovery = Recovery(["http://a"])
    recovery.looked(0, status(ILL, last_request_id="old", error="old trouble"), 0.0)
    recovery.told(0, "new", 0.0)
    recovery.looked(0, status(ILL, last_request_id="old", error="old trouble"), 1.0)
    assert not recovery.done
    recovery.looked(0, status(ILL, last_request_id="new", error="no quorum"), 2.0)
    assert recovery.done
    (rank,) = recovery.report()
    assert (rank.outcome, rank.error, rank.state) == (Outcome.REFUSED, "no quorum", ILL)


def test_a_rank_that_got_well_before_it_was_told_did_not_need_it() -> None:
    """Somebody else's retry came first: ours is refused, and the rank is healthy, which is what matters."""
    recovery = Recovery(["http://a"])
    recovery.looked(0, status(ILL), 0.0)
    recovery.told(0, "a", 0.0)
    recovery.looked(0, status(WELL, last_request_id="a", error="not unhealthy"), 1.0)
    assert recovery.done
    (rank,) = recovery.report()
    assert (rank.outcome, rank.error, rank.ok) == (Outcome.NOT_NEEDED, "not unhealthy", True)


def test_an_engine_that_dies_meanwhile_is_dead() -> None:
    """Its time ran out before its peers were told."""
    recovery = Recovery(["http://a"])
    recovery.looked(0, status(ILL), 0.0)
    recovery.told(0, "a", 0.0)
    recovery.looked(0, status(DEAD, info="gave up"), 120.0)
    assert recovery.done
    assert (recovery.report()[0].outcome, recovery.report()[0].error) == (Outcome.DEAD, "gave up")


def test_a_state_on_its_way_is_waited_for_and_not_told() -> None:
    """A state of the future, "diagnosing" say, is neither told nor taken for the end."""
    recovery = Recovery(["http://a"])
    recovery.looked(0, status(UNKNOWN, info="status diagnosing"), 0.0)
    assert (recovery.to_tell(), recovery.done) == ([], False)
    assert outcomes(recovery) == [Outcome.OUT_OF_TIME]
    recovery.looked(0, status(ILL), 1.0)
    assert recovery.to_tell() == [0]


def test_a_server_with_two_engines_is_told_once_and_reported_twice() -> None:
    """The instruction is the server's; the one engine that is well refuses it and is well all the same."""
    recovery = Recovery(["http://a"])
    recovery.looked(0, status(ILL, WELL), 0.0)
    assert recovery.to_tell() == [0]
    recovery.told(0, "a", 0.0)
    engines = (
        EngineHealth(engine=0, state=WELL, last_request_id="a"),
        EngineHealth(engine=1, state=WELL, last_request_id="a", error="not unhealthy"),
    )
    recovery.looked(0, FaultStatus(engines=engines), 1.0)
    assert outcomes(recovery) == [Outcome.RECOVERED, Outcome.NOT_NEEDED]


@pytest.mark.parametrize(
    ("error", "outcome", "settled"),
    [
        (GONE, Outcome.UNREACHABLE, False),
        (LATE, Outcome.OUT_OF_TIME, False),
        (BROKEN, Outcome.FAILED, False),
        (FOREIGN, Outcome.FAILED, True),
        (NONE, Outcome.NOT_SUPPORTED, True),
        (e.InvalidArgument(*ARGS), Outcome.REFUSED, True),
        (e.PreconditionFailed(*ARGS), Outcome.REFUSED, True),
    ],
)
def test_when_telling_fails(error: e.ControlError, outcome: Outcome, settled: bool) -> None:
    """What may have arrived is watched and never repeated; what was declined is over."""
    recovery = Recovery(["http://a"])
    recovery.looked(0, status(ILL), 0.0)
    recovery.told(0, error, 0.0)
    assert recovery.done is settled
    if not settled:
        recovery.looked(0, status(ILL), 1.0)
    assert recovery.to_tell() == []
    assert (outcomes(recovery), recovery.report()[0].error) == ([outcome], str(error))
    if not settled:
        recovery.looked(0, status(WELL), 2.0)
        assert outcomes(recovery) == [Outcome.RECOVERED]


def test_a_server_that_was_changing_size_is_told_again() -> None:
    """It refused everything, so it was not told: that is no repetition."""
    recovery = Recovery(["http://a"])
    recovery.looked(0, status(ILL), 0.0)
    recovery.told(0, BUSY, 0.0)
    assert (recovery.to_tell(), recovery.done) == ([0], False)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(NONE, Outcome.NOT_SUPPORTED), (FOREIGN, Outcome.FAILED), (BROKEN, Outcome.FAILED), (LATE, Outcome.OUT_OF_TIME)],
)
def test_when_looking_fails(error: e.ControlError, outcome: Outcome) -> None:
    """A server that can't say how its engine is does not get an instruction."""
    recovery = Recovery(["http://a"])
    recovery.looked(0, error, 0.0)
    assert (recovery.to_tell(), recovery.done, outcomes(recovery)) == ([], True, [outcome])


def test_a_server_without_engines_is_said_to_have_none() -> None:
    """An empty list is no health."""
    recovery = Recovery(["http://a"])
    recovery.looked(0, status(), 0.0)
    assert recovery.done
    assert not recovery.report()[0].ok


LOOKS = st.one_of(
    st.sampled_from([GONE, LATE, FOREIGN, BUSY, NONE, BROKEN]),
    st.builds(
        lambda states, ours, error: status(*states, last_request_id=ours, error=error),
        st.lists(st.sampled_from(list(EngineState)), max_size=2),
        st.sampled_from([None, "id", "other"]),
        st.sampled_from([None, "refused"]),
    ),
)
TELLS = st.sampled_from(["id", None, GONE, LATE, FOREIGN, NONE, BROKEN])


@given(st.lists(st.tuples(st.lists(LOOKS, min_size=3, max_size=3), TELLS), max_size=12))
def test_whatever_happens(rounds: list[tuple[list[FaultStatus | e.ControlError], str | e.ControlError | None]]) -> None:
    """Nobody is told twice or while not unhealthy, healthy means ok, and no duration is negative."""
    recovery = Recovery(["http://0", "http://1", "http://2"])
    told: list[int] = []
    for now, (looks, tell) in enumerate(rounds):
        for n in recovery.to_look():
            recovery.looked(n, looks[n], float(now))
        for n in recovery.to_tell():
            seen = looks[n]
            assert isinstance(seen, FaultStatus)
            assert ILL in {engine.state for engine in seen.engines}
            told.append(n)
            recovery.told(n, tell, float(now))
    assert len(told) == len(set(told))
    report = recovery.report()
    assert {rank.target for rank in report} == {"http://0", "http://1", "http://2"}
    for rank in report:
        assert rank.seconds is None or rank.seconds >= 0
        assert not rank.ok or rank.state is WELL
        assert rank.outcome is not Outcome.RECOVERED or rank.seconds is not None
