"""Which method is answered by what, and what is no method at a version."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from google.protobuf.message import Message

from vllm_cp._proto import health_pb2 as health
from vllm_cp._proto import inference_pb2 as inference
from vllm_cp.testing._bell import Refusal
from vllm_cp.testing._calls import Call, read
from vllm_cp.testing._control import CONTROL
from vllm_cp.testing._health import check, watch
from vllm_cp.testing._inference import generate, generate_stream
from vllm_cp.testing._seen import request_dict, short_name

if TYPE_CHECKING:
    from vllm_cp.testing._frontend import Frontend

__all__ = ["canonical", "measure", "request_of", "route"]

Handler = Callable[["Frontend", Call], Awaitable[None]]

_METADATA_LIMIT = 16 * 1024
_MIB = 1024 * 1024
_HEALTH = "/grpc.health.v1.Health"
_INFERENCE = "/vllm.Inference"
_CONTROL = "/vllm.Control"
_STREAMS: dict[str, Handler] = {
    f"{_HEALTH}/Check": check,
    f"{_HEALTH}/Watch": watch,
    f"{_INFERENCE}/Generate": generate,
    f"{_INFERENCE}/GenerateStream": generate_stream,
}
_REQUESTS: dict[str, type[Message]] = {_HEALTH: health.HealthCheckRequest, _INFERENCE: inference.GenerateRequest}
_METHODS = tuple(short_name(path) for path in (*_STREAMS, *(f"{_CONTROL}/{name}" for name in CONTROL)))


def route(path: str, version: tuple[int, ...]) -> Handler:
    """What answers calls of a path. Raises Refusal for what that version does not have."""
    if path in _STREAMS:
        return _STREAMS[path]
    service, _, name = path.rpartition("/")
    if service != _CONTROL or name not in CONTROL or version < CONTROL[name][0]:
        raise Refusal("UNIMPLEMENTED")
    _, kind, answer = CONTROL[name]

    async def unary(front: Frontend, call: Call) -> None:
        data = await answer(front, read(kind, call.request))
        await front.bell.until(lambda: not front.frozen)
        await call.send(data)

    return unary


def measure(call: Call, version: tuple[int, ...]) -> None:
    """Raises Refusal for what is above the limits of that version."""
    if sum(len(key) + len(value) + 32 for key, value in call.metadata) > _METADATA_LIMIT:
        raise Refusal("UNKNOWN", "Received http2 header with status: 431")
    limit = 4 * _MIB if version < (0, 28) else 32 * _MIB
    if len(call.request) > limit:
        found = len(call.request)
        raise Refusal(
            "OUT_OF_RANGE",
            f"Error, decoded message length too large: found {found} bytes, the limit is: {limit} bytes",
        )


def request_of(call: Call) -> dict[str, object]:
    """The fields of a request, for the record of calls; empty for what cannot be read."""
    service, _, name = call.path.rpartition("/")
    kind = CONTROL[name][1] if service == _CONTROL and name in CONTROL else _REQUESTS.get(service)
    try:
        return request_dict(read(kind, call.request)) if kind is not None else {}
    except Refusal:
        return {}


def canonical(method: str) -> str:
    """``Control.IsPaused`` for any spelling of it. Raises ValueError for what is no method of a worker."""
    if method.startswith("/"):
        return short_name(method)
    for known in _METHODS:
        if method in (known, known.rpartition(".")[2]):
            return known
    raise ValueError(f"no method is called {method!r}; one of {_METHODS}")
