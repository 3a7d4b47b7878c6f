"""``vllm-cp audit``: what an outsider can do to a worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from vllm_cp.cli import _context
from vllm_cp.cli._exit import Exit
from vllm_cp.cli._table import Column, View
from vllm_cp.cli._verb import Verb, answer

if TYPE_CHECKING:
    from vllm_cp.client import ControlClient
    from vllm_cp.config import Connection

__all__ = ["command"]

_SEVERITIES = ("info", "low", "medium", "high")
_WORST_FIRST = ("high", "medium", "low", "info", "unknown", "ok", "none")
_WORDS = {"guarded": "ok", "absent": "none", "unknown": "unknown"}
_HOST = "{host}"


def _rows(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    rows = [
        {**found, "target": record["target"], "risk": _WORDS.get(found["verdict"], found["severity"])}
        for found in record["findings"]
    ]
    return sorted(rows, key=lambda row: _WORST_FIRST.index(row["risk"]))


_VIEW = View(
    (
        Column("TARGET", "target"),
        Column("RISK", "risk", good=frozenset({"ok", "none", "info"})),
        Column("CHECK", "id"),
        Column("SEEN", "evidence"),
        Column("WHAT TO DO", "remedy", wide=True),
    ),
    _rows,
)


@click.command(
    "audit",
    cls=Verb,
    examples="""
vllm-cp audit --target llama-0 --http-url http://llama-0:8000
vllm-cp audit --target llama-0 --target llama-1 --http-url http://{host}:8000
vllm-cp audit --tls-ca ca.pem --target llama-0 --fail-on high -o wide
""",
)
@click.option("--http-url", metavar="URL", help="The worker's HTTP server; {host} in it is the target's host.")
@click.option(
    "--fail-on", type=click.Choice(_SEVERITIES), help="Exit with 8 for an open door of this severity or a higher one."
)
def command(http_url: str | None, fail_on: str | None) -> int:
    """Try every target's doors as somebody without token, key or certificate would.

    RISK is the severity of an open door; ok: tried and refused; none: there is no such door; unknown: no telling, and
    why. Nothing is changed: an abort of no requests is the boldest thing that is sent. Each wait ends with --timeout.
    It is a view from here: what a firewall on the way refuses, others may reach. A certificate or token that is given
    serves only to learn which KV ports to try.
    """
    context = click.get_current_context()
    connections = {connection.address.name: connection for connection in _context.connections()}
    if http_url is not None and len(connections) > 1 and _HOST not in http_url:
        raise click.UsageError(f"--http-url is one URL for several targets: write {_HOST} in it", context)
    urls = {name: _url(http_url, connection, context) for name, connection in connections.items()}

    def ask(client: ControlClient) -> Mapping[str, Any]:
        from vllm_cp.audit import audit

        findings = [
            {
                "id": found.id,
                "verdict": found.verdict.value,
                "severity": found.severity.value,
                "evidence": found.evidence,
                "remedy": found.remedy or None,
            }
            for found in audit(connections[client.target], http_url=urls[client.target])
        ]
        return {"http_url": urls[client.target], "findings": findings}

    def judge(record: Mapping[str, Any]) -> tuple[Exit, str]:
        exposed = [found["severity"] for found in record["findings"] if found["verdict"] == "exposed"]
        counts = [f"{exposed.count(severity)} {severity}" for severity in reversed(_SEVERITIES) if severity in exposed]
        bad = fail_on is not None and any(_SEVERITIES.index(s) >= _SEVERITIES.index(fail_on) for s in exposed)
        remark = f"open doors: {', '.join(counts)}; -o wide says what to do" if counts else ""
        return Exit.NOT_READY if bad else Exit.OK, remark

    return answer(_VIEW, ask, judge=judge)


def _url(text: str | None, connection: Connection, context: click.Context) -> str | None:
    from vllm_cp._http_connection import HttpConnection
    from vllm_cp.errors import ConfigError

    if text is None:
        return None
    host = connection.address.host
    if _HOST in text and host is None:
        raise click.UsageError(f"--http-url: {connection.address.name} has no host to put in for {_HOST}", context)
    try:
        return HttpConnection(url=text.replace(_HOST, f"[{host}]" if host and ":" in host else host or "")).base
    except ConfigError as error:
        raise click.UsageError(f"--http-url: {error}", context) from None
