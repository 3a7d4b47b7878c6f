"""``/api/v1``: what autoscalers, routers and other programs build on."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest

from tests.exporter.asking import Asker, check, serving
from tests.exporter.views import FACTS, GONE, SERVER, UP, WALL, life, lives, snapshot, view
from vllm_cp import Parallelism
from vllm_cp.models.episode import Cause, Episode
from vllm_cp.models.probe import EngineMetrics
from vllm_cp_exporter import api as api_module
from vllm_cp_exporter.demand import FLOOR_S, Demands
from vllm_cp_exporter.ledger import Ledger
from vllm_cp_exporter.pools import pool_record
from vllm_cp_exporter.snapshot import Board, Facts, WorkerView

STATES = ("starting", "ready", "suspended", "draining", "faulted", "unknown")


def busy(key: str, running: float = 3, waiting: float = 1, used: float | None = 0.5, **fields: Any) -> WorkerView:
    """A worker whose /metrics is read."""
    page = EngineMetrics(running=running, waiting=waiting, kv_cache_usage_ratio=used)
    words: dict[str, Any] = {
        "http_url": f"http://{key}:8000",
        "metrics": page,
        "facts": FACTS,
        "proofs": MappingProxyType({"engine_metrics": WALL}),
    }
    return view(key=key, **words | fields)


def pool(*views: WorkerView, demands: Demands | None = None, min_ready: int | None = None) -> dict[str, Any]:
    return pool_record("chat", views, min_ready, demands or Demands(wall=lambda: WALL + 2))[0]


class Now:
    """A clock to be set."""

    at = 0.0

    def __call__(self) -> float:
        return self.at


# -- workers --------------------------------------------------------------------------------


async def test_every_kind_of_worker_fits_the_schema() -> None:
    """Workers in all walks of life have records that the shipped schema describes, to the last field."""
    board = Board()
    for number, state in enumerate(lives()):
        board.publish(view(state, key=f"w{number}", facts=FACTS if number % 2 else Facts(), pool="chat"))
    board.publish(busy("busy"))
    board.publish(view(key="http-only", target="", http_url="http://h:8000"))
    board.publish(view(life(UP, GONE), key="down", episodes=(Episode(cause=Cause.UNREACHABLE, start=WALL),)))
    async with serving(board) as ask:
        workers = (await ask("/api/v1/workers")).json
        check("workers", workers)
        check("episodes", (await ask("/api/v1/episodes")).json)
        check("pool", (await ask("/api/v1/pools/chat")).json)
        delta = (await ask("/api/v1/watch?wait=0")).json
        check("watch", delta)
    assert delta["full"]
    assert delta["revision"] == workers["revision"]
    assert not workers["complete"]
    by_key = {record["worker"]: record for record in workers["workers"]}
    assert by_key["down"]["fault"]["cause"] == "unreachable"
    assert by_key["down"]["errors"]["health"]["kind"] == "WorkerUnreachable"
    assert by_key["http-only"]["target"] is None
    assert by_key["busy"]["load"]["running"] == 3
    assert by_key["busy"]["server"]["total_kv_blocks"] == 40000


async def test_workers_of_one_pool_and_nothing_missing() -> None:
    """``?pool=`` chooses; with all facts known the answer is complete; hostile text does no harm."""
    board = Board()
    board.publish(view(key="a\udcff", facts=FACTS))
    board.publish(view(key="b", pool="code", facts=FACTS))
    async with serving(board) as ask:
        answer = await ask("/api/v1/workers?pool=chat")
        assert [record["worker"] for record in answer.json["workers"]] == ["a\ufffd"]
        assert answer.json["complete"]
        assert answer.headers["Cache-Control"] == "no-store"
        assert (await ask("/api/v1/workers?pool=none")).json["workers"] == []


async def test_a_strange_worker_costs_its_own_record(caplog: pytest.LogCaptureFixture) -> None:
    """A worker of which no record can be made is left out, with a line in the log; the answer is not complete."""
    board = Board()
    board.publish(view(key="bad", facts=Facts(server=object())))  # type: ignore[arg-type]
    board.publish(view(key="good", facts=FACTS))
    async with serving(board) as ask:
        answer = (await ask("/api/v1/workers")).json
    assert ([record["worker"] for record in answer["workers"]], answer["complete"]) == (["good"], False)
    assert "record_failed" in [record.message for record in caplog.records]


# -- pools ----------------------------------------------------------------------------------


def test_supply_and_demand_of_a_pool_that_is_well() -> None:
    """Requests are added up, cache use is weighted by blocks, and seats are per rank times the ranks."""
    small = replace(SERVER, total_kv_blocks=10000, parallelism=Parallelism(data_parallel_size_local=1))
    record = pool(busy("a", used=0.5), busy("b", 1, 0, 1.0, facts=Facts(server=small)), min_ready=1)
    assert record["complete"]
    assert record["workers"] == {"expected": 2, "observed": 2, **dict.fromkeys(STATES, 0), "ready": 2}
    assert record["demand"] == {
        "running": 4.0, "waiting": 1.0, "kv_used_ratio": 0.6, "covers": 2, "age_s": 2.0, "held": False,
    }  # fmt: skip
    assert record["supply"] == {"kv_blocks_ready": 50000, "max_running_ready": 256 * 4 + 256, "covers": 2}
    assert record["hold"] == {"scale_down": False, "why": None}
    assert [victim["worker"] for victim in record["victims"]] == ["b", "a"]


@pytest.mark.parametrize("state", lives())
def test_counts_cover_every_worker_once(state: Any) -> None:
    """Each worker is in one state, and what is not ready is not in the supply."""
    record = pool(view(state, facts=FACTS))
    assert sum(record["workers"][name] for name in STATES) == record["workers"]["expected"] == 1
    assert (record["supply"]["kv_blocks_ready"] == 40000) is state.ready


def test_unknown_is_null() -> None:
    """No /metrics is no demand, a ready worker without facts is no supply; only an empty pool has zero of it."""
    record = pool(view())
    assert (record["demand"]["running"], record["demand"]["kv_used_ratio"]) == (None, None)
    assert (record["supply"]["kv_blocks_ready"], record["supply"]["max_running_ready"]) == (None, None)
    assert not record["complete"]
    assert record["hold"]["scale_down"]
    assert pool()["supply"]["kv_blocks_ready"] == 0


def test_the_queue_of_a_faulted_worker_does_not_vanish() -> None:
    """A worker falls over with its queue: the last complete demand is the floor, though its page says 0 now."""
    now = Now()
    demands = Demands(clock=now, wall=lambda: WALL)
    demands.tick(snapshot(busy("a", 3, 1), busy("b", 5, 2)))
    fallen = busy("b", 0, 0, state=life(UP, GONE))
    now.at = 30.0
    demands.tick(snapshot(busy("a", 3, 1), fallen))
    record, lost = pool_record("chat", [busy("a", 3, 1), fallen], None, demands)
    assert (record["demand"]["running"], record["demand"]["waiting"]) == (8.0, 3.0)
    assert (record["demand"]["held"], record["demand"]["covers"], record["demand"]["age_s"]) == (True, 1, 30.0)
    assert (record["complete"], record["victims"], lost) == (False, [], False)
    assert "demand held, no word from b" in record["hold"]["why"]
    more, _ = pool_record("chat", [busy("a", 20, 1), fallen], None, demands)
    assert more["demand"]["running"] == 20.0, "a floor, no ceiling"
    now.at = FLOOR_S + 1
    gone, lost = pool_record("chat", [busy("a", 3, 1), fallen], None, demands)
    assert (gone["demand"]["running"], gone["demand"]["held"], lost) == (None, False, True)


async def test_lost_demand_is_503() -> None:
    """A demand that was never whole is 503: the autoscaler is told that nothing is known, instead of a number."""
    board = Board()
    board.publish(busy("a"))
    board.publish(busy("b", state=life(UP, GONE)))
    async with serving(board) as ask:
        answer = await ask("/api/v1/pools/chat")
        assert (answer.status, answer.json["demand"]["running"]) == (503, None)
        check("pool", answer.json)
        board.publish(busy("b"))
        assert (await ask("/api/v1/pools/chat")).status == 200
        missing = await ask("/api/v1/pools/none")
    assert (missing.status, missing.json["error"]) == (404, "no pool 'none'")


async def test_a_configured_pool_without_workers() -> None:
    """It is there, with nothing in it; its name may hold slashes."""
    async with serving(Board({"ml/chat": 2})) as ask:
        record = (await ask("/api/v1/pools/ml/chat")).json
    assert (record["workers"]["expected"], record["min_ready"]) == (0, 2)
    assert record["hold"]["why"] == "demand unknown: no worker's /metrics is read; 0 ready, 2 wanted"


def test_a_worker_without_a_page_beside_others() -> None:
    """Where some workers' load is never seen, the sum is partial and says so; scaling down is held."""
    record = pool(busy("a"), view(key="b", facts=FACTS))
    assert (record["demand"]["running"], record["demand"]["covers"], record["complete"]) == (3.0, 1, False)
    assert record["hold"]["why"] == "demand partly unknown, no HTTP URL of b"


