"""A worker as a JSON record, for whoever reads the API instead of asking workers. Unknown is null."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from datetime import datetime, timezone
from enum import Enum
from typing import Any

from vllm_cp.models.episode import Episode
from vllm_cp.models.ladder import RungState
from vllm_cp_exporter.collector import clean
from vllm_cp_exporter.snapshot import WorkerView

__all__ = ["episode_record", "iso", "load_record", "plain", "worker_record"]

#: The errors of the SDK by what the exporter has kept of them.
_PROBLEMS = {"not supported": ("NotSupported", "UNIMPLEMENTED"), "credentials rejected": ("CredentialsRejected", "")}


def worker_record(view: WorkerView, now: float) -> dict[str, Any]:
    """All that is known of one worker. ``now``: Unix seconds, for ages."""
    state, facts = view.state, view.facts
    fault = state.open_fault
    return {
        "worker": clean(view.key),
        "pool": clean(view.pool),
        "target": _or_none(view.target),
        "http_url": _or_none(view.http_url),
        "namespace": _or_none(view.namespace),
        "pod": _or_none(view.pod),
        "node": _or_none(view.node),
        "state": view.pool_state,
        "ready": state.ready,
        "reason": state.reason.value if state.reason else None,
        "health": state.evidence.health.value if state.evidence.health else None,
        "rungs": {rung.value: _rung(held) for rung, held in state.rungs},
        "instance_id": _or_none(state.instance_id or ""),
        "server": plain(facts.server),
        "model": plain(facts.model),
        "sources": plain(facts.sources),
        "errors": _errors(view),
        "load": load_record(view, now),
        "fault": episode_record(fault.episode) if fault else None,
        "restarts": state.restarts,
        "first_ready": iso(state.first_ready),
        "last_recovery_s": _number(state.last_recovery_s),
        "startup_s": plain(state.startup.phases()),
    }


def load_record(view: WorkerView, now: float) -> dict[str, Any] | None:
    """What the worker's own /metrics says of its load; ``None`` where it is not read, or not lately."""
    if view.metrics is None:
        return None
    at = view.proofs.get("engine_metrics")
    return {
        "running": _number(view.metrics.running),
        "waiting": _number(view.metrics.waiting),
        "kv_used_ratio": _number(view.metrics.kv_cache_usage_ratio),
        "age_s": None if at is None else round(max(0.0, now - at), 3),
    }


def episode_record(episode: Episode) -> dict[str, Any]:
    """One fault."""
    return {
        "cause": episode.cause.value,
        "start": iso(episode.start),
        "end": iso(episode.end),
        "kind": episode.kind.value if episode.kind else None,
        "duration_s": _number(episode.duration_s),
        "instance_id": None if episode.instance_id is None else clean(episode.instance_id),
        "detail": clean(episode.detail),
    }


def plain(value: Any) -> Any:
    """A model as JSON: the names of its fields, lists for tuples, words for enums."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return [plain(each) for each in value]
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if value is None or isinstance(value, int):
        return value
    raise TypeError(f"no record can be made of {type(value).__name__}")


def iso(at: float | None) -> str | None:
    """A moment for people and machines, in UTC; ``None`` where no calendar has it."""
    if at is None:
        return None
    try:
        return datetime.fromtimestamp(at, timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    except (OverflowError, ValueError, OSError):
        return None


def _rung(state: RungState) -> dict[str, Any]:
    return {
        "holds": state.holds,
        "provable": state.provable,
        "since": iso(state.since),
        "proved_at": iso(state.proved_at),
        "proof": _or_none(state.proof),
        "why": _or_none(state.why),
    }


def _errors(view: WorkerView) -> dict[str, dict[str, str]]:
    """Why each fact that is not known is not, in the terms of the SDK's errors."""
    facts, rungs = view.facts, view.state.rungs
    if not view.target:
        other = _error("NotSupported", "", "no control port: this worker is watched over HTTP only")
    elif rungs.reachable.holds is False:
        other = _error("WorkerUnreachable", "UNAVAILABLE", rungs.reachable.why)
    else:
        other = _error("ControlError", "", rungs.reachable.why or "not read yet")
    errors = {}
    if view.state.evidence.health is None:
        errors["health"] = other
    for name, value in (("server", facts.server), ("model", facts.model)):
        if value is None:
            errors[name] = other
    if facts.sources is None:
        problem = facts.sources_problem
        kind, code = _PROBLEMS.get(problem, ("ControlError", ""))
        errors["sources"] = _error(kind, code, problem) if problem else other
    return errors


def _error(kind: str, code: str, detail: str) -> dict[str, str]:
    return {"kind": kind, "code": code, "detail": clean(detail)}


def _or_none(text: str) -> str | None:
    return clean(text) if text else None


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
