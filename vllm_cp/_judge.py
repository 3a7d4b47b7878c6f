"""From evidence to a verdict: which rungs hold, and why the worker is not ready. Pure.

Ages are in *watched* seconds: the time during which somebody was looking. A daemon that was stopped for a minute
learned nothing in that minute, so nothing grows old in it.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_cp.errors import ConfigError
from vllm_cp.models.health import HealthStatus
from vllm_cp.models.ladder import Expect, Reason, Rung, Rungs, RungState
from vllm_cp.models.probe import Answer, EngineHealth, EngineState, RoundTrip

__all__ = ["Evidence", "Mark", "Rules", "judge", "quiet_s", "silent_since"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How evidence is judged. All times in seconds."""

    #: A round trip that waits for longer than this refutes ``answering``; silence of the port refutes ``reachable``.
    answer_within_s: float = 15.0
    #: A fault's cause, and its end, are counted after this long: a planned stop looks like a death at first.
    window_s: float = 5.0
    #: How long weight updates and sleep operations may hold up the engines.
    maintenance_s: float = 600.0
    #: How often questions are asked; an answer may be that much older than the question that shows it missing.
    interval_s: float = 5.0
    #: A stream that ended in order, on a port that still accepts and does not answer for this long, is a drain.
    drain_after_s: float = 3.0
    #: The rung that makes a worker ready.
    ready_rung: Rung = Rung.ADMITTING
    expect: Expect = Expect.SERVING

    def __post_init__(self) -> None:
        for name in ("answer_within_s", "window_s", "maintenance_s", "drain_after_s", "interval_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be a positive number of seconds, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment, on both clocks."""

    #: Watched seconds.
    watched: float
    #: Unix seconds.
    wall: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The newest evidence of each kind."""

    #: The last answer of the control port, of whatever kind.
    contact: Mark | None = None
    #: The connection was refused or broke, and no answer came since.
    broken: Mark | None = None
    broken_detail: str = ""
    #: Why we could not ask at all; a fault of ours, which says nothing of the worker.
    blind: str = ""
    #: What was said instead of a health status: we may not ask, or there is nobody to ask.
    turned_away: str = ""
    health: HealthStatus | None = None
    #: The health service once knew the name that is watched.
    name_known: bool = False
    #: The health stream ended in order after NOT_SERVING.
    ended: Mark | None = None
    #: A drain was recognised; holds until the worker serves again.
    draining: bool = False
    #: Discovery says that the worker is being deleted.
    deleted: bool = False
    #: The question now waiting for an answer.
    asked: Mark | None = None
    answered: Mark | None = None
    round_trip: RoundTrip | None = None
    round_trips_unsupported: bool = False
    #: The token counter of each engine, in the order of the page.
    tokens: tuple[float, ...] = ()
    #: When each of them was last seen to move.
    moved: tuple[Mark | None, ...] = ()
    #: Since when each of them has moved at least once: the oldest of those moves.
    tokens_moved: Mark | None = None
    maintenance: Mark | None = None
    #: An operation that was in flight was seen to be over, inside the time allowed for it.
    maintained: Mark | None = None
    #: A generation was seen to finish on this instance.
    generated: Mark | None = None
    #: The last canary's success.
    canary: Mark | None = None
    #: Canaries are sent to this worker.
    canaries: bool = False
    #: The worker's /metrics page is read, and counts tokens.
    metrics: bool = False
    engines: tuple[EngineHealth, ...] = ()
    #: When fault tolerance last told of them.
    engines_at: Mark | None = None

    @property
    def stopping(self) -> bool:
        """The worker goes away on purpose: what it loses now is no fault."""
        return self.draining or self.deleted


@dataclass(frozen=True, slots=True)
class _Proof:
    mark: Mark | None
    what: str


def judge(seen: Evidence, rules: Rules, now: Mark) -> tuple[Rungs, Reason | None]:
    """The ladder, and the reason why the worker is not ready (``None`` when it is)."""
    reachable, unreachable = _reachable(seen, rules, now)
    serving, not_serving = _serving(seen)
    answering, silent = _answering(seen, rules, now)
    admitting, held = _admitting(seen, answering)
    warm = _warm(seen)
    serving = _below(reachable, serving)
    answering = _below(serving, answering)
    admitting = _below(answering, admitting)
    warm = _below(admitting, warm)
    rungs = Rungs(reachable=reachable, serving=serving, answering=answering, admitting=admitting, warm=warm)
    wanted = rules.ready_rung
    suspended = held is Reason.SUSPENDED
    if suspended and rules.expect is not Expect.SERVING and wanted.height > Rung.ANSWERING.height:
        wanted = Rung.ANSWERING
    if rungs[rungs.provable(wanted)].holds:
        return rungs, None
    if seen.stopping:
        return rungs, Reason.DRAINING
    for reason in (unreachable, not_serving, silent, held):
        if reason is not None:
            return rungs, reason
    if rules.ready_rung is Rung.WARM and rungs.warm.holds is False:
        return rungs, Reason.NOT_WARM
    if seen.turned_away and not seen.blind:
        return rungs, Reason.UNPROVABLE
    return rungs, Reason.STARTING if seen.answered is None else Reason.UNKNOWN


def _below(lower: RungState, upper: RungState) -> RungState:
    """The upper rung, knowing the one below: it falls with it, and is unknown where that is unknown."""
    if lower.holds is False:
        return RungState(
            holds=False, provable=upper.provable, proved_at=upper.proved_at, proof=upper.proof, why=lower.why
        )
    if lower.holds is None and lower.provable and upper.holds is not None:
        return RungState(provable=upper.provable, proved_at=upper.proved_at, proof=upper.proof, why=lower.why)
    return upper


def _reachable(seen: Evidence, rules: Rules, now: Mark) -> tuple[RungState, Reason | None]:
    at = seen.contact.wall if seen.contact else None
    if seen.broken is not None:
        why = seen.broken_detail or "the connection was refused or broke"
        return RungState(holds=False, proved_at=at, proof="answer", why=why), Reason.UNREACHABLE
    if seen.blind:
        return RungState(proved_at=at, proof="answer", why=seen.blind), None
    if seen.contact is None:
        return RungState(why="not asked yet"), None
    silence = now.watched - seen.contact.watched
    # When a round trip is overdue and the port said nothing else meanwhile, it is the port that is silent.
    if silence > rules.answer_within_s + rules.interval_s or (
        _overdue(seen, rules, now) and silence >= _waiting(seen, now)
    ):
        why = f"no answer for {silence:.1f} s"
        return RungState(holds=False, proved_at=at, proof="answer", why=why), Reason.UNREACHABLE
    return RungState(holds=True, proved_at=at, proof="answer"), None


def _serving(seen: Evidence) -> tuple[RungState, Reason | None]:
    at = seen.contact.wall if seen.contact else None
    if seen.health is HealthStatus.SERVING:
        return RungState(holds=True, proved_at=at, proof="health"), None
    if seen.health in (None, HealthStatus.UNKNOWN):
        return RungState(why="health said nothing yet" if seen.health is None else "health says UNKNOWN"), None
    return RungState(holds=False, proved_at=at, proof="health", why=f"health says {seen.health.value}"), (
        Reason.NOT_SERVING
    )


def _newest(*proofs: _Proof) -> _Proof:
    """The newest of the proofs that exist."""
    best = _Proof(None, "")
    for proof in proofs:
        if proof.mark is not None and (best.mark is None or proof.mark.watched >= best.mark.watched):
            best = proof
    return best


def _proof(seen: Evidence) -> _Proof:
    """The newest proof that the engines answer."""
    trip = seen.round_trip
    answered = seen.answered if trip and trip.answer in (Answer.ANSWERED, Answer.DISAGREE) else None
    return _newest(_Proof(answered, "round trip"), _Proof(seen.tokens_moved, "tokens"), _Proof(seen.canary, "canary"))


def silent_since(seen: Evidence) -> Mark | None:
    """Since when a round trip has been waiting, and nothing else proved that the engines answer, or excused them."""
    if seen.asked is None:
        return None
    marks = (seen.asked, _proof(seen).mark, seen.maintained)
    return max((mark for mark in marks if mark is not None), key=lambda mark: mark.watched)


def _answering(seen: Evidence, rules: Rules, now: Mark) -> tuple[RungState, Reason | None]:
    proof, trip, silent = _proof(seen), seen.round_trip, silent_since(seen)
    waiting = now.watched - silent.watched if silent else 0.0
    overdue = waiting > rules.answer_within_s
    # What waited until an operation was over waited with reason, and may wait as long again as any other question.
    excused = silent is not None and silent is seen.maintained and not overdue and _overdue(seen, rules, now)
    lately = False
    if proof.mark is not None:
        # A question younger than its limit accuses nobody, and the answer before it may be older by an interval.
        age = (seen.asked or now).watched - proof.mark.watched
        lately = age <= rules.answer_within_s + rules.interval_s

    def state(holds: bool | None, why: str = "") -> RungState:
        # Without round trips it is the canary still to come that can prove the rung; else only what is seen.
        awaited = not seen.round_trips_unsupported or (seen.canaries and seen.generated is None)
        at = proof.mark.wall if proof.mark else None
        return RungState(holds=holds, provable=awaited or holds is not None, proved_at=at, proof=proof.what, why=why)

    if trip and trip.answer is Answer.ENGINE_ERROR:
        # Tokens of another engine do not take it back; the next round trip does.
        return state(False, trip.detail or "an engine failed to answer"), Reason.ENGINE_ERROR
    if lately and not overdue and not excused:
        return state(True), None
    if seen.maintenance is not None and now.watched - seen.maintenance.watched <= rules.maintenance_s:
        return state(None, "a weight update or sleep operation is in flight"), Reason.MAINTENANCE
    if excused:
        return state(None, "a weight update or sleep operation was in flight until now"), Reason.MAINTENANCE
    if overdue:
        return state(False, f"a round trip has been waiting for {waiting:.1f} s"), Reason.ENGINE_SILENT
    if seen.round_trips_unsupported:
        return state(None, "this worker's version has no round trip; a canary or its /metrics could prove it"), None
    if seen.asked is not None:
        return state(None, f"a round trip has been waiting for {waiting:.1f} s"), None
    return state(None, "not asked yet" if proof.mark is None else "the proof is stale"), None


def quiet_s(seen: Evidence, rules: Rules, watched: float) -> float:
    """Seconds from ``watched`` on in which no evidence grows too old: what ``judge`` says stays so that long.

    On the safe side. It is 0 where reasons tell a time that runs, or where something waits for the end of a window.
    """
    limit = rules.answer_within_s + rules.interval_s
    proof = _proof(seen).mark
    running = (seen.broken, seen.ended, seen.maintenance, seen.maintained)
    if any(mark is not None for mark in running) or seen.contact is None:
        return 0.0
    ends = [seen.contact.watched + limit]
    if seen.engines_at is not None:
        ends.append(seen.engines_at.watched + limit)
    if seen.asked is not None:
        if proof is None or seen.asked.watched - proof.watched > limit:
            return 0.0
        ends.append(seen.asked.watched + rules.answer_within_s)
    elif proof is not None:
        ends.append(proof.watched + limit)
    return max(0.0, min(ends) - watched)


def _waiting(seen: Evidence, now: Mark) -> float:
    """Watched seconds for which a round trip has been waiting."""
    return now.watched - seen.asked.watched if seen.asked else 0.0


def _overdue(seen: Evidence, rules: Rules, now: Mark) -> bool:
    return _waiting(seen, now) > rules.answer_within_s


def _admitting(seen: Evidence, answering: RungState) -> tuple[RungState, Reason | None]:
    states = {engine.state for engine in seen.engines}
    trip = seen.round_trip
    at, proof = answering.proved_at, answering.proof

    def state(holds: bool | None, why: str = "") -> RungState:
        # What refutes this rung is known, also where nothing could prove it.
        provable = answering.provable or holds is False
        return RungState(holds=holds, provable=provable, proved_at=at, proof=proof, why=why)

    if seen.stopping:
        return state(False, "draining or being deleted"), Reason.DRAINING
    if EngineState.DEAD in states:
        return state(False, "fault tolerance says an engine is dead"), Reason.FT_DEAD
    if EngineState.UNHEALTHY in states:
        return state(False, "fault tolerance says an engine is unhealthy"), Reason.FT_UNHEALTHY
    if trip is not None and trip.answer is Answer.DISAGREE:
        return state(False, trip.detail or "the ranks are in different states"), Reason.RANKS_DISAGREE
    if trip is not None and trip.paused:
        return state(False, "paused or asleep"), Reason.SUSPENDED
    return state(answering.holds, answering.why), None


def _warm(seen: Evidence) -> RungState:
    if seen.generated is not None:
        return RungState(holds=True, proved_at=seen.generated.wall, proof="canary" if seen.canary else "tokens")
    if not (seen.canaries or seen.metrics):
        return RungState(provable=False, why="nothing here sees generations: give an HTTP URL or allow a canary")
    return RungState(holds=False, why="no generation was seen to finish on this instance")
