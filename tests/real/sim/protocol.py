"""The protocol between vLLM's frontend and its engine cores, as far as the simulator speaks it.

1. The engine (ZMQ DEALER whose identity is its rank as 2 little-endian bytes) sends ``{"status": "HELLO"}`` to the
   frontend's handshake ROUTER and gets back INIT: the addresses of the frontend's data sockets.
2. It connects a DEALER (same identity) to every input address and sends the *ready response* there: a map with all the
   facts that feed ``Control.GetServerInfo``, ``GetModelInfo`` and ``GetKvEventSources``.  A PUSH socket goes to every
   output address.
3. For a mixture-of-experts model with several ranks INIT also names a coordinator: the engine subscribes and waits for
   ``READY`` there.
4. It sends ``{"status": "READY"}`` on the handshake socket.
5. From then on it receives ``[type byte, msgpack]`` (ADD, ABORT, UTILITY) and pushes ``EngineCoreOutputs`` arrays, or
   the literal ``ENGINE_CORE_DEAD``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

pack = msgspec.msgpack.Encoder().encode
unpack = msgspec.msgpack.Decoder().decode

# Request types: the first frame of every message on the input socket.
ADD, ABORT, START_DP_WAVE, UTILITY = b"\x00", b"\x01", b"\x02", b"\x03"

# Sent instead of an output batch when the engine core hits a fatal error.
DEAD_SENTINEL = b"ENGINE_CORE_DEAD"

# EngineCoreOutput.finish_reason
STOP, LENGTH, ABORTED, ERROR = 0, 1, 2, 3

# One EngineCoreOutput: positional, trailing defaults left out.
Output = list[Any]


@dataclass(kw_only=True)
class Batch:
    """What one frontend client is told in one message: an ``EngineCoreOutputs``."""

    client: int
    outputs: list[Output] = field(default_factory=list)
    finished: list[str] | None = None
    stats: dict[str, Any] | None = None
    utility: list[Any] | None = None

    def encode(self, rank: int, now: float) -> bytes:
        """The message as engine ``rank`` pushes it at ``now`` (its monotonic clock, seconds)."""
        return pack([rank, self.outputs, self.stats, now, self.utility, self.finished])
