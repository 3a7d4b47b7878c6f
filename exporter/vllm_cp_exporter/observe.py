"""One look at what a worker says it is: its facts, in one bundle."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from vllm_cp import AsyncControlClient, ControlError, NotSupported, OutOfTime, WorkerUnreachable
from vllm_cp.models.server import ServerInfo
from vllm_cp_exporter.snapshot import Facts

__all__ = ["read_facts"]

T = TypeVar("T")


async def read_facts(
    client: AsyncControlClient,
    known: Facts,
    *,
    ask_sources: bool,
    on_server: Callable[[ServerInfo | ControlError], object],
) -> Facts:
    """The facts as they are known after asking.

    ``on_server`` is told at once who answers, or why nobody does: the rest may take its time. A fact that is not
    offered leaves the others alone. ``ask_sources`` off keeps what is known of the event sources: a worker that does
    not offer them, or does not let us ask, is not asked again and again.
    """
    server = await _outcome(client.server_info())
    on_server(server)
    if isinstance(server, WorkerUnreachable | OutOfTime):
        return known
    facts = replace(known, server=server if isinstance(server, ServerInfo) else None)
    model = await _outcome(client.model_info())
    if not isinstance(model, ControlError):
        version = facts.server.engine_version if facts.server else ""
        facts = replace(facts, model=model.seen_on(version))
    if ask_sources:
        sources = await _outcome(client.kv_event_sources())
        if isinstance(sources, ControlError):
            problem = "not supported" if isinstance(sources, NotSupported) else sources.meaning
            facts = replace(facts, sources=None, sources_problem=problem)
        else:
            facts = replace(facts, sources=sources, sources_problem="")
    return facts


async def _outcome(call: Awaitable[T]) -> T | ControlError:
    try:
        return await call
    except ControlError as error:
        return error
