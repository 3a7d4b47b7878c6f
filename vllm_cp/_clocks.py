"""How the clocks of a start are kept. Pure."""

from __future__ import annotations

from dataclasses import replace

from vllm_cp._judge import Evidence, Mark
from vllm_cp.models.health import HealthStatus
from vllm_cp.models.startup import Startup

__all__ = ["arrive", "keep"]


def arrive(arriving: Startup | None, before: Evidence, after: Evidence, now: Mark) -> Startup | None:
    """The clocks of whoever comes up behind a port that was closed, until its instance is known."""
    if before.broken is not None and after.broken is None:
        arriving = Startup(began=before.broken.wall, socket=now.wall)
    elif after.broken is not None:
        arriving = None
    if arriving is not None and arriving.serving is None and after.health is HealthStatus.SERVING:
        arriving = replace(arriving, serving=now.wall)
    return arriving


def keep(startup: Startup, evidence: Evidence, process_start: float | None) -> Startup:
    """The clocks of a known instance, with what is newly known."""
    if startup.socket is None:
        return startup
    if process_start is not None and process_start <= startup.socket and startup.began != process_start:
        startup = replace(startup, began=process_start)
    if startup.serving is None and evidence.health is HealthStatus.SERVING and evidence.contact is not None:
        startup = replace(startup, serving=evidence.contact.wall)
    if startup.warm is None and evidence.generated is not None:
        startup = replace(startup, warm=evidence.generated.wall)
    answered = [mark.wall for mark in (evidence.canary, evidence.tokens_moved) if mark is not None]
    if startup.first_response is None and answered:
        startup = replace(startup, first_response=min(answered))
    return startup
