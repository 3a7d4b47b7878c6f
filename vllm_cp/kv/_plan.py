"""From advertised sources to what is subscribed to. Pure; ports and ranks as given, never computed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from vllm_cp.kv.events import SourceId
from vllm_cp.kv.stream import Notice, NoticeKind, SourceState, StateChange
from vllm_cp.models.kv_source import KvEventSource

__all__ = ["Plan", "Wanted", "plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """One subscription."""

    source: SourceId
    topic: bytes
    #: We bind to the address, the publisher connects to it.
    bind: bool
    #: Where to ask for missed batches; ``None`` when there is nowhere.
    replay: str | None
    #: Batches that a replay may bring.
    buffer_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to subscribe to, and what has to be said about the rest."""

    wanted: tuple[Wanted, ...]
    #: Sources that cannot be read, with the reason; or that there are none.
    states: tuple[StateChange, ...]
    notices: tuple[Notice, ...]


#: Batches kept by a vLLM that does not say how many.
_DEFAULT_STEPS = 10_000


def plan(sources: Iterable[KvEventSource], worker: str) -> Plan:
    """What to do with the sources of a worker."""
    groups: dict[tuple[str, str], list[KvEventSource]] = {}
    states: list[StateChange] = []
    sources = tuple(sources)
    for source in sources:
        why = _unreadable(source)
        if why is not None:
            who = SourceId(worker=worker, rank=source.data_parallel_rank, address=source.endpoint)
            states.append(StateChange(source=who, state=SourceState.UNSUPPORTED, detail=why))
        elif source.connect_to is not None:
            groups.setdefault((source.connect_to, source.topic), []).append(source)
    if not sources:
        detail = "the worker advertises no KV-event sources: start vLLM with --kv-events-config to publish them"
        states.append(StateChange(source=None, state=SourceState.DISABLED, detail=detail))
    wanted, notices = [], []
    for (address, topic), same in groups.items():
        ranks = list(dict.fromkeys(source.data_parallel_rank for source in same))
        first = same[0]
        who = SourceId(worker=worker, rank=ranks[0] if len(ranks) == 1 else None, address=address)
        wanted.append(
            Wanted(
                source=who,
                topic=topic.encode(),
                bind=first.live.publisher_connects,
                replay=first.replay.connect_to,
                buffer_steps=first.buffer_steps or _DEFAULT_STEPS,
            )
        )
        if len(same) > 1:
            named = ", ".join("all" if rank is None else str(rank) for rank in ranks)
            detail = f"{address} is advertised {len(same)} times, for rank {named}: subscribed once"
            notices.append(Notice(source=who, kind=NoticeKind.SHARED_ADDRESS, detail=detail))
    return Plan(wanted=tuple(wanted), states=tuple(states), notices=tuple(notices))


def _unreadable(source: KvEventSource) -> str | None:
    if source.transport.lower() != "zmq":
        return f"transport {source.transport!r} is unknown: only zmq can be read"
    if source.encoding.lower() not in ("", "msgpack"):
        return f"encoding {source.encoding!r} is unknown: only msgpack can be read"
    return None if source.connect_to is not None else source.reason or "there is no address to connect to"
