"""Every time constant and limit of a subscriber."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from vllm_cp.errors import ConfigError

__all__ = ["Settings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a subscriber waits and what it may hold. Seconds, batches and bytes; raises ConfigError for nonsense."""

    #: Ask for batches from before the first one that was heard, where the publisher keeps them.
    backfill: bool = True
    #: First batch that is wanted; earlier ones are not asked for.
    from_seq: int = 0
    #: A source that is connected and silent for this long at the start is asked for its history.
    catch_up_after_s: float = 2.0
    #: Longest pause between two messages of a replay. An idle publisher takes 0.1 s to begin.
    replay_idle_s: float = 3.0
    #: Longest replay.
    replay_total_s: float = 60.0
    #: Shortest time from the end of one replay of a source to the next.
    replay_cool_down_s: float = 1.0
    #: Requests for the same missing batches before they count as lost.
    replay_attempts: int = 3
    #: Live batches of one source that may wait for the end of a replay. Later ones are asked for again.
    max_pending: int = 20_000
    max_pending_bytes: int = 64 << 20
    #: Batches that may wait for the consumer. Beyond that the oldest are dropped, counted, and stated as a gap.
    max_queue: int = 65_536
    max_queue_bytes: int = 256 << 20
    #: Longest message; a publisher that sends a longer one is disconnected.
    max_message_bytes: int = 256 << 20
    #: Pause before connecting again: the first, then doubled up to the longest.
    reconnect_s: float = 0.1
    reconnect_max_s: float = 5.0
    #: A peer that accepts connections and does not speak ZeroMQ is given up after this.
    handshake_s: float = 5.0
    #: Ping the publisher this often; it is taken for gone after at most three times that.
    heartbeat_s: float = 2.0
    #: Shortest time between two requests for fresh sources, doubled after failures up to the longest.
    refresh_s: float = 1.0
    refresh_max_s: float = 30.0
    #: After an answer that is final (not supported, not allowed, events off): ask again after this.
    refresh_final_s: float = 300.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name in ("backfill", "from_seq", "catch_up_after_s", "replay_cool_down_s") else None
            if not math.isfinite(value) or value < 0 or (least is None and value == 0):
                raise ConfigError(f"{field.name} must be a positive number, not {value}")
