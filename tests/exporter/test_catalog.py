"""The metric table, over workers in all walks of life."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from tests.exporter.pages import page
from tests.exporter.views import FACTS, GONE, MODEL, SERVER, UP, WALL, life, lives, snapshot, view
from vllm_cp import HealthStatus, ModelInfo, Parallelism, ServerInfo
from vllm_cp.episodes import Rules, WorkerState
from vllm_cp.models.episode import Cause, EndKind
from vllm_cp.models.ladder import Reason, Rung
from vllm_cp.models.probe import Answer, EngineHealth, EngineState, RoundTrip
from vllm_cp_exporter.catalog import CHECKS, OWN_ROWS, POOL_ROWS, ROWS, WORKER_ROWS, Row
from vllm_cp_exporter.selfmetrics import RECOVERY_BOUNDS, SelfMetrics
from vllm_cp_exporter.snapshot import POOL_STATES, Board, Facts

RESERVED = ["job", "instance", "namespace", "pod", "container", "node", "service", "endpoint", "cluster", "env", "zone"]
HEALTH = {"serving", "not_serving", "unknown", "no_answer"}


@pytest.mark.parametrize("state", lives())
def test_closed_sets_are_whole(state: WorkerState) -> None:
    """Whatever happens to a worker, each closed set is on the page with all its members."""
    seen = page(view(state))
    assert set(seen.by("worker_health", "status")) == HEALTH
    assert set(seen.by("worker_not_ready", "reason")) == {reason.value for reason in Reason}
    assert set(seen.by("worker_faults_total", "cause")) == {cause.value for cause in Cause}
    assert set(seen.by("worker_fault_ends_total", "kind")) == {kind.value for kind in EndKind}
    assert set(seen.by("pool_workers", "state")) == set(POOL_STATES)
    assert sum(seen.by("pool_workers", "state").values()) == 1


@pytest.mark.parametrize("state", lives())
def test_exactly_one_state_is_one(state: WorkerState) -> None:
    """One health word is 1; one reason is 1 when the worker is not ready, and none when it is."""
    seen = page(view(state))
    assert sorted(seen.by("worker_health", "status").values()) == [0, 0, 0, 1]
    assert sum(seen.by("worker_not_ready", "reason").values()) == 1 - (seen["worker_ready", "a"] or 0)


def test_rows_before_the_first_probe() -> None:
    """From discovery on there are zeros to count from, and nothing that nobody knows."""
    seen = page(view(life()))
    assert set(seen.by("worker_faults_total", "cause").values()) == {0}
    assert set(seen.by("worker_fault_ends_total", "kind").values()) == {0}
    assert seen["worker_ready", "a"] == 0
    assert seen["worker_not_ready", "starting"] == 1
    assert seen["worker_health", "no_answer"] == 1
    assert seen["worker_fault_active", "a"] == 0
    assert seen["worker_restarts_total", "a"] == 0
    assert seen["worker_discovered_timestamp_seconds", "a"] == WALL
    absent = ("worker_rung", "worker_first_ready_timestamp_seconds", "worker_fault_start_timestamp_seconds")
    for name in (*absent, "worker_last_recovery_duration_seconds", "worker_round_trip_seconds", "worker_info"):
        assert not seen.of(name), name


@pytest.mark.parametrize(
    ("said", "word"),
    [
        (HealthStatus.SERVING, "serving"),
        (HealthStatus.NOT_SERVING, "not_serving"),
        (HealthStatus.UNKNOWN, "unknown"),
        (HealthStatus.SERVICE_UNKNOWN, "unknown"),
    ],
)
def test_the_servers_word(said: HealthStatus, word: str) -> None:
    """Each health status has its word; one that has none of its own is unknown."""
    assert page(view(life({"contact": True, "health": said})))["worker_health", word] == 1


def test_a_rung_is_one_zero_or_absent() -> None:
    """A rung is 1 when proved, 0 when refuted, and absent when neither."""
    proved = page(view(life(UP))).by("worker_rung", "rung")
    assert proved == {"reachable": 1, "serving": 1, "answering": 1, "admitting": 1}, "warm is not provable here"
    refuted = page(view(life(UP, GONE))).by("worker_rung", "rung")
    assert refuted["reachable"] == refuted["admitting"] == 0
    unsupported = {**UP, "round_trip": RoundTrip(answer=Answer.UNSUPPORTED)}
    assert page(view(life(unsupported))).by("worker_rung", "rung") == {"reachable": 1, "serving": 1}
    assert set(refuted) <= {rung.value for rung in Rung}


def test_a_dead_worker_keeps_state_and_loses_facts() -> None:
    """A worker that died keeps its counters and state; what it said it was is gone."""
    alive = page(view(life(UP), facts=FACTS))
    dead = page(view(life(UP, GONE, *[{}] * 10)))
    gone = {sample.name for sample in alive.samples} - {sample.name for sample in dead.samples}
    assert gone == {
        f"vllm_cp_worker_{name}"
        for name in [
            "info",
            "instance_info",
            "model_info",
            "parallelism",
            "kv_blocks",
            "kv_block_size_tokens",
            "max_batched_tokens",
            "max_loras",
            "effective_attention_block_size_tokens",
            "max_model_length_tokens",
            "max_running_requests",
            "kv_event_sources",
        ]
    }
    assert dead["worker_faults_total", "unreachable"] == 1
    assert dead["worker_not_ready", "unreachable"] == 1
    assert dead["worker_fault_active", "a"] == 1
    assert dead["worker_fault_start_timestamp_seconds", "a"] == WALL + 2
    assert dead["worker_first_ready_timestamp_seconds", "a"] == WALL + 1


def test_a_recovery() -> None:
    """When the worker is back the fault is closed, its duration is there, and the counts follow after the window."""
    again = {**UP, "instance_id": "second"}
    seen = page(view(life(UP, GONE, *[{}] * 9, again, *[again] * 10)))
    assert seen["worker_fault_active", "a"] == 0
    assert not seen.of("worker_fault_start_timestamp_seconds")
    assert seen["worker_last_recovery_duration_seconds", "a"] == 10
    assert seen["worker_fault_ends_total", "replaced"] == 1
    assert seen["worker_restarts_total", "a"] == 1


def test_one_no_longer_a_target_loses_everything() -> None:
    """A worker that is taken off the board is not on the next page, under any name."""
    board = Board()
    board.publish(view(key="a"))
    board.publish(view(key="b"))
    assert page(board.snapshot).series("a") > 0
    board.remove(["a"])
    left = page(board.snapshot)
    assert left.series("a") == 0
    assert left.series("b") > 0


# -- B20: what KV capacity means ------------------------------------------------------------


def _capacity(server: ServerInfo) -> Any:
    return page(view(facts=Facts(server=server)))


def test_b20_a_blocks_are_the_workers_once() -> None:
    """40000 blocks over four ranks are 40000, once per worker."""
    seen = _capacity(SERVER)
    assert seen["worker_kv_blocks", "a"] == 40000
    assert seen["worker_parallelism", "data"] == 4


def test_b20_b_not_reported_is_absent() -> None:
    """Sizes that a server left at zero are absent, not 0."""
    seen = _capacity(replace(SERVER, total_kv_blocks=None, kv_block_size=None))
    assert not seen.of("worker_kv_blocks")
    assert not seen.of("worker_kv_block_size_tokens")
    assert seen["worker_max_model_length_tokens", "a"] == 4096


def test_b20_c_both_block_sizes_and_no_product() -> None:
    """A hybrid model's two block sizes are both there, and nobody multiplies them into a capacity in tokens."""
    seen = _capacity(replace(SERVER, kv_block_size=4, effective_attention_block_size=256))
    assert seen["worker_kv_block_size_tokens", "a"] == 4
    assert seen["worker_effective_attention_block_size_tokens", "a"] == 256
    assert not [sample.name for sample in seen.samples if "capacity" in sample.name]


