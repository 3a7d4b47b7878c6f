"""How fast the stories run, and how exact what is measured has to be."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest

from vllm_cp.episodes import Rules

IN_CI = os.environ.get("CI", "").lower() in ("1", "true")

#: How far a time may lie from the simulator's own, seconds.
EXACT_S = 1.0 if IN_CI else 0.3
#: From the server's own word to ``ready``, seconds.
WORD_S = 1.0 if IN_CI else 0.1
#: From a worker's return to the moment when it is noticed, seconds; literal at every pace.
RETURN_S = 2.5
#: Patience with what has no bound of its own, seconds.
PATIENCE_S = 15.0


@dataclass(frozen=True)
class Pace:
    """The rules of one run, and how long things last in it."""

    name: str
    rules: Rules
    outage_s: float

    @property
    def round_s(self) -> float:
        """The longest time between two questions: the interval and its jitter."""
        return 1.2 * self.rules.interval_s

    @property
    def silent_within_s(self) -> float:
        """From an engine's silence to a worker that is not ready, at most."""
        return self.rules.answer_within_s + self.rules.interval_s

    @property
    def busy_s(self) -> float:
        """A long step that is none too long: 12 s where 15 s are allowed."""
        return 0.8 * self.rules.answer_within_s


FAST = Pace(
    "fast", Rules(answer_within_s=1.0, window_s=0.6, interval_s=0.2, drain_after_s=0.3, maintenance_s=30), outage_s=5.0
)
LITERAL = Pace("literal", Rules(), outage_s=45.0)

#: For stories that are told at both paces; ``pace`` is FAST where a test says nothing.
both_paces = pytest.mark.parametrize(
    "pace", [FAST, pytest.param(LITERAL, marks=[pytest.mark.slow, pytest.mark.timeout(300)])], ids=lambda p: p.name
)
