"""The worker's own /metrics page, as far as the ladder needs it.

    from vllm_cp import FaultTolerance, read_page

    with FaultTolerance("http://llama-0:8000") as worker:
        print(read_page(worker).generation_tokens)

A page has 50 to 90 KB and more, is read every few seconds from every worker of a fleet, and seven families of it are
wanted: so the page is searched for their names instead of being parsed, a hundred times as fast. Tests hold the result
equal to that of prometheus_client's parsers.
"""

from __future__ import annotations

import math
import re

from vllm_cp._http import AsyncHttpClient, HttpClient
from vllm_cp._http_call import Answer, Call, UnreadableError
from vllm_cp.models.probe import EngineMetrics

__all__ = ["parse_page", "read_page", "read_page_async"]

_TOKENS = b"vllm:generation_tokens_total"
_RUNNING = b"vllm:num_requests_running"
_WAITING = b"vllm:num_requests_waiting"
_KV_CACHE = b"vllm:kv_cache_usage_perc"
_WEIGHTS = b"vllm:rl_weight_update_operations_in_flight"
_SLEEP = b"vllm:sleep_mode_operations_in_flight"
_START = b"process_start_time_seconds"

#: Longest line that is read as a sample, bytes; real ones have some hundreds.
_LONGEST = 64 * 1024

#: The Rust frontend answers in OpenMetrics whatever one asks for; samples look the same in both formats.
_TYPES = frozenset({"", "text/plain", "application/openmetrics-text"})
_ACCEPT = "text/plain;version=0.0.4,*/*;q=0.5"

# From the end of the name on: labels, whose quoted values may hold braces and escaped quotes, and the value. What
# follows on the line (a time, an exemplar) is none of ours.
_REST = re.compile(rb'(?:[ \t]*\{(?:[^"}\n]|"(?:[^"\\\n]|\\[^\n])*")*\}[ \t]*|[ \t]+)([^ \t\r\n#]+)')


def read_page(client: HttpClient, *, timeout_s: float | None = None) -> EngineMetrics:
    """What the worker's own page says now; ``client`` is a ``FaultTolerance``.

    Raises ControlError, see ``vllm_cp.errors``: EngineFailed when what comes is no page of metrics, TooLarge when it is
    longer than the connection's ``max_answer_bytes``. Source: GET /metrics of both servers."""
    return client.run(call(), timeout_s)


async def read_page_async(client: AsyncHttpClient, *, timeout_s: float | None = None) -> EngineMetrics:
    """``read_page`` for asyncio; ``client`` is an ``AsyncFaultTolerance``."""
    return await client.run(call(), timeout_s)


def call() -> Call[EngineMetrics]:
    """The request, as a value."""
    return Call(verb="GET", path="/metrics", parse=_parse, safe=True, accept=_ACCEPT)


def parse_page(page: bytes) -> EngineMetrics:
    """The families the ladder needs, from a page in the Prometheus text format or in OpenMetrics.

    Counts are summed over the engines, KV-cache usage is the highest of them; ``None`` is not on the page. Lines that
    are no samples and values that are not finite are as good as absent. Never raises."""
    kv_cache, start, tokens = _values(page, _KV_CACHE), _values(page, _START), _values(page, _TOKENS)
    return EngineMetrics(
        generation_tokens=math.fsum(tokens) if tokens else None,
        tokens_by_engine=tuple(tokens),
        running=_sum(page, _RUNNING),
        waiting=_sum(page, _WAITING),
        maintenance=(_sum(page, _WEIGHTS) or 0.0) + (_sum(page, _SLEEP) or 0.0),
        kv_cache_usage_ratio=max(kv_cache) if kv_cache else None,
        process_start=min(start) if start else None,
    )


def _parse(answer: Answer) -> EngineMetrics:
    if answer.content_type not in _TYPES:
        raise UnreadableError(f"{answer.content_type} is no page of metrics")
    return parse_page(answer.body)


def _sum(page: bytes, name: bytes) -> float | None:
    values = _values(page, name)
    return math.fsum(values) if values else None


def _values(page: bytes, name: bytes) -> list[float]:
    """The finite values of all samples of that name."""
    values: list[float] = []
    at = page.find(name)
    while at >= 0:
        end = at + len(name)
        if _begins_line(page, at):
            line = page.find(b"\n", end, end + _LONGEST)
            last = line if line >= 0 else len(page)
            # A line without an end in sight is no sample, and searching all of it for one would take for ever.
            found = _REST.match(page, end, last) if last - end < _LONGEST else None
            if found is not None and math.isfinite(value := _number(found[1])):
                values.append(value)
            end = last
        at = page.find(name, end)
    return values


def _begins_line(page: bytes, at: int) -> bool:
    """Whether only blanks stand before ``at``: elsewhere a name is in a comment, a label or a longer name."""
    while at > 0 and page[at - 1] in b" \t":
        at -= 1
    return at == 0 or page[at - 1] == 0x0A


def _number(text: bytes) -> float:
    try:
        # Python takes 1_000 for a number, and the formats don't.
        return math.nan if b"_" in text else float(text)
    except ValueError:
        return math.nan
