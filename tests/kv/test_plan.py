"""Advertised sources to subscriptions; when fresh ones are asked for; whose turn a replay is."""

from __future__ import annotations

from itertools import pairwise

import pytest

from vllm_cp.errors import ConfigError, CredentialsRejected, NotSupported, WorkerUnreachable
from vllm_cp.kv import NoticeKind, Settings, SourceState
from vllm_cp.kv._gate import Gate
from vllm_cp.kv._plan import plan
from vllm_cp.kv._refreshing import Refreshing
from vllm_cp.models.kv_source import KvEventSource, resolve_address


def source(endpoint: str, rank: int | None = 0, *, host: str | None = "10.0.0.7", **others: object) -> KvEventSource:
    """A source as a client would hand it over."""
    fields = {"transport": "zmq", "encoding": "msgpack", **others}
    return KvEventSource(
        endpoint=endpoint,
        data_parallel_rank=rank,
        live=resolve_address(endpoint, host),
        replay=resolve_address(str(fields.get("replay_endpoint") or ""), host),
        **fields,  # type: ignore[arg-type]
    )


def test_b09_ports_are_those_reported() -> None:
    """Rank 1 before rank 0, ports that have nothing to do with ranks: each is dialled as reported."""
    swapped = plan([source("tcp://*:5558", 1), source("tcp://*:5557", 0)], "w")
    assert [(wanted.source.rank, wanted.source.address) for wanted in swapped.wanted] == [
        (1, "tcp://10.0.0.7:5558"),
        (0, "tcp://10.0.0.7:5557"),
    ]
    odd = plan([source("tcp://*:43121", 0), source("tcp://*:38877", 1)], "w")
    assert [wanted.source.address for wanted in odd.wanted] == ["tcp://10.0.0.7:43121", "tcp://10.0.0.7:38877"]


def test_b09_rank_unset_is_not_rank_zero() -> None:
    """A source of all ranks has no rank of its own."""
    assert plan([source("tcp://*:5557", None)], "w").wanted[0].source.rank is None
    assert plan([source("tcp://*:5557", 0)], "w").wanted[0].source.rank == 0


def test_b09_a_shared_address_is_subscribed_once() -> None:
    """Two ranks behind one address: one subscription, for no rank in particular, and a notice."""
    found = plan([source("tcp://*:5557", 0), source("tcp://*:5557", 1)], "w")
    [wanted] = found.wanted
    [notice] = found.notices
    assert wanted.source.rank is None
    assert notice.kind is NoticeKind.SHARED_ADDRESS
    assert "rank 0, 1" in notice.detail


def test_b08_what_cannot_be_connected_to_says_why() -> None:
    """inproc, nothing at all, and a wildcard behind a unix socket: unsupported, each with its reason."""
    found = plan(
        [
            source("inproc://kv"),
            source(""),
            source("tcp://*:5557", host=None),
            source("tcp://[::]:5557", host="fd00::5"),
        ],
        "w",
    )
    assert [wanted.source.address for wanted in found.wanted] == ["tcp://[fd00::5]:5557"]
    assert {change.state for change in found.states} == {SourceState.UNSUPPORTED}
    details = [change.detail for change in found.states]
    assert len(set(details)) == 3
    assert "inproc" in details[0]


def test_a_plain_host_is_bound_to() -> None:
    """vLLM connects its publisher to such an address, so the subscriber binds."""
    [wanted] = plan([source("tcp://10.9.9.9:5561")], "w").wanted
    assert wanted.bind


def test_b11_other_transports_and_no_sources_are_told_apart() -> None:
    """A transport that nobody here reads is unsupported; an empty list means that events are off."""
    nats = plan([source("nats://broker", transport="nats")], "w")
    assert nats.wanted == ()
    assert [(change.state, "nats" in change.detail) for change in nats.states] == [(SourceState.UNSUPPORTED, True)]
    json = plan([source("tcp://*:1", encoding="json")], "w")
    assert [change.state for change in json.states] == [SourceState.UNSUPPORTED]
    [off] = plan([], "w").states
    assert off.state is SourceState.DISABLED
    assert "--kv-events-config" in off.detail


def test_fresh_sources_are_asked_for_politely() -> None:
    """Once at a time; after an answer that did not help ever more slowly; at once when something new happened."""
    timer = Refreshing(Settings(refresh_s=1.0, refresh_max_s=4.0))
    assert not timer.take(0.0)
    timer.want(0.0)
    assert timer.take(0.0)
    timer.want(0.1)
    assert not timer.take(0.1), "one is under way"
    timer.answered(0.5, final=False)
    assert timer.take(1.5), "what was wanted meanwhile"
    timer.answered(2.0, final=False)
    asked = []
    for tenth in range(20, 300):
        now = tenth / 10
        timer.want(now, urgent=False)
        if timer.take(now):
            asked.append(now)
            timer.answered(now, final=False)
    assert [round(later - earlier) for earlier, later in pairwise(asked)][:4] == [2, 4, 4, 4]


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (NotSupported("w", "Control.GetKvEventSources", "UNIMPLEMENTED"), SourceState.UNSUPPORTED),
        (CredentialsRejected("w", "Control.GetKvEventSources", "PERMISSION_DENIED"), SourceState.DENIED),
        (WorkerUnreachable("w", "Control.GetKvEventSources", "UNAVAILABLE"), None),
        (ZeroDivisionError(), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_b11_final_answers_are_not_asked_again_soon(error: Exception, state: SourceState | None) -> None:
    """Not supported and not allowed are final: asked again only after long, or after a restart."""
    timer = Refreshing(Settings(refresh_s=1.0, refresh_final_s=300.0))
    timer.want(0.0)
    assert timer.take(0.0)
    assert timer.failed_with(error, 0.0) is state
    assert timer.failed == 1
    assert timer.take(2.0) is (state is None)
    if state is not None:
        assert not timer.take(299.0)
        timer.want(299.0)
        assert timer.take(300.0)


def test_replays_stand_in_line() -> None:
    """One at a time, in the order in which they came; who leaves makes room."""
    gate = Gate(1)
    a, b, c = object(), object(), object()
    assert gate.enter(a)
    assert gate.enter(a)
    assert not gate.enter(b)
    assert not gate.enter(c)
    gate.leave(a)
    assert not gate.enter(c), "b was first"
    assert gate.enter(b)
    gate.leave(c)
    gate.leave(b)
    assert gate.enter(a)


@pytest.mark.parametrize("wrong", [{"replay_idle_s": 0}, {"max_queue": -1}, {"heartbeat_s": float("inf")}], ids=repr)
def test_settings_refuse_nonsense(wrong: dict[str, float]) -> None:
    """A time or limit that cannot be is refused by name."""
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Settings(**wrong)  # type: ignore[arg-type]
