"""The one metric table: what each row is called, what it means, and how it is read.

The page, the README's list and every other way out of the daemon walk these tables; nothing else names a metric.
``read`` gives the points of one worker, pool or daemon: the values of the row's own labels, and a number. A point that
is left out is absent from the page: unknown is not zero. It may raise; whoever walks the table guards each row.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Generic, Literal, TypeVar

from vllm_cp import HealthStatus, ModelInfo, Parallelism, ServerInfo, __version__
from vllm_cp.models.episode import Cause, EndKind
from vllm_cp.models.ladder import Reason
from vllm_cp.models.probe import EngineState
from vllm_cp_exporter.selfmetrics import RECOVERY_BOUNDS, RECOVERY_KINDS, Buckets, Own
from vllm_cp_exporter.snapshot import POOL_STATES, WorkerView

__all__ = ["CHECKS", "OWN_ROWS", "POOL_ROWS", "ROWS", "ROW_ERRORS", "WORKER_ROWS", "Point", "PoolView", "Row"]

T = TypeVar("T")
Kind = Literal["gauge", "counter", "histogram"]
#: Label values in the order of ``Row.labels``, and the number.
Point = tuple[tuple[str, ...], "float | Buckets"]
Points = Iterable[Point]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolView:
    """One pool at one moment."""

    name: str
    workers: tuple[WorkerView, ...]
    #: Workers wanted ready; ``None`` when not configured.
    min_ready: int | None
    own: Own


@dataclass(frozen=True, slots=True)
class Row(Generic[T]):
    """One metric."""

    #: As on the page, ``_total`` of counters included.
    name: str
    help: str
    kind: Kind
    #: The labels beside those of the subject (``worker`` and ``pool``, ``pool``, or none).
    labels: tuple[str, ...]
    read: Callable[[T], Points]

    @property
    def family(self) -> str:
        """The name without ``_total``."""
        return self.name.removesuffix("_total")

    @property
    def sample_names(self) -> tuple[str, ...]:
        """The names of its samples."""
        if self.kind == "histogram":
            return tuple(f"{self.name}{suffix}" for suffix in ("_bucket", "_sum", "_count"))
        return (self.name,)


# -- ways to read ---------------------------------------------------------------------------


def _value(number: float | None) -> Points:
    return () if number is None else (((), number),)


def _info(*values: str) -> Points:
    return ((values, 1.0),)


def _one_of(closed: Iterable[str], chosen: str | None) -> Points:
    """A closed set, whole: one 1, or none."""
    return [((value,), float(value == chosen)) for value in closed]


def _word(flag: bool | None) -> str:
    return "unknown" if flag is None else str(flag).lower()


def _names(closed: Iterable[Any]) -> list[str]:
    return [member.value for member in closed]


def _row(name: str, kind: Kind, text: str, labels: str, read: Callable[[T], Points]) -> Row[T]:
    return Row(f"vllm_cp_{name}", text, kind, tuple(labels.split()), read)


def _gauge(name: str, text: str, read: Callable[[T], float | None]) -> Row[T]:
    return _row(name, "gauge", text, "", lambda subject: _value(read(subject)))


def _server(name: str, text: str, read: Callable[[ServerInfo], float | None]) -> Row[WorkerView]:
    return _gauge(name, text, lambda view: read(view.facts.server) if view.facts.server else None)


# -- what a worker is -----------------------------------------------------------------------


def _server_info(view: WorkerView) -> Points:
    server = view.facts.server
    if server is None:
        return ()
    rl = server.rl_capabilities
    return _info(
        server.engine_version,
        "rust" if view.target else "unknown",
        server.proto_version or "",
        str(server.parallelism.data_parallel_rank) if server.parallelism else "",
        _word(rl.weight_transfer_enabled if rl else None),
        _word(rl.sleep_mode_enabled if rl else None),
    )


def _instance(view: WorkerView) -> Points:
    server = view.facts.server
    return _info(server.instance_id) if server and server.instance_id is not None else ()


def _model(view: WorkerView) -> Points:
    if view.facts.model is None:
        return ()
    model: ModelInfo = view.facts.model
    if view.facts.server is not None:
        model = model.seen_on(view.facts.server.engine_version)
    return _info(
        model.served_model_name,
        model.model_id,
        ",".join(model.served_model_aliases),
        model.reasoning_parser or "",
        model.tool_call_parser or "",
        _word(model.supports_text_input),
        _word(model.supports_token_ids_input),
        _word(model.supports_lora),
        _word(model.supports_multimodal),
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


def _health(view: WorkerView) -> Points:
    said = _HEALTH.get(view.state.evidence.health, "unknown")
    return _one_of(("serving", "not_serving", "unknown", "no_answer"), said)


def _rungs(view: WorkerView) -> Points:
    return [((rung.value,), float(state.holds)) for rung, state in view.state.rungs if state.holds is not None]


def _not_ready(view: WorkerView) -> Points:
    return _one_of(_names(Reason), view.state.reason.value if view.state.reason else None)


def _fault_start(view: WorkerView) -> float | None:
    fault = view.state.open_fault
    return fault.episode.start if fault else None


def _proofs(view: WorkerView) -> Points:
    return [((check,), view.proofs[check]) for check in CHECKS if check in view.proofs]


def _engines(view: WorkerView) -> Iterator[Point]:
    for engine in view.state.evidence.engines:
        for status in EngineState:
            yield (str(engine.engine), status.value), float(status is engine.state)


WORKER_ROWS: tuple[Row[WorkerView], ...] = (
    _row(
        "worker_target_info",
        "gauge",
        "Where the worker is asked; always 1.",
        "target http_url worker_namespace worker_pod worker_node",
        lambda view: _info(view.target, view.http_url, view.namespace, view.pod, view.node),
    ),
    _row(
        "worker_info",
        "gauge",
        "What the worker says it is; always 1.",
        "engine_version frontend proto_version data_parallel_rank weight_transfer sleep_mode",
        _server_info,
    ),
    _row("worker_instance_info", "gauge", "The instance that answers; always 1.", "instance_id", _instance),
    _row(
        "worker_model_info",
        "gauge",
        "The model and what it can do; always 1. Several aliases are joined by commas.",
        "model_name model_id model_aliases reasoning_parser tool_call_parser"
        " supports_text_input supports_token_ids_input supports_lora supports_multimodal",
        _model,
    ),
    _row("worker_parallelism", "gauge", "How the model is spread, by dimension.", "dimension", _parallelism),
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
    _gauge(
        "worker_kv_event_sources",
        "Publishers of KV-cache events; 0 when events are off.",
        lambda view: None if view.facts.sources is None else len(view.facts.sources),
    ),
    _row("worker_health", "gauge", "The server's own word: 1 for what it says.", "status", _health),
    _row("worker_rung", "gauge", "1 proved, 0 refuted, absent when neither.", "rung", _rungs),
    _gauge("worker_ready", "Whether the worker is ready.", lambda view: float(view.state.ready)),
    _row("worker_not_ready", "gauge", "Why the worker is not ready: 1 for the reason.", "reason", _not_ready),
    _row(
        "worker_faults_total",
        "counter",
        "Faults, by their first sign.",
        "cause",
        lambda view: [((cause.value,), view.state.faults[cause]) for cause in Cause],
    ),
    _row(
        "worker_fault_ends_total",
        "counter",
        "Ends of faults, by how.",
        "kind",
        lambda view: [((kind.value,), view.state.ends[kind]) for kind in EndKind],
    ),
    _gauge("worker_fault_active", "Whether a fault is open.", lambda view: float(view.state.open_fault is not None)),
    _gauge("worker_fault_start_timestamp_seconds", "Start of the open fault; absent when there is none.", _fault_start),
    _gauge(
        "worker_last_recovery_duration_seconds",
        "How long the last finished fault took; absent until there is one.",
        lambda view: view.state.last_recovery_s,
    ),
    _row(
        "worker_restarts_total",
        "counter",
        "New instances seen in the place of old ones.",
        "",
        lambda view: _value(view.state.restarts),
    ),
    _gauge("worker_discovered_timestamp_seconds", "When watching began.", lambda view: view.state.discovered),
    _gauge(
        "worker_first_ready_timestamp_seconds",
        "When the worker was first ready; absent until then.",
        lambda view: view.state.first_ready,
    ),
    _row("worker_last_proof_timestamp_seconds", "gauge", "When each thing was last really known.", "check", _proofs),
    _gauge("worker_round_trip_seconds", "The last completed engine round trip.", lambda view: view.round_trip_s),
    _row(
        "worker_startup_seconds",
        "gauge",
        "From the beginning of this instance to each stage, where witnessed.",
        "phase",
        lambda view: [((phase,), seconds) for phase, seconds in view.state.startup.phases().items()],
    ),
    _row(
        "engine_fault_tolerance_status",
        "gauge",
        "What fault tolerance says of each engine: 1 for its status.",
        "engine status",
        _engines,
    ),
    _row(
        "engine_gives_up_timestamp_seconds",
        "gauge",
        "When an unhealthy engine dies unless it is told to retry; absent for all others.",
        "engine",
        lambda view: [((str(engine),), at) for engine, at in view.gives_up_at.items()],
    ),
)


# -- pools, and the daemon itself -----------------------------------------------------------


def _pool_workers(pool: PoolView) -> Points:
    states = [view.pool_state for view in pool.workers]
    return [((state,), states.count(state)) for state in POOL_STATES]


def _recoveries(pool: PoolView) -> Points:
    empty = Buckets.empty(RECOVERY_BOUNDS)
    return [((kind.value,), pool.own.recoveries.get((pool.name, kind), empty)) for kind in RECOVERY_KINDS]


POOL_ROWS: tuple[Row[PoolView], ...] = (
    _row("pool_workers", "gauge", "Workers by state.", "state", _pool_workers),
    _gauge("pool_min_ready", "Workers wanted ready, where configured.", lambda pool: pool.min_ready),
    _row("recovery_duration_seconds", "histogram", "How long faults took that ended in service.", "kind", _recoveries),
)


def _row_errors(own: Own) -> Points:
    return [((row.name,), own.row_errors.get(row.name, 0)) for row in ROWS]


def _build(_: Own) -> Points:
    return _info(__version__, platform.python_version(), version("grpcio"))


#: Apart from the others: it has to be read last.
ROW_ERRORS: Row[Own] = _row(
    "exporter_row_errors_total", "counter", "Samples left out because a row could not be read.", "row", _row_errors
)
OWN_ROWS: tuple[Row[Own], ...] = (
    _row("exporter_build_info", "gauge", "What runs here; always 1.", "version python_version grpcio_version", _build),
    _row(
        "rpc_duration_seconds",
        "histogram",
        "How long calls to workers took, failed ones included.",
        "method",
        lambda own: [((method,), buckets) for method, buckets in sorted(own.rpc_durations.items())],
    ),
    _row(
        "rpc_failures_total",
        "counter",
        "Calls to workers that failed, by status.",
        "method code",
        lambda own: sorted(own.rpc_failures.items()),
    ),
    _row(
        "discovery_last_success_timestamp_seconds",
        "gauge",
        "When each source of targets last answered; now for a fixed list.",
        "source",
        lambda own: [((source,), at) for source, at in own.discovered.items()],
    ),
    _gauge(
        "exporter_oldest_tick_timestamp_seconds",
        "The last sign of life of the watcher that is furthest behind.",
        lambda own: own.oldest_tick,
    ),
    _gauge(
        "config_last_reload_successful",
        "Whether the configuration was taken over when last read.",
        lambda own: float(own.reload_ok),
    ),
    _gauge(
        "state_file_ok",
        "Whether the state file can be written; absent when there is none.",
        lambda own: None if own.state_file_ok is None else float(own.state_file_ok),
    ),
    _gauge(
        "insecure_control_ports",
        "Workers whose control port is asked in plaintext across a network.",
        lambda own: own.insecure_ports,
    ),
)

#: All of them, in the order of the page.
ROWS: tuple[Row[Any], ...] = (*WORKER_ROWS, *POOL_ROWS, *OWN_ROWS, ROW_ERRORS)