def test_start_up_times_outlive_their_workers() -> None:
    """The lead time of a pool is of the last starts that were witnessed, each counted once."""
    demands = Demands()
    for number, seconds in enumerate((10.0, 30.0, 20.0)):
        state = life({**GONE, "at": 1.0}, {**UP, "at": 1.0 + seconds})
        for _ in range(2):
            demands.tick(snapshot(view(state, key=f"w{number}")))
    demands.tick(snapshot(view()))
    assert pool(view(), demands=demands)["startup_s"] == {"p50": 20.0, "p90": 30.0, "n": 3}
    demands.tick(snapshot())
    assert pool(view(), demands=demands)["startup_s"] == {"p50": None, "p90": None, "n": 0}


# -- changes --------------------------------------------------------------------------------


def test_revisions_count_what_matters() -> None:
    """A proof that is newer is no change; a rung, a fact, another pool, a worker that leaves is."""
    ledger = Ledger(clock=lambda: 1.0)
    first = ledger.catch_up(snapshot(view(), view(key="b")))
    state = life({"contact": True}, state=life(UP))
    assert ledger.catch_up(snapshot(view(state, round_trip_s=0.2), view(key="b"))) == first
    second = ledger.catch_up(snapshot(view(life(UP, GONE)), view(key="b")))
    assert second > first
    changes = ledger.since(first)
    assert changes is not None
    assert (changes.changed, changes.removed) == (("a",), ())
    third = ledger.catch_up(snapshot(view(facts=FACTS)))
    changes = ledger.since(second)
    assert changes is not None
    assert (changes.revision, changes.changed, changes.removed) == (third, ("a",), ("b",))
    assert not ledger.since(third)
    assert ledger.since(third + 1) is None, "none of ours: of another daemon, or made up"
    assert ledger.since(999) is None, "of a daemon that ran here before"


