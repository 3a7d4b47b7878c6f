"""``kv tail`` and ``kv stats`` (B02, B03, B11, B15, B36): every event, and no silent loss."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Cli
from tests.cli.facts import source
from tests.cli.held import held
from tests.cli.process import Terminal, ended, environment, shell, start
from tests.cli.test_watch import Lines
from vllm_cp.cli import _kv_records
from vllm_cp.testing import FakeKvPublisher, FakeWorker, KvLayout

FULL = Path("/dev/full")
TOKENS = ",".join(map(str, range(70)))
PAST = ("--from-seq", "0")
NAME = "127.0.0.1:11111"
STORED = {"type": "BlockStored", "parent_block_hash": None, "token_ids": [], "block_size": 0}


def _records(cli: Cli, worker: FakeWorker, *flags: str) -> list[dict[str, Any]]:
    got = cli("kv", "tail", "--target", worker.target, "-o", "jsonl", *flags)
    assert got.code == 0
    return [json.loads(line) for line in got.out.splitlines()]


@contextmanager
def tailing(kv: FakeKvPublisher, *args: str) -> Iterator[Lines]:
    """A tail that runs and has subscribed, and is ended."""
    process = start("kv", "tail", *args)
    try:
        kv.wait_subscribed(timeout_s=15)
        yield Lines(process)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def _nobody_listens(kv: FakeKvPublisher) -> None:
    """Wait until the publisher knows that its last subscriber has left."""
    deadline = time.monotonic() + 10
    while kv.subscribers:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _publish_all(kv: FakeKvPublisher) -> None:
    kv.store(range(64))
    kv.store(range(100, 132), lora="sql")
    kv.evict(1)
    kv.publish({"type": "Heartbeat", "uptime": 12})
    kv.clear()


def _still(text: str, worker: FakeWorker) -> str:
    return re.sub(r"tcp://[^\"\s]+", "tcp://127.0.0.1:5557", text.replace(worker.target, NAME))


@pytest.mark.parametrize("output", ["table", "jsonl"])
def test_tail_is_as_written_down(
    output: str, kv: FakeKvPublisher, publishing: FakeWorker, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of everything, as lines and as records."""
    monkeypatch.setattr(_kv_records, "local_now", lambda _: "03:04:05 UTC")
    monkeypatch.setattr(_kv_records, "iso", lambda _: "2026-01-02T03:04:05.678Z")
    _publish_all(kv)
    got = cli("kv", "tail", "--target", publishing.target, *PAST, "--count", "5", "-o", output)
    held(f"kv-tail.{output}", _still(got.out, publishing))
    held("kv-tail.talk", _still(got.err, publishing))
    assert got.code == 0


@pytest.mark.parametrize("layout", [KvLayout.MAP, KvLayout.BATCH_MAP])
def test_fields_that_differ_between_releases(layout: KvLayout, cli: Cli) -> None:
    """Integer and byte hashes stay apart, an absent medium is not made up, and a key nobody knows is kept (B02)."""
    hashes: list[Any] = [2**63 + 1, -5, bytes(range(32))]
    with FakeKvPublisher(layout=layout) as kv, FakeWorker(kv_sources=[kv.source]) as worker:
        for medium in ({"medium": "GPU"}, {"medium": "CPU"}, {}):
            kv.publish({**STORED, "block_hashes": hashes, "lora_id": None, "group_idx": 1, **medium})
        records = _records(cli, worker, *PAST, "--count", "3")
    expected = ["9223372036854775809", "-5", f"0x{bytes(range(32)).hex()}"]
    assert [record["block_hashes"] for record in records] == [expected] * 3
    assert [record["medium"] for record in records] == ["GPU", "CPU", None]
    assert {record["group_idx"] for record in records} == {1}


def test_what_nobody_knows_is_kept(kv: FakeKvPublisher, publishing: FakeWorker, cli: Cli) -> None:
    """A key and an event kind of tomorrow are in the record as they came, in text as a word."""
    kv.publish({**STORED, "block_hashes": [1], "lora_name": "sql", "colour": b"\xff"})
    kv.publish({"type": "Heartbeat", "uptime": float("inf")})
    first, second = _records(cli, publishing, *PAST, "--count", "2")
    assert (first["lora_name"], first["extra"]) == ("sql", {"colour": "0xff"})
    assert (second["type"], second["kind"]) == ("unknown", "Heartbeat")
    text = cli("kv", "tail", "--target", publishing.target, *PAST, "--count", "2").out
    assert "unknown: colour" in text
    assert "Heartbeat" in text


def test_poison(kv: FakeKvPublisher, publishing: FakeWorker) -> None:
    """Strange messages between good ones stop nothing, nothing is printed of them but the loss (B03)."""
    with tailing(kv, "--target", publishing.target, "-o", "jsonl") as lines:
        kv.store(range(16))
        kv.publish({"type": "Other"}, {"type": "AllBlocksCleared"})
        kv.poison(b"", b"two frames")
        kv.poison(b"", b"1234567", b"\x90")
        kv.poison(b"", b"\xff" * 8, b"\x90")
        kv.store(range(100, 116))
        assert [lines.record()["type"] for _ in range(4)] == ["stored", "unknown", "cleared", "stored"]


