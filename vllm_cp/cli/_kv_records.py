"""Items of the KV-event stream as records and as lines."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

from vllm_cp.cli._text import plain
from vllm_cp.cli._times import iso, local_now
from vllm_cp.kv import Batch, BlockHash, Cleared, Event, Gap, Item, Removed, Reset, Stored

__all__ = ["line_of", "records_of", "said_of"]

_TYPES: dict[type, str] = {Stored: "stored", Removed: "removed", Cleared: "cleared"}
_HASHES = ("block_hashes", "parent_block_hash")


def records_of(target: str, item: Item) -> Iterator[dict[str, Any]]:
    """A record for each event of a batch, one for a gap or a reset, none for what is not about the cache."""
    if isinstance(item, Batch):
        about = {
            "at": _moment(item.received_at),
            "target": target,
            "rank": item.rank,
            "seq": item.seq,
            "published_at": _moment(item.ts),
            "replayed": item.replayed,
        }
        for event in item.events:
            yield {**about, "type": _TYPES.get(type(event), "unknown"), **_fields(event)}
    elif isinstance(item, Gap | Reset):
        record: dict[str, Any] = {"target": target, "rank": item.source.rank, "reason": item.reason.value}
        if isinstance(item, Gap):
            yield {**record, "type": "gap", "first": item.first, "last": item.last, "lost": item.lost}
        else:
            yield {**record, "type": "reset", "begins_at": item.begins_at}


def said_of(record: Mapping[str, Any]) -> str:
    """A gap or a reset, in words."""
    who = f"{record['target']} {_rank(record)}"
    if record["type"] == "gap":
        lost = "1 batch is" if record["lost"] == 1 else f"{record['lost']} batches are"
        return f"{who}: {lost} lost, {record['first']} to {record['last']}: {record['reason']}"
    if record["begins_at"] is not None:
        return f"{who}: the view begins at batch {record['begins_at']}, what was before is not known"
    return f"{who}: all that was known is void: {record['reason']}"


def line_of(record: Mapping[str, Any], widest: int, now: float) -> str:
    """A record for people, on one line."""
    kind = record["type"]
    head = f"{local_now(now)}  {plain(record['target']):{widest}}  {_rank(record):8}  {kind:7}  "
    if kind in ("gap", "reset"):
        return head + said_of(record).partition(": ")[2]
    parts = {"stored": _stored, "removed": _removed}.get(kind, _other)(record)
    replayed = ["replayed"] if record["replayed"] else []
    return plain(head + f"#{record['seq']}  " + ", ".join([*parts, *replayed]))


def _stored(record: Mapping[str, Any]) -> list[str]:
    parts = [_blocks(record)]
    if record["token_ids"]:
        parts[0] += f" of {record['block_size']} tokens"
    parts += [str(record["medium"])] if record["medium"] is not None else []
    if record["lora_name"] is not None or record["lora_id"] is not None:
        lora = record["lora_id"] if record["lora_name"] is None else record["lora_name"]
        parts.append(f"lora {lora}")
    if record["group_idx"] is not None:
        parts.append(f"group {record['group_idx']}")
    after = record["parent_block_hash"]
    parts.append("start of a prompt" if after is None else f"after {_short(after)}")
    return [*parts, *_extra(record)]


def _removed(record: Mapping[str, Any]) -> list[str]:
    parts = [_blocks(record), *([str(record["medium"])] if record["medium"] is not None else [])]
    if record["group_idx"] is not None:
        parts.append(f"group {record['group_idx']}")
    return [*parts, *_extra(record)]


def _other(record: Mapping[str, Any]) -> list[str]:
    if record["type"] == "cleared":
        return ["the whole cache of this rank", *_extra(record)]
    why = f" ({record['malformed']})" if record["malformed"] else ""
    return [f"{record['kind'] or 'an event without a kind'}{why}"]


def _blocks(record: Mapping[str, Any]) -> str:
    hashes = record["block_hashes"]
    count = f"{len(hashes)} block{'' if len(hashes) == 1 else 's'}"
    return f"{count} ({_short(hashes[0])})" if len(hashes) == 1 else count


def _extra(record: Mapping[str, Any]) -> list[str]:
    return [f"unknown: {', '.join(record['extra'])}"] if record["extra"] else []


def _rank(record: Mapping[str, Any]) -> str:
    return "all" if record["rank"] is None else f"rank {record['rank']}"


def _short(text: str) -> str:
    return text if len(text) <= 20 else f"{text[:10]}..{text[-8:]}"


def _fields(event: Event) -> dict[str, Any]:
    fields = {name: getattr(event, name) for name in event.__struct_fields__}
    return {name: _hashes(value) if name in _HASHES else _plain(value) for name, value in fields.items()}


def _hashes(value: Any) -> Any:
    return [_hash(each) for each in value] if isinstance(value, tuple) else None if value is None else _hash(value)


def _hash(value: BlockHash) -> str:
    """As text: few readers of JSON hold 64 bits, and none holds bytes."""
    return f"0x{value.hex()}" if isinstance(value, bytes) else str(value)


def _plain(value: Any) -> Any:
    """Anything that msgpack can hold, as JSON."""
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bytes | bytearray | memoryview):
        return f"0x{bytes(value).hex()}"
    if isinstance(value, Mapping):
        return {str(_plain(key)): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(each) for each in value]
    return str(value)


def _moment(unix: float | None) -> str | None:
    try:
        return iso(unix)
    except (OverflowError, ValueError, OSError):  # a clock that no calendar has
        return None
