"""From bytes to events. Tolerant: schema growth is routine upstream, so only what an event must have is required.

Two paths with one result. The fast one is msgspec with today's layout spelled out (the batch an array, events maps,
nothing unknown in them). Whatever does not fit goes through the tolerant one: older layouts, maps with integer keys,
unknown kinds and keys, odd types. Nothing here raises: a failure is a value with a reason of a closed set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from vllm_cp.kv._layout import event_from, key_of
from vllm_cp.kv.events import Cleared, DecodeReason, Event, Removed, Stored

__all__ = ["DecodeFailure", "Decoded", "decode", "unfit"]

#: What msgspec raises on bytes from elsewhere; RecursionError for a thousand nested arrays.
_BAD = (msgspec.MsgspecError, RecursionError, ValueError, TypeError)


class DecodeFailure(Struct, frozen=True, gc=False):
    """Why bytes are not a batch."""

    reason: DecodeReason
    #: For people; may hold a few bytes of what was received.
    detail: str = ""


class Decoded(Struct, frozen=True, gc=False):
    """One batch as it was in the payload."""

    #: Unix seconds by the publisher's clock; ``None`` when it did not say.
    ts: float | None
    events: tuple[Event, ...]
    data_parallel_rank: int | None = None
    #: What nobody here knows about the batch itself, by name or position; ``None`` when there is nothing.
    extra: dict[str | int, Any] | None = None
    #: It had today's layout, so there is nothing unknown in it.
    current: bool = False


class _Today(Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    ts: float
    events: tuple[Stored | Removed | Cleared, ...]
    data_parallel_rank: int | None = None


class _Outline(Struct, array_like=True, gc=False):
    ts: Any
    events: list[msgspec.Raw]


_today = msgspec.msgpack.Decoder(_Today)
_outline = msgspec.msgpack.Decoder(_Outline)
_anything = msgspec.msgpack.Decoder()


def decode(payload: bytes) -> Decoded | DecodeFailure:
    """The batch in a payload, in any layout seen so far. Never raises."""
    try:
        batch = _today.decode(payload)
    except _BAD:
        return _tolerant(payload)
    return Decoded(batch.ts, batch.events, batch.data_parallel_rank, None, True)


def unfit(payload: bytes) -> DecodeFailure | None:
    """Why a payload is not a batch, ``None`` when it looks like one. Many times cheaper than decoding it."""
    try:
        _outline.decode(payload)
    except _BAD:
        found = _tolerant(payload)
        return found if isinstance(found, DecodeFailure) else None
    return None


def _tolerant(payload: bytes) -> Decoded | DecodeFailure:
    try:
        raw = _anything.decode(payload)
    except _BAD as error:
        return DecodeFailure(DecodeReason.MSGPACK, str(error))
    parts = _parts(raw)
    if parts is None:
        return DecodeFailure(DecodeReason.BATCH, f"a {type(raw).__name__}, not an array or a map")
    events = parts.pop("events", None)
    if not isinstance(events, Sequence) or isinstance(events, str | bytes):
        return DecodeFailure(DecodeReason.BATCH, "no list of events in it")
    ts, rank = parts.pop("ts", None), parts.pop("data_parallel_rank", None)
    known_ts, known_rank = _number(ts), rank if type(rank) is int else None
    if ts is not None and known_ts is None:
        parts["ts"] = ts
    if rank is not None and known_rank is None:
        parts["data_parallel_rank"] = rank
    return Decoded(known_ts, tuple(event_from(event) for event in events), known_rank, parts or None)


_FIELDS = ("ts", "events", "data_parallel_rank")


def _parts(raw: Any) -> dict[str | int, Any] | None:
    """The parts of a batch by name; those without one by position or as they are called."""
    if isinstance(raw, Mapping):
        return {_FIELDS[key] if type(key) is int and 0 <= key < len(_FIELDS) else key_of(key): raw[key] for key in raw}
    if isinstance(raw, Sequence) and not isinstance(raw, str | bytes):
        return {_FIELDS[at] if at < len(_FIELDS) else at: part for at, part in enumerate(raw)}
    return None


def _number(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) else None
