"""The events of a KV-cache publisher, typed. Frozen; absent stays absent.

Field names are those of the wire. ``None`` means that the publisher did not say; nothing is filled in.
Source: vLLM's KV-event publisher (msgpack over ZeroMQ), since vLLM 0.27 behind the Rust frontend.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, TypeAlias

from msgspec import Struct, field

__all__ = [
    "Batch",
    "BlockHash",
    "Cleared",
    "DecodeReason",
    "Event",
    "Removed",
    "SourceId",
    "Stored",
    "Unknown",
]

#: The engine's name for a block, opaque: an unsigned or a signed 64-bit integer, or bytes (32 of them for SHA-256).
#: Compare for equality only; the kinds stay apart. Hashes of different workers need not agree.
BlockHash: TypeAlias = int | bytes

_Extra: TypeAlias = dict[str | int, Any] | None


class Stored(
    Struct, frozen=True, kw_only=True, gc=False, forbid_unknown_fields=True, tag_field="type", tag="BlockStored"
):
    """Blocks were added to the cache, in the order of the prompt.

    The same block may be stored twice (two physical copies) and is then removed twice. Offload tiers may announce
    blocks by hash alone: no tokens, and a block size of 0.
    """

    block_hashes: tuple[BlockHash, ...]
    #: The block before the first of these; ``None`` at the start of a prompt.
    parent_block_hash: BlockHash | None = None
    #: ``block_size`` token ids for each block, end to end; may be empty.
    token_ids: tuple[int, ...] = ()
    #: Tokens per block.
    block_size: int | None = None
    lora_id: int | None = None
    #: ``GPU``, ``CPU``, ``STORAGE``, or what a connector calls it.
    medium: str | None = None
    lora_name: str | None = None
    #: For each block what besides tokens made its hash: adapter name, multi-modal content, cache salt (first block).
    extra_keys: tuple[tuple[Any, ...] | None, ...] | None = None
    #: KV-cache group, for models that mix kinds of attention.
    group_idx: int | None = None
    #: ``full_attention``, ``sliding_window``, …
    kv_cache_spec_kind: str | None = None
    #: Tokens that the sliding window of this group spans.
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    #: The offload tier that owns the copy.
    ownership: str | None = None
    session_id: str | None = None
    #: Since vLLM 0.33; as received.
    lookahead_token_ids: Any = None
    #: What nobody here knows, by name (maps) or position (arrays), as received; ``None`` when there is nothing.
    extra: _Extra = field(default=None, name="")


class Removed(
    Struct, frozen=True, kw_only=True, gc=False, forbid_unknown_fields=True, tag_field="type", tag="BlockRemoved"
):
    """One copy of each of these blocks left the cache."""

    block_hashes: tuple[BlockHash, ...]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None
    #: As in ``Stored``.
    extra: _Extra = field(default=None, name="")


class Cleared(
    Struct, frozen=True, kw_only=True, gc=False, forbid_unknown_fields=True, tag_field="type", tag="AllBlocksCleared"
):
    """The whole cache of this rank was emptied."""

    #: As in ``Stored``.
    extra: _Extra = field(default=None, name="")


class Unknown(Struct, frozen=True, kw_only=True, gc=False):
    """An event of a kind that is not known here, or a known kind without what it must have."""

    #: As received; ``None`` when the event does not even name its kind.
    kind: str | None
    #: The whole event as received.
    raw: Any
    #: What is missing; empty for a kind that is not known.
    malformed: str = ""


Event: TypeAlias = Stored | Removed | Cleared | Unknown


class SourceId(Struct, frozen=True, kw_only=True):
    """One publisher that is listened to: of a worker, usually of one of its ranks."""

    #: The name that the subscriber was given; may be empty.
    worker: str = ""
    #: The rank as advertised, zero is a rank; ``None`` for a publisher of all ranks.
    rank: int | None = None
    #: The live address in use.
    address: str = ""


class Batch(Struct, frozen=True, kw_only=True, gc=False):
    """What one scheduling step did to the cache of one rank."""

    source: SourceId
    #: Number of the batch, from 0 for each publisher process and rank, without holes.
    seq: int
    #: Unix seconds by the publisher's clock; ``None`` when it did not say.
    ts: float | None
    events: tuple[Event, ...]
    #: The rank that the publisher stamped into the batch; ``None`` when it did not.
    data_parallel_rank: int | None = None
    #: It came from the replay socket.
    replayed: bool = False
    #: Unix seconds by our clock, when it was received.
    received_at: float = 0.0
    #: What nobody here knows about the batch itself, as in ``Stored``.
    extra: _Extra = None

    @property
    def rank(self) -> int | None:
        """The rank these events belong to: as the source is advertised, or as stamped when it serves all ranks."""
        return self.data_parallel_rank if self.source.rank is None else self.source.rank

    @property
    def rank_disagrees(self) -> bool:
        """The publisher stamps another rank than the one that was advertised for its address."""
        return self.data_parallel_rank is not None and self.data_parallel_rank != self.rank


class DecodeReason(str, Enum):
    """Why something a publisher sent could not be used. A closed set, for counters."""

    #: Not the three frames topic, sequence, payload.
    FRAMES = "frames"
    #: The sequence frame is not eight bytes, or no number a publisher can reach.
    SEQUENCE = "sequence"
    #: A live message with the number that is reserved for the end of a replay.
    RESERVED = "reserved"
    #: The payload is not msgpack.
    MSGPACK = "msgpack"
    #: The payload is msgpack and not a batch of events.
    BATCH = "batch"
    #: An event of a known kind without what it must have; delivered as ``Unknown``.
    EVENT = "event"
