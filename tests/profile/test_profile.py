"""Facts of a profile, and how two of them differ."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from tests.profile.facts import MODEL, SERVER, SOURCES, source
from vllm_cp import ControlClient, KvEventSource, ModelInfo, ServerInfo
from vllm_cp.profile import Allowed, Drift, DriftKind, Profile, Value, capture, compare, loads, not_compared, profile_of
from vllm_cp.testing import FakeWorker

LOCKED = profile_of(SERVER, MODEL, SOURCES)


def _live(sources: Iterable[KvEventSource] = SOURCES, **server: Any) -> Profile:
    return profile_of(replace(SERVER, **server), MODEL, sources)


def _ruled(text: str) -> Profile:
    return replace(LOCKED, allow=loads(f"schema: 1\nallow:\n  {text}\n").allow)


def test_capture_is_what_the_worker_says(worker: FakeWorker) -> None:
    """Three reads of a worker give the same profile as its answers do."""
    with ControlClient(worker.target) as client:
        assert capture(client) == LOCKED
    assert [call.method for call in worker.calls] == [
        "Control.GetServerInfo",
        "Control.GetModelInfo",
        "Control.GetKvEventSources",
    ]


def test_the_instance_is_volatile_and_left_out() -> None:
    """Two starts of one deployment give the same profile; who wants the instance in it asks."""
    assert _live(instance_id="another") == LOCKED
    assert "instance_id" not in LOCKED.facts
    assert profile_of(SERVER, MODEL, SOURCES, instance_id=True).facts["instance_id"] == "6f1c0b6e-3f0a"


def test_what_no_worker_knows_is_told() -> None:
    """Image, driver and notes come from the caller, and are not there unless told."""
    told = profile_of(SERVER, MODEL, (), image_digest="sha256:1", driver="570.133", notes=["a", "b"])
    assert (told.facts["image_digest"], told.facts["driver"], told.notes) == ("sha256:1", "570.133", ("a", "b"))
    assert not {"image_digest", "driver"} & set(LOCKED.facts)


def test_unknown_stays_unknown() -> None:
    """What an old worker does not send is None, in a part that is missing as a whole too; a no stays a no."""
    bare = profile_of(ServerInfo(engine_version="0.27.0"), ModelInfo(), ()).facts
    assert bare["total_kv_blocks"] is None
    assert bare["tensor_parallel_size"] is None
    assert bare["sleep_mode_enabled"] is None
    assert bare["supports_lora"] is None
    assert bare["reasoning_parser"] is None
    assert bare["supports_text_input"] is False
    assert bare["kv_events.ranks"] == ()
    newer = profile_of(ServerInfo(engine_version="0.33.0"), ModelInfo(), ()).facts
    assert newer["supports_lora"] is False


def test_what_all_ranks_share_is_said_once() -> None:
    """Endpoints stand by rank, the rest once; a single publisher has its rank, or "all", in every name."""
    assert LOCKED.facts["kv_events.ranks"] == (0, 1)
    assert LOCKED.facts["kv_events.1.endpoint"] == "tcp://*:5558"
    assert LOCKED.facts["kv_events.*.topic"] == "kv"
    assert "kv_events.0.topic" not in LOCKED.facts
    assert _live([source(5557, None)]).facts["kv_events.all.topic"] == "kv"


def test_a_second_publisher_of_a_rank_hides_nothing() -> None:
    """Two publishers that claim one rank are both in the profile, and its text can be read back."""
    twice = _live([source(5557, 0), source(5558, 0)])
    assert twice.facts["kv_events.ranks"] == (0, "0-2")
    assert twice.facts["kv_events.0-2.endpoint"] == "tcp://*:5558"
    assert not compare(twice, twice)


def test_no_drift_against_itself() -> None:
    """A worker does not differ from its own lock."""
    assert compare(LOCKED, LOCKED) == ()


def test_a_changed_fact() -> None:
    """A fact that both sides know and that differs is drift, with both values."""
    (drift,) = compare(LOCKED, _live(engine_version="0.34.0"))
    assert drift == Drift(name="engine_version", kind=DriftKind.CHANGED, locked="0.33.0", live="0.34.0")


def test_unknown_against_known_is_drift_and_says_which_way() -> None:
    """A fact that is newly reported and one that no longer is are told apart from one that changed."""
    older = _live(proto_version=None)
    (new,) = compare(older, LOCKED)
    assert (new.kind, new.locked, new.live) == (DriftKind.NEWLY_REPORTED, None, "0.6.0")
    (gone,) = compare(LOCKED, older)
    assert (gone.kind, gone.locked, gone.live) == (DriftKind.NO_LONGER_REPORTED, "0.6.0", None)


def test_facts_that_one_side_lacks_are_not_compared() -> None:
    """A deleted line is no demand; a demand about which nothing is known now is named."""
    fewer = replace(LOCKED, facts={"max_model_len": 131072, "driver": "570"})
    assert compare(fewer, _live(engine_version="9")) == ()
    assert not_compared(fewer, LOCKED) == ("driver",)


def test_a_rank_that_is_gone() -> None:
    """A publisher less is one drift, that of the ranks, and not one of each of its facts."""
    (drift,) = compare(LOCKED, _live(SOURCES[:1]))
    assert (drift.name, drift.locked, drift.live) == ("kv_events.ranks", (0, 1), (0,))
    assert not_compared(LOCKED, _live(SOURCES[:1])) == ()


def test_what_was_said_of_all_ranks_is_compared_rank_by_rank() -> None:
    """One rank with another topic is drift of that rank; a new rank has to keep to what all share."""
    (drift,) = compare(LOCKED, _live([SOURCES[0], replace(SOURCES[1], topic="x")]))
    assert (drift.name, drift.locked, drift.live) == ("kv_events.1.topic", "kv", "x")
    third = replace(source(5559, 2), hwm=0)
    assert {d.name for d in compare(LOCKED, _live([*SOURCES, third]))} == {"kv_events.ranks", "kv_events.2.hwm"}


@pytest.mark.parametrize(
    ("rule", "server", "fine"),
    [
        ("engine_version: 0.34.*", {"engine_version": "0.34.2"}, True),
        ("engine_version: 0.34.*", {"engine_version": "0.35.0"}, False),
        ("engine_version: 0.34.*", {"engine_version": "0134.2"}, False),
        ('engine_version: ["0.34.*", "0.35.0"]', {"engine_version": "0.35.0"}, True),
        ("engine_version: any", {"engine_version": ""}, True),
        ("proto_version: 0.*", {"proto_version": None}, False),
        ("proto_version: null", {"proto_version": None}, True),
        ('proto_version: [null, "0.7.*"]', {"proto_version": None}, True),
        ('proto_version: ["null"]', {"proto_version": None}, False),
        ("total_kv_blocks: any", {"total_kv_blocks": None}, True),
        ("total_kv_blocks: 40000..42000", {"total_kv_blocks": 40000}, True),
        ("total_kv_blocks: 40000..42000", {"total_kv_blocks": 42001}, False),
        ("total_kv_blocks: 40000..", {"total_kv_blocks": 10**9}, True),
        ("total_kv_blocks: ..42000", {"total_kv_blocks": 1}, True),
        ("total_kv_blocks: ..42000", {"total_kv_blocks": None}, False),
        ('total_kv_blocks: [1, "5..6"]', {"total_kv_blocks": 5}, True),
        ("total_kv_blocks: 7", {"total_kv_blocks": 7}, True),
    ],
)
def test_rules(rule: str, server: dict[str, Any], fine: bool) -> None:
    """A rule allows values, patterns, ranges, null, a list of them, or anything; the locked value stays good."""
    lock = _ruled(rule)
    assert compare(lock, LOCKED) == ()
    found = compare(lock, _live(**server))
    assert (found == ()) is fine
    assert all(drift.allowed == rule.partition(": ")[2] for drift in found)


def test_a_rule_for_one_rank_wins_over_one_for_all() -> None:
    """kv_events.*.endpoint: any lets ports move, and kv_events.1.endpoint may still pin one."""
    moved = _live([source(7001, 0), source(7002, 1)])
    rules = "kv_events.*.endpoint: any\n  kv_events.*.replay_endpoint: any"
    assert compare(_ruled(rules), moved) == ()
    (drift,) = compare(_ruled(rules + "\n  kv_events.1.endpoint: tcp://*:6*"), moved)
    assert drift.name == "kv_events.1.endpoint"


@pytest.mark.parametrize(
    ("alternative", "value"), [(True, 1), (1, True), ("a.c", "abc"), ("[ab]", "a"), ("1..2", "1"), ("x", 5)]
)
def test_what_a_rule_does_not_mean(alternative: Value, value: Value) -> None:
    """Yes is not 1, only * is special in text, and a range of numbers is no pattern of text."""
    assert not Allowed(text="", alternatives=(alternative,)).admits(value)
