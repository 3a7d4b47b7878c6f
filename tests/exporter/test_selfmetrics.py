"""What the daemon says about itself."""

from __future__ import annotations

import math

import pytest

from tests.exporter.pages import page
from tests.exporter.views import WALL, snapshot
from vllm_cp import RpcRecord
from vllm_cp.models.episode import EndKind
from vllm_cp_exporter.selfmetrics import RPC_BOUNDS, SelfMetrics


def call(method: str = "Health.Check", code: str = "OK", elapsed_s: float = 0.02) -> RpcRecord:
    return RpcRecord(target="secret-host:8001", method=method, code=code, detail="", elapsed_s=elapsed_s, attempt=1)


def test_calls_by_method_and_status() -> None:
    """Calls are timed by method, failures counted by status; no worker is named."""
    metrics = SelfMetrics()
    for record in (call(), call(code="UNAVAILABLE", elapsed_s=100.0), call("Control.IsPaused", elapsed_s=0.005)):
        metrics.rpc(record)
    seen = page(snapshot(), metrics.freeze())
    assert seen.by("rpc_duration_seconds_count", "method") == {"Health.Check": 2, "Control.IsPaused": 1}
    assert seen["rpc_duration_seconds_sum", "Health.Check"] == pytest.approx(100.02)
    buckets = {s.labels["le"]: s.value for s in seen.of("rpc_duration_seconds_bucket") if "Check" in s.labels["method"]}
    assert buckets["0.01"] == 0
    assert buckets["0.05"] == buckets["60.0"] == 1
    assert buckets["+Inf"] == 2
    assert len(buckets) == len(RPC_BOUNDS) + 1
    assert seen["rpc_duration_seconds_bucket", "Control.IsPaused", "0.005"] == 1, "a bound belongs to its bucket"
    (failure,) = seen.of("rpc_failures_total")
    assert failure.labels == {"method": "Health.Check", "code": "UNAVAILABLE"}


def test_no_time_is_negative() -> None:
    """A clock that was set back makes no negative duration, and no number that is none."""
    metrics = SelfMetrics()
    metrics.rpc(call(elapsed_s=-3.0))
    metrics.recovered("chat", EndKind.RESUMED, math.nan)
    own = metrics.freeze()
    assert own.rpc_durations["Health.Check"].sum == 0
    assert own.recoveries["chat", EndKind.RESUMED].counts[-1] == 0


def test_discovery_times() -> None:
    """A source that discovers shows when it last did; a fixed list is always up to date."""
    metrics = SelfMetrics(clock=lambda: WALL + 60)
    metrics.discovered("dns", WALL)
    metrics.discovered("flags", None)
    seen = page(snapshot(), metrics.freeze())
    assert seen.by("discovery_last_success_timestamp_seconds", "source") == {"dns": WALL, "flags": WALL + 60}


def test_the_watcher_furthest_behind() -> None:
    """The oldest tick is read at the moment of the scrape, and absent while nothing is watched."""
    metrics = SelfMetrics()
    ticks: list[float] = []
    metrics.watched(lambda: ticks)
    assert not page(snapshot(), metrics.freeze()).of("exporter_oldest_tick_timestamp_seconds")
    ticks += [WALL + 5, WALL, WALL + 9]
    assert page(snapshot(), metrics.freeze())["exporter_oldest_tick_timestamp_seconds",] == WALL


def test_flags_of_the_daemon() -> None:
    """Reload, state file and plaintext ports; a state file that is not configured is neither good nor bad."""
    metrics = SelfMetrics()
    seen = page(snapshot(), metrics.freeze())
    assert seen["config_last_reload_successful",] == 1
    assert seen["state_file_ok",] is None
    metrics.reloaded(False)
    metrics.state_file(lambda: False)
    metrics.insecure_ports(3)
    seen = page(snapshot(), metrics.freeze())
    assert seen["config_last_reload_successful",] == 0
    assert seen["state_file_ok",] == 0
    assert seen["insecure_control_ports",] == 3


def test_a_frozen_copy_stays_as_it_is() -> None:
    """What a page was made from does not change while the daemon counts on."""
    metrics = SelfMetrics()
    metrics.rpc(call())
    own = metrics.freeze()
    metrics.rpc(call(code="UNAVAILABLE"))
    metrics.row_errors({"row": 1})
    assert own.rpc_durations["Health.Check"].counts[-1] == 1
    assert not own.rpc_failures
    assert not own.row_errors
