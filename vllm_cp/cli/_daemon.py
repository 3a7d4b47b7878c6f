"""What a vllm-cp-exporter knows of the workers, for ``--via``: the plain JSON of its API."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from vllm_cp import errors
from vllm_cp._http_call import Answer, Call, UnreadableError
from vllm_cp.cli import _context, _http_side
from vllm_cp.cli._fanout import Reply
from vllm_cp.cli._talk import call_hook
from vllm_cp.cli._text import plain
from vllm_cp.errors import ConfigError, ControlError, NotFound

if TYPE_CHECKING:
    from vllm_cp.models.kv_source import KvEventSource

__all__ = ["ask", "chosen", "fact", "sources", "told_of_each"]

T = TypeVar("T")

_SCHEMA = 1
_HINT = "is this the base URL of a vllm-cp-exporter?"


def told_of_each(tell: Callable[[Mapping[str, Any]], T]) -> list[Reply[T]]:
    """What the daemon says of each worker that was asked for, in its order; a daemon that doesn't answer is one reply.

    ``tell`` makes of a worker's record what is wanted, or raises why that is not known.
    """
    try:
        workers = ask("workers")
    except ControlError as error:
        return [Reply(error.target, error=error)]
    found, missing = chosen(workers)
    replies: list[Reply[T]] = []
    for worker in found:
        try:
            replies.append(Reply(worker["worker"], tell(worker)))
        except ControlError as error:
            replies.append(Reply(worker["worker"], error=error))
    return [*replies, *(Reply(name, error=_not_watched(name)) for name in missing)]


def chosen(records: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[str]]:
    """The records of the workers and the pool that the command line names, and the names that there are no records of.

    Raises UsageError for a pool that there is not.
    """
    targets, pool = _context.named()
    pools = {record["pool"] for record in records}
    if pool is not None and pool not in pools and records:
        there = ", ".join(sorted(map(plain, pools)))
        raise click.UsageError(f"--pool: the daemon knows no worker in the pool '{plain(pool)}': there are {there}")
    found = [record for record in records if pool in (None, record["pool"])]
    if not targets:
        return found, []
    by_name = {name: record for record in found for name in (record.get("target"), record["worker"]) if name}
    canonical = {target: _context.canonical(target) for target in targets}
    named = {target: by_name.get(target, by_name.get(canonical[target])) for target in targets}
    wanted = {id(record) for record in named.values()}
    return [r for r in found if id(r) in wanted], [target for target, record in named.items() if record is None]


def ask(what: str) -> list[Mapping[str, Any]]:
    """The list that the daemon has under ``/api/v1/<what>``. Raises ControlError, UsageError."""
    from vllm_cp.faults import FaultTolerance

    # What can't be meant is found before anybody is asked.
    _context.named()
    source, url = _context.via()
    assert url is not None
    call = Call(verb="GET", path=f"/api/v1/{what}", parse=lambda said: _read(said, what), safe=True, missing=_HINT)
    try:
        # An HTTP client like any other, that here asks no worker.
        client = FaultTolerance(_http_side.connection_to(url, _context.defaults(), source), on_rpc=call_hook())
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    with client:
        return client.run(call, None)


def fact(worker: Mapping[str, Any], name: str) -> Any:
    """One fact of a worker's record. Raises the ControlError that says why it is not known."""
    if worker[name] is not None:
        return worker[name]
    said = worker.get("errors", {}).get(name) or {}
    kind = getattr(errors, str(said.get("kind")), ControlError)
    if not (isinstance(kind, type) and issubclass(kind, ControlError)):
        kind = ControlError
    code, detail = said.get("code", ""), said.get("detail", "")
    raise kind(worker["worker"], "the daemon says", code or detail or "it does not say why", detail if code else "")


def sources(records: Sequence[Mapping[str, Any]]) -> list[KvEventSource]:
    """Event sources as the SDK has them."""
    from dataclasses import fields

    from vllm_cp.models.kv_source import Address, KvEventSource

    made = []
    for record in records:
        known = {field.name: record[field.name] for field in fields(KvEventSource) if field.name in record}
        for side in ("live", "replay"):
            known[side] = Address(**known.get(side, {}))
        made.append(KvEventSource(**known))
    return made


def _read(answer: Answer, what: str) -> list[Mapping[str, Any]]:
    try:
        document = json.loads(answer.body)
    except (ValueError, RecursionError):
        raise UnreadableError("no JSON", _HINT) from None
    if not isinstance(document, dict) or not isinstance(document.get(what), list):
        raise UnreadableError(f"no list of {what} in it", _HINT)
    if document.get("schema") != _SCHEMA:
        raise UnreadableError(f"format {document.get('schema')!r}, and {_SCHEMA} is read here", "update vllm-cp")
    return [record for record in document[what] if isinstance(record, dict)]


def _not_watched(name: str) -> ControlError:
    return NotFound(name, "the daemon says", "not found", "it watches no such worker")