def test_who_left_is_forgotten_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of those who left is bounded; a reader from before is told to read everything again."""
    from vllm_cp_exporter import ledger as ledger_module

    monkeypatch.setattr(ledger_module, "_GONE", 2)
    ledger = Ledger()
    before = ledger.catch_up(snapshot(*(view(key=f"w{number}") for number in range(4))))
    after = ledger.catch_up(snapshot())
    assert ledger.since(before) is None
    assert ledger.since(after) is not None


async def test_a_long_poll_waits_for_news() -> None:
    """It answers as soon as there is something, with what changed alone, and with nothing when the time is up."""
    board = Board()
    board.publish(view(facts=FACTS))
    board.publish(view(key="b"))
    async with serving(board) as ask:
        now = (await ask("/api/v1/workers")).json["revision"]
        empty = (await ask(f"/api/v1/watch?since={now}&wait=0.05")).json
        assert (empty["revision"], empty["changed"], empty["removed"], empty["full"]) == (now, [], [], False)
        waiting = asyncio.create_task(ask(f"/api/v1/watch?since={now}&wait=20"))
        await ask("/-/healthy")
        board.publish(view(life(UP, GONE)))
        board.remove(["b"])
        news = (await asyncio.wait_for(waiting, 10)).json
    check("watch", news)
    assert ([record["worker"] for record in news["changed"]], news["removed"]) == (["a"], ["b"])
    assert news["changed"][0]["state"] == "faulted"


@pytest.mark.parametrize(
    ("query", "status"),
    [("since=1", 410), ("since=99999999999999", 410), ("since=x", 400), ("since=-1", 400), ("wait=x", 400),
     ("wait=nan", 400), ("wait=61", 400), (f"since={'9' * 400}", 400)],
)  # fmt: skip
async def test_unknown_revisions_and_nonsense(query: str, status: int) -> None:
    """A revision that is not known is 410: read everything again. What is no revision is 400, in one sentence."""
    async with serving() as ask:
        answer = await ask(f"/api/v1/watch?{query}")
    assert answer.status == status
    assert answer.json["error"]


async def _events(ask: Asker, count: int, query: str = "", **headers: str) -> list[dict[str, Any]]:
    """The first events of a stream."""
    found: list[dict[str, Any]] = []
    async with ask.session.get(f"{ask.url}/api/v1/watch{query}", headers=headers) as answer:
        assert answer.headers["Content-Type"] == "text/event-stream"
        event: dict[str, Any] = {}
        async for raw in answer.content:
            name, _, value = raw.decode().rstrip("\n").partition(": ")
            if name == "" and event:
                found.append(event)
                event = {}
            elif name in ("id", "event", "data"):
                event[name] = json.loads(value) if name == "data" else value
            if len(found) == count:
                return found
    return found


async def test_a_stream_of_changes() -> None:
    """Server-sent events: first everything, then what changes; a browser that comes back goes on where it was."""
    board = Board()
    board.publish(view())
    async with serving(board) as ask:
        reading = asyncio.create_task(_events(ask, 2))
        (first,) = await asyncio.wait_for(_events(ask, 1), 10)
        assert first["data"]["full"]
        await ask.until("/-/healthy", lambda _: not reading.done())
        # The stream may not have begun yet; then its first event has the change in it, and another one follows.
        changes = [life(UP, GONE), life(UP)]

        async def change() -> None:
            while not reading.done():
                board.publish(view(changes[0]))
                changes.reverse()
                await ask(f"/api/v1/watch?since={first['id']}&wait=0.3")

        await asyncio.wait_for(asyncio.gather(reading, change()), 15)
        full, delta = reading.result()
        check("watch", delta["data"])
        assert (full["event"], full["data"]["full"], delta["data"]["full"]) == ("workers", True, False)
        assert int(delta["id"]) == delta["data"]["revision"] > int(full["id"])
        (again,) = await asyncio.wait_for(_events(ask, 1, **{"Last-Event-ID": first["id"]}), 10)
        assert not again["data"]["full"]


async def test_readers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many may wait, the next one is told; the place of one that left is free at once."""
    monkeypatch.setattr(api_module, "_READERS", 1)
    async with serving() as ask:
        async with ask.session.get(f"{ask.url}/api/v1/watch") as answer:
            assert await answer.content.readline() == b"retry: 2000\n"
            assert (await ask("/api/v1/watch")).status == 503
        await ask.until("/api/v1/watch?wait=0", lambda answer: answer.status == 200)


async def test_readers_are_let_go_when_the_daemon_stops() -> None:
    """Who waits is no reason for the daemon to stay: each gets the end of its answer at once."""
    board = Board()
    made = api_module.Api(board, asyncio.to_thread, look_s=10.0)
    events = made._events(made.revision, lambda: False)
    assert await anext(events)
    waiting = asyncio.ensure_future(anext(events, None))
    made.start()
    await made.stop()
    assert await asyncio.wait_for(waiting, 5) is None


async def test_a_quiet_stream_breathes() -> None:
    """A stream with nothing to say says so now and then, and notices when its reader has left."""
    board = Board()
    made = api_module.Api(board, asyncio.to_thread, look_s=0.01, breath_s=0.05)
    said = []
    async for event in made._events(made.revision, lambda: False):
        said.append(event)
        if len(said) == 3:
            break
    assert said[1:] == [b": nothing new\n\n"] * 2
