"""KV-cache events as the daemon's users meet them: flags, file, process, and what the counts are made of."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tests.exporter.pages import page
from tests.exporter.process import Exporter
from tests.exporter.test_config_file import load, settings
from tests.exporter.views import view
from vllm_cp import KvEventSource
from vllm_cp.kv import (
    Batch,
    DecodeReason,
    GapReason,
    Reset,
    ResetReason,
    SourceId,
    SourceState,
    SourceStats,
    Stored,
    SubscriberStats,
)
from vllm_cp.models.kv_source import Address
from vllm_cp.testing import FakeKvPublisher, FakeWorker
from vllm_cp_exporter.configdump import redacted
from vllm_cp_exporter.kvfold import KvFold
from vllm_cp_exporter.kvview import KvView, settled
from vllm_cp_exporter.lined import Mistakes

# -- where it is said -------------------------------------------------------------------------


def test_flag_and_file(tmp_path: Path) -> None:
    """Off unless it is asked for: by flag, for all, for a pool or for one target; the nearest word counts."""
    assert not settings("--target", "a:1").workers[0].kv_events
    assert settings("--target", "a:1", "--kv-events").workers[0].kv_events
    text = """
        defaults: {kv_events: true}
        pools: {quiet: {kv_events: false}}
        targets:
          - a:1
          - {grpc: "b:1", pool: quiet}
          - {grpc: "c:1", pool: quiet, kv_events: on}
          - {grpc: "d:1", kv_events: off}
          - e=http://e:8000
        discovery: {file_sd: [targets.json]}
    """
    told = load(tmp_path, textwrap.dedent(text))
    assert [worker.kv_events for worker in told.workers] == [True, False, True, False, False]
    assert (told.kv_events("chat"), told.kv_events("quiet")) == (True, False)
    written = replace(told, workers=told.workers[:-1])
    assert load(tmp_path, yaml.safe_dump(redacted(written))) == written


def test_only_over_grpc(tmp_path: Path) -> None:
    """A worker without gRPC has nobody to ask where it publishes: that is a mistake, with its line."""
    with pytest.raises(Mistakes, match=r":1: targets\[0\]: .* found over gRPC"):
        load(tmp_path, "targets: [{name: a, http: 'http://a:8000', kv_events: on}]")


MISSING = """
    import importlib.util, sys
    find = importlib.util.find_spec
    importlib.util.find_spec = lambda name, package=None: None if name == "zmq" else find(name, package)
    sys.modules["zmq"] = None
    from vllm_cp_exporter.app import main
    sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--target", "a:1", "--kv-events"], ""),
        ([], "pools: {chat: {kv_events: true}}"),
        ([], "targets: [{grpc: 'a:1', kv_events: true}]"),
    ],
    ids=["flag", "pool", "target"],
)
def test_without_the_extra(tmp_path: Path, args: list[str], text: str) -> None:
    """Where they are asked for and what they need is not installed: one line says what to install, exit code 2."""
    (tmp_path / "exporter.yaml").write_text(text)
    command = [sys.executable, "-c", textwrap.dedent(MISSING), *args]
    if text:
        command += ["--config", str(tmp_path / "exporter.yaml")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    (line,) = ended.stderr.splitlines()
    assert 'needs zmq, which is not installed: pip install "vllm-cp[kv]"' in line


def test_the_extra_is_not_needed_by_others() -> None:
    """Who does not ask for events needs nothing for them."""
    code = textwrap.dedent(MISSING)
    command = [sys.executable, "-c", code, "--target", "a:1", "--check-config"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_the_process_follows_and_stops() -> None:
    """The daemon shows what a publisher says and stops in time, also with publishers out of reach."""
    with (
        FakeKvPublisher() as kv,
        FakeKvPublisher(rank=1) as gone,
        FakeWorker(kv_sources=[kv.source, gone.source]) as worker,
    ):
        gone.stop()
        targets = [f"--target=w{n}={worker.target}" for n in range(20)]
        with Exporter("--kv-events", *targets) as exporter:
            kv.wait_subscribed(20, timeout_s=15.0)
            kv.store(range(64))
            line = 'vllm_cp_kv_blocks_resident{medium="gpu",pool="default",rank="0",worker="w%d"} 4.0\n'
            exporter.eventually(lambda text: all(line % n in text for n in range(20)))
            code, took = exporter.stop()
            assert (code, took < 2.5) == (0, True), took
            assert not [line for line in exporter.lines if "hang" in line or "Traceback" in line]


# -- what is made of it -----------------------------------------------------------------------


def source(address: str = "a", rank: int | None = 0) -> SourceId:
    return SourceId(worker="w", rank=rank, address=address)


def stats(
    *sources: SourceId, gaps: int = 0, state: SourceState = SourceState.CONNECTED, dropped: int = 0
) -> SubscriberStats:
    """Each of these sources with the same numbers."""
    each = [
        SourceStats(
            source=one,
            state=state,
            detail="",
            state_since=0.0,
            last_seq=gaps,
            begins_at=0,
            last_batch_at=1.0,
            batches=0,
            replayed=0,
            gaps=gaps,
            lost=dict.fromkeys(GapReason, 0),
            replays={"ok": gaps, "partial": 0, "failed": 0},
            replay_seconds=gaps / 4,
            replaying=False,
            pending=0,
            restarts=0,
            connects=1,
            failures=dict.fromkeys(DecodeReason, 0),
            unknown_events=0,
            unknown_keys=0,
            rank_disagreements=0,
            foreign=0,
        )
        for one in sources
    ]
    return SubscriberStats(
        sources=tuple(each), queue_depth=0, queue_bytes=0, dropped=dropped, refreshes=0, refresh_failures=0
    )


def batch(seq: int, *blocks: int, rank: int = 0, whose: SourceId | None = None) -> Batch:
    event = Stored(block_hashes=blocks, medium="GPU")
    return Batch(source=whose or source(), seq=seq, ts=1.0, events=(event,), data_parallel_rank=rank)


@pytest.fixture
def fold() -> KvFold:
    return KvFold("w")


def test_counters_never_fall(fold: KvFold) -> None:
    """A source that leaves takes its own numbers along, not those on the page; one that comes back counts on."""
    for shown, said in [
        (3, stats(source(), gaps=3)),
        (5, stats(source(), gaps=5)),
        (5, stats()),
        (7, stats(source(), gaps=2)),
        (8, stats(source(), gaps=1)),
    ]:
        fold.count(said)
        seen = fold.view(said, (), "unknown")
        assert (seen.gaps, seen.replays["ok"], seen.replay_seconds) == (shown, shown, shown / 4)
    fold.count(stats(dropped=4))
    fold.ended()
    fold.count(stats(source(), gaps=1, dropped=1))
    seen = fold.view(None, None, "unknown")
    assert (seen.gaps, seen.dropped) == (9, 5)


def test_what_is_held_ends_with_the_subscription(fold: KvFold) -> None:
    """A source that departs, and a subscription that ends, leave no number of blocks held behind."""
    fold.apply(batch(0, 1, 2))
    assert fold.view(None, None, "unknown").resident == {("0", "gpu"): 2}
    fold.apply(Reset(source=source(), reason=ResetReason.DEPARTED))
    assert not fold.view(None, None, "unknown").resident
    fold.apply(batch(0, 1, 2))
    fold.ended()
    last = fold.view(None, None, "unknown")
    assert (last.resident, last.complete, last.stored) == ({}, {}, {("0", "gpu"): 4})


def test_ranks_that_nobody_has(fold: KvFold) -> None:
    """A publisher that stamps ranks without end fills one label value."""
    shared = source(rank=None)
    for rank in range(1000):
        fold.apply(batch(rank, rank, rank=rank, whose=shared))
    seen = fold.view(None, None, "unknown")
    assert len(seen.stored) <= 257
    assert seen.stored["all", "gpu"] == 1000 - 256
    assert sum(seen.resident.values()) == 1000
    assert len(seen.resident) <= 257


def test_several_publishers_of_one_rank(fold: KvFold) -> None:
    """Of several publishers of one rank the worst state is told, and the highest number."""
    said = replace(
        stats(source("a"), gaps=7),
        sources=(
            *stats(source("a"), gaps=7).sources,
            *stats(source("b"), gaps=2, state=SourceState.UNREACHABLE).sources,
        ),
    )
    seen = fold.view(said, (), "unknown")
    assert (seen.states, seen.last_sequence) == ({"0": "unreachable"}, {"0": 7})


def test_sources_that_were_not_taken_up_yet(fold: KvFold) -> None:
    """A source that the subscriber has not opened yet is connecting; no sources at all is what the worker says."""
    told = KvEventSource(transport="zmq", endpoint="a", data_parallel_rank=2, live=Address(connect_to="a"))
    assert fold.view(stats(), (told,), "unknown").states == {"2": "connecting"}
    assert fold.view(stats(source("a", 2)), (told,), "unknown").states == {"2": "connected"}
    assert fold.view(None, None, "denied").states == {"all": "denied"}
    assert fold.view(stats(source(), state=SourceState.CLOSED), (), "unknown").states == {"0": "unknown"}


def test_what_did_not_change_is_the_same_object(fold: KvFold) -> None:
    """A view without news is the one before, one with some shares the rest: pages keep their lines by that."""
    old = settled(KvView(), fold.view(None, None, "unknown"))
    assert settled(old, fold.view(None, None, "unknown")) is old
    fold.apply(batch(0, 1))
    new = settled(old, fold.view(None, None, "unknown"))
    assert new.resident == {("0", "gpu"): 1}
    assert new.replays is old.replays
    assert new.events is not old.events


def test_series_per_worker_and_rank(fold: KvFold) -> None:
    """What the README says: 19 series for a worker, 13 for each rank."""
    counts = []
    for ranks in (1, 2, 4):
        sources = [source(f"a{rank}", rank) for rank in range(ranks)]
        for rank, one in enumerate(sources):
            fold.apply(batch(0, rank, rank=rank, whose=one))
        seen = page(view(kv=fold.view(stats(*sources), (), "unknown")))
        counts.append(sum(sample.name.startswith("vllm_cp_kv_") for sample in seen.samples))
    assert counts == [19 + 13 * ranks for ranks in (1, 2, 4)]
