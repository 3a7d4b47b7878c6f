"""Where a worker publishes its KV-cache events."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Address", "KvEventSource", "resolve_address"]

_WILDCARDS = ("*", "0.0.0.0", "[::]")  # noqa: S104  (names to recognise, not to bind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """One advertised ZeroMQ address, and what a subscriber can do with it."""

    #: Where to connect; ``None`` when nobody can, for the ``reason`` given.
    connect_to: str | None = None
    #: Why there is nothing to connect to.
    reason: str | None = None
    #: The publisher connects to this address itself, so a subscriber has to bind there.
    publisher_connects: bool = False


def resolve_address(advertised: str, worker_host: str | None, transport: str = "zmq") -> Address:
    """What to do with an advertised address, given the host at which we reached the worker.

    Only ``zmq`` can be read. A wildcard host is replaced by ``worker_host`` (bracketed for IPv6), the port kept as
    given; everything else stays as it is. ``worker_host`` is ``None`` when the worker was reached over a unix socket.
    """
    if not advertised:
        return Address(reason="the server advertises no address")
    if transport != "zmq":
        return Address(reason=f"transport {transport!r} cannot be read, only zmq")
    scheme, separator, rest = advertised.partition("://")
    if not separator:
        return Address(reason=f"not a ZeroMQ address: {advertised!r}")
    if scheme == "inproc":
        return Address(reason="inproc: reachable inside the engine's process only")
    if scheme == "ipc":
        return Address(connect_to=advertised)
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not (port.isascii() and port.isdigit()):
        return Address(reason=f"not a tcp or ipc address: {advertised!r}")
    if int(port) == 0:
        return Address(reason="the server advertises port 0: the real port is not known")
    if host in _WILDCARDS:
        if worker_host is None:
            return Address(reason="a wildcard address, and the worker was reached over a unix socket: host unknown")
        host = f"[{worker_host}]" if ":" in worker_host else worker_host
        return Address(connect_to=f"tcp://{host}:{port}")
    # vLLM binds wildcard, ipc and IPv6 addresses and connects its publisher to any other.
    return Address(connect_to=advertised, publisher_connects="::" not in host)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventSource:
    """The KV-cache event publisher of one data-parallel rank. Source: GetKvEventSources, since vLLM 0.27."""

    #: ``zmq``, or another transport that this project cannot read.
    transport: str = ""
    #: The live address, verbatim as the server was configured; usually a wildcard.
    endpoint: str = ""
    #: The replay address, verbatim; ``None`` when there is none.
    replay_endpoint: str | None = None
    #: ZeroMQ topic of the live messages; may be empty.
    topic: str = ""
    #: Rank of the publisher, zero is a rank; ``None`` is one source for all ranks.
    data_parallel_rank: int | None = None
    #: ``msgpack``.
    encoding: str = ""
    schema_version: int | None = None
    #: Batches kept for replay.
    buffer_steps: int | None = None
    #: ZeroMQ high-water mark, messages; zero is "no limit".
    hwm: int = 0
    #: Batches queued inside the engine before it blocks.
    max_queue_size: int | None = None
    #: The live address as a subscriber can use it.
    live: Address = field(default_factory=Address)
    #: The replay address as a subscriber can use it.
    replay: Address = field(default_factory=Address)

    @property
    def connect_to(self) -> str | None:
        """Where to connect for live events; ``None`` when nobody can, see ``reason``."""
        return self.live.connect_to

    @property
    def reason(self) -> str | None:
        """Why there is no ``connect_to``."""
        return self.live.reason
