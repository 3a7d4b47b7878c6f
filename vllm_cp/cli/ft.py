"""``vllm-cp ft``: fault tolerance over HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import click

from vllm_cp.cli import _context, _http_side, _stdio
from vllm_cp.cli._change import DRY, Changing, confirmed, dry
from vllm_cp.cli._exit import Exit, overall
from vllm_cp.cli._table import Column, View
from vllm_cp.cli._talk import call_hook
from vllm_cp.cli._verb import Noun, Verb, Verdict, conclude

if TYPE_CHECKING:
    from vllm_cp.faults import FaultTolerance, HttpConnection
    from vllm_cp.models.recovery import RankRecovery, RecoveryOutcome

__all__ = ["command"]

_DEFAULT_S = 120.0
_URLS = "HTTP server of a worker, each one of a group; or one with {host} in it for the host of each target."

command = Noun(
    "ft",
    help="Fault tolerance: state of the engines, and bringing them back.",
    examples="""
vllm-cp ft status --http-url http://llama-0:8000
vllm-cp ft retry --context prod --http-url http://{host}:8000 --all
""",
)


def _rows(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    shared = {key: value for key, value in record.items() if key != "engines"}
    return [{**shared, **engine} for engine in record["engines"]] or [shared]


_STATUS = View(
    (
        Column("TARGET", "target"),
        Column("ENGINE", "engine"),
        Column("STATE", "state", good=frozenset({"healthy"})),
        Column("FAULT", "info"),
        Column("LAST ERROR", "error"),
        Column("LAST INSTRUCTION", "last_request_id", wide=True),
        Column("URL", "http_url", wide=True),
    ),
    _rows,
)
_RETRY = View(
    (
        Column("TARGET", "target"),
        Column("RESULT", "result", good=frozenset({"recovered", "not_needed"})),
        Column("ENGINE", "engine"),
        Column("STATE", "state", good=frozenset({"healthy"})),
        Column("SECONDS", "seconds"),
        Column("WHY NOT", "error"),
        Column("INSTRUCTION", "request_id", wide=True),
        Column("URL", "http_url", wide=True),
    ),
    _rows,
)


@command.command(
    "status",
    cls=Verb,
    params=[_http_side.http_url_option(_URLS)],
    examples="""
vllm-cp ft status --http-url http://w-0:8000 --http-url http://w-1:8000
vllm-cp ft status --target llama-0 --http-url http://{host}:8000 -o json
""",
)
def status(http_urls: tuple[str, ...]) -> int:
    """What fault tolerance says of each engine.

    It is on vLLM's Python server started with --enable-fault-tolerance. Servers that discovery knows need no URL.
    healthy: it works. unhealthy: it waits for an instruction, and dies when none comes in time (120 s by default).
    dead: only a new process helps. Anything but healthy exits with 8.
    """
    shape, servers = _context.shape(_STATUS), _http_side.servers(http_urls)
    from vllm_cp.cli import _fanout

    with ExitStack() as stack:
        clients = _clients(servers, stack)
        return conclude(_STATUS, shape, _fanout.ask_each(clients, _looked, stack.close))


def _looked(client: FaultTolerance) -> Verdict:
    said = client.status()
    engines = [
        {
            "engine": engine.engine,
            "state": engine.state.value,
            "info": engine.info,
            "last_request_id": engine.last_request_id,
            "error": engine.error,
        }
        for engine in said.engines
    ]
    record = {"http_url": client.target, "total_engines": said.total_engines, "engines": engines}
    ill = [f"engine {engine['engine']} is {engine['state']}" for engine in engines if engine["state"] != "healthy"]
    if not ill:
        return Verdict(record)
    waits = any(engine["state"] == "unhealthy" for engine in engines)
    hint = "; 'vllm-cp ft retry' with every server of its group tells it to go on" if waits else ""
    return Verdict(record, Exit.NOT_READY, ", ".join(ill) + hint)


@command.command(
    "retry",
    cls=Changing,
    timeout_help="Longest wait in all. [default: 120]",
    params=[_http_side.http_url_option(_URLS)],
    examples="""
