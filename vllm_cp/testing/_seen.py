"""What a fake worker remembers of the calls it got."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from google.protobuf.message import Message

__all__ = ["SeenCall", "request_dict", "short_name"]


@dataclass(slots=True, kw_only=True)
class SeenCall:
    """One call as the worker saw it. Only ``code`` changes afterwards, once, when the call ends."""

    #: ``Control.GetServerInfo``.
    method: str
    #: Metadata as it arrived, names in lower case, gRPC's own (``user-agent``) included.
    metadata: tuple[tuple[str, str], ...] = ()
    #: Seconds the caller had left when the call arrived; ``None``: the call came without a deadline.
    deadline_s: float | None = None
    #: The fields that the request set, by their names in the wire contract; enums are numbers, bytes stay bytes.
    request: Mapping[str, object] = field(default_factory=dict)
    #: When it arrived, seconds on the clock of ``time.monotonic()`` (of the fleet's process for a ``FakeFleet``).
    at_s: float = 0.0
    #: How it ended, as a gRPC status name; ``None`` while in flight; ``CANCELLED`` when the caller gave up, its
    #: deadline passed or the connection broke.
    code: str | None = None

    @property
    def request_ids(self) -> tuple[str, ...]:
        """The ids of an Abort, or the one id of a Generate."""
        ids = self.request.get("request_ids")
        if isinstance(ids, tuple):
            return ids
        one = self.request.get("request_id")
        return (one,) if isinstance(one, str) else ()

    @property
    def rank(self) -> int | None:
        """The data-parallel rank that the call was meant for, if it named one."""
        said = self.get("x-data-parallel-rank")
        return int(said) if said is not None and said.isdigit() else None

    def get(self, name: str) -> str | None:
        """The first metadata value of that name."""
        return next((value for key, value in self.metadata if key == name.lower()), None)


def short_name(path: str) -> str:
    """``/grpc.health.v1.Health/Check`` -> ``Health.Check``."""
    service, _, method = path.rpartition("/")
    return f"{service.rpartition('.')[2].lstrip('/')}.{method}"


def request_dict(message: Message) -> dict[str, object]:
    """The fields set in a message, as plain Python values."""
    return {descriptor.name: _plain(value) for descriptor, value in message.ListFields()}


def _plain(value: object) -> object:
    if isinstance(value, Message):
        return request_dict(value)
    if isinstance(value, (str, bytes, int, float)):
        return value
    return tuple(_plain(item) for item in value)  # type: ignore[attr-defined]  # a repeated field
