"""What a health service says."""

from __future__ import annotations

from enum import Enum

__all__ = ["HealthStatus"]


class HealthStatus(str, Enum):
    """The word of ``grpc.health.v1.Health``: what the *frontend* says about itself.

    It is no proof that an engine answers: the real server goes on saying SERVING while its engine is frozen or gone.
    """

    UNKNOWN = "UNKNOWN"
    SERVING = "SERVING"
    NOT_SERVING = "NOT_SERVING"
    #: The server has no service of that name, on Check and Watch alike.
    SERVICE_UNKNOWN = "SERVICE_UNKNOWN"
