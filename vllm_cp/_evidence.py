"""Observations, and how one becomes evidence. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from vllm_cp._judge import Evidence, Mark, Rules, silent_since
from vllm_cp.models.health import HealthStatus
from vllm_cp.models.probe import Answer, EngineHealth, EngineMetrics, RoundTrip

__all__ = ["Observation", "new_instance", "take"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One thing that was seen, with its time. Every field left out says nothing; all left out, time passes."""

    #: Monotonic seconds.
    at: float
    #: Unix seconds.
    wall: float
    #: Monotonic seconds when the question was asked to which this is the answer.
    began: float | None = None
    #: True: the control port answered, whatever it said. False: it refused, or the connection broke and a new one too.
    contact: bool | None = None
    health: HealthStatus | None = None
    #: The health stream ended with status OK.
    stream_ended: bool = False
    #: From GetServerInfo.
    instance_id: str | None = None
    #: A round trip to the engines was asked for.
    asked: bool = False
    round_trip: RoundTrip | None = None
    metrics: EngineMetrics | None = None
    #: Whether canaries are sent to this worker at all.
    canaries: bool | None = None
    #: A generation of ours finished.
    canary: bool = False
    engines: tuple[EngineHealth, ...] | None = None
    #: Whether discovery says that the worker is being deleted.
    deleted: bool | None = None
    #: The worker is no longer discovered.
    removed: bool = False
    #: It is asked at another address from now on: another instance there is no fault.
    moved: bool = False
    #: A question was not answered and not left open either: we may not ask it, or nobody is there who could answer.
    #: Without ``contact`` it never left us.
    turned_away: bool = False
    #: What was said, for people.
    detail: str = ""


def _with(evidence: Evidence, **facts: object) -> Evidence:
    """The same evidence where it says so already: most looks bring nothing new, and a copy of all of it is not free."""
    if all(getattr(evidence, name) is fact for name, fact in facts.items()):
        return evidence
    return replace(evidence, **facts)  # type: ignore[arg-type]  # names and types are those of the fields


def take(evidence: Evidence, seen: Observation, now: Mark, rules: Rules) -> Evidence:
    """The evidence after one observation."""
    if seen.moved:
        # A question in flight was given up with the connection.
        evidence = replace(evidence, asked=None)
    evidence = _connection(evidence, seen, now)
    evidence = _round_trip(evidence, seen, now)
    if seen.metrics is not None:
        evidence = _metrics(evidence, seen.metrics, now, rules)
    if seen.canaries is not None:
        evidence = replace(evidence, canaries=seen.canaries)
    if seen.canary:
        evidence = replace(evidence, canary=now, generated=evidence.generated or now)
    if seen.engines is not None:
        evidence = replace(evidence, engines=seen.engines, engines_at=now)
    elif evidence.engines_at is not None and now.watched - evidence.engines_at.watched > _ages(rules):
        evidence = replace(evidence, engines=(), engines_at=None)
    return _stopping(evidence, seen, now, rules)


def _ages(rules: Rules) -> float:
    """Seconds after which what fault tolerance said last is no longer how things are."""
    return rules.answer_within_s + rules.interval_s


def _connection(evidence: Evidence, seen: Observation, now: Mark) -> Evidence:
    if seen.contact:
        evidence = replace(evidence, contact=now, broken=None, broken_detail="", blind="")
    elif seen.contact is False:
        # The question in flight died with the connection, and the server's word is old.
        evidence = replace(
            evidence,
            broken=evidence.broken or now,
            broken_detail=seen.detail,
            blind="",
            health=None,
            # Whoever comes up next may not know the name yet; that is a start, not a drain.
            name_known=False,
            ended=None,
            asked=None,
            round_trip=None,
            moved=(None,) * len(evidence.moved),
            tokens_moved=None,
            canary=None,
            engines=(),
            maintenance=None,
        )
    if seen.turned_away:
        # What was known of the server is old from here on, and the question in flight is taken back.
        blind = "" if seen.contact else seen.detail or "we could not ask"
        evidence = replace(evidence, health=None, asked=None, blind=blind, turned_away=seen.detail or "turned away")
    if seen.health is not None:
        known = evidence.name_known or seen.health is not HealthStatus.SERVICE_UNKNOWN
        ended = None if seen.health is HealthStatus.SERVING else evidence.ended
        evidence = _with(evidence, turned_away="", health=seen.health, name_known=known, ended=ended)
    if seen.stream_ended and evidence.health is HealthStatus.NOT_SERVING:
        evidence = replace(evidence, ended=now)
    return evidence


