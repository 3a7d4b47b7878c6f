"""Workers at one moment, made the way the daemon makes them: by stepping a state through observations."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from vllm_cp import HealthStatus, KvEventSource, ModelInfo, Parallelism, RlCapabilities, ServerInfo
from vllm_cp.episodes import Observation, Rules, WorkerState, begin, step
from vllm_cp.models.probe import Answer, RoundTrip
from vllm_cp_exporter.kvview import KvView
from vllm_cp_exporter.snapshot import Facts, Snapshot, WorkerView

#: Unix seconds at which all these lives begin.
WALL = 1_700_000_000.0

ANSWERED = RoundTrip(answer=Answer.ANSWERED, paused=False, seconds=0.01)
SERVER = ServerInfo(
    engine_version="0.33.0",
    api_version="vllm",
    instance_id="first",
    parallelism=Parallelism(
        tensor_parallel_size=2,
        pipeline_parallel_size=1,
        data_parallel_size=4,
        decode_context_parallel_size=1,
        world_size=2,
        data_parallel_size_local=4,
    ),
    max_model_len=4096,
    kv_block_size=16,
    total_kv_blocks=40000,
    max_running_requests=256,
    max_batched_tokens=8192,
    max_loras=4,
    rl_capabilities=RlCapabilities(sleep_mode_enabled=True),
    proto_version="0.6.0",
    effective_attention_block_size=16,
)
MODEL = ModelInfo(model_id="/models/llama", served_model_name="llama", served_model_aliases=("l", "lama"))
FACTS = Facts(server=SERVER, model=MODEL, sources=(KvEventSource(transport="zmq"),))
KV = KvView(
    events={("stored", "gpu", "none"): 3, ("removed", "cpu", "tier-1"): 1},
    stored={("0", "gpu"): 12},
    removed={("0", "gpu"): 4},
    resident={("0", "gpu"): 8},
    complete={"0": 1.0},
    last_sequence={"0": 3},
    last_event={"0": WALL},
    states={"0": "connected"},
    replays={"ok": 1, "partial": 0, "failed": 0},
    failures={"msgpack": 1},
    gaps=1,
    lost=2,
    replay_seconds=0.25,
    restarts=0,
    queue_depth=5,
    dropped=6,
)


def life(*seen: dict[str, Any], rules: Rules | None = None, state: WorkerState | None = None) -> WorkerState:
    """The state after these observations, one a second."""
    state = state or begin(at=0.0, wall=WALL, rules=rules)
    for fields in seen:
        at = fields.get("at", state.at + 1.0)
        state, _ = step(state, Observation(**{"wall": WALL + at, **fields, "at": at}))
    return state


UP = {"contact": True, "health": HealthStatus.SERVING, "instance_id": "first", "round_trip": ANSWERED}
GONE = {"contact": False, "detail": "connection refused"}


def view(state: WorkerState | None = None, *, key: str = "a", pool: str = "chat", **fields: Any) -> WorkerView:
    """A worker; without a state, one that serves."""
    return WorkerView(key=key, pool=pool, **{"target": f"{key}:8001", "state": state or life(UP), **fields})


def snapshot(*views: WorkerView, min_ready: dict[str, int] | None = None) -> Snapshot:
    """All of them at one moment."""
    return Snapshot(workers=MappingProxyType({each.key: each for each in views}), min_ready=min_ready or {})


def lives() -> Sequence[WorkerState]:
    """Workers in all walks of life."""
    return (
        life(),
        life(UP),
        life(GONE),
        life(UP, GONE),
        life(UP, {"contact": True, "health": HealthStatus.NOT_SERVING}),
        life(UP, {"contact": True, "health": HealthStatus.SERVICE_UNKNOWN}),
        life(UP, {"round_trip": RoundTrip(answer=Answer.ANSWERED, paused=True)}),
        life(UP, {"round_trip": RoundTrip(answer=Answer.ENGINE_ERROR, detail="boom")}),
        life(UP, {"round_trip": RoundTrip(answer=Answer.DISAGREE)}),
        life(UP, {"asked": True}, *[{"contact": True}] * 30),
        life(UP, {"deleted": True}),
    )
