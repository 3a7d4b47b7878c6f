"""PrefixIndex: which worker and rank holds the start of a prompt. Pure: it is told, it asks nobody."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any, TypeAlias

from vllm_cp.errors import ConfigError
from vllm_cp.kv._lookup import Runs, limit, runs_of
from vllm_cp.kv._shelves import Group, Owner, Place, Plane, Shelf, content_keys, root_key
from vllm_cp.kv.events import Batch, BlockHash, Cleared, Removed, SourceId, Stored
from vllm_cp.kv.stream import Gap, Item, Reset, ResetReason

__all__ = ["Match", "OnLoss", "PrefixIndex", "Run", "View"]

#: From the first and the last token (excluded) of a block to its extra keys, without adapter and salt.
ExtraKeys: TypeAlias = Callable[[int, int], Sequence[Any] | None]

#: Blocks that make room at one go when the index is full.
_AT_ONCE = 256

#: What a publisher may invent before it counts as one: memory is bounded whatever is sent. Real ones stay far below.
_MOST_PLACES, _MOST_GROUPS, _MOST_RANKS, _MOST_SIZES = 64, 16, 256, 8
_ELSEWHERE: Place = ("elsewhere", None)


class OnLoss(str, Enum):
    """What happens to the blocks of a rank when batches about it are lost."""

    #: Keep them. Some may be gone by now, others are missing; ``complete`` says so until the next clear or restart.
    KEEP = "keep"
    #: Forget them, and build up anew from what comes.
    DROP = "drop"


@dataclass(frozen=True, slots=True)
class Run:
    """The unbroken start of a prompt that is resident."""

    blocks: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """How much of the start of a prompt one rank of one worker holds."""

    worker: str
    rank: int | None
    #: Leading blocks that are resident, in whatever medium, and their tokens.
    blocks: int
    tokens: int
    #: The same for each medium alone: the leading blocks that are all resident there. Media with none are left out.
    by_medium: Mapping[str | None, Run]
    #: The view of this rank has no holes.
    complete: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What the index knows of one rank of one worker, and how well."""

    worker: str
    rank: int | None
    #: Every change since the cache was empty was seen, and all of it is still here.
    complete: bool
    #: The batch with which the view began, and its time (Unix seconds, publisher's clock).
    since_seq: int | None
    since_ts: float | None
    #: Batches lost since then.
    lost_batches: int
    #: Blocks that this index had to let go since then, because it was full.
    evicted_blocks: int
    #: Events since then that could not be read.
    unreadable_events: int
    #: Blocks held, by medium and tier (``ownership``).
    blocks: Mapping[tuple[str | None, str | None], int]
    #: Blocks among them whose place in a prompt is not known (their parent was never seen): counted, never matched.
    unlinked_blocks: int


