"""Where the index keeps blocks: by engine hash for each owner, and by content for all of them together.

A block is known twice. Its owner (one rank of one worker) knows it by the engine's hash, with a count, because that is
what removals name. All owners together know it by content: a plane for each place (medium and tier) maps a content key
to a bit mask of the cache groups that hold it. The content key is chained, ``hash((key of the block before, tokens))``,
so a prompt is looked up by walking its own tokens, whatever the engines' hashes are and wherever the blocks lie.
Content keys are 64 bits: among a million blocks the odds of one wrong answer are about one in forty million.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from vllm_cp.kv.events import BlockHash, Stored

__all__ = ["Group", "Owner", "Place", "Plane", "Shelf", "content_keys", "frozen", "root_key"]

#: Medium and offload tier (ownership), each as the engine says it or absent.
Place: TypeAlias = tuple[str | None, str | None]
#: Content key -> bit mask of groups.
Plane: TypeAlias = dict[int, int]

_WINDOWED = ("sliding", "mamba", "chunked", "linear")
_TOKEN_BYTES = array("I").itemsize


def root_key(lora: str | int | None) -> int:
    """The key before the first block of a prompt."""
    return hash(("vllm-cp", lora))


def content_keys(root: int, tokens: Sequence[int], size: int, extra: Sequence[Any] | None) -> Iterator[int]:
    """The keys of the full blocks of ``size`` tokens, as far as they can be made.

    ``extra`` is what else makes each block what it is, ``None`` or empty for nothing; it may be short.
    """
    try:
        data = array("I", tokens).tobytes()
    except (OverflowError, TypeError):
        return  # no vocabulary has such tokens
    key, step = root, _TOKEN_BYTES * size
    if not extra:
        for at in range(0, len(data) - step + 1, step):
            key = hash((key, data[at : at + step]))
            yield key
        return
    for number, at in enumerate(range(0, len(data) - step + 1, step)):
        more = extra[number] if number < len(extra) else None
        chunk = data[at : at + step]
        key = hash((key, chunk, frozen(more))) if more else hash((key, chunk))
        yield key


def frozen(value: Any) -> Any:
    """The same, hashable; lists and tuples alike."""
    if isinstance(value, list | tuple):
        return tuple(map(frozen, value))
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value


class Shelf:
    """The blocks of one group in one place."""

    __slots__ = ("_again", "_bit", "_plane", "_twice", "held", "unlinked")

    def __init__(self, bit: int, plane: Plane) -> None:
        #: Content key by hash, ``None`` where it is not known. Parents come before their children.
        self.held: dict[BlockHash, int | None] = {}
        #: Blocks whose content key is not known.
        self.unlinked = 0
        self._bit = bit
        self._plane = plane
        self._again: dict[BlockHash, int] = {}  # copies, of blocks with more than one
        self._twice: dict[int, int] = {}  # hashes, of contents with more than one

    def count(self, block: BlockHash) -> int:
        """Copies held."""
        return self._again.get(block, 1) if block in self.held else 0

    def add(self, block: BlockHash, key: int | None) -> int:
        """One copy more. Returns how many blocks the shelf grew by, 0 or 1."""
        if block in self.held:
            self._again[block] = self._again.get(block, 1) + 1
            if key is not None and self.held[block] is None:
                self.held[block] = key
                self.unlinked -= 1
                self._show(key)
            return 0
        self.held[block] = key
        if key is None:
            self.unlinked += 1
        else:
            self._show(key)
        return 1

    def remove(self, block: BlockHash) -> int:
        """One copy less, of a block that is held. Returns how many blocks the shelf shrank by, 0 or 1."""
        again = self._again.get(block)
        if again is not None:
            if again > 2:
                self._again[block] = again - 1
            else:
                del self._again[block]
            return 0
        self._gone(self.held.pop(block))
        return 1

    def pop(self) -> None:
        """All copies of the newest block go: children before their parents, so that what is left hangs together."""
        block, key = self.held.popitem()
        self._again.pop(block, None)
        self._gone(key)

    def clear(self) -> int:
        """Empty it. Returns how many blocks went."""
        gone = len(self.held)
        self._twice.clear()
        for key in set(self.held.values()):
            if key is not None:
                self._hide(key)
        self.held.clear()
        self._again.clear()
        self.unlinked = 0
        return gone

    def _gone(self, key: int | None) -> None:
        if key is None:
            self.unlinked -= 1
        else:
            self._hide(key)

    def _show(self, key: int) -> None:
        mask = self._plane.get(key)
        if mask is None:
            self._plane[key] = self._bit  # the same object for every block held here alone
        elif mask & self._bit:
            self._twice[key] = self._twice.get(key, 1) + 1
        else:
            self._plane[key] = mask | self._bit

    def _hide(self, key: int) -> None:
        twice = self._twice.get(key)
        if twice is not None:
            if twice > 2:
                self._twice[key] = twice - 1
            else:
                del self._twice[key]
            return
        mask = self._plane[key] & ~self._bit
        if mask:
            self._plane[key] = mask
        else:
            del self._plane[key]


class Group:
    """One cache group of one owner."""

    __slots__ = ("bit", "index", "number", "owner", "shelves", "sizes", "windowed")

    def __init__(self, owner: Owner, index: int | None, number: int) -> None:
        self.owner = owner
        #: As the engine numbers it; ``None`` where it does not.
        self.index = index
        #: Of its bit in the planes.
        self.number = number
        self.bit = 1 << number
        self.shelves: dict[Place, Shelf] = {}
        #: Block sizes seen, tokens.
        self.sizes: set[int] = set()
        #: It keeps a window of the prompt by design, so its run says nothing about the prefix.
        self.windowed = False

    def learn(self, event: Stored) -> None:
        """What the event says about the group."""
        kind = event.kv_cache_spec_kind
        if event.kv_cache_spec_sliding_window is not None or (kind is not None and kind.startswith(_WINDOWED)):
            self.windowed = True


class Owner:
    """One rank of one worker."""

    __slots__ = ("complete", "evicted", "groups", "lost", "rank", "since_seq", "since_ts", "unreadable", "worker")

    def __init__(self, worker: str, rank: int | None) -> None:
        self.worker = worker
        self.rank = rank
        self.groups: dict[int | None, Group] = {}
        self.complete = False
        #: Where the view began: number and publisher's time of the batch.
        self.since_seq: int | None = None
        self.since_ts: float | None = None
        self.lost = self.evicted = self.unreadable = 0

    def shelves(self) -> Iterator[tuple[Group, Place, Shelf]]:
        """All there are."""
        for group in self.groups.values():
            for place, shelf in group.shelves.items():
                yield group, place, shelf

    def find(self, block: BlockHash) -> tuple[Group, int | None] | None:
        """Where a block is held, whatever the place: the group, and the content key. ``None`` when it is not."""
        found: tuple[Group, int | None] | None = None
        for group, _, shelf in self.shelves():
            if block in shelf.held:
                key = shelf.held[block]
                if key is not None:
                    return group, key
                found = group, None
        return found

    def holder(self, block: BlockHash, group: int | None, place: Place) -> Shelf | None:
        """The shelf that a removal means. What it leaves out (group, medium) is taken from where the block lies, if
        that is one place only."""
        exact = self.groups.get(group)
        shelf = None if exact is None else exact.shelves.get(place)
        if shelf is not None and block in shelf.held:
            return shelf
        candidates = [
            other
            for held_by, at, other in self.shelves()
            if block in other.held
            and (group is None or held_by.index == group)
            and (place == at or (place[0] is None and place[1] in (None, at[1])))
        ]
        return candidates[0] if len(candidates) == 1 else None
