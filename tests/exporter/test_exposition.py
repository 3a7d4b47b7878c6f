"""The page from kept lines is the library's page, whatever came before; and a row reads what it says it reads."""

from __future__ import annotations

import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.exporter.pages import FORMS
from tests.exporter.parts import changed, corpus, has, part, paths
from tests.exporter.views import FACTS, MODEL, SERVER, UP, WALL, life, snapshot, view
from vllm_cp import KvEventSource, ModelInfo, Parallelism, ServerInfo
from vllm_cp.models.episode import Cause, EndKind
from vllm_cp.models.probe import EngineHealth, EngineState
from vllm_cp_exporter import collector
from vllm_cp_exporter.catalog import CHECKS, ROWS, WORKER_ROWS, Row
from vllm_cp_exporter.collector import PageCollector
from vllm_cp_exporter.exposition import Exposition
from vllm_cp_exporter.negotiate import OPENMETRICS, TEXT
from vllm_cp_exporter.selfmetrics import RPC_BOUNDS, Buckets, Own
from vllm_cp_exporter.snapshot import Facts, Snapshot, WorkerView
from vllm_cp_exporter.writer import number

_FORMS = {"text": TEXT, "openmetrics": OPENMETRICS}


def same(exposition: Exposition, shot: Snapshot, own: Own | None = None, names: frozenset[str] | None = None) -> bytes:
    """The page in both forms, held to the library's, errors and problems too; the text form is returned."""
    for form in FORMS:
        ours, theirs = (PageCollector(shot, own or Own(), names) for _ in range(2))
        body = exposition.render(ours, _FORMS[form])
        assert body == FORMS[form][0](theirs)
        assert (ours.errors, ours.problems) == (theirs.errors, theirs.problems)
    return exposition.render(PageCollector(shot, own or Own(), names), TEXT)


# -- any workers, any changes -----------------------------------------------------------------

TEXTS = st.one_of(
    st.sampled_from(["", "a", "a\\b\\", 'a"b', "a\nb", "%s%%", "{", "w\udc80", "w\udc81", "x" * 600, "模型", "a\0b"]),
    st.text(max_size=5),
)
NUMBERS = st.one_of(
    st.integers(),
    st.floats(),
    st.floats(1e9, 1e10),
    st.sampled_from([WALL, 0.0, -0.0, 1e6, 999999.5, 1e15, 1e16, 1e17, 1e22, 1e-5, 10**400, True, "12", "many", None]),
)


