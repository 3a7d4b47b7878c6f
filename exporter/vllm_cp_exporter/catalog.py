"""The one metric table: what each row is called, what it means, and how it is read.

The page, the README's list and every other way out of the daemon walk these tables; nothing else names a metric.
``read`` gives the points of one worker, pool or daemon: the values of the row's own labels, and a number. A point that
is left out is absent from the page: unknown is not zero. It may raise; whoever walks the table guards each row.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from vllm_cp import HealthStatus, ModelInfo, Parallelism, ServerInfo, __version__
from vllm_cp.models.episode import Cause, EndKind
from vllm_cp.models.ladder import Reason, Rung
from vllm_cp.models.probe import EngineState
from vllm_cp_exporter.kvrows import KV_ROWS
from vllm_cp_exporter.row import Point, Points, Row, gauge, info, names, one_of, row, value, word
from vllm_cp_exporter.selfmetrics import RECOVERY_BOUNDS, RECOVERY_KINDS, Buckets, Own
from vllm_cp_exporter.snapshot import POOL_STATES, WorkerView

__all__ = ["CHECKS", "OWN_ROWS", "POOL_ROWS", "ROWS", "ROW_ERRORS", "WORKER_ROWS", "Point", "PoolView", "Row"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolView:
    """One pool at one moment."""

    name: str
    workers: tuple[WorkerView, ...]
    #: Workers wanted ready; ``None`` when not configured.
    min_ready: int | None
    own: Own


def _server(name: str, text: str, read: Callable[[ServerInfo], float | None]) -> Row[WorkerView]:
    return gauge(name, text, lambda view: read(view.facts.server) if view.facts.server else None, "facts.server")


# -- what a worker is -----------------------------------------------------------------------


def _server_info(view: WorkerView) -> Points:
    server = view.facts.server
    if server is None:
        return ()
    rl = server.rl_capabilities
    return info(
        server.engine_version,
        "rust" if view.target else "unknown",
        server.proto_version or "",
        str(server.parallelism.data_parallel_rank) if server.parallelism else "",
        word(rl.weight_transfer_enabled if rl else None),
        word(rl.sleep_mode_enabled if rl else None),
    )


def _instance(view: WorkerView) -> Points:
    server = view.facts.server
    return info(server.instance_id) if server and server.instance_id is not None else ()


def _model(view: WorkerView) -> Points:
    if view.facts.model is None:
        return ()
    model: ModelInfo = view.facts.model
    if view.facts.server is not None:
        model = model.seen_on(view.facts.server.engine_version)
    return info(
        model.served_model_name,
        model.model_id,
        ",".join(model.served_model_aliases),
        model.reasoning_parser or "",
        model.tool_call_parser or "",
        word(model.supports_text_input),
        word(model.supports_token_ids_input),
        word(model.supports_lora),
        word(model.supports_multimodal),
    )


def _parallelism(view: WorkerView) -> Points:
    spread: Parallelism | None = view.facts.server.parallelism if view.facts.server else None
    if spread is None:
        return ()
    sizes = {
        "tensor": spread.tensor_parallel_size,
        "pipeline": spread.pipeline_parallel_size,
        "data": spread.data_parallel_size,
        "data_local": spread.data_parallel_size_local,
        "decode_context": spread.decode_context_parallel_size,
        "world": spread.world_size,
    }
    return [((dimension,), size) for dimension, size in sizes.items() if size is not None]


# -- how it is ------------------------------------------------------------------------------

_HEALTH = {HealthStatus.SERVING: "serving", HealthStatus.NOT_SERVING: "not_serving", None: "no_answer"}
#: The things that are proved now and then.
CHECKS = ("health", "round_trip", "canary", "facts", "fault_tolerance", "engine_metrics")
_CHECK_LABELS = [(check, (check,)) for check in CHECKS]
#: A proof moves at every look, what it proves hardly ever.
_RUNGS = " ".join(f"state.rungs.{rung.value}.holds" for rung in Rung)


def _health(view: WorkerView) -> Points:
    said = _HEALTH.get(view.state.evidence.health, "unknown")
    return one_of(("serving", "not_serving", "unknown", "no_answer"), said)


def _rungs(view: WorkerView) -> Points:
    return [((rung.value,), float(state.holds)) for rung, state in view.state.rungs if state.holds is not None]


def _not_ready(view: WorkerView) -> Points:
    return one_of(names(Reason), view.state.reason.value if view.state.reason else None)


def _proofs(view: WorkerView) -> Points:
    proofs = view.proofs
    return [(labels, proofs[check]) for check, labels in _CHECK_LABELS if check in proofs]


def _engines(view: WorkerView) -> Iterator[Point]:
    for engine in view.state.evidence.engines:
        for status in EngineState:
            yield (str(engine.engine), status.value), float(status is engine.state)


WORKER_ROWS: tuple[Row[WorkerView], ...] = (
    row(
        "worker_target_info",
        "gauge",
        "Where the worker is asked; always 1.",
        "target http_url worker_namespace worker_pod worker_node",
        lambda view: info(view.target, view.http_url, view.namespace, view.pod, view.node),
        "target http_url namespace pod node",
    ),
    row(
        "worker_info",
        "gauge",
        "What the worker says it is; always 1.",
        "engine_version frontend proto_version data_parallel_rank weight_transfer sleep_mode",
        _server_info,
        "facts.server target",
    ),
    row(
        "worker_instance_info",
        "gauge",
        "The instance that answers; always 1.",
        "instance_id",
        _instance,
        "facts.server",
    ),
    row(
        "worker_model_info",
        "gauge",
        "The model and what it can do; always 1. Several aliases are joined by commas.",
        "model_name model_id model_aliases reasoning_parser tool_call_parser"
        " supports_text_input supports_token_ids_input supports_lora supports_multimodal",
        _model,
        "facts.model facts.server",
    ),
    row(
        "worker_parallelism",
        "gauge",
        "How the model is spread, by dimension.",
        "dimension",
        _parallelism,
        "facts.server",
    ),
    _server("worker_kv_blocks", "KV-cache blocks as configured, the sum over the ranks.", lambda s: s.total_kv_blocks),
    _server(
        "worker_kv_block_size_tokens",
        "Scheduler block, in the scheduler's own unit; not a token count for hybrid models.",
        lambda s: s.kv_block_size,
    ),
    _server(
        "worker_effective_attention_block_size_tokens",
        "Attention block, where the server knows it.",
        lambda s: s.effective_attention_block_size,
    ),
    _server("worker_max_model_length_tokens", "Longest sequence, prompt and output.", lambda s: s.max_model_len),
    _server("worker_max_running_requests", "Most sequences at once, per rank.", lambda s: s.max_running_requests),
    _server(
        "worker_max_batched_tokens", "Most tokens in one scheduler step, per rank.", lambda s: s.max_batched_tokens
    ),
    _server("worker_max_loras", "Most LoRA adapters at once.", lambda s: s.max_loras),
    gauge(
        "worker_kv_event_sources",
        "Publishers of KV-cache events; 0 when events are off.",
        lambda view: None if view.facts.sources is None else len(view.facts.sources),
        "facts.sources",
    ),
    row(
        "worker_health",
        "gauge",
        "The server's own word: 1 for what it says.",
        "status",
        _health,
        "state.evidence.health",
    ),
    row("worker_rung", "gauge", "1 proved, 0 refuted, absent when neither.", "rung", _rungs, _RUNGS),
    gauge("worker_ready", "Whether the worker is ready.", lambda view: float(view.state.ready), "state.reason"),
    row(
        "worker_not_ready",
        "gauge",
        "Why the worker is not ready: 1 for the reason.",
        "reason",
        _not_ready,
        "state.reason",
    ),
    row(
        "worker_faults_total",
        "counter",
        "Faults, by their first sign.",
        "cause",
        lambda view: [((cause.value,), view.state.faults[cause]) for cause in Cause],
        "state.faults",
    ),
    row(
        "worker_fault_ends_total",
        "counter",
        "Ends of faults, by how.",
        "kind",
        lambda view: [((kind.value,), view.state.ends[kind]) for kind in EndKind],
        "state.ends",
    ),
    gauge(
        "worker_fault_active",
        "Whether a fault is open.",
        lambda view: float(view.state.open_fault is not None),
        "state.fault",
    ),
    gauge(
        "worker_fault_start_timestamp_seconds",
        "Start of the open fault; absent when there is none.",
        lambda view: view.state.open_fault.episode.start if view.state.open_fault else None,
        "state.fault",
    ),
    gauge(
        "worker_last_recovery_duration_seconds",
        "How long the last finished fault took; absent until there is one.",
        lambda view: view.state.last_recovery_s,
        "state.last_recovery_s",
    ),
    row(
        "worker_restarts_total",
        "counter",
        "New instances seen in the place of old ones.",
        "",
        lambda view: value(view.state.restarts),
        "state.restarts",
    ),
    gauge(
        "worker_shared_name",
        "1 where instances take turns behind the worker's name, which is then several workers; else absent.",
        lambda view: 1.0 if view.state.shared_name else None,
        "state.shared_name",
    ),
    gauge(
        "worker_discovered_timestamp_seconds",
        "When watching began.",
        lambda view: view.state.discovered,
        "state.discovered",
    ),
    gauge(
        "worker_first_ready_timestamp_seconds",
        "When the worker was first ready; absent until then.",
        lambda view: view.state.first_ready,
        "state.first_ready",
    ),
    row(
        "worker_last_proof_timestamp_seconds",
        "gauge",
        "When each thing was last really known.",
        "check",
        _proofs,
        "proofs",
    ),
    gauge(
        "worker_round_trip_seconds",
        "The last completed engine round trip.",
        lambda view: view.round_trip_s,
        "round_trip_s",
    ),
    row(
        "worker_startup_seconds",
        "gauge",
        "From the beginning of this instance to each stage, where witnessed.",
        "phase",
        lambda view: [((phase,), seconds) for phase, seconds in view.state.startup.phases().items()],
        "state.startup",
    ),
    row(
        "engine_fault_tolerance_status",
        "gauge",
        "What fault tolerance says of each engine: 1 for its status.",
        "engine status",
        _engines,
        "state.evidence.engines",
    ),
    row(
        "engine_gives_up_timestamp_seconds",
        "gauge",
        "When an unhealthy engine dies unless it is told to retry; absent for all others.",
        "engine",
        lambda view: [((str(engine),), at) for engine, at in view.gives_up_at.items()],
        "gives_up_at",
    ),
    *KV_ROWS,
)


# -- pools, and the daemon itself -----------------------------------------------------------


def _pool_workers(pool: PoolView) -> Points:
    states = [view.pool_state for view in pool.workers]
    return [((state,), states.count(state)) for state in POOL_STATES]


def _recoveries(pool: PoolView) -> Points:
    empty = Buckets.empty(RECOVERY_BOUNDS)
    return [((kind.value,), pool.own.recoveries.get((pool.name, kind), empty)) for kind in RECOVERY_KINDS]


POOL_ROWS: tuple[Row[PoolView], ...] = (
    row("pool_workers", "gauge", "Workers by state.", "state", _pool_workers),
    gauge("pool_min_ready", "Workers wanted ready, where configured.", lambda pool: pool.min_ready),
    row("recovery_duration_seconds", "histogram", "How long faults took that ended in service.", "kind", _recoveries),
)


def _row_errors(own: Own) -> Points:
    return [((row.name,), own.row_errors.get(row.name, 0)) for row in ROWS]


def _build(_: Own) -> Points:
    return info(__version__, platform.python_version(), version("grpcio"))


#: Apart from the others: it has to be read last.
ROW_ERRORS: Row[Own] = row(
    "exporter_row_errors_total", "counter", "Samples left out because a row could not be read.", "row", _row_errors
)
OWN_ROWS: tuple[Row[Own], ...] = (
    row("exporter_build_info", "gauge", "What runs here; always 1.", "version python_version grpcio_version", _build),
    row(
        "rpc_duration_seconds",
        "histogram",
        "How long calls to workers took, failed ones included.",
        "method",
        lambda own: [((method,), buckets) for method, buckets in sorted(own.rpc_durations.items())],
    ),
    row(
        "rpc_failures_total",
        "counter",
        "Calls to workers that failed, by status.",
        "method code",
        lambda own: sorted(own.rpc_failures.items()),
    ),
    row(
        "discovery_last_success_timestamp_seconds",
        "gauge",
        "When each source of targets last answered; now for a fixed list.",
        "source",
        lambda own: [((source,), at) for source, at in own.discovered.items()],
    ),
    gauge(
        "exporter_oldest_tick_timestamp_seconds",
        "The last sign of life of the watcher that is furthest behind.",
        lambda own: own.oldest_tick,
    ),
    gauge(
        "config_last_reload_successful",
        "Whether the configuration was taken over when last read.",
        lambda own: float(own.reload_ok),
    ),
    gauge(
        "state_file_ok",
        "Whether the state file can be written; absent when there is none.",
        lambda own: None if own.state_file_ok is None else float(own.state_file_ok),
    ),
    gauge(
        "insecure_control_ports",
        "Workers whose control port is asked in plaintext across a network.",
        lambda own: own.insecure_ports,
    ),
)

#: All of them, in the order of the page.
ROWS: tuple[Row[Any], ...] = (*WORKER_ROWS, *POOL_ROWS, *OWN_ROWS, ROW_ERRORS)