vllm-cp ft retry --http-url http://llama-0:8000
vllm-cp ft retry --context prod --http-url http://{host}:8000 --all --yes
vllm-cp ft retry --http-url http://w-0:8000 --dry-run
""",
)
def retry(http_urls: tuple[str, ...]) -> int:
    """Tell unhealthy engines to go on, and wait until they are healthy.

    Give the servers of all ranks of a group: none goes on before every unhealthy one was told. Each is told once, never
    again; a healthy one is not told. The report has a row for each rank: recovered, not_needed, dead, refused,
    out_of_time, unreachable, not_supported or failed.
    """
    shape, deadline_s = _context.shape(_RETRY), _context.whole_timeout(_DEFAULT_S)
    servers = _http_side.servers(http_urls, at_most_s=deadline_s)
    from vllm_cp.cli._fanout import Reply

    does, names = "tell unhealthy engines to retry", list(servers)
    if dry(does, names):
        verdicts = {name: Verdict({"result": DRY, "http_url": servers[name].base, "engines": []}) for name in names}
        return conclude(_RETRY, shape, [Reply(name, verdict) for name, verdict in verdicts.items()])
    if not confirmed(does, names):
        return Exit.INTERRUPTED
    try:
        ranks = _recovered(servers, deadline_s)
    except KeyboardInterrupt:
        _stdio.say("interrupted: what was sent already is not taken back")
        return Exit.INTERRUPTED
    said = {name: [rank for rank in ranks if rank.target == servers[name].base] for name in names}
    return conclude(_RETRY, shape, [Reply(name, _reported(said[name], servers[name].base)) for name in names])


def _recovered(servers: Mapping[str, HttpConnection], deadline_s: float) -> Sequence[RankRecovery]:
    from vllm_cp.faults import recover

    with ExitStack() as stack:
        return recover(_clients(servers, stack).values(), deadline_s=deadline_s, poll_s=min(1.0, deadline_s / 10))


def _reported(ranks: Sequence[RankRecovery], url: str) -> Verdict:
    engines = [
        {
            "result": rank.outcome.value,
            "engine": rank.engine,
            "state": rank.state.value,
            "seconds": None if rank.seconds is None else round(rank.seconds, 3),
            "request_id": rank.request_id,
            "error": _without_target(rank),
        }
        for rank in ranks
    ]
    failed = [
        f"{'the server' if rank.engine is None else f'engine {rank.engine}'} {_words(rank)}"
        for rank in ranks
        if not rank.ok
    ]
    code = overall({_exit_of(rank.outcome) for rank in ranks})
    return Verdict({"http_url": url, "engines": engines}, code, "; ".join(failed))


def _words(rank: RankRecovery) -> str:
    did, why = f"did not recover: {rank.outcome.value}", _without_target(rank)
    return f"{did} ({why})" if why else did


def _without_target(rank: RankRecovery) -> str | None:
    return rank.error.removeprefix(f"{rank.target}: ") if rank.error else None


def _exit_of(outcome: RecoveryOutcome) -> Exit:
    return {
        "recovered": Exit.OK,
        "not_needed": Exit.OK,
        "out_of_time": Exit.UNREACHABLE,
        "unreachable": Exit.UNREACHABLE,
        "not_supported": Exit.NOT_SUPPORTED,
    }.get(outcome.value, Exit.REFUSED)


def _clients(servers: Mapping[str, HttpConnection], stack: ExitStack) -> dict[str, FaultTolerance]:
    from vllm_cp.errors import ConfigError
    from vllm_cp.faults import FaultTolerance

    try:
        hook = call_hook()
        return {name: stack.enter_context(FaultTolerance(server, on_rpc=hook)) for name, server in servers.items()}
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