class Broken:
    """A part in which nothing can be read."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("a surprise")


def optional(of: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(st.none(), of)


def everywhere(kind: type, of: st.SearchStrategy[Any], **special: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """A dataclass of which any field may be missing."""
    return st.fixed_dictionaries({}, optional=dict.fromkeys(kind.__dataclass_fields__, of) | special).map(
        lambda given: kind(**given)
    )


SERVERS = everywhere(
    ServerInfo,
    NUMBERS,
    **dict.fromkeys(("engine_version", "api_version", "instance_id", "proto_version"), optional(TEXTS)),
    parallelism=optional(everywhere(Parallelism, st.integers(0, 9))),
    rl_capabilities=st.none(),
)
MODELS = everywhere(
    ModelInfo, optional(TEXTS), served_model_aliases=st.lists(TEXTS, max_size=2).map(tuple), supports_lora=st.booleans()
)
PARTS: dict[str, st.SearchStrategy[Any]] = {
    "key": TEXTS,
    "pool": TEXTS,
    **dict.fromkeys(("target", "http_url", "namespace", "pod", "node"), TEXTS),
    "facts": st.builds(Broken),
    "facts.server": st.one_of(st.none(), SERVERS, st.builds(Broken)),
    "facts.model": st.one_of(st.none(), MODELS, st.builds(Broken)),
    "facts.sources": optional(st.lists(st.builds(KvEventSource), max_size=2).map(tuple)),
    "proofs": st.dictionaries(st.sampled_from([*CHECKS, "guessed"]), NUMBERS),
    "gives_up_at": st.dictionaries(st.integers(0, 3), NUMBERS),
    **dict.fromkeys(("round_trip_s", "state.last_recovery_s", "state.discovered", "state.first_ready"), NUMBERS),
    "state": st.one_of(st.builds(Broken), st.sampled_from([one.state for one in corpus()])),
    "state.restarts": NUMBERS,
    "state.faults": st.one_of(st.just({}), st.fixed_dictionaries(dict.fromkeys(Cause, NUMBERS))),
    "state.ends": st.one_of(st.just({}), st.fixed_dictionaries(dict.fromkeys(EndKind, NUMBERS))),
    "state.evidence.engines": st.lists(
        st.builds(EngineHealth, engine=st.integers(0, 2), state=st.sampled_from(EngineState)), max_size=3
    ).map(tuple),
}
VIEWS = st.sampled_from(corpus())
OWN = st.builds(
    Own,
    rpc_durations=st.dictionaries(
        TEXTS, st.builds(Buckets, st.just(RPC_BOUNDS), st.lists(NUMBERS, min_size=10, max_size=12), NUMBERS)
    ),
    rpc_failures=st.dictionaries(st.tuples(TEXTS, TEXTS), st.integers(0, 3), max_size=3),
    discovered=st.dictionaries(TEXTS, NUMBERS, max_size=2),
    row_errors=st.dictionaries(st.sampled_from([row.name for row in ROWS]), st.integers(0, 9), max_size=2),
)
NAMES = st.one_of(st.none(), st.frozensets(st.sampled_from([row.family for row in ROWS] + ["nonsense"]), max_size=6))


@st.composite
def stories(draw: st.DrawFn) -> list[tuple[Snapshot, Own, frozenset[str] | None]]:
    """Pages one after another, between which workers come, go, trade places and change in some of their parts."""
    workers: dict[str, WorkerView] = {}
    pages = []
    for _ in range(draw(st.integers(1, 4))):
        for _ in range(draw(st.integers(0, 4))):
            slot = draw(st.sampled_from("abc"))
            if slot in workers and draw(st.integers(0, 5)) == 0:
                del workers[slot]
                continue
            one = workers.get(slot) or draw(VIEWS)
            path = draw(st.sampled_from(sorted(PARTS)))
            if not isinstance(part(one, path.partition(".")[0]), Broken):
                one = changed(one, path, draw(PARTS[path]))
            workers[slot] = one
        shot = Snapshot(workers=dict(workers), min_ready=draw(st.dictionaries(TEXTS, NUMBERS, max_size=2)))
        pages.append((shot, draw(OWN), draw(NAMES)))
    return pages


@settings(max_examples=200, deadline=None)
@given(stories())
def test_the_librarys_page_byte_for_byte(story: list[tuple[Snapshot, Own, frozenset[str] | None]]) -> None:
    """Whatever workers are like and however they change, every page is the one that the library would have written."""
    exposition = Exposition()
    for shot, own, names in story:
        same(exposition, shot, own, names)


@given(NUMBERS.filter(lambda value: isinstance(value, float)))
def test_numbers_are_written_as_the_library_does(value: float) -> None:
    """A number looks the same on both pages, be it a count, a time of this age, or what no clock ever showed."""
    from prometheus_client.utils import floatToGoString

    assert number(value) == floatToGoString(value + 0.0)


# -- what a row reads -------------------------------------------------------------------------


def points(row: Row[WorkerView], one: WorkerView) -> list[Any]:
    return [(values, repr(value)) for values, value in row.read(one)]


def others(value: Any) -> list[Any]:
    """Values of the same type that are not this one."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value + 1]
    return [f"{value}x"] if type(value) is str else []


def really_read() -> dict[str, set[str]]:
    """By row, the parts that make a difference: each part of each worker was exchanged for that of every other one."""
    workers = corpus()
    before = [{row.name: points(row, one) for row in WORKER_ROWS} for one in workers]
    found: dict[str, set[str]] = defaultdict(set)
    for path in {path for one in workers for path in paths(one)}:
        holders = [(one, was) for one, was in zip(workers, before, strict=True) if has(one, path)]
        seen = [part(one, path) for one, _ in holders]
        parts = {repr(value): value for value in [*seen, *(other for value in seen for other in others(value))]}
        for one, was in holders:
            for value in parts.values():
                other = changed(one, path, value)
                for row in WORKER_ROWS:
                    if points(row, other) != was[row.name]:
                        found[row.name].add(path)
    return found


def test_rows_read_what_they_say() -> None:
    """Exchanging a part of a worker changes the rows that declare it and no other; none declares what it ignores."""
    found = really_read()
    for row in WORKER_ROWS:
        declared = set(row.reads)
        covered = {path for path in found[row.name] for own in declared if f"{path}.".startswith(f"{own}.")}
        around = {path for path in found[row.name] for own in declared if own.startswith(f"{path}.")}
        assert found[row.name] == covered | around, row.name
        assert declared <= found[row.name], row.name


