"""From what a subscriber says to numbers on a page. Pure: it is told, it asks nobody."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from vllm_cp import KvEventSource
from vllm_cp.kv import (
    Batch,
    Cleared,
    DecodeReason,
    Event,
    Item,
    PrefixIndex,
    Removed,
    SourceId,
    SourceState,
    SourceStats,
    StateChange,
    Stored,
    SubscriberStats,
)
from vllm_cp_exporter.kvview import KV_STATES, KvView

__all__ = ["KvFold"]

#: Blocks held of one worker beyond which its resident numbers are absent; about a quarter of a kilobyte each.
_MOST_BLOCKS = 1_000_000
#: Media of blocks; others are ``unknown``.
_MEDIA = ("gpu", "cpu", "storage")
#: What a publisher may invent before it counts as one: as many tiers, of such a length, and ranks.
_MOST_TIERS, _TIER_LENGTH, _MOST_RANKS = 8, 64, 256
#: One for all ranks, or the worker as a whole.
_ALL = "all"
_RESULTS = ("ok", "partial", "failed")
#: From good to bad: of several publishers of one rank the worst is told.
_BADNESS = {state: place for place, state in enumerate(KV_STATES)}


class KvFold:
    """The counts of one worker. They only rise, over any number of subscriptions."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._index = PrefixIndex(max_blocks=_MOST_BLOCKS)
        # What every publisher has is there from the start, to count from zero.
        self._events = Counter({(kind, "gpu", "none"): 0 for kind in ("stored", "removed")})
        self._events.update({(kind, "none", "none"): 0 for kind in ("cleared", "unknown")})
        self._stored: Counter[tuple[str, str]] = Counter()
        self._removed: Counter[tuple[str, str]] = Counter()
        self._ranks: set[str] = set()
        self._tiers: set[str] = set()
        self._totals: Counter[tuple[str, str]] = Counter()
        self._seen: dict[SourceId | None, Mapping[tuple[str, str], float]] = {}
        self._unreadable: set[tuple[int | None, str]] = set()

    # -- being told

    def apply(self, item: Item) -> None:
        """One item of a subscriber."""
        self._index.apply(item)
        if isinstance(item, Batch):
            rank = self._rank(item.rank)
            for event in item.events:
                self._event(event, rank)
        elif isinstance(item, StateChange) and item.source is not None and item.state is SourceState.UNSUPPORTED:
            self._unreadable.add((item.source.rank, item.source.address))

    def _event(self, event: Event, rank: str) -> None:
        if isinstance(event, Stored | Removed):
            kind, blocks = ("stored", self._stored) if isinstance(event, Stored) else ("removed", self._removed)
            medium = _medium(event.medium)
            self._events[kind, medium, self._tier(event.ownership)] += 1
            blocks[rank, medium] += len(event.block_hashes)
        else:
            self._events["cleared" if isinstance(event, Cleared) else "unknown", "none", "none"] += 1

    def count(self, stats: SubscriberStats) -> None:
        """The numbers of the subscription as they are now. Take them often: what departs takes its last ones along."""
        now: dict[SourceId | None, Mapping[tuple[str, str], float]] = {
            source.source: dict(_numbers(source)) for source in stats.sources
        }
        now[None] = {("dropped", ""): stats.dropped}
        for source, numbers in now.items():
            before = self._seen.get(source, {})
            for name, number in numbers.items():
                risen = number - before.get(name, 0)
                # Less than before: the source left and came back since, and counts from zero.
                self._totals[name] += risen if risen >= 0 else number  # type: ignore[assignment]
        self._seen = now

    def ended(self) -> None:
        """The subscription is over: nothing is known of what is held, and the next one counts from zero."""
        self._index.forget(self._worker)
        self._seen = {}
        self._unreadable = set()

    def _rank(self, rank: int | None) -> str:
        name = _rank(rank)
        if name not in self._ranks:
            if len(self._ranks) >= _MOST_RANKS:
                return _ALL
            self._ranks.add(name)
            for blocks in (self._stored, self._removed):
                blocks.setdefault((name, "gpu"), 0)
        return name

    def _tier(self, name: str | None) -> str:
        if not name:
            return "none"
        if name not in self._tiers:
            if len(self._tiers) >= _MOST_TIERS or len(name) > _TIER_LENGTH:
                return "unknown"
            self._tiers.add(name)
        return name

    # -- being asked

    def view(self, stats: SubscriberStats | None, sources: tuple[KvEventSource, ...] | None, otherwise: str) -> KvView:
        """All of it. ``sources`` are those of the worker; ``otherwise`` is the state where there are none."""
        resident, complete = self._held()
        feeds = () if stats is None else stats.sources
        totals = self._totals
        return KvView(
            events=_frozen(self._events),
            stored=_frozen(self._stored),
            removed=_frozen(self._removed),
            resident=_frozen(resident),
            complete=_frozen(complete),
            last_sequence=_latest((feed.source.rank, feed.last_seq) for feed in feeds),
            last_event=_latest((feed.source.rank, feed.last_batch_at) for feed in feeds),
            states=MappingProxyType(self._states(feeds, sources or ()) or {_ALL: otherwise}),
            replays=MappingProxyType({result: totals["replay", result] for result in _RESULTS}),
            failures=MappingProxyType({reason.value: totals["failure", reason.value] for reason in DecodeReason}),
            gaps=totals["gaps", ""],
            lost=totals["lost", ""],
            replay_seconds=totals["replay_s", ""],
            restarts=totals["restarts", ""],
            queue_depth=0 if stats is None else stats.queue_depth,
            dropped=totals["dropped", ""],
        )

    def _held(self) -> tuple[Counter[tuple[str, str]], dict[str, float]]:
        resident: Counter[tuple[str, str]] = Counter()
        complete: dict[str, float] = {}
        for view in self._index.views():
            rank = _rank(view.rank)
            complete[rank] = float(view.complete)
            if view.complete:
                for (medium, _), blocks in (view.blocks or {("gpu", None): 0}).items():
                    resident[rank, _medium(medium)] += blocks
        return resident, complete

    def _states(self, feeds: Iterable[SourceStats], sources: tuple[KvEventSource, ...]) -> dict[str, str]:
        found = [(_rank(feed.source.rank), _state(feed.state)) for feed in feeds]
        heard = {feed.source.address for feed in feeds}
        self._unreadable &= {(source.data_parallel_rank, source.endpoint) for source in sources}
        for source in sources:
            if source.connect_to not in heard:
                unreadable = (source.data_parallel_rank, source.endpoint) in self._unreadable
                found.append((_rank(source.data_parallel_rank), "unsupported" if unreadable else "connecting"))
        worst: dict[str, str] = {}
        for rank, state in found:
            worst[rank] = max(state, worst.get(rank, state), key=_BADNESS.__getitem__)
        return worst


def _numbers(source: SourceStats) -> Iterator[tuple[tuple[str, str], float]]:
    yield ("gaps", ""), source.gaps
    yield ("lost", ""), sum(source.lost.values())
    yield ("restarts", ""), source.restarts
    yield ("replay_s", ""), source.replay_seconds
    for result, number in source.replays.items():
        yield ("replay", result), number
    for reason, number in source.failures.items():
        yield ("failure", reason.value), number


def _rank(rank: int | None) -> str:
    return _ALL if rank is None else str(rank)


def _medium(name: str | None) -> str:
    if name is None:
        return "none"
    return name.lower() if name.lower() in _MEDIA else "unknown"


def _state(state: SourceState) -> str:
    return state.value if state.value in KV_STATES else "unknown"


def _latest(seen: Iterable[tuple[int | None, float | None]]) -> Mapping[str, float]:
    """The highest number of each rank."""
    found: dict[str, float] = {}
    for rank, number in seen:
        if number is not None:
            found[_rank(rank)] = max(number, found.get(_rank(rank), number))
    return MappingProxyType(found)


def _frozen(numbers: Mapping[Any, float]) -> Mapping[Any, float]:
    return MappingProxyType(dict(numbers))