def _round_trip(evidence: Evidence, seen: Observation, now: Mark) -> Evidence:
    # One asked in place of a lost one waits from the lost one on, unless something proved the engines in between.
    if seen.asked and (evidence.asked is None or silent_since(evidence) is not evidence.asked):
        evidence = replace(evidence, asked=now)
    trip = seen.round_trip
    if trip is None:
        return evidence
    if trip.answer is Answer.LOST:
        # Not an answer: the silence goes on from the first question.
        return evidence
    if trip.answer is Answer.UNSUPPORTED:
        return replace(evidence, round_trips_unsupported=True, asked=None)
    return replace(evidence, round_trip=trip, answered=now, asked=None, round_trips_unsupported=False)


def _metrics(evidence: Evidence, page: EngineMetrics, now: Mark, rules: Rules) -> Evidence:
    if page.maintenance > 0:
        evidence = replace(evidence, maintenance=evidence.maintenance or now)
    elif evidence.maintenance is not None:
        in_time = now.watched - evidence.maintenance.watched <= rules.maintenance_s
        evidence = replace(evidence, maintenance=None, maintained=now if in_time else None)
    tokens = page.tokens_by_engine
    if not tokens and page.generation_tokens is not None:
        tokens = (page.generation_tokens,)
    if not tokens:
        return evidence
    before, moved = evidence.tokens, evidence.moved
    if len(before) != len(tokens):
        before, moved = tokens, (None,) * len(tokens)
    moved = tuple(now if new > old else mark for new, old, mark in zip(tokens, before, moved, strict=True))
    seen = [mark for mark in moved if mark is not None]
    generated = evidence.generated
    if any(new < old for new, old in zip(tokens, before, strict=True)):
        generated = None  # A counter that fell is another process's.
    return replace(
        evidence,
        metrics=True,
        tokens=tokens,
        moved=moved,
        # One engine that generates says nothing of another that is gone: only the slowest of them proves anything.
        tokens_moved=min(seen, key=lambda mark: mark.watched) if len(seen) == len(moved) else None,
        generated=generated or (now if any(tokens) else None),
    )


def _stopping(evidence: Evidence, seen: Observation, now: Mark, rules: Rules) -> Evidence:
    if seen.deleted is not None:
        evidence = replace(evidence, deleted=seen.deleted)
    if seen.health is HealthStatus.SERVING:
        return _with(evidence, draining=False)
    if evidence.health is HealthStatus.SERVICE_UNKNOWN and evidence.name_known:
        return _with(evidence, draining=True)
    waiting = now.watched - evidence.ended.watched if evidence.ended else 0.0
    if waiting > rules.drain_after_s and evidence.broken is None:
        return replace(evidence, draining=True)
    return evidence


def new_instance(evidence: Evidence, *, unseen: bool) -> Evidence:
    """The evidence that outlives an instance: what was proved of the old one says nothing of the new one.

    ``unseen``: no break was seen in between, so the last round trip may have been the old one's.
    """
    if unseen:
        evidence = replace(evidence, asked=None, answered=None, round_trip=None)
    return replace(
        evidence,
        draining=False,
        ended=None,
        generated=None,
        canary=None,
        tokens=(),
        moved=(),
        tokens_moved=None,
        engines=(),
    )
