"""``vllm-cp lock`` and ``vllm-cp diff``."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.profile.conftest import Cli
from tests.profile.facts import MODEL, SERVER, SOURCES
from vllm_cp.cli import _fanout, _output
from vllm_cp.profile import load
from vllm_cp.testing import FakeWorker

GOLDEN = Path(__file__).parent / "golden"
NAMES = ("127.0.0.1:11111", "127.0.0.1:22222")


def _held(name: str, text: str) -> None:
    path = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, "utf-8")
    assert text == path.read_text("utf-8"), f"UPDATE_GOLDEN=1 writes {path.name} anew"


@pytest.fixture
def lock(worker: FakeWorker, cli: Cli, tmp_path: Path) -> Path:
    """The lock of the worker, in a file."""
    path = tmp_path / "certified.lock"
    ended = cli("lock", "--target", worker.target, "--out", str(path))
    assert (ended.code, ended.out) == (0, "")
    assert ended.err == f"vllm-cp: {path}: 41 facts of {worker.target}\n"
    return path


def test_lock_prints_the_file(worker: FakeWorker, cli: Cli) -> None:
    """Standard output is the file, to the letter."""
    told = ("--image-digest", "sha256:ab12", "--driver", "570.133", "--note", "load test of May", "--note", "ticket 7")
    ended = cli("lock", "--target", worker.target, *told)
    assert (ended.code, ended.err) == (0, "")
    _held("certified.lock", ended.out)


def test_lock_as_data(worker: FakeWorker, cli: Cli) -> None:
    """-o json gives the facts with their types."""
    ended = cli("lock", "--target", worker.target, "--instance-id", "-o", "json")
    (record,) = json.loads(ended.out)
    assert record["target"] == worker.target
    assert record["facts"]["instance_id"] == "6f1c0b6e-3f0a"
    assert record["facts"]["kv_events.ranks"] == [0, 1]
    assert record["facts"]["reasoning_parser"] is None


def test_locking_again_keeps_the_rules(worker: FakeWorker, lock: Path, cli: Cli) -> None:
    """New facts, the rules of before with what is written behind them."""
    with lock.open("a") as file:
        file.write("  engine_version: 0.3*  # ticket 12\n")
    worker.set(max_loras=4)
    assert cli("lock", "--target", worker.target, "--out", str(lock)).code == 0
    assert load(lock).facts["max_loras"] == 4
    assert "  engine_version: 0.3*  # ticket 12\n" in lock.read_text()


def test_what_is_no_lock_is_not_replaced(worker: FakeWorker, cli: Cli, tmp_path: Path) -> None:
    """--out refuses to replace another file, a broken lock or a directory, before anything is asked."""
    other = tmp_path / "notes.txt"
    other.write_text("dear diary")
    for path, said in ((other, "no lock in order"), (tmp_path, "no regular file")):
        ended = cli("lock", "--target", worker.target, "--out", str(path))
        assert (ended.code, ended.out) == (2, "")
        assert said in ended.err
    assert other.read_text() == "dear diary"
    assert worker.calls == []


def test_lock_that_cannot_be_written(worker: FakeWorker, cli: Cli, tmp_path: Path) -> None:
    """A directory that does not exist is one line and exit 1."""
    ended = cli("lock", "--target", worker.target, "--out", str(tmp_path / "no" / "a.lock"))
    assert (ended.code, ended.out) == (1, "")
    assert "cannot write" in ended.err
    assert "No such file or directory" in ended.err


def test_lock_is_of_one_worker(cli: Cli) -> None:
    """Two targets are a usage error, and so are empty values."""
    assert "a lock is of one worker and 2 were given" in cli("lock", "--target", "a", "--target", "b").err
    for flag in ("--out", "--driver", "--image-digest"):
        ended = cli("lock", flag, "")
        assert (ended.code, f"{flag}: the value is empty" in ended.err) == (2, True)


def test_lock_of_nobody(cli: Cli, tmp_path: Path) -> None:
    """An unreachable worker is exit 3 and leaves no file."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        out = tmp_path / "a.lock"
        ended = cli("lock", "--target", f"127.0.0.1:{held.getsockname()[1]}", "--out", str(out), "--timeout", "1")
    assert (ended.code, ended.out, out.exists()) == (3, "", False)
    assert "worker unreachable" in ended.err


