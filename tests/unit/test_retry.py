"""Whether to ask again: only what is safe, only UNAVAILABLE, only inside the deadline."""

from __future__ import annotations

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_cp import Retry, errors
from vllm_cp._retry import pause_before_next
from vllm_cp._status import meaning
from vllm_cp.errors import ControlError, NotAdmitting, TlsFailed, WorkerUnreachable

UNREACHABLE = WorkerUnreachable("w", "M", "UNAVAILABLE")


def pause(
    error: ControlError = UNREACHABLE,
    *,
    safe: bool = True,
    attempt: int = 1,
    remaining_s: float = 5.0,
    retry: Retry | None = None,
    jitter: float = 1.0,
) -> float | None:
    return pause_before_next(
        error,
        safe=safe,
        attempt=attempt,
        remaining_s=remaining_s,
        retry=retry or Retry(),
        jitter=lambda: jitter,
    )


def test_a_safe_read_is_asked_three_times() -> None:
    """An unreachable worker is asked again twice, with growing pauses, and then no more."""
    assert [pause(attempt=n) for n in (1, 2, 3)] == [0.25, 0.5, None]


def test_three_attempts_outlast_a_dial() -> None:
    """A worker that was just restarting is given the time that gRPC needs to dial it again, and no whole second."""
    for jitter in (0.0, 0.5, 1.0):
        pauses = [pause(attempt=n, jitter=jitter) or 0.0 for n in (1, 2)]
        assert 0.35 < sum(pauses) < 0.8


def test_a_change_is_never_asked_again() -> None:
    """What is not safe to repeat is sent once."""
    assert pause(safe=False) is None


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
def test_only_unavailable_is_worth_asking_again(code: grpc.StatusCode) -> None:
    """Every other status is an answer, or has used up its time."""
    again = pause(meaning(code, "", target="w", method="M"))
    assert (again is not None) is (code is grpc.StatusCode.UNAVAILABLE)


@pytest.mark.parametrize("kind", [NotAdmitting, TlsFailed])
def test_what_does_not_pass_by_itself_is_not_asked_again(kind: type[ControlError]) -> None:
    """A pause or a TLS disagreement arrives as UNAVAILABLE and does not go away within a deadline."""
    assert pause(kind("w", "M", "UNAVAILABLE")) is None


def test_jitter_spreads_the_pause() -> None:
    """A herd does not come back in step: the pause is anything from half the step to all of it."""
    assert [pause(jitter=j) for j in (0.0, 0.5, 1.0)] == [0.125, 0.1875, 0.25]


def test_pauses_have_a_ceiling() -> None:
    """However often it failed, nobody waits for longer than the setting says."""
    assert pause(attempt=30, retry=Retry(attempts=99, initial_s=0.1, max_s=0.7), remaining_s=60) == 0.7


@pytest.mark.parametrize(("remaining_s", "again"), [(0.25, None), (0.259, None), (0.261, 0.25), (-1.0, None)])
def test_a_try_without_time_is_not_begun(remaining_s: float, again: float | None) -> None:
    """The deadline is for all tries together: one that could only fail is not sent."""
    assert pause(remaining_s=remaining_s) == again


@given(
    kind=st.sampled_from([getattr(errors, name) for name in errors.__all__]).filter(
        lambda kind: issubclass(kind, ControlError)
    ),
    safe=st.booleans(),
    attempt=st.integers(1, 100),
    remaining_s=st.floats(-10, 100),
    jitter=st.floats(0, 1),
)
def test_whatever_happens_the_pause_fits(
    kind: type[ControlError], safe: bool, attempt: int, remaining_s: float, jitter: float
) -> None:
    """A pause is never negative, never above the ceiling, and always ends before the deadline."""
    again = pause(kind("w", "M", "UNAVAILABLE"), safe=safe, attempt=attempt, remaining_s=remaining_s, jitter=jitter)
    if again is not None:
        assert 0 <= again <= Retry().max_s
        assert again < remaining_s
        assert safe
        assert attempt < Retry().attempts