def test_a_loss_is_said(kv: FakeKvPublisher, publishing: FakeWorker) -> None:
    """Batches that cannot be had again are a line in their place; filtered out it is said on standard error."""
    with tailing(kv, "--target", publishing.target, "-o", "jsonl", "--count", "3") as lines:
        kv.store(range(16))
        assert lines.record()["seq"] == 0
        kv.drop(2)
        kv.store(range(16, 32))
        kv.store(range(32, 48))
        kv.forget()
        kv.store(range(48, 64))
        gap = lines.record()
        assert (gap["type"], gap["first"], gap["last"], gap["lost"], gap["reason"]) == ("gap", 1, 2, 2, "evicted")
        assert lines.record()["seq"] == 3
    _nobody_listens(kv)
    with tailing(kv, "--target", publishing.target, "--type", "cleared", "--count", "1") as lines:
        kv.store(range(200, 216))
        kv.drop(1)
        kv.store(range(64, 80))
        kv.forget()
        kv.clear()
        assert "cleared" in lines.next()
        got = ended(lines.process)
        assert "1 batch is lost, 5 to 5: evicted" in got.err


def test_choice(cli: Cli) -> None:
    """--rank and --type choose; where the view begins goes to standard error unless resets are asked for."""
    with (
        FakeKvPublisher(rank=0) as zero,
        FakeKvPublisher(rank=1) as one,
        FakeWorker(kv_sources=[zero.source, one.source]) as worker,
    ):
        for kv in (zero, one):
            _publish_all(kv)
        flags = ("--rank", "1", "--type", "removed", "--type", "cleared", "--count", "2")
        records = _records(cli, worker, *PAST, *flags)
        assert [(record["rank"], record["type"]) for record in records] == [(1, "removed"), (1, "cleared")]
        got = cli("kv", "tail", "--target", worker.target, "--rank", "7")
        assert (got.code, got.out) == (5, "")
        assert "no such rank: there are 0, 1" in got.err


def test_from_seq(kv: FakeKvPublisher, publishing: FakeWorker, cli: Cli) -> None:
    """The past begins with the batch that was asked for."""
    for start_at in range(0, 96, 16):
        kv.store(range(start_at, start_at + 16))
    assert [r["seq"] for r in _records(cli, publishing, "--from-seq", "3", "--count", "3")] == [3, 4, 5]


def test_five_kinds_of_no_events(kv: FakeKvPublisher, publishing: FakeWorker, cli: Cli) -> None:
    """Off, not supported, denied, unreadable and merely silent are five messages and four codes (B11)."""
    with FakeWorker() as off, FakeWorker() as older, FakeWorker() as denied, FakeWorker() as nats:
        older.fail("GetKvEventSources", "UNIMPLEMENTED")
        denied.fail("GetKvEventSources", "PERMISSION_DENIED", "RBAC: access denied")
        nats.set(kv_sources=[source("tcp://broker:4222", transport="nats")])
        workers = (off, older, denied, nats, publishing)
        got = [cli("kv", "tail", "--target", worker.target, "--for-seconds", "1") for worker in workers]
        assert [each.code for each in got] == [8, 7, 4, 7, 0]
        assert len({each.err.partition(": ")[2] for each in got}) == 5
        assert got[4].err == f"vllm-cp: {publishing.target} rank 0: connected\n"
        # A final answer is not asked for again.
        assert len([call for call in older.calls if call.method.endswith("GetKvEventSources")]) == 1
        targets = [part for worker in workers for part in ("--target", worker.target)]
        stats = cli("kv", "stats", *targets, "--every", "0.3", "--count", "2", "-o", "jsonl")
        assert stats.code == 6
        assert stats.err.count("\n") == 4
        rows = [json.loads(line) for line in stats.out.splitlines()]
        assert {(row["target"], row["state"], row["last_batch_age_s"]) for row in rows} == {
            (publishing.target, "connected", None)
        }


def test_stats(kv: FakeKvPublisher, publishing: FakeWorker) -> None:
    """Rates are those of the last interval; ages and losses go on."""
    process = start("kv", "stats", "--target", publishing.target, "--every", "0.5", "-o", "jsonl")
    lines = Lines(process)
    try:
        kv.wait_subscribed(timeout_s=15)
        lines.record()
        kv.store(range(64))
        kv.evict(2)
        busy = next(row for row in iter(lines.record, None) if row["batches_per_s"])
        assert busy["batches_per_s"] == pytest.approx(4, rel=0.5)
        assert busy["stored_per_s"] == pytest.approx(2 * busy["batches_per_s"], rel=0.1)
        assert busy["removed_per_s"] == pytest.approx(busy["batches_per_s"], rel=0.1)
        assert (busy["last_seq"], busy["lost"]) == (1, 0)
        assert lines.record()["batches_per_s"] == 0
        assert lines.record()["last_batch_age_s"] > 0.4
    finally:
        process.kill()
        process.communicate()


