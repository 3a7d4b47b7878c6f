"""What a subscriber says besides batches: losses, resets, states, notices; and the numbers it keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from vllm_cp.kv.events import Batch, DecodeReason, SourceId

__all__ = [
    "Gap",
    "GapReason",
    "Item",
    "Notice",
    "NoticeKind",
    "Reset",
    "ResetReason",
    "SourceState",
    "SourceStats",
    "StateChange",
    "SubscriberStats",
]


class GapReason(str, Enum):
    """Why batches are lost. A closed set."""

    #: The publisher no longer had them when it was asked.
    EVICTED = "evicted"
    #: They were missed and there is no replay address to ask.
    NO_REPLAY = "no_replay"
    #: The replay did not answer, or not to its end.
    REPLAY_FAILED = "replay_failed"
    #: They came, and nobody can read them.
    UNREADABLE = "unreadable"
    #: They came, and the consumer was too slow: the oldest in the queue went first.
    OVERFLOW = "overflow"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Batches that will not be delivered, said at the place where they are missing. Both ends are included."""

    source: SourceId
    first: int
    last: int
    reason: GapReason

    @property
    def lost(self) -> int:
        """How many batches."""
        return self.last - self.first + 1


class ResetReason(str, Enum):
    """Why what was known of a source is void. A closed set."""

    #: The publisher has a past that cannot be had: the view begins at ``begins_at``. Not a loss.
    LATE_START = "late_start"
    #: The publisher is a new process, or the control plane shows a new instance.
    RESTARTED = "restarted"
    #: The worker no longer advertises this source.
    DEPARTED = "departed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reset:
    """Forget what is known of this source; what comes next builds a new view."""

    source: SourceId
    reason: ResetReason
    #: With LATE_START: number of the first batch in view.
    begins_at: int | None = None


class SourceState(str, Enum):
    """How a source can be heard. A closed set; silence is CONNECTED with an old last event."""

    #: The worker advertises no source: KV events are off.
    DISABLED = "disabled"
    #: The worker has no such RPC, or publishes over something, or at an address, that cannot be read from here.
    UNSUPPORTED = "unsupported"
    #: The worker may not be asked for its sources with these credentials.
    DENIED = "denied"
    CONNECTING = "connecting"
    #: The publisher is there and would be heard.
    CONNECTED = "connected"
    #: An attempt to connect failed; it goes on trying.
    UNREACHABLE = "unreachable"
    #: The subscriber was closed.
    CLOSED = "closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class StateChange:
    """A source can be heard in another way than before."""

    #: ``None`` when it concerns the worker as a whole.
    source: SourceId | None
    state: SourceState
    #: For people; may be empty.
    detail: str = ""


class NoticeKind(str, Enum):
    """What an operator should know and no counter explains. A closed set."""

    #: Several ranks are advertised with one address, which is subscribed once.
    SHARED_ADDRESS = "shared_address"
    #: A publisher stamps another rank than the one advertised for its address.
    RANK_DISAGREES = "rank_disagrees"
    #: Fresh sources could not be had.
    REFRESH_FAILED = "refresh_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """Said once, for as long as it stays so."""

    source: SourceId | None
    kind: NoticeKind
    detail: str


Item: TypeAlias = Batch | Gap | Reset | StateChange | Notice


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceStats:
    """The numbers of one source. Counters only rise, and start at 0 with the subscriber."""

    source: SourceId
    state: SourceState
    detail: str
    #: Unix seconds since when it is in this state.
    state_since: float
    #: Number of the last batch passed on; ``None`` before the first of this publisher process.
    last_seq: int | None
    #: Number of the first batch in view.
    begins_at: int | None
    #: Unix seconds, our clock, when the last batch came; ``None`` before the first.
    last_batch_at: float | None
    #: Batches passed on, those from replays included.
    batches: int
    #: Of those, from replays.
    replayed: int
    #: Times that batches were missing from the live stream, recovered or not.
    gaps: int
    #: Batches that are lost for good, by reason; every reason is there.
    lost: Mapping[GapReason, int]
    #: Replay requests by how they ended: ``ok``, ``partial`` (some batches came), ``failed``.
    replays: Mapping[str, int]
    #: Seconds spent in replays, all together.
    replay_seconds: float
    #: A replay is under way.
    replaying: bool
    #: Live batches that wait for the end of a replay.
    pending: int
    restarts: int
    #: Times that the connection was made, the first included.
    connects: int
    #: What could not be used, by reason; every reason is there.
    failures: Mapping[DecodeReason, int]
    #: Events of kinds that are not known here.
    unknown_events: int
    #: Keys that are not known here, in known events and batches.
    unknown_keys: int
    #: Batches stamped with another rank than advertised.
    rank_disagreements: int
    #: Messages of other topics at the same address.
    foreign: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriberStats:
    """The numbers of a subscriber. A source that departed takes its own along."""

    sources: tuple[SourceStats, ...]
    #: Batches that wait for the consumer, and their bytes.
    queue_depth: int
    queue_bytes: int
    #: Batches that the consumer was too slow for.
    dropped: int
    #: Times that fresh sources were asked for, and failed.
    refreshes: int
    refresh_failures: int
