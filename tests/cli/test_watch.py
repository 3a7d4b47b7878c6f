"""``watch`` (B15, B36): each change at once, into a terminal or a pipe, and a clean end in every way there is."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Cli
from tests.cli.process import Terminal, ended, run, shell, start
from vllm_cp.episodes import TransitionKind
from vllm_cp.testing import FakeWorker

FULL = Path("/dev/full")
BEGINNING = [
    ("health", None, "no_answer", "SERVING"),
    ("rung", "reachable", "unknown", "yes"),
    ("rung", "serving", "unknown", "yes"),
    ("rung", "answering", "unknown", "yes"),
    ("rung", "admitting", "unknown", "yes"),
    ("ready", None, "starting", "ready"),
]


class Lines:
    """The lines that a running watch writes, as they come."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self._rest = b""

    def next(self, timeout_s: float = 15.0) -> str:
        """The next line; fails when none comes in time."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            left = deadline - time.monotonic()
            assert left > 0, f"no line came, only {self._rest!r}"
            if select.select([self.process.stdout], [], [], left)[0]:
                data = os.read(self.process.stdout.fileno(), 65536)
                assert data, "the watch has ended"
                self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()

    def record(self) -> dict[str, Any]:
        """The next line as an object."""
        made: dict[str, Any] = json.loads(self.next())
        return made

    def until(self, kind: str) -> dict[str, Any]:
        """The next record of that kind."""
        while True:
            record = self.record()
            if record["kind"] == kind:
                return record


@contextmanager
def watching(*args: str, env: dict[str, str] | None = None) -> Iterator[Lines]:
    """A watch that runs, and is ended."""
    process = start("watch", *args, env=env)
    try:
        yield Lines(process)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def _open_watches(worker: FakeWorker) -> list[str | None]:
    return [call.code for call in worker.calls if call.method == "Health.Watch"]


def _closed(worker: FakeWorker) -> bool:
    deadline = time.monotonic() + 5
    while None in _open_watches(worker):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_how_things_stand(worker: FakeWorker, cli: Cli) -> None:
    """The first records tell how things stand, rung by rung, with times in UTC; --count ends it with 0."""
    got = cli("watch", "--target", worker.target, "--count", "6", "-o", "jsonl")
    records = [json.loads(line) for line in got.out.splitlines()]
    assert (got.code, got.err) == (0, "")
    assert [(r["kind"], r["rung"], r["was"], r["now"]) for r in records] == BEGINNING
    assert {r["target"] for r in records} == {worker.target}
    assert all(r["at"].endswith("Z") for r in records)
    assert list(records[0]) == ["at", "target", "kind", "rung", "was", "now", "detail", "episode"]
    assert _closed(worker)


def test_lines_for_people(worker: FakeWorker, cli: Cli) -> None:
    """As text it is a line each: time with zone, worker, kind, and what became of what."""
    got = cli("watch", "--target", worker.target, "--count", "6")
    shown = [re.sub(r"^\d\d:\d\d:\d\d \S+", "TIME", line) for line in got.out.splitlines()]
    assert shown == [
        f"TIME  {worker.target}  {kind:14}  {f'{rung} ' if rung else ''}{was} -> {now}"
        for kind, rung, was, now in BEGINNING
    ]


def test_a_death_and_a_recovery(worker: FakeWorker) -> None:
    """A death, the fault it opens, a new instance, and the recovery with its length: each line as it happens."""
    with watching("--target", worker.target, "-o", "jsonl") as lines:
        assert lines.until("ready")["now"] == "ready"
        began = time.monotonic()
        worker.die(reported=True)
        assert lines.until("health")["now"] == "NOT_SERVING"
        assert time.monotonic() - began < 1
        assert lines.until("ready")["now"] == "not_serving"
        assert lines.until("fault_opened")["episode"]["cause"] == "engine_reported"
        worker.restart(instance_id="next")
        assert lines.until("instance")["now"] == "next"
        closed = lines.until("fault_closed")["episode"]
        assert (closed["kind"], closed["start"] < closed["end"]) == ("replaced", True)
        assert 0 < closed["duration_s"] < 20


def test_pause_shows(worker: FakeWorker) -> None:
    """A pause is not in the health stream; the next sign of life brings it."""
    with watching("--target", worker.target, "-o", "jsonl", "--every", "0.2", "--kind", "ready") as lines:
        assert lines.record()["now"] == "ready"
        worker.set(paused=True)
        assert lines.record()["now"] == "suspended"
        worker.set(paused=False)
        assert lines.record()["now"] == "ready"


def test_several_workers(worker: FakeWorker, nobody: str, cli: Cli) -> None:
    """One that is away is told as such, and does not keep the others' lines."""
    with FakeWorker(version="0.27.0") as old:
        targets = (worker.target, nobody, old.target)
        flags = [part for target in targets for part in ("--target", target)]
        got = cli("watch", *flags, "--for-seconds", "1", "-o", "jsonl")
    assert got.code == 0
    last: dict[str, Any] = {}
    for line in got.out.splitlines():
        record = json.loads(line)
        if record["kind"] == "rung" and record["rung"] == "reachable":
            last[record["target"]] = record["now"]
    assert last == dict(zip(targets, ("yes", "no", "yes"), strict=True))


