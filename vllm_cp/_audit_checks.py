"""The checks of an audit: their names, how much harm each open door does, and what to do about it."""

from __future__ import annotations

from typing import NamedTuple

from vllm_cp.models.finding import Finding, Severity, Verdict

__all__ = ["CHECKS", "ROUTES", "Check", "finding"]


class Check(NamedTuple):
    """One check."""

    #: Of the door when it is open.
    severity: Severity
    remedy: str


_CLIENTS = "demand client certificates: --ssl-ca-certs with --ssl-cert-reqs 2; --api-key does not guard gRPC"
_KV_PORTS = "let only subscribers reach the port (network policy, firewall): ZeroMQ asks for no credentials"
_ROUTES = "let no stranger reach the HTTP port: put a proxy before it that passes the API's routes only"

#: Every check by its id, in the order of the report.
CHECKS: dict[str, Check] = {
    "beyond-loopback": Check(Severity.LOW, "narrow --host, or say in a network policy who may connect"),
    "grpc-plaintext": Check(Severity.MEDIUM, "give vLLM --ssl-certfile and --ssl-keyfile: they cover gRPC too"),
    "tls-versions": Check(Severity.MEDIUM, "allow TLS 1.2 and later only"),
    "tls-certificate": Check(Severity.MEDIUM, "renew the certificate, and restart vLLM to load it"),
    "client-certificate": Check(Severity.MEDIUM, _CLIENTS),
    "discovery-open": Check(Severity.LOW, _CLIENTS),
    "abort-open": Check(Severity.HIGH, _CLIENTS),
    "http-api-open": Check(Severity.MEDIUM, "start vLLM with --api-key, or put HTTP behind a proxy that asks"),
    "api-key-skips-grpc": Check(Severity.HIGH, _CLIENTS),
    "kv-events-open": Check(Severity.HIGH, f"{_KV_PORTS}, and the events hold the prompts as token ids"),
    "kv-replay-open": Check(Severity.HIGH, f"{_KV_PORTS}, and a replay holds the prompts as token ids"),
    "http-metrics": Check(Severity.LOW, _ROUTES),
    "http-health": Check(Severity.INFO, ""),
    "http-kv-sources": Check(Severity.LOW, _ROUTES),
    "http-fault-tolerance": Check(Severity.MEDIUM, f"{_ROUTES}; what changes engines stands beside it, untried"),
    "http-elastic-scaling": Check(Severity.MEDIUM, f"{_ROUTES}; what rescales stands beside it, untried"),
}

#: The operational routes by check. All of them get a GET, which changes nothing on any.
ROUTES = {
    "http-metrics": "/metrics",
    "http-health": "/health",
    "http-kv-sources": "/kv_event_sources",
    "http-fault-tolerance": "/fault_tolerance/status",
    "http-elastic-scaling": "/is_scaling_elastic_ep",
}


def finding(
    check: str, verdict: Verdict, evidence: str, *, severity: Severity | None = None, remedy: str = ""
) -> Finding:
    """What a check saw. An open door has the severity and remedy of its check, unless others are given."""
    harm = Severity.INFO
    if verdict is Verdict.EXPOSED:
        harm = severity or CHECKS[check].severity
        remedy = remedy or CHECKS[check].remedy
    return Finding(id=check, verdict=verdict, severity=harm, evidence=evidence, remedy=remedy)
