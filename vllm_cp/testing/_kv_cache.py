"""A minimal prefix cache: which full blocks are held, and the events that say so."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

__all__ = ["FakeKvCache", "HashKind", "HeldBlock"]


class HashKind(str, Enum):
    """What block hashes look like."""

    UNSIGNED = "unsigned"
    SIGNED = "signed"
    #: 32 bytes.
    BYTES = "bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBlock:
    """A block in the cache."""

    #: Its tokens.
    tokens: tuple[int, ...]
    #: Hash of the block before it; ``None`` at the start of a prompt.
    parent: int | bytes | None
    lora: str | None
    #: Cache salt of the request; it is part of a first block only, the others inherit it by their parent.
    salt: str | None


class FakeKvCache:
    """Blocks by hash, oldest first. Verbs return the events of a real block pool, as maps in field order."""

    def __init__(self, block_size: int, capacity: int | None, hashes: HashKind) -> None:
        self.block_size = block_size
        self._capacity = capacity
        self._hashes = hashes
        self._blocks: OrderedDict[int | bytes, HeldBlock] = OrderedDict()

    @property
    def blocks(self) -> dict[int | bytes, HeldBlock]:
        """What is held, by hash."""
        return dict(self._blocks)

    def store(self, tokens: Sequence[int], *, lora: str | None, salt: str | None) -> list[dict[str, Any]]:
        """Hold every full block of a prompt."""
        new: list[int | bytes] = []
        new_tokens: list[int] = []
        first_parent = parent = None
        size = self.block_size
        chain = [tuple(tokens[at : at + size]) for at in range(0, len(tokens) - size + 1, size)]
        for chunk in chain:
            its_salt = salt if parent is None else None
            block = self._hash(parent, chunk, lora, its_salt)
            if block in self._blocks:
                self._blocks.move_to_end(block)
            else:
                if not new:
                    first_parent = parent
                new.append(block)
                new_tokens += chunk
                self._blocks[block] = HeldBlock(tokens=chunk, parent=parent, lora=lora, salt=its_salt)
            parent = block
        if not new:
            return []
        keys: list[list[str] | None] = [[lora] if lora is not None else None for _ in new]
        if salt is not None and first_parent is None:
            keys[0] = [*(keys[0] or ()), salt]
        stored = {
            "type": "BlockStored",
            "block_hashes": new,
            "parent_block_hash": first_parent,
            "token_ids": new_tokens,
            "block_size": size,
            "lora_id": None if lora is None else 1,
            "medium": "GPU",
            "lora_name": lora,
            "extra_keys": keys,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
        over = 0 if self._capacity is None else len(self._blocks) - self._capacity
        return [*self.evict(max(0, over)), stored]

    def evict(self, count: int) -> list[dict[str, Any]]:
        """Let the oldest go, one event for each as a real pool does."""
        gone = [self._blocks.popitem(last=False)[0] for _ in range(min(count, len(self._blocks)))]
        return [{"type": "BlockRemoved", "block_hashes": [block], "medium": "GPU", "group_idx": 0} for block in gone]

    def clear(self) -> list[dict[str, Any]]:
        """Let all go."""
        self._blocks.clear()
        return [{"type": "AllBlocksCleared"}]

    def _hash(
        self, parent: int | bytes | None, tokens: tuple[int, ...], lora: str | None, salt: str | None
    ) -> int | bytes:
        digest = hashlib.sha256(repr((parent, tokens, lora, salt)).encode()).digest()
        if self._hashes is HashKind.BYTES:
            return digest
        return int.from_bytes(digest[:8], "big", signed=self._hashes is HashKind.SIGNED)
