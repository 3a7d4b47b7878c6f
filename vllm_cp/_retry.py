"""Whether and when to ask again. It decides; the clients wait."""

from __future__ import annotations

from collections.abc import Callable

from vllm_cp.config import Retry
from vllm_cp.errors import ControlError, NotAdmitting, TlsFailed

__all__ = ["pause_before_next"]

#: A try that would have less than this left is not worth starting, seconds.
_LEAST = 0.01


def pause_before_next(
    error: ControlError, *, safe: bool, attempt: int, remaining_s: float, retry: Retry, jitter: Callable[[], float]
) -> float | None:
    """Seconds to wait before attempt ``attempt + 1``, or ``None`` to give up.

    ``jitter`` returns a number from 0 to 1. Only UNAVAILABLE is worth asking again: every other status is an answer,
    and a pause or a TLS disagreement does not go away within a deadline.
    """
    if not safe or error.code != "UNAVAILABLE" or isinstance(error, NotAdmitting | TlsFailed):
        return None
    if attempt >= retry.attempts:
        return None
    longest = min(retry.max_s, retry.initial_s * 2 ** (attempt - 1))
    # Not all of it is left to chance: three quick tries would all be over before gRPC dials again.
    pause = longest * (1 + jitter()) / 2
    return pause if pause + _LEAST < remaining_s else None