def test_b20_d_the_largest_number() -> None:
    """2^64-1 blocks are many blocks, and no crash."""
    assert _capacity(replace(SERVER, total_kv_blocks=2**64 - 1))["worker_kv_blocks", "a"] == pytest.approx(2**64)


def test_b20_e_parallelism_may_be_missing() -> None:
    """A server that does not say how it is spread is shown without it; an unknown dimension is left out."""
    assert not _capacity(replace(SERVER, parallelism=None)).of("worker_parallelism")
    some = _capacity(replace(SERVER, parallelism=Parallelism(tensor_parallel_size=8, data_parallel_size_local=None)))
    assert some.by("worker_parallelism", "dimension") == {"tensor": 8}


@pytest.mark.parametrize(("sources", "number"), [(None, None), ((), 0), (FACTS.sources, 1)])
def test_event_sources_off_or_unknown(sources: Any, number: float | None) -> None:
    """No event sources are 0 when events are off, and absent when it is not known."""
    assert page(view(facts=Facts(sources=sources)))["worker_kv_event_sources", "a"] == number


@pytest.mark.parametrize(
    ("supports", "version", "word"), [(True, "0.29.1", "true"), (None, "0.33.0", "false"), (None, "0.28.0", "unknown")]
)
def test_capabilities_are_true_false_or_unknown(supports: bool | None, version: str, word: str) -> None:
    """What an older server could not say about LoRA is unknown; what a newer one left out is a no."""
    facts = Facts(server=replace(SERVER, engine_version=version), model=replace(MODEL, supports_lora=supports))
    (sample,) = page(view(facts=facts)).of("worker_model_info")
    assert sample.labels["supports_lora"] == word
    assert sample.labels["supports_text_input"] == "false"
    assert sample.labels["model_name"] == "llama"
    assert sample.labels["model_aliases"] == "l,lama"