class PrefixIndex:
    """Feed it what subscribers say (``apply``), ask it who holds a prompt (``match``). Not thread-safe.

    It works from the token ids and parents in the events, so it needs no engine hash, and workers may have different
    block sizes. Blocks are counted: stored twice and removed once is still there. A clear, a restart and a departure
    empty a rank; lost batches leave it incomplete, see ``OnLoss``. ``max_blocks`` bounds the memory (about a quarter of
    a kilobyte for each block of each holder): when it is full, the newest blocks of the fullest cache go, so that what
    stays are still unbroken starts of prompts; that rank is then no longer complete.
    """

    def __init__(self, *, max_blocks: int = 8_000_000, on_loss: OnLoss = OnLoss.KEEP) -> None:
        """Raises ConfigError for a ``max_blocks`` below 1."""
        if max_blocks < 1:
            raise ConfigError(f"max_blocks must be 1 or more, not {max_blocks}")
        self._max_blocks = max_blocks
        self._on_loss = on_loss
        self._owners: dict[tuple[str, int | None], Owner] = {}
        self._sources: dict[SourceId, _Source] = {}
        self._planes: dict[Place, Plane] = {}
        self._groups: list[Group | None] = []  # by number of their bit
        self._sizes: dict[int, int] = {}  # block size -> mask of the groups that use it
        self._blocks = 0
        #: Removals of blocks that were not held; they come with late starts and losses.
        self.unknown_removals = 0

    def __len__(self) -> int:
        """Blocks held, each once for every group and place that holds it."""
        return self._blocks

    # -- being told

    def apply(self, item: Item) -> None:
        """One item of a subscriber. States and notices change nothing."""
        if isinstance(item, Batch):
            self._batch(item)
        elif isinstance(item, Gap):
            self._gap(item)
        elif isinstance(item, Reset):
            source = self._sources.pop(item.source, None)
            for owner in source.owners if source is not None else ():
                self._empty(owner)
                if item.reason is ResetReason.DEPARTED:
                    self._retire(owner)

    def forget(self, worker: str) -> None:
        """The worker is gone: drop all that is known of it."""
        for owner in [owner for owner in self._owners.values() if owner.worker == worker]:
            self._retire(owner)
        self._sources = {source: seen for source, seen in self._sources.items() if source.worker != worker}

    def _batch(self, batch: Batch) -> None:
        source = self._sources.get(batch.source)
        if source is None:
            source = self._sources[batch.source] = _Source(batch.seq)
        owner = self._owner(batch, source)
        for event in batch.events:
            if isinstance(event, Stored):
                self._store(owner, event)
            elif isinstance(event, Removed):
                self._remove(owner, event)
            elif isinstance(event, Cleared):
                self._empty(owner)
                self._begin(owner, batch, complete=True)
            elif event.malformed:
                owner.unreadable += 1
                owner.complete = False
        while self._blocks > self._max_blocks:
            self._make_room()

    def _gap(self, gap: Gap) -> None:
        source = self._sources.setdefault(gap.source, _Source(gap.first))
        source.lossless = False
        for owner in source.owners:
            owner.lost += gap.lost
            owner.complete = False
            if self._on_loss is OnLoss.DROP:
                self._blocks -= sum(shelf.clear() for _, _, shelf in owner.shelves())

    def _owner(self, batch: Batch, source: _Source) -> Owner:
        name = (batch.source.worker, batch.rank)
        if name not in self._owners and len(source.owners) >= _MOST_RANKS:
            name = (batch.source.worker, None)
        owner = self._owners.get(name)
        if owner is None:
            owner = self._owners[name] = Owner(*name)
        if owner.since_seq is None:
            self._begin(owner, batch, complete=source.begin == 0 and source.lossless)
        source.owners[owner] = None
        return owner

    @staticmethod
    def _begin(owner: Owner, batch: Batch, *, complete: bool) -> None:
        owner.since_seq, owner.since_ts, owner.complete = batch.seq, batch.ts, complete
        owner.lost = owner.evicted = owner.unreadable = 0

    def _store(self, owner: Owner, event: Stored) -> None:
        if event.block_size is None or event.block_size <= 0 or not event.token_ids:
            for block in event.block_hashes:
                # An offload tier names blocks by hash alone: what and whose they are is known from where else they lie.
                group, key = owner.find(block) or (None, None)
                if event.group_idx is not None or group is None:
                    group = self._group(owner, event.group_idx)
                self._blocks += self._shelf(group, event).add(block, key)
            return
        group = self._group(owner, event.group_idx)
        group.learn(event)
        if event.block_size not in group.sizes and len(group.sizes) < _MOST_SIZES:
            group.sizes.add(event.block_size)
            self._sizes[event.block_size] = self._sizes.get(event.block_size, 0) | group.bit
        shelf = self._shelf(group, event)
        keys = self._keys(owner, event)
        grown = 0
        for block in event.block_hashes:
            grown += shelf.add(block, next(keys, None))
        self._blocks += grown

    @staticmethod
    def _keys(owner: Owner, event: Stored) -> Iterator[int]:
        """The content keys of the blocks of an event; none when the block before them is not known."""
        lora = event.lora_name if event.lora_name is not None else event.lora_id
        if event.parent_block_hash is None:
            start: int | None = root_key(lora)
        else:
            _, start = owner.find(event.parent_block_hash) or (None, None)
        if start is None or not event.block_size:
            return iter(())
        extra: Sequence[Any] | None = event.extra_keys
        if extra is not None:
            # The engine lists the adapter's name among the keys; here it is the root already.
            if lora is not None:
                extra = [keys[1:] if keys and keys[0] == event.lora_name else keys for keys in extra]
            extra = extra if any(extra) else None
        return content_keys(start, event.token_ids, event.block_size, extra)

    def _remove(self, owner: Owner, event: Removed) -> None:
        place = self._place(event)
        for block in event.block_hashes:
            shelf = owner.holder(block, event.group_idx, place)
            if shelf is None:
                self.unknown_removals += 1
            else:
                self._blocks -= shelf.remove(block)

    # -- being asked

    def match(
        self,
        token_ids: Sequence[int],
        *,
        lora: str | int | None = None,
        salt: str | None = None,
        extra_keys: ExtraKeys | None = None,
        workers: Iterable[str] | None = None,
    ) -> tuple[Match, ...]:
        """Who holds the start of this prompt, most tokens first. Ranks that hold none of it are left out.

        Args:
            token_ids: the prompt as the engine would see it. Only full blocks count.
            lora: the adapter, by name (or by id, for engines that send no name).
            salt: the request's cache salt.
            extra_keys: for multi-modal prompts, from the first and last (excluded) token of a block to its extra keys.
            workers: only these.
        """
        allowed = -1
        if workers is not None:
            names = frozenset(workers)
            allowed = sum(group.bit for group in self._groups if group is not None and group.owner.worker in names)
        anywhere: dict[int, tuple[int, int]] = {}
        by_medium: dict[str | None, dict[int, tuple[int, int]]] = {}
        for size, groups in self._sizes.items():
            if size > len(token_ids) or not groups & allowed:
                continue
            keys = content_keys(root_key(lora), token_ids, size, _extra(len(token_ids), size, salt, extra_keys))
            runs, media = runs_of(self._planes, keys, groups & allowed)
            _longest(anywhere, runs, size)
            for medium, found in media.items():
                _longest(by_medium.setdefault(medium, {}), found, size)
        # Several groups of one owner come to one answer.
        owners = dict.fromkeys(group.owner for number in anywhere if (group := self._groups[number]) is not None)
        matches = [_match(owner, anywhere, by_medium) for owner in owners]
        matches.sort(key=lambda match: (-match.tokens, match.worker, -1 if match.rank is None else match.rank))
        return tuple(match for match in matches if match.tokens)

    def views(self) -> tuple[View, ...]:
        """What is known of each rank of each worker, and how well."""
        return tuple(_view(owner) for owner in self._owners.values())

    def held(
        self, worker: str, rank: int | None
    ) -> Iterator[tuple[tuple[str | None, str | None], int | None, BlockHash, int]]:
        """Every block of one rank: medium and tier, cache group, the engine's hash, copies."""
        owner = self._owners.get((worker, rank))
        for group, place, shelf in owner.shelves() if owner is not None else ():
            for block in shelf.held:
                yield place, group.index, block, shelf.count(block)

    # -- room

    def _group(self, owner: Owner, index: int | None) -> Group:
        if len(owner.groups) >= _MOST_GROUPS and index not in owner.groups:
            index = None
        group = owner.groups.get(index)
        if group is None:
            free = self._groups.index(None) if None in self._groups else len(self._groups)
            group = owner.groups[index] = Group(owner, index, free)
            self._groups[free : free + 1] = [group]
        return group

    def _shelf(self, group: Group, event: Stored) -> Shelf:
        place = self._place(event)
        shelf = group.shelves.get(place)
        if shelf is None:
            shelf = group.shelves[place] = Shelf(group.bit, self._planes.setdefault(place, {}))
        return shelf

    def _place(self, event: Stored | Removed) -> Place:
        place = (event.medium, event.ownership)
        return place if place in self._planes or len(self._planes) < _MOST_PLACES else _ELSEWHERE

    def _empty(self, owner: Owner) -> None:
        self._blocks -= sum(shelf.clear() for _, _, shelf in owner.shelves())
        owner.since_seq, owner.complete = None, False

    def _retire(self, owner: Owner) -> None:
        self._empty(owner)
        for group in owner.groups.values():
            self._groups[group.number] = None
            for size in group.sizes:
                self._sizes[size] &= ~group.bit
                if not self._sizes[size]:
                    del self._sizes[size]
        self._owners.pop((owner.worker, owner.rank), None)
        for source in self._sources.values():
            source.owners.pop(owner, None)

    def _make_room(self) -> None:
        shelves = [
            (len(shelf.held), owner, shelf) for owner in self._owners.values() for _, _, shelf in owner.shelves()
        ]
        size, owner, shelf = max(shelves, key=lambda entry: entry[0])
        going = min(_AT_ONCE, size, max(1, self._blocks - self._max_blocks))
        for _ in range(going):
            shelf.pop()
        self._blocks -= going
        owner.evicted += going
        owner.complete = False


