"""Whether a worker is being scaled."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ScalingState"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingState:
    """Elastic expert parallelism. Source: POST /is_scaling_elastic_ep of the Python server.

    Older servers say only whether; everything else is ``None`` where the server does not say it.
    """

    #: A change of size is under way. While one is being committed the server may refuse all other requests.
    scaling: bool
    #: The step it is in, in the server's own words.
    phase: str | None = None
    #: Names this change of size; opaque.
    epoch: str | None = None
    #: Why the last change failed.
    error: str | None = None
    #: Data-parallel ranks asked for.
    requested_data_parallel_size: int | None = None