def test_a_model_alone() -> None:
    """A model whose server does not tell its version is shown with what is known."""
    (sample,) = page(view(facts=Facts(model=ModelInfo()))).of("worker_model_info")
    assert sample.labels["supports_lora"] == "unknown"


def test_proofs_of_known_checks_only() -> None:
    """Each check has the time of its last proof; a check that nobody knows makes no new label value."""
    seen = page(view(proofs={"health": WALL, "round_trip": WALL + 1, "guessed": WALL}))
    assert seen.by("worker_last_proof_timestamp_seconds", "check") == {"health": WALL, "round_trip": WALL + 1}


def test_engines_under_fault_tolerance() -> None:
    """Each engine's status is a closed set with one 1."""
    engines = (
        EngineHealth(engine=0, state=EngineState.HEALTHY),
        EngineHealth(engine=1, state=EngineState.UNHEALTHY),
    )
    seen = page(view(life(UP, {"engines": engines})))
    assert len(seen.of("engine_fault_tolerance_status")) == 2 * len(EngineState)
    ones = {(s.labels["engine"], s.labels["status"]) for s in seen.of("engine_fault_tolerance_status") if s.value == 1}
    assert ones == {("0", "healthy"), ("1", "unhealthy")}


def test_the_clocks_of_a_start() -> None:
    """A start that was witnessed from the closed port on shows how long each stage took."""
    seen = page(view(life(GONE, {}, {}, UP))).by("worker_startup_seconds", "phase")
    assert seen["to_serving"] == 3
    assert not page(view(life(UP))).of("worker_startup_seconds")


# -- pools ----------------------------------------------------------------------------------


def test_pools() -> None:
    """A pool counts its workers by state and shows how many are wanted; one without a worker is all zeros."""
    shot = snapshot(
        view(key="a"), view(life(UP, GONE), key="b"), view(life(), key="c"), min_ready={"chat": 2, "embed": 1}
    )
    seen = page(shot)
    chat = {s.labels["state"]: s.value for s in seen.of("pool_workers") if s.labels["pool"] == "chat"}
    assert chat == {"starting": 1, "ready": 1, "suspended": 0, "draining": 0, "faulted": 1, "unknown": 0}
    assert {s.value for s in seen.of("pool_workers") if s.labels["pool"] == "embed"} == {0}
    assert seen.by("pool_min_ready", "pool") == {"chat": 2, "embed": 1}


def test_recoveries_per_pool() -> None:
    """The histogram is whole from the start, for each pool; a planned stop and a removed target are not in it."""
    metrics = SelfMetrics()
    for kind in EndKind:
        metrics.recovered("chat", kind, 42.0)
    seen = page(snapshot(view(), min_ready={"embed": 1}), metrics.freeze())
    counts = {(s.labels["pool"], s.labels["kind"]): s.value for s in seen.of("recovery_duration_seconds_count")}
    kinds = ("resumed", "replaced", "retried")
    assert counts == {("chat", kind): 1 for kind in kinds} | {("embed", kind): 0 for kind in kinds}
    buckets = {
        s.labels["le"]: s.value
        for s in seen.of("recovery_duration_seconds_bucket")
        if (s.labels["pool"], s.labels["kind"]) == ("chat", "resumed")
    }
    assert [float(le) for le in buckets] == [*RECOVERY_BOUNDS, float("inf")]
    assert list(buckets.values()) == [0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1]


