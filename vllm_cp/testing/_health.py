"""The health service of a fake worker."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from vllm_cp._proto import health_pb2 as health
from vllm_cp.models.health import HealthStatus
from vllm_cp.testing._bell import Refusal
from vllm_cp.testing._calls import Call, read

if TYPE_CHECKING:
    from vllm_cp.testing._frontend import Frontend

__all__ = ["SERVICES", "check", "watch"]

SERVICES = ("", "vllm.Inference", "vllm.Control")


async def check(front: Frontend, call: Call) -> None:
    """The status now."""
    await call.send(_message(_said(front, call)()))


async def watch(front: Frontend, call: Call) -> None:
    """The status now and at each change. Stays open after NOT_SERVING, ends when the worker drains."""
    said = _said(front, call)
    last = said()
    await call.send(_message(last))
    while True:
        await front.bell.until(partial(_news, front, said, last))
        if said() is not last:
            last = said()
            await call.send(_message(last))
        if front.draining:
            return


def _news(front: Frontend, said: Callable[[], HealthStatus], last: HealthStatus) -> bool:
    return not front.frozen and (said() is not last or front.draining)


def _said(front: Frontend, call: Call) -> Callable[[], HealthStatus]:
    service = read(health.HealthCheckRequest, call.request).service
    if service not in front.statuses:
        raise Refusal("NOT_FOUND", "service not registered")
    return lambda: front.statuses[service]


def _message(status: HealthStatus) -> bytes:
    return health.HealthCheckResponse(status=status.name).SerializeToString()