def test_one_cause_is_told_once(nobody: str, cli: Cli) -> None:
    """As text, what brings down five rungs at once is told with the first of them; data has it with each."""
    text = cli("watch", "--target", nobody, "--count", "5").out
    assert text.count("refused") == 1
    assert cli("watch", "--target", nobody, "--count", "5", "-o", "jsonl").out.count("refused") == 5


def test_kinds_are_those_of_the_sdk() -> None:
    """--kind knows the transitions there are."""
    from vllm_cp.cli.watch import _KINDS

    assert list(_KINDS) == [kind.value for kind in TransitionKind]


def test_head(worker: FakeWorker) -> None:
    """watch | head -1: one line, no noise, and the health stream is closed although nothing more happens."""
    began = time.monotonic()
    got = shell("run watch -o jsonl | head -n 1; run watch | head -n 1", env={"VLLM_CP_TARGET": worker.target})
    assert time.monotonic() - began < 10
    assert (got.code, got.err) == (0, "")
    assert got.out.count("\n") == 2
    assert _closed(worker)


def test_each_line_reaches_the_pipe_at_once(worker: FakeWorker) -> None:
    """Into a pipe a line comes when it happens, not when a buffer is full."""
    with watching("--target", worker.target) as lines:
        for _ in BEGINNING:
            lines.next()
        worker.health("NOT_SERVING")
        began = time.monotonic()
        assert "NOT_SERVING" in lines.next()
        assert time.monotonic() - began < 1


def test_reader_that_leaves_ends_it(worker: FakeWorker) -> None:
    """A pipe that nobody reads any more is noticed without a line to write; the exit code is 0."""
    process = start("watch", "--target", worker.target)
    assert process.stdout is not None
    assert process.stdout.readline()
    process.stdout.close()
    assert process.wait(10) == 0
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()
    assert _closed(worker)


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full on this system")
@pytest.mark.parametrize("output", ["table", "jsonl"])
def test_full_disk(output: str, worker: FakeWorker) -> None:
    """A line that can't be written ends it with 1 and one line."""
    with FULL.open("wb") as full:
        got = run("watch", "-o", output, "--target", worker.target, stdout=full)
    assert (got.code, got.err) == (1, "vllm-cp: cannot write to standard output: No space left on device\n")


@pytest.mark.parametrize("twice", [False, True])
def test_ctrl_c(twice: bool, worker: FakeWorker, silent: str, nobody: str) -> None:
    """Ctrl-C, once or twice, with a healthy, a silent and an absent worker: 130 within three seconds, one line."""
    flags = [part for target in (worker.target, silent, nobody) for part in ("--target", target)]
    with watching(*flags, "-o", "jsonl", "--kind", "ready") as lines:
        lines.record()
        began = time.monotonic()
        lines.process.send_signal(signal.SIGINT)
        if twice:
            lines.process.send_signal(signal.SIGINT)
        got = ended(lines.process)
    assert time.monotonic() - began < 3
    assert got.code == 130
    assert "Traceback" not in got.err
    assert twice or got.err == "vllm-cp: interrupted\n"


def test_sigterm(worker: FakeWorker) -> None:
    """SIGTERM ends it at once, without a word."""
    with watching("--target", worker.target, "-o", "jsonl") as lines:
        lines.until("ready")
        lines.process.terminate()
        got = ended(lines.process, 3.0)
    assert (got.code, got.err) == (-signal.SIGTERM, "")


def test_on_a_terminal(worker: FakeWorker) -> None:
    """On a terminal lines are coloured and fit; Ctrl-C is 130."""
    with Terminal("watch", "--target", worker.target, columns=60) as terminal:
        terminal.expect("\x1b[32m")
        worker.stop()
        terminal.expect("fault_opened")
        terminal.press("\x03")
        assert terminal.end() == 130
    lines = re.sub(r"\x1b\[\d+m", "", terminal.shown).splitlines()
    assert max(map(len, lines)) <= 60


def test_verbose(worker: FakeWorker, cli: Cli) -> None:
    """--verbose shows the calls of a watch too."""
    got = cli("watch", "-v", "--target", worker.target, "--count", "6")
    assert f"vllm-cp: {worker.target}: Health.Check: OK in " in got.err
    assert f"vllm-cp: {worker.target}: Control.IsPaused: OK in " in got.err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--count", "0"), "0 is not in the range"),
        (("--for-seconds", "0"), "--for-seconds: 0 is no number of seconds"),
        (("--every", "-1"), "--every: -1 is no number of seconds"),
        (("--kind", "lunch"), "'lunch' is not one of"),
        (("-o", "json"), "'json' is not one of"),
        (("-o", "yaml"), "'yaml' is not one of"),
    ],
)
def test_usage(args: tuple[str, ...], said: str, cli: Cli) -> None:
    """Numbers out of range, and formats that a stream can't have, are usage errors."""
    got = cli("watch", *args)
    assert (got.code, got.out) == (2, "")
    assert said in got.err


def test_format_given_before_the_verb(cli: Cli) -> None:
    """A format that was chosen further left, and that watch does not have, is refused by name."""
    got = cli("-o", "json", "watch")
    assert got.code == 2
    assert "-o json: this verb has table, jsonl only" in got.err