def test_same(worker: FakeWorker, lock: Path, cli: Cli) -> None:
    """A worker that is as locked: exit 0, and a restart does not matter."""
    worker.restart()
    ended = cli("diff", str(lock), "--target", worker.target)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.splitlines()[1].split("  ")[1] == "as locked"


@pytest.mark.parametrize("output", ["80", "table", "wide", "json", "yaml", "jsonl", "name"])
def test_drift_as_it_is_written_down(
    output: str, worker: FakeWorker, lock: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that drifted and one that is as locked, in every format: exit 6, that of some targets."""
    text = lock.read_text().replace('proto_version: "0.6.0"', "proto_version: null")
    lock.write_text(text + "  engine_version: 0.33.*\n  total_kv_blocks: 40000..\n")
    monkeypatch.chdir(lock.parent)
    names = {worker.target: NAMES[0]}
    ask_all = _fanout.ask_all

    def renamed(*args: Any) -> list[_fanout.Reply[Any]]:
        return [reply._replace(target=names[reply.target]) for reply in ask_all(*args)]

    monkeypatch.setattr(_fanout, "ask_all", renamed)
    if output == "80":
        monkeypatch.setattr(_output, "terminal_width", lambda: 80)
    same = FakeWorker(version="0.33.0", ranks=2, info=SERVER, model=MODEL, kv_sources=SOURCES)
    with same:
        names[same.target] = NAMES[1]
        same.set(proto_version="")
        worker.set(max_model_len=65536, max_loras=None, total_kv_blocks=39000, tool_call_parser="hermes")
        worker.set(served_model_aliases=("llama",), kv_sources=SOURCES[:1])
        ended = cli(
            *("diff", "certified.lock", "--target", worker.target, "--target", same.target),
            *(() if output == "80" else ("-o", output)),
        )
    _held(f"diff.{output}", ended.out)
    assert ended.code == 6
    assert ended.err == f"vllm-cp: {NAMES[0]}: 7 facts differ from certified.lock\n"
    if output == "80":
        assert max(map(len, ended.out.splitlines())) <= 80


def test_drift_of_all_is_8(worker: FakeWorker, lock: Path, cli: Cli) -> None:
    """One worker, one drift: exit 8 and one line that counts."""
    worker.set(max_loras=4)
    ended = cli("diff", str(lock), "--target", worker.target)
    assert ended.code == 8
    assert ended.err == f"vllm-cp: {worker.target}: 1 fact differs from {lock}\n"


def test_what_only_flags_can_tell(worker: FakeWorker, cli: Cli, tmp_path: Path) -> None:
    """A locked driver is compared when it is told, and named as not compared when it is not."""
    path = str(tmp_path / "a.lock")
    assert cli("lock", "--target", worker.target, "--driver", "570", "--out", path).code == 0
    quiet = cli("diff", path, "--target", worker.target)
    assert quiet.code == 0
    assert "not compared: driver; no worker tells, give --driver" in quiet.err
    assert cli("diff", path, "--target", worker.target, "--driver", "570").err == ""
    assert cli("diff", path, "--target", worker.target, "--driver", "571").code == 8


def test_a_locked_instance_is_compared(worker: FakeWorker, cli: Cli, tmp_path: Path) -> None:
    """Who locks the instance learns of a restart."""
    path = str(tmp_path / "a.lock")
    assert cli("lock", "--target", worker.target, "--instance-id", "--out", path).code == 0
    assert cli("diff", path, "--target", worker.target).code == 0
    worker.restart()
    ended = cli("diff", path, "--target", worker.target)
    assert (ended.code, "instance_id" in ended.out) == (8, True)


def test_bad_lock(worker: FakeWorker, cli: Cli, tmp_path: Path) -> None:
    """A lock that cannot be read is exit 2 with its line, and nobody is asked."""
    path = tmp_path / "a.lock"
    path.write_text("schema: 1\nfacts:\n  engine_versoin: 1\n")
    ended = cli("diff", str(path), "--target", worker.target)
    assert (ended.code, ended.out, worker.calls) == (2, "", [])
    assert f"{path}, line 3: unknown key engine_versoin; did you mean engine_version?" in ended.err
    assert cli("diff", str(tmp_path / "gone")).code == 2
