"""Faults and recoveries as a function: ``step(state, seen)`` gives the next state and what changed.

Pure: an observation carries its time, so a ten-minute recovery is tested in a millisecond. What is seen shows at once
(``ready``, the open fault, its start); what is *counted* waits for ``Rules.window_s``, because a planned stop looks
like a death at first and a flapping worker has one fault, not ten: a relapse within the window after a recovery is the
same fault going on.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from vllm_cp._clocks import arrive, keep
from vllm_cp._evidence import Observation, new_instance, take
from vllm_cp._judge import Mark, Rules, judge, quiet_s, silent_since
from vllm_cp._worker import Fault, Memory, Transition, TransitionKind, WorkerState
from vllm_cp.models.episode import Cause, EndKind, Episode
from vllm_cp.models.health import HealthStatus
from vllm_cp.models.ladder import Reason, Rung, Rungs, RungState
from vllm_cp.models.probe import Answer, EngineState
from vllm_cp.models.startup import Startup

__all__ = [
    "Fault",
    "Mark",
    "Memory",
    "Observation",
    "Rules",
    "Transition",
    "TransitionKind",
    "WorkerState",
    "begin",
    "quiet_until",
    "remember",
    "step",
]


#: More workers than this behind one name are not told from one that restarts.
_REMEMBERED = 32
_RUNGS = tuple(rung.value for rung in Rung)


#: Characters of what was said at the first sign: a worker may say a great deal, and this is kept and logged.
_LONGEST_DETAIL = 500


def remember(state: WorkerState) -> Memory:
    """What to keep of a worker."""
    fault = state.open_fault
    return Memory(
        instance_id=state.instance_id,
        first_ready=state.first_ready,
        was_admitting=state.was_admitting,
        open_fault=fault.episode if fault else None,
        counted=fault.counted if fault else False,
    )


def begin(*, at: float, wall: float, rules: Rules | None = None, memory: Memory | None = None) -> WorkerState:
    """The state of a worker that was just discovered. ``at`` is monotonic, ``wall`` Unix seconds."""
    known = memory or Memory()
    fault = None
    if known.open_fault is not None:
        # Only the wall clock reaches across a restart; a clock that was set back must not make a negative age.
        age = max(0.0, wall - known.open_fault.start)
        fault = Fault(episode=known.open_fault, started=at - age, opened=0.0, counted=known.counted)
    return WorkerState(
        rules=rules or Rules(),
        at=at,
        discovered=wall,
        instance_id=known.instance_id,
        first_ready=known.first_ready,
        was_admitting=known.was_admitting,
        fault=fault,
    )


def step(state: WorkerState, seen: Observation) -> tuple[WorkerState, tuple[Transition, ...]]:
    """The state after one observation, and what changed. Observations come in order of their ``at``."""
    elapsed = max(0.0, seen.at - state.at)
    # Whoever looks looks at least once in an interval: what lies beyond, nobody watched.
    watched = state.watched + min(elapsed, state.rules.interval_s)
    now = Mark(watched, seen.wall)
    changes: list[Transition] = []
    evidence = state.evidence
    if seen.instance_id is not None and state.instance_id not in (None, seen.instance_id):
        evidence = new_instance(evidence, unseen=state.instance_fresh)
    evidence = take(evidence, seen, now, state.rules)
    arriving = arrive(state.arriving, state.evidence, evidence, now)
    new = replace(state, at=max(state.at, seen.at), watched=watched, evidence=evidence, arriving=arriving)
    new = _instance(new, seen, now, changes)
    process_start = seen.metrics.process_start if seen.metrics else None
    startup = keep(new.startup, new.evidence, process_start)
    if startup is not new.startup:
        new = replace(new, startup=startup)
    new = _verdict(new, now, changes)
    if state.evidence.health is not new.evidence.health:
        changes.insert(0, _health_changed(state.evidence.health, new.evidence.health, now))
    new = _fault(new, seen, now, changes)
    return new, tuple(changes)


def quiet_until(state: WorkerState) -> float:
    """Monotonic seconds until which time alone changes nothing: whoever lets it pass need not step before.

    On the safe side: in a fault, or while a reason tells how long something has lasted, it is ``state.at``. Never more
    than ``Rules.interval_s`` after that, for time is only watched where somebody looks.
    """
    if state.fault is not None:
        return state.at
    return state.at + min(state.rules.interval_s, quiet_s(state.evidence, state.rules, state.watched))


def _health_changed(was: HealthStatus | None, status: HealthStatus | None, now: Mark) -> Transition:
    return Transition(
        kind=TransitionKind.HEALTH,
        wall=now.wall,
        was=was.value if was else "no_answer",
        now=status.value if status else "no_answer",
    )


def _instance(state: WorkerState, seen: Observation, now: Mark, changes: list[Transition]) -> WorkerState:
    # By the verdict before this observation it was down or went away on purpose; whoever is back may be another one.
    away = state.rungs.serving.holds is False or state.reason is Reason.DRAINING
    back = state.evidence.health is HealthStatus.SERVING and not state.evidence.stopping
    if state.evidence.broken is not None or (away and back):
        state = replace(state, instance_fresh=False)
    if seen.moved:
        state = replace(state, moved=True, shared_name=False, instances_before=())
    if seen.instance_id is None:
        return state
    was, unbroken = state.instance_id, state.instance_fresh and not state.moved
    if was == seen.instance_id and unbroken and state.arriving is None:
        return state
    state = replace(state, instance_id=seen.instance_id, instance_fresh=True, moved=False)
    if was == seen.instance_id:
        return replace(state, arriving=None)
    # Clocks are kept of a start that was watched, from a closed port on.
    state = replace(state, startup=state.arriving or Startup(), arriving=None)
    if was is None:
        return state
    state = _turns(state, was, now, changes)
    if state.shared_name:
        return state
    changes.append(Transition(kind=TransitionKind.INSTANCE, wall=now.wall, was=was, now=seen.instance_id))
    state = replace(state, restarts=state.restarts + 1)
    # Where the worker was seen to go away, that was a fault or it was not.
    if unbroken and state.was_admitting and state.fault is None:
        episode = Episode(
            cause=Cause.REPLACED_UNSEEN, start=now.wall, end=now.wall, kind=EndKind.REPLACED, instance_id=was
        )
        state = _count_end(_count_fault(state, episode, now, changes), episode, now, changes)
    return state


def _turns(state: WorkerState, was: str, now: Mark, changes: list[Transition]) -> WorkerState:
    """Whether the instance that answers now is one that was there before: an id is never given twice."""
    assert state.instance_id is not None
    if state.instance_id in state.instances_before and not state.shared_name:
        known = len({*state.instances_before, was})
        detail = f"{known} instances answer in turns: name each worker apart"
        changes.append(
            Transition(kind=TransitionKind.SHARED_NAME, wall=now.wall, was=was, now=state.instance_id, detail=detail)
        )
        state = replace(state, shared_name=True)
    before = (*(one for one in state.instances_before if one != was), was)
    return replace(state, instances_before=before[-_REMEMBERED:])


def _verdict(state: WorkerState, now: Mark, changes: list[Transition]) -> WorkerState:
    rungs, reason = judge(state.evidence, state.rules, now)
    stamped = {}
    for name in _RUNGS:
        old, fresh = getattr(state.rungs, name), getattr(rungs, name)
        same = old.holds == fresh.holds and old.since is not None
        stamped[name] = RungState(
            holds=fresh.holds,
            provable=fresh.provable,
            since=old.since if same else now.wall,
            proved_at=fresh.proved_at,
            proof=fresh.proof,
            why=fresh.why,
        )
        if old.holds != fresh.holds:
            changes.append(
                Transition(
                    kind=TransitionKind.RUNG,
                    wall=now.wall,
                    was=f"{name}={_word(old.holds)}",
                    now=f"{name}={_word(fresh.holds)}",
                    detail=fresh.why,
                )
            )
    if (state.reason is None) != (reason is None):
        changes.append(
            Transition(
                kind=TransitionKind.READY,
                wall=now.wall,
                was="ready" if state.reason is None else state.reason.value,
                now="ready" if reason is None else reason.value,
            )
        )
    admitting = rungs[rungs.provable(Rung.ADMITTING)].holds
    return replace(
        state,
        rungs=Rungs(**stamped),
        reason=reason,
        first_ready=now.wall if reason is None and state.first_ready is None else state.first_ready,
        was_admitting=state.was_admitting or bool(admitting),
    )


def _word(holds: bool | None) -> str:
    return {True: "yes", False: "no", None: "unknown"}[holds]


def _up(state: WorkerState) -> bool | None:
    """Whether the worker does its work: the opposite of a fault. Suspension is no fault."""
    sick = any(e.state in (EngineState.UNHEALTHY, EngineState.DEAD) for e in state.evidence.engines)
    holds = state.rungs[state.rungs.provable(Rung.ANSWERING)].holds
    return False if sick else holds


def _fault(state: WorkerState, seen: Observation, now: Mark, changes: list[Transition]) -> WorkerState:
    up = _up(state)
    planned = state.evidence.stopping or seen.removed
    fault = state.fault
    if planned and up is False:
        # It stopped on purpose: who comes next has yet to show that it can serve.
        state = replace(state, was_admitting=False)
    if fault is None:
        if up is False and state.was_admitting and not planned:
            state = _open(state, seen, now, changes)
        return state
    if planned and not fault.counted:
        return _planned(state, fault, now, changes)
    if fault.closed is None:
        if seen.removed:
            return _gone(state, fault, now, changes)
        if up:
            state = _recover(state, fault, seen, now, changes)
        elif fault.up_since is not None:
            state = replace(state, fault=replace(fault, up_since=None))
    elif seen.removed:
        return _count(state, now, changes, at_once=True)
    elif up is False and not planned:
        episode = replace(fault.episode, end=None, kind=None, duration_s=None)
        changes.append(Transition(kind=TransitionKind.FAULT_REOPENED, wall=now.wall, episode=episode))
        state = replace(state, fault=replace(fault, episode=episode, closed=None, up_since=None))
    return _count(state, now, changes)


def _open(state: WorkerState, seen: Observation, now: Mark, changes: list[Transition]) -> WorkerState:
    cause = _cause(state)
    began = seen.at if seen.began is None else min(seen.began, seen.at)
    silent, contact = silent_since(state.evidence), state.evidence.contact
    if cause is Cause.ENGINE_SILENT and silent is not None:
        # The fault began, as far as anybody can know, with the question that was not answered.
        began = seen.at - (now.watched - silent.watched)
    elif cause is Cause.UNREACHABLE and contact is not None:
        # However long ago the question was asked that broke off, the last answer came before the fault.
        last = seen.at - (now.watched - contact.watched)
        began = last if state.evidence.broken is None else max(began, last)
    episode = Episode(
        cause=cause,
        start=now.wall - (seen.at - began),
        instance_id=state.instance_id,
        detail=_detail(state),
    )
    changes.append(Transition(kind=TransitionKind.FAULT_OPENED, wall=now.wall, now=cause.value, episode=episode))
    return replace(state, fault=Fault(episode=episode, started=began, opened=now.watched))


def _detail(state: WorkerState) -> str:
    for _, rung in state.rungs:
        if rung.holds is False:
            return rung.why[:_LONGEST_DETAIL]
    return ""


def _cause(state: WorkerState) -> Cause:
    seen = state.evidence
    if state.rungs.reachable.holds is False:
        return Cause.UNREACHABLE
    if state.rungs.serving.holds is False:
        return Cause.ENGINE_REPORTED
    engines = {engine.state for engine in seen.engines}
    if EngineState.DEAD in engines:
        return Cause.FT_DEAD
    if EngineState.UNHEALTHY in engines:
        return Cause.FT_UNHEALTHY
    if seen.round_trip is not None and seen.round_trip.answer is Answer.ENGINE_ERROR:
        return Cause.ENGINE_ERROR
    return Cause.ENGINE_SILENT if state.rungs.answering.holds is False else Cause.UNKNOWN


def _recover(state: WorkerState, fault: Fault, seen: Observation, now: Mark, changes: list[Transition]) -> WorkerState:
    up_since = seen.at if fault.up_since is None else fault.up_since
    fault = replace(fault, up_since=up_since)
    # Whether it resumed or was replaced is known once the instance is read again; a server without one can't tell.
    if not state.instance_fresh and state.instance_id is not None and seen.at - up_since < state.rules.window_s:
        return replace(state, fault=fault)
    kind = EndKind.RESUMED
    if fault.episode.instance_id not in (None, state.instance_id):
        kind = EndKind.REPLACED
    elif fault.episode.cause in (Cause.FT_UNHEALTHY, Cause.FT_DEAD):
        kind = EndKind.RETRIED
    return _close(state, fault, kind, up_since, seen, now, changes)


def _close(  # noqa: PLR0917  (one call site each; the arguments are the sentence)
    state: WorkerState,
    fault: Fault,
    kind: EndKind,
    at: float,
    seen: Observation,
    now: Mark,
    changes: list[Transition],
) -> WorkerState:
    episode = replace(
        fault.episode,
        end=now.wall - (seen.at - at),
        kind=kind,
        duration_s=max(0.0, at - fault.started),
    )
    changes.append(Transition(kind=TransitionKind.FAULT_CLOSED, wall=now.wall, now=kind.value, episode=episode))
    return replace(
        state,
        fault=replace(fault, episode=episode, closed=now.watched),
        last_recovery_s=episode.duration_s,
    )


def _planned(state: WorkerState, fault: Fault, now: Mark, changes: list[Transition]) -> WorkerState:
    episode = replace(fault.episode, end=now.wall, kind=EndKind.PLANNED, duration_s=None)
    return _count_end(replace(state, fault=None), episode, now, changes)


def _gone(state: WorkerState, fault: Fault, now: Mark, changes: list[Transition]) -> WorkerState:
    episode = replace(fault.episode, end=now.wall, kind=EndKind.GONE)
    return _count_end(replace(state, fault=None), episode, now, changes)


def _count(state: WorkerState, now: Mark, changes: list[Transition], *, at_once: bool = False) -> WorkerState:
    """Count what has waited for the window."""
    fault = state.fault
    if fault is None:
        return state
    window = 0.0 if at_once else state.rules.window_s
    if not fault.counted and now.watched - fault.opened >= window:
        state = _count_fault(state, fault.episode, now, changes)
        fault = replace(fault, counted=True)
        state = replace(state, fault=fault)
    if fault.closed is not None and now.watched - fault.closed >= window:
        state = _count_end(replace(state, fault=None), fault.episode, now, changes)
    return state


def _count_fault(state: WorkerState, episode: Episode, now: Mark, changes: list[Transition]) -> WorkerState:
    changes.append(
        Transition(kind=TransitionKind.FAULT_COUNTED, wall=now.wall, now=episode.cause.value, episode=episode)
    )
    faults = {**state.faults, episode.cause: state.faults[episode.cause] + 1}
    return replace(state, faults=MappingProxyType(faults))


def _count_end(state: WorkerState, episode: Episode, now: Mark, changes: list[Transition]) -> WorkerState:
    assert episode.kind is not None
    changes.append(Transition(kind=TransitionKind.FAULT_ENDED, wall=now.wall, now=episode.kind.value, episode=episode))
    ends = {**state.ends, episode.kind: state.ends[episode.kind] + 1}
    return replace(state, ends=MappingProxyType(ends))
