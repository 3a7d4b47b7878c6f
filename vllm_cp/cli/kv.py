"""``vllm-cp kv``: the KV cache seen from outside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm_cp.cli import _kv_match, _kv_stats, _kv_tail
from vllm_cp.cli._exit import Exit
from vllm_cp.cli._table import Column, View
from vllm_cp.cli._verb import Noun, Verb, answer

if TYPE_CHECKING:
    from vllm_cp.models.kv_source import KvEventSource

__all__ = ["command"]

command = Noun(
    "kv",
    help="KV cache: its events, and which worker holds a prompt.",
    examples="""
vllm-cp kv sources
vllm-cp kv tail --target llama-0 -o jsonl
vllm-cp kv match --text "You are a helpful" --tokenizer tokenizer.json
""",
)


def _rows(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    target = record["target"]
    if not record["sources"]:
        return [{"target": target, "note": "events are off"}]
    return [
        {
            **source,
            "target": target,
            "rank": "all" if source["data_parallel_rank"] is None else source["data_parallel_rank"],
            "note": _note(source),
        }
        for source in record["sources"]
    ]


def _note(source: Mapping[str, Any]) -> str:
    if source["reason"] is not None:
        return str(source["reason"])
    return "bind there: the publisher connects" if source["publisher_connects"] else ""


_VIEW = View(
    (
        Column("TARGET", "target"),
        Column("RANK", "rank"),
        Column("CONNECT TO", "connect_to"),
        Column("ADVERTISED", "endpoint"),
        Column("NOTE", "note"),
        Column("REPLAY", "replay_connect_to", wide=True),
        Column("REPLAY ADVERTISED", "replay_endpoint", wide=True),
        Column("REPLAY NOTE", "replay_reason", wide=True),
        Column("TRANSPORT", "transport", wide=True),
        Column("ENCODING", "encoding", wide=True),
        Column("SCHEMA", "schema_version", wide=True),
        Column("TOPIC", "topic", wide=True),
        Column("STEPS", "buffer_steps", wide=True),
        Column("HWM", "hwm", wide=True),
        Column("QUEUE", "max_queue_size", wide=True),
    ),
    _rows,
)


def _judge(record: Mapping[str, Any]) -> tuple[Exit, str]:
    if record["sources"]:
        return Exit.OK, ""
    return Exit.OK, "KV-cache events are off: start vLLM with --kv-events-config to publish them"


@command.command(
    "sources",
    cls=Verb,
    examples="""
vllm-cp kv sources
vllm-cp kv sources --target llama-0 --target llama-1 -o wide
vllm-cp kv sources -o json | jq -r '.[].sources[].connect_to'
""",
)
def sources() -> int:
    """Where each rank publishes its KV-cache events.

    CONNECT TO is usable from here: a wildcard host is replaced by the worker's, the rest stays as ADVERTISED. NOTE says
    why there is nothing to connect to, or that a subscriber has to bind because the publisher connects. Nothing is
    dialled: an address in this list is no proof of events.
    """
    return answer(_VIEW, lambda client: _record(client.kv_event_sources()), judge=_judge, told=_told)


def _told(worker: Mapping[str, Any]) -> Mapping[str, Any]:
    from vllm_cp.cli._daemon import fact, sources

    return _record(sources(fact(worker, "sources")))


def _record(sources: Sequence[KvEventSource]) -> Mapping[str, Any]:
    found = [_source(source) for source in sources]
    return {"events": "on" if found else "off", "sources": found}


def _source(source: KvEventSource) -> dict[str, Any]:
    connect_to, reason = source.connect_to, source.reason
    replay_connect_to, replay_reason = source.replay.connect_to, source.replay.reason
    if source.transport.lower() != "zmq":
        # However its address looks, there is nothing here that could read it.
        reason = f"transport {source.transport!r} is unknown: only zmq can be read"
        connect_to = replay_connect_to = None
    return {
        "data_parallel_rank": source.data_parallel_rank,
        "transport": source.transport,
        "endpoint": source.endpoint,
        "connect_to": connect_to,
        "publisher_connects": source.live.publisher_connects,
        "reason": reason,
        "replay_endpoint": source.replay_endpoint,
        "replay_connect_to": replay_connect_to,
        "replay_reason": replay_reason,
        "topic": source.topic,
        "encoding": source.encoding,
        "schema_version": source.schema_version,
        "buffer_steps": source.buffer_steps,
        "hwm": source.hwm,
        "max_queue_size": source.max_queue_size,
    }


for _verb in (_kv_match.command, _kv_stats.command, _kv_tail.command):
    command.add_command(_verb)
