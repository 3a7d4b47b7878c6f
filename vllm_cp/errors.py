"""What can go wrong, by meaning rather than by transport.

::

    ControlError                 every failed call; carries target, method, code, detail, hint
    ├── WorkerUnreachable        nobody there, or the connection broke
    │   └── TlsFailed            there, but the two sides do not agree on TLS or certificates
    ├── OutOfTime                the deadline passed (DEADLINE_EXCEEDED, or CANCELLED "Timeout expired")
    ├── NotSupported             this worker's version has no such RPC; ``since`` names the one that has
    ├── CredentialsRejected      UNAUTHENTICATED or PERMISSION_DENIED, or no token could be read
    ├── Refused                  the worker understood and declined
    │   ├── PreconditionFailed   a feature is not configured, or the state does not allow it
    │   └── NotAdmitting         generation is paused
    ├── NotFound                 no such service, adapter, …
    ├── InvalidArgument          the request is malformed
    ├── TooLarge                 request, response or metadata above a limit
    └── EngineFailed             the frontend answered, an engine behind it did not do its part
        └── RanksDisagree        every engine answered, with different answers

    ConfigError(ValueError)      a setting of ours is wrong; nothing was sent
    ClientClosed(RuntimeError)   the client was closed
    ForkedClient(RuntimeError)   the client was made in the parent of this process
"""

from __future__ import annotations

__all__ = [
    "ClientClosed",
    "ConfigError",
    "ControlError",
    "CredentialsRejected",
    "EngineFailed",
    "ForkedClient",
    "InvalidArgument",
    "NotAdmitting",
    "NotFound",
    "NotSupported",
    "OutOfTime",
    "PreconditionFailed",
    "RanksDisagree",
    "Refused",
    "TlsFailed",
    "TooLarge",
    "WorkerUnreachable",
]


class ControlError(Exception):
    """A call on a worker failed.

    Attributes:
        target: the worker, as the caller wrote it.
        method: the method, ``Control.GetServerInfo`` for gRPC or ``GET /path`` for HTTP.
        code: the status name as it came over the wire (``UNAVAILABLE``), or ``HTTP 503``.
        detail: the status text as it came over the wire; may be empty.
        hint: what to do about it; may be empty.
    """

    #: Whether the call left this process. False: the fault is ours, and says nothing of the worker.
    sent = True
    #: One short clause, used when the server said nothing.
    meaning = "the call failed"

    def __init__(self, target: str, method: str, code: str, detail: str = "", hint: str = "") -> None:
        super().__init__(target, method, code, detail, hint)
        self.target = target
        self.method = method
        self.code = code
        self.detail = detail
        self.hint = hint

    def __str__(self) -> str:
        said = f" {_one_line(self.detail)}" if self.detail else ""
        hint = f"; {self.hint}" if self.hint else ""
        return f"{self.target}: {self.method}: {self.meaning} ({self.code}{said}){hint}"


class WorkerUnreachable(ControlError):
    """Nobody listens at the target, or the connection broke before an answer came."""

    meaning = "worker unreachable"


class TlsFailed(WorkerUnreachable):
    """Somebody listens, but TLS was not agreed: one side only, wrong name, wrong CA, missing client certificate."""

    meaning = "TLS failed"


class OutOfTime(ControlError):
    """No answer before the deadline. The worker may have acted all the same."""

    meaning = "no answer in time"


class NotSupported(ControlError):
    """This worker's version does not have the RPC. ``since`` is the vLLM version that brought it ("" if unknown)."""

    meaning = "not supported by this worker"

    def __init__(
        self, target: str, method: str, code: str, detail: str = "", hint: str = "", *, since: str = ""
    ) -> None:
        super().__init__(target, method, code, detail, hint)
        self.since = since

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), self.args, {"since": self.since}


class CredentialsRejected(ControlError):
    """The caller is not who it must be, or may not do this."""

    meaning = "credentials rejected"


class Refused(ControlError):
    """The worker understood the request and declined it."""

    meaning = "refused"


class PreconditionFailed(Refused):
    """The worker is not configured for this, or is not in the state for it."""

    meaning = "not possible on this worker"


class NotAdmitting(Refused):
    """Generation is paused: the worker takes no new requests for now."""

    meaning = "not admitting requests"


class NotFound(ControlError):
    """The worker does not know the name in the request."""

    meaning = "not found"


class InvalidArgument(ControlError):
    """The worker found the request malformed."""

    meaning = "invalid request"


class TooLarge(ControlError):
    """The request, the answer or the metadata is above a size limit."""

    meaning = "message too large"


class EngineFailed(ControlError):
    """The frontend answered, but an engine behind it failed to do its part."""

    meaning = "engine failed"


class RanksDisagree(EngineFailed):
    """Every engine answered, and they do not agree: all are alive, but the worker is not in one state."""

    meaning = "ranks disagree"


class ConfigError(ValueError):
    """A target, path or option of ours is wrong. Says what to write instead; nothing was sent."""


class ClientClosed(RuntimeError):
    """The client was used after ``close()``."""


class ForkedClient(RuntimeError):
    """The client was made before ``fork()`` and used in the child: gRPC channels do not survive it. Make a new one.

    That works as long as no watch was open at the moment of the fork: gRPC itself may crash in a child of a process
    that was reading a stream. Such a process starts its children anew (``spawn``), or forks before it watches.
    """


def _one_line(text: str) -> str:
    """The text with control characters escaped, so that an answer can't forge lines or move the cursor."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
