"""The clocks of a start."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Startup"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Startup:
    """When one instance reached each stage of its start, Unix seconds; ``None`` where nobody was looking."""

    #: The process's own start where its /metrics tells, else when the port was first seen to be closed.
    began: float | None = None
    #: The control port answered.
    socket: float | None = None
    #: Health said SERVING.
    serving: float | None = None
    #: A first generation had finished, whoever asked for it.
    warm: float | None = None
    #: A generation was seen to be answered: ours, or the token counter moving.
    first_response: float | None = None

    def phases(self) -> dict[str, float]:
        """Seconds from the beginning to each stage: ``to_socket``, ``to_serving``, ``to_warm``, ``to_first_response``.

        Only what was witnessed: empty for a worker that was up when it was first seen.
        """
        if self.began is None or self.socket is None:
            return {}
        stages = {
            "to_socket": self.socket,
            "to_serving": self.serving,
            "to_warm": self.warm,
            "to_first_response": self.first_response,
        }
        return {name: max(0.0, at - self.began) for name, at in stages.items() if at is not None}