def test_stats_are_as_written_down(publishing: FakeWorker, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """A silent rank in each format, and on a terminal of 80 columns."""
    for output in ("table", "wide", "jsonl", "80"):
        if output == "80":
            monkeypatch.setattr("vllm_cp.cli._kv_stats.terminal_width", lambda: 80)
            monkeypatch.setenv("TERM", "dumb")
        flags = () if output == "80" else ("-o", output)
        got = cli("kv", "stats", "--target", publishing.target, "--every", "0.3", "--count", "1", *flags)
        held(f"kv-stats.{output}", _still(got.out, publishing))
        assert (got.code, got.err) == (0, "")
        assert output != "80" or max(map(len, got.out.splitlines())) <= 80


def test_stats_stay_in_place(publishing: FakeWorker) -> None:
    """On a terminal the next look is painted over the last one."""
    with Terminal("kv", "stats", "--target", publishing.target, "--every", "0.2", "--count", "2") as terminal:
        assert terminal.end() == 0
    assert terminal.shown.count("TARGET") == 2
    assert "\x1b[2F\x1b[J" in terminal.shown


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("match",), "give the prompt: --tokens IDS, or --text TEXT with --tokenizer FILE"),
        (("match", "--tokens", "1", "--text", "x"), "give the prompt"),
        (("match", "--tokens", "1,x"), "give token ids, whole numbers"),
        (("match", "--tokens", ""), "the prompt is empty"),
        (("match", "--text", "x"), "give --tokenizer FILE"),
        (("match", "--text", "x", "--tokenizer", "nothing.json"), "--tokenizer: 'nothing.json' can't be used"),
        (("tail", "-o", "json"), "'json' is not one of"),
        (("tail", "--for-seconds", "0"), "no number of seconds"),
        (("stats", "--every", "-1"), "no number of seconds"),
        (("tail", "--rank", "-1"), "-1"),
    ],
)
def test_usage(args: tuple[str, ...], said: str, worker: FakeWorker, cli: Cli) -> None:
    """A command line that can't be meant asks nobody."""
    got = cli("kv", *args, "--target", worker.target)
    assert (got.code, got.out, worker.calls) == (2, "", [])
    assert said in got.err


@pytest.mark.parametrize("verb", ["tail", "stats"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_end_by_signal(
    verb: str, number: signal.Signals, code: int, kv: FakeKvPublisher, publishing: FakeWorker
) -> None:
    """With a silent publisher and one that is not there it is gone within three seconds, without a traceback (B15)."""
    away = source("tcp://127.0.0.1:9")
    with FakeWorker(kv_sources=[away]) as other:
        process = start("kv", verb, "--target", publishing.target, "--target", other.target)
        kv.wait_subscribed(timeout_s=15)
        began = time.monotonic()
        process.send_signal(number)
        got = ended(process, 10)
    assert time.monotonic() - began < 3
    assert got.code == code
    assert "Traceback" not in got.err


def test_reader_that_leaves(kv: FakeKvPublisher, publishing: FakeWorker) -> None:
    """A pipe that nobody reads any more ends it, with 0 and no word, also when no event comes (B36)."""
    reader, writer = os.pipe()
    process = start("kv", "tail", "--target", publishing.target, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    kv.wait_subscribed(timeout_s=15)
    os.close(reader)
    got = ended(process, 10)
    assert got.code == 0
    assert "Traceback" not in got.err


def test_head_and_promptness(kv: FakeKvPublisher, publishing: FakeWorker) -> None:
    """Through a pipe each event comes at once, and head ends it (B36)."""
    with tailing(kv, "--target", publishing.target) as lines:
        began = time.monotonic()
        kv.store(range(16))
        assert "stored" in lines.next()
        assert time.monotonic() - began < 1
    got = shell('run "$@" | head -n 1', "kv", "tail", *PAST, env={"VLLM_CP_TARGET": publishing.target})
    assert (got.code, got.out.count("\n")) == (0, 1)


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full on this system")
def test_full_disk(kv: FakeKvPublisher, publishing: FakeWorker) -> None:
    """Events that could not be written are 1 and one line."""
    kv.store(range(16))
    with FULL.open("wb") as full:
        process = start("kv", "tail", "--target", publishing.target, *PAST, stdout=full)
        got = ended(process, 15)
    assert got.code == 1
    assert got.err.endswith("vllm-cp: cannot write to standard output: No space left on device\n")


def test_a_missing_package_is_named() -> None:
    """Without the libraries of the extra one line says what to install."""
    code = (
        "import importlib.util, sys; importlib.util.find_spec = lambda name, *_: None;"
        "from vllm_cp.cli import main; sys.exit(main(['kv', 'tail', '--target', 'h']))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert 'pip install "vllm-cp[kv]"' in done.stderr