class _Source:
    """What one publisher has said so far."""

    __slots__ = ("begin", "lossless", "owners")

    def __init__(self, begin: int) -> None:
        self.begin = begin
        self.lossless = True
        self.owners: dict[Owner, None] = {}


def _extra(tokens: int, size: int, salt: str | None, extra_keys: ExtraKeys | None) -> list[Any] | None:
    """The extra keys of each block; the salt is the last of the first block's."""
    if salt is None and extra_keys is None:
        return None
    ends = range(size, tokens + 1, size)
    extra: list[Any] = [None if extra_keys is None else extra_keys(end - size, end) for end in ends]
    if salt is not None:
        extra[0] = (*(extra[0] or ()), salt)
    return extra


def _longest(into: dict[int, tuple[int, int]], runs: Runs, size: int) -> None:
    for number, blocks in runs.items():
        if blocks * size > into.get(number, (0, 0))[1]:
            into[number] = (blocks, blocks * size)


def _match(
    owner: Owner, anywhere: dict[int, tuple[int, int]], by_medium: dict[str | None, dict[int, tuple[int, int]]]
) -> Match:
    blocks, tokens = limit(owner, anywhere)
    media = {medium: Run(*limit(owner, runs)) for medium, runs in by_medium.items()}
    return Match(
        worker=owner.worker,
        rank=owner.rank,
        blocks=blocks,
        tokens=tokens,
        by_medium=MappingProxyType({medium: run for medium, run in media.items() if run.tokens}),
        complete=owner.complete,
    )


def _view(owner: Owner) -> View:
    blocks: dict[Place, int] = {}
    unlinked = 0
    for _, place, shelf in owner.shelves():
        blocks[place] = blocks.get(place, 0) + len(shelf.held)
        unlinked += shelf.unlinked
    return View(
        worker=owner.worker,
        rank=owner.rank,
        complete=owner.complete,
        since_seq=owner.since_seq,
        since_ts=owner.since_ts,
        lost_batches=owner.lost,
        evicted_blocks=owner.evicted,
        unreadable_events=owner.unreadable,
        blocks=MappingProxyType(blocks),
        unlinked_blocks=unlinked,
    )
