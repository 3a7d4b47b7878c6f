"""What a fake HTTP server answers: the pages of the two kinds of real server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_cp.models.scaling import ScalingState
from vllm_cp.testing._http_group import FakeEngine

__all__ = ["HttpFacts", "Reply", "metrics", "scaling"]

_MODEL = "fake"


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer."""

    status: int
    body: bytes = b""
    content_type: str = "application/json"

    @classmethod
    def json(cls, status: int, said: object) -> Reply:
        """An answer in JSON."""
        return cls(status, json.dumps(said, separators=(",", ":")).encode())


@dataclass(slots=True, kw_only=True)
class HttpFacts:
    """What a fake HTTP server says of itself, apart from its engines."""

    healthy: bool = True
    #: Weight updates and sleep operations in flight; only the Rust frontend's page has them.
    weight_updates: int = 0
    sleep_operations: int = 0
    #: Unix seconds; only the Python server's page has it.
    process_start: float = 1_796_066_261.33
    #: ``None``: this server can't be scaled, and has no such route.
    scaling: ScalingState | None = field(default_factory=lambda: ScalingState(scaling=False))
    #: As /kv_event_sources lists them, by rank.
    kv_event_sources: dict[str, Any] = field(default_factory=dict)


def metrics(rust: bool, facts: HttpFacts, engines: Sequence[FakeEngine]) -> Reply:
    """The page, in the format and with the families of that kind of server."""
    page = _Page(rust)
    if not rust:
        page.family("process_start_time_seconds", "gauge", "Start time of the process since unix epoch in seconds.")
        page.sample("process_start_time_seconds", "", facts.process_start)
    for name, kind, text, key in (
        ("num_requests_running", "gauge", "Number of requests in model execution batches.", "running"),
        ("num_requests_waiting", "gauge", "Number of requests waiting to be processed.", "waiting"),
        ("kv_cache_usage_perc", "gauge", "KV-cache usage. 1 means 100 percent usage.", "kv_cache_usage"),
        ("generation_tokens", "counter", "Number of generation tokens processed.", "generation_tokens"),
    ):
        page.family(f"vllm:{name}", kind, text)
        for engine in engines:
            total = "_total" if kind == "counter" else ""
            page.sample(f"vllm:{name}{total}", page.labels(engine.number), getattr(engine, key))
        if key == "waiting":
            page.family("vllm:num_requests_waiting_by_reason", "gauge", "Number of waiting requests by reason.")
            for engine in engines:
                labels = page.labels(engine.number, 'reason="capacity"')
                page.sample("vllm:num_requests_waiting_by_reason", labels, engine.waiting)
    if rust:
        for name, what, value in (
            ("rl_weight_update_operations_in_flight", "Weight-transfer", facts.weight_updates),
            ("sleep_mode_operations_in_flight", "Sleep-mode", facts.sleep_operations),
        ):
            page.family(f"vllm:{name}", "gauge", f"{what} operations currently awaited.")
            # As on the real page: no sample before there was an operation.
            if value:
                page.sample(f"vllm:{name}", "", value)
    return page.reply()


def scaling(state: ScalingState) -> Reply:
    """The answer to /is_scaling_elastic_ep."""
    return Reply.json(
        200,
        {
            "is_scaling_elastic_ep": state.scaling,
            "phase": state.phase,
            "epoch": state.epoch,
            "error": state.error,
            "requested_data_parallel_size": state.requested_data_parallel_size,
        },
    )


class _Page:
    def __init__(self, rust: bool) -> None:
        self._rust = rust
        self._lines: list[str] = []

    def family(self, name: str, kind: str, text: str) -> None:
        # The Prometheus text format names a counter by its sample, OpenMetrics without the ending.
        name = f"{name}_total" if kind == "counter" and not self._rust else name
        self._lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]

    def labels(self, engine: int, more: str = "") -> str:
        pairs = [f'engine="{engine}"', f'model_name="{_MODEL}"']
        pairs = [*(reversed(pairs) if self._rust else pairs), *([more] if more else [])]
        return "{" + ",".join(pairs) + "}"

    def sample(self, name: str, labels: str, value: float) -> None:
        shown = str(int(value)) if self._rust and value == int(value) else repr(float(value))
        self._lines.append(f"{name}{labels} {shown}")

    def reply(self) -> Reply:
        if self._rust:
            kind = "application/openmetrics-text; version=1.0.0; charset=utf-8"
            self._lines.append("# EOF")
        else:
            kind = "text/plain; version=1.0.0; charset=utf-8"
        return Reply(200, ("\n".join(self._lines) + "\n").encode(), kind)