# -- what is kept -----------------------------------------------------------------------------


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of rows as they are read."""
    read: list[str] = []

    def counting(row: Row[WorkerView]) -> Row[WorkerView]:
        def reading(one: WorkerView) -> Any:
            read.append(row.name.removeprefix("vllm_cp_"))
            return row.read(one)

        return replace(row, read=reading)

    monkeypatch.setattr(collector, "WORKER_ROWS", tuple(map(counting, WORKER_ROWS)))
    return read


def test_a_look_that_brought_nothing_new_is_two_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """After another look at a worker that is as it was, its proofs and its round trip are written again, no more."""
    read = counted(monkeypatch)
    exposition, before = Exposition(), life(UP)
    exposition.render(PageCollector(snapshot(one := view(before, facts=FACTS)), Own()), TEXT)
    assert len(read) == len(WORKER_ROWS)
    read.clear()
    exposition.render(PageCollector(snapshot(one), Own()), TEXT)
    assert read == []
    equal = replace(one, target="".join(one.target), facts=replace(FACTS, server=replace(SERVER)), gives_up_at={})
    exposition.render(PageCollector(snapshot(equal), Own()), TEXT)
    assert read == []
    seen = replace(one, state=life(UP, state=before), proofs={"health": WALL + 2}, round_trip_s=0.5)
    exposition.render(PageCollector(snapshot(seen), Own()), OPENMETRICS)
    assert sorted(read) == ["worker_last_proof_timestamp_seconds", "worker_round_trip_seconds"]


def test_a_row_that_declares_nothing_is_read_for_each_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row may leave out what it reads; that costs time and never truth."""
    numbers = iter(range(100))
    told = replace(WORKER_ROWS[0], labels=(), read=lambda _: [((), next(numbers))], reads=())
    monkeypatch.setattr(collector, "WORKER_ROWS", (*WORKER_ROWS[1:], told))
    exposition, shot = Exposition(), snapshot(view())
    for turn in range(3):
        body = exposition.render(PageCollector(shot, Own()), TEXT)
        assert f'{told.name}{{pool="chat",worker="a"}} {turn}.0\n'.encode() in body


def test_workers_that_leave_are_forgotten() -> None:
    """Nothing is kept of workers that are gone, and a page is all that is kept of those that stay."""
    exposition = Exposition()
    same(exposition, snapshot(*[view(key=f"worker {number}", facts=FACTS) for number in range(50)]))
    empty = same(exposition, snapshot())
    assert b"worker 7" not in empty
    tables = [vars(table) for table in vars(exposition)["_tables"].values()]
    assert "worker 7" not in repr(tables)
    assert sum(len(column.lines) for table in tables for column in table["_columns"]) < len(empty)


def test_workers_trade_places() -> None:
    """Workers that are listed in another order are on the page in that order, each with its own lines."""
    exposition, workers = Exposition(), [view(key=key, facts=FACTS) for key in "abcd"]
    for order in ((0, 1, 2, 3), (3, 1, 0), (2, 3, 1, 0), (0,), (1, 0)):
        same(exposition, snapshot(*[workers[place] for place in order]))


def test_published_alike_and_then_not() -> None:
    """Of two workers that would have the same labels the first is on the page; when it leaves, the other one is."""
    exposition = Exposition()
    first, second = view(key="w\udc80"), view(life(), key="w\udc81")
    for shot in (snapshot(first, second), snapshot(second), snapshot(second, first), snapshot(first)):
        same(exposition, shot)


def test_a_row_that_failed_is_tried_again() -> None:
    """A fact that can't be read is counted on every page until it can, also where a page for others comes between."""
    exposition = Exposition()
    bad = view(facts=Facts(server=Broken(), model=MODEL))  # type: ignore[arg-type]
    for names in (None, frozenset({"vllm_cp_worker_ready"}), frozenset({"vllm_cp_worker_kv_blocks"}), None):
        same(exposition, snapshot(bad, view(key="b")), names=names)
    made = PageCollector(snapshot(bad), Own())
    exposition.render(made, TEXT)
    assert made.errors["vllm_cp_worker_kv_blocks"] == 1
    same(exposition, snapshot(view(facts=FACTS)))


def test_a_page_that_breaks_off_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Should a page not come to its end, the next one is whole all the same."""
    exposition, after = Exposition(), snapshot(view(life()), view(life(), key="b"))
    same(exposition, snapshot(view(), view(key="b")))
    with monkeypatch.context() as patch:
        patch.setattr("vllm_cp_exporter.column.Column.put", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            exposition.render(PageCollector(after, Own()), TEXT)
    same(exposition, after)


def _interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


def test_an_older_snapshot_may_come_later() -> None:
    """Two pages may overtake each other: each is of its own snapshot."""
    exposition = Exposition()
    old, new = snapshot(view(life())), snapshot(view(life(UP), facts=FACTS), view(key="b"))
    for shot in (old, new, old, new):
        same(exposition, shot)


def test_pages_in_two_threads_at_once() -> None:
    """Threads that make pages at the same time get the library's page, each of its own snapshot."""
    exposition, gate = Exposition(), threading.Barrier(4)
    shots = [
        snapshot(*[view(one.state, key=f"w{number}") for number in range(3 + turn)])
        for turn, one in enumerate(corpus()[:4])
    ]

    def make(turn: int) -> None:
        gate.wait(timeout=30)
        for _ in range(10):
            same(exposition, shots[turn])

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(make, turn) for turn in range(4)]:
            done.result(timeout=60)