# -- the contract ---------------------------------------------------------------------------


def test_no_label_that_scrapers_own() -> None:
    """No row uses a label that a scraper adds itself, and none gives a label twice."""
    for row in ROWS:
        assert not set(row.labels) & set(RESERVED), row.name
        assert len({"worker", "pool", "le", *row.labels}) == 3 + len(row.labels), row.name


@pytest.mark.parametrize("form", ["text", "openmetrics"])
def test_labels_on_the_page_are_those_of_the_table(form: str) -> None:
    """Every row of a worker carries exactly worker and pool beside its own labels; pools carry pool."""
    metrics = SelfMetrics()
    metrics.discovered("flags", WALL)
    engines = (EngineHealth(engine=0, state=EngineState.DEAD),)
    full = view(life(UP, {"engines": engines}), facts=FACTS, proofs=dict.fromkeys(CHECKS, WALL), round_trip_s=0.1)
    seen = page(snapshot(full, min_ready={"chat": 1}), metrics.freeze(), form)
    identity = {id(row): ("worker", "pool") for row in WORKER_ROWS} | {id(row): ("pool",) for row in POOL_ROWS}
    for row in ROWS:
        wanted = {*row.labels, *identity.get(id(row), ())}
        for name in row.sample_names:
            for sample in seen.of(name):
                assert set(sample.labels) - {"le"} == wanted, name


def test_names() -> None:
    """Names are ours, unique, in base units, and counters alone end in _total."""
    assert len({row.family for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert re.fullmatch(r"vllm_cp_[a-z][a-z_]*[a-z]", row.name)
        assert row.name.endswith("_total") == (row.kind == "counter"), row.name
        assert not re.search(r"_(ms|milliseconds|minutes|percent|mb|gb)(_|$)", row.name)
        assert row.help.endswith("."), row.name


def test_every_row_is_named_on_an_empty_page() -> None:
    """What the README lists is on every page, if only by name and help."""
    named = {family.name for family in page(snapshot()).families}
    assert {row.family for row in ROWS} == {name.removesuffix("_total") for name in named}


def test_a_worker_has_fewer_than_80_series() -> None:
    """The worker with the most to say stays within its budget, whether it speaks gRPC or is under fault tolerance."""
    everything = {"proofs": dict.fromkeys(CHECKS, WALL), "round_trip_s": 0.1}
    again = {**UP, "canaries": True, "canary": True, "instance_id": "second"}
    busy = life(UP, GONE, *[{}] * 9, again, *[again] * 10, GONE)
    assert 60 < page(view(busy, facts=FACTS, **everything)).series("a") < 80
    engines = tuple(EngineHealth(engine=rank, state=EngineState.HEALTHY) for rank in range(4))
    assert page(view(life(UP, {"engines": engines}), **everything)).series("a") < 80


def test_b30_a_thousand_restarts_add_no_series() -> None:
    """A worker that changed its instance, model and version 1000 times has as many series as after one change."""
    counts, state = [], life(UP, rules=Rules())
    for number in range(1, 1001):
        state = life({**UP, "instance_id": f"instance {number}"}, state=state)
        if number in (1, 1000):
            server = replace(SERVER, instance_id=f"instance {number}", engine_version=f"0.33.{number}")
            facts = replace(FACTS, server=server, model=replace(MODEL, model_id=f"model {number}"))
            counts.append(page(view(state, facts=facts)).series("a"))
    assert counts[0] == counts[1]
    assert page(view(state))["worker_restarts_total", "a"] == 1000


def test_the_tables_are_all_there_is() -> None:
    """Each row is in one table, and all of them make the page."""
    listed: list[Row[Any]] = [*WORKER_ROWS, *POOL_ROWS, *OWN_ROWS]
    assert [row.name for row in ROWS[:-1]] == [row.name for row in listed]
