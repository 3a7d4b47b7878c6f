"""One event out of decoded msgpack, in any layout: a map tagged by ``type``, an array in field order, integer keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm_cp.kv.events import Cleared, Event, Removed, Stored, Unknown

__all__ = ["event_from", "key_of"]

Check = Callable[[Any], bool]


def _is_int(value: Any) -> bool:
    return type(value) is int  # a bool is no number here


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_hash(value: Any) -> bool:
    return type(value) in (int, bytes)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _is_hashes(value: Any) -> bool:
    return _is_list(value) and {int, bytes}.issuperset(map(type, value))


def _is_tokens(value: Any) -> bool:
    return _is_list(value) and {int}.issuperset(map(type, value))


def _is_extra_keys(value: Any) -> bool:
    return _is_list(value) and all(part is None or _is_list(part) for part in value)


def _anything(_: Any) -> bool:
    return True


#: Fields in the order in which arrays list them, with what their values must be.
_STORED: dict[str, Check] = {
    "block_hashes": _is_hashes,
    "parent_block_hash": _is_hash,
    "token_ids": _is_tokens,
    "block_size": _is_int,
    "lora_id": _is_int,
    "medium": _is_text,
    "lora_name": _is_text,
    "extra_keys": _is_extra_keys,
    "group_idx": _is_int,
    "kv_cache_spec_kind": _is_text,
    "kv_cache_spec_sliding_window": _is_int,
    "locality": _is_text,
    "ownership": _is_text,
    "session_id": _is_text,
    "lookahead_token_ids": _anything,
}
_REMOVED: dict[str, Check] = {
    "block_hashes": _is_hashes,
    "medium": _is_text,
    "group_idx": _is_int,
    "locality": _is_text,
    "ownership": _is_text,
}
_KINDS: dict[str, tuple[type[Stored | Removed | Cleared], dict[str, Check]]] = {
    "BlockStored": (Stored, _STORED),
    "BlockRemoved": (Removed, _REMOVED),
    "AllBlocksCleared": (Cleared, {}),
}
_LISTS = ("block_hashes", "token_ids")


def event_from(raw: Any) -> Event:
    """The event in ``raw``. What is optional and not as it should be is kept under ``extra``. Never raises."""
    kind, parts = _named(raw)
    if kind not in _KINDS:
        return Unknown(kind=kind, raw=raw)
    make, fields = _KINDS[kind]
    known: dict[str, Any] = {}
    extra: dict[str | int, Any] = {}
    for name, value in parts.items():
        if value is None and name in fields:
            continue
        check = fields.get(name) if isinstance(name, str) else None
        if check is not None and check(value):
            known[str(name)] = _frozen(str(name), value)
        else:
            extra[name] = value
    if make is not Cleared and "block_hashes" not in known:
        return Unknown(kind=kind, raw=raw, malformed="block_hashes is missing or not a list of hashes")
    return make(**known, extra=extra or None)


def _named(raw: Any) -> tuple[str | None, dict[str | int, Any]]:
    """The kind of an event, and its parts by name where they have one."""
    if isinstance(raw, Mapping):
        parts = {key_of(key): value for key, value in raw.items()}
        kind = _text(parts.pop("type", None) if "type" in parts else parts.pop(0, None))
    elif _is_list(raw) and raw:
        kind, parts = _text(raw[0]), dict(enumerate(raw[1:], 1))
    else:
        return (_text(raw) if isinstance(raw, str | bytes) else None), {}
    order = tuple(_KINDS[kind][1]) if kind in _KINDS else ()
    named: dict[str | int, Any] = {}
    for key, value in parts.items():
        named[order[key - 1] if isinstance(key, int) and 1 <= key <= len(order) else key] = value
    return kind, named


def _frozen(name: str, value: Any) -> Any:
    if name in _LISTS:
        return tuple(value)
    if name == "extra_keys":
        return tuple(None if part is None else tuple(part) for part in value)
    return value


def _text(value: Any) -> str | None:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value if isinstance(value, str) else None


def key_of(key: Any) -> str | int:
    """A key of a decoded map as text or number."""
    if isinstance(key, str) or type(key) is int:
        return key
    return key.decode("utf-8", "replace") if isinstance(key, bytes) else repr(key)
