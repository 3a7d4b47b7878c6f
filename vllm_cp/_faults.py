"""The requests of fault tolerance and its neighbours, one pure function each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from vllm_cp._http_call import Answer, Call, UnreadableError
from vllm_cp.errors import NotAdmitting
from vllm_cp.models.fault_status import FaultStatus
from vllm_cp.models.health import HealthStatus
from vllm_cp.models.probe import EngineHealth, EngineState
from vllm_cp.models.scaling import ScalingState

__all__ = ["apply", "health", "scaling", "status"]

#: The one format of the status that exists so far.
_SCHEMA = 1
#: Without and with: vLLM versions differ.
_FORMS = ("", "/v1")
_NO_FAULT_TOLERANCE = (
    "this route exists on the Python server started with --enable-fault-tolerance (neither with nor without /v1 here);"
    " the Rust frontend has no fault tolerance"
)
_NO_SCALING = "this route exists on the Python server with elastic expert parallelism; the Rust frontend has none"


def health() -> Call[HealthStatus]:
    return Call(verb="GET", path="/health", parse=_health, safe=True, accept="*/*", also=frozenset({503}))


def status() -> Call[FaultStatus]:
    return Call(
        verb="GET",
        path="/fault_tolerance/status",
        parse=_status,
        safe=True,
        forms=_FORMS,
        missing=_NO_FAULT_TOLERANCE,
    )


def apply(instruction: str, params: Mapping[str, Any] | None) -> Call[str | None]:
    body = json.dumps({"instruction": instruction, "params": dict(params or {})}, allow_nan=False)
    return Call(
        verb="POST",
        path="/fault_tolerance/apply",
        parse=_accepted,
        safe=False,
        body=body.encode(),
        forms=_FORMS,
        missing=_NO_FAULT_TOLERANCE,
    )


def scaling() -> Call[ScalingState]:
    return Call(
        verb="POST",
        path="/is_scaling_elastic_ep",
        parse=_scaling,
        # It reads, whatever its verb.
        safe=True,
        forms=_FORMS,
        # While it commits, the server refuses this request as any other, and so answers it.
        answers={NotAdmitting: ScalingState(scaling=True)},
        missing=_NO_SCALING,
    )


def _health(answer: Answer) -> HealthStatus:
    return HealthStatus.NOT_SERVING if answer.status == 503 else HealthStatus.SERVING


def _status(answer: Answer) -> FaultStatus:
    said = _object(answer)
    schema = _number(said.get("schema_version"))
    if schema is not None and schema != _SCHEMA:
        raise UnreadableError(f"schema_version {schema}", f"this vllm-cp reads version {_SCHEMA}: update it")
    engines = said.get("engines")
    if not isinstance(engines, list):
        raise UnreadableError("no list of engines in it")
    return FaultStatus(
        engines=tuple(_engine(engine) for engine in engines),
        total_engines=_number(said.get("total_engines")),
        schema_version=schema,
    )


def _engine(said: object) -> EngineHealth:
    number = _number(said.get("id")) if isinstance(said, dict) else None
    if not isinstance(said, dict) or number is None:
        raise UnreadableError("an engine without a number in it")
    state = said.get("status")
    info = _text(said.get("fault_info"))
    try:
        known = EngineState(state)
    except ValueError:
        known = EngineState.UNKNOWN
        info = info or f"status {_text(state)}"
    return EngineHealth(
        engine=number,
        state=known,
        info=info,
        last_request_id=_text(said.get("last_ft_request_id")),
        error=_text(said.get("ft_error")),
    )


def _accepted(answer: Answer) -> str | None:
    return _text(_object(answer).get("request_id"))


def _scaling(answer: Answer) -> ScalingState:
    said = _object(answer)
    scaling = said.get("is_scaling_elastic_ep")
    if not isinstance(scaling, bool):
        raise UnreadableError("no is_scaling_elastic_ep in it")
    return ScalingState(
        scaling=scaling,
        phase=_text(said.get("phase")),
        epoch=_text(said.get("epoch")),
        error=_text(said.get("error")),
        requested_data_parallel_size=_number(said.get("requested_data_parallel_size")),
    )


def _object(answer: Answer) -> dict[str, Any]:
    try:
        said = json.loads(answer.body)
    except (ValueError, RecursionError):
        raise UnreadableError("no JSON") from None
    if not isinstance(said, dict):
        raise UnreadableError("no JSON object")
    return said


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _text(value: object) -> str | None:
    """What may be text, a number or a whole object, in this or that version; ``None`` for nothing said."""
    if value is None or value == "":
        return None
    return value if isinstance(value, str) else json.dumps(value)
