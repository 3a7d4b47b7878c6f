"""``wait``: the goals, what is shown meanwhile, and how it ends when time is up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time

import pytest

from tests.cli.conftest import Cli
from tests.cli.process import Terminal, ended, start
from vllm_cp.testing import FakeWorker


def _later(act: object, seconds: float = 0.3) -> threading.Timer:
    timer = threading.Timer(seconds, act)  # type: ignore[arg-type]
    timer.start()
    return timer


@pytest.mark.parametrize("goal", ["reachable", "serving", "answering", "admitting", "warm"])
def test_rungs_are_reached_at_once(goal: str, worker: FakeWorker, cli: Cli) -> None:
    """Of a worker that serves every rung is reached at the first look; warm takes the one token it sends."""
    got = cli("wait", "--for", goal, "--target", worker.target, "-o", "json")
    (row,) = json.loads(got.out)
    assert (got.code, got.err, row["reached"], row["goal"], row["why"]) == (0, "", True, goal, "")
    assert row["seconds"] < 2
    generated = [call.method for call in worker.calls].count("Inference.Generate")
    assert generated == (goal == "warm")


def test_a_worker_that_is_not_there_yet(worker: FakeWorker, cli: Cli) -> None:
    """A port that refuses is waited for until somebody serves behind it."""
    worker.stop()
    timer = _later(worker.restart)
    got = cli("wait", "--for", "admitting", "--target", worker.target, "--timeout", "20")
    timer.join()
    assert (got.code, got.err) == (0, "")


def test_gone(worker: FakeWorker, cli: Cli) -> None:
    """gone is reached when the port closes."""
    timer = _later(worker.stop)
    got = cli("wait", "--for", "gone", "--target", worker.target, "--timeout", "20", "-o", "json")
    timer.join()
    assert got.code == 0
    assert json.loads(got.out)[0]["state"] == "unreachable"


def test_drained(worker: FakeWorker, cli: Cli) -> None:
    """drained is reached by a worker that is on its way out: here, whose health service forgets its own name."""

    def drain() -> None:
        worker.fail("Check", "NOT_FOUND", "service not registered")

    timer = _later(drain)
    assert cli("wait", "--for", "drained", "--target", worker.target, "--timeout", "20").code == 0
    timer.join()
    assert worker.calls


def test_time_is_up(worker: FakeWorker, nobody: str, cli: Cli) -> None:
    """When the time is up it is 3, with the last state seen, in the record and in a line."""
    worker.set(paused=True)
    got = cli("wait", "--for", "admitting", "--timeout", "0.6", "--target", worker.target, "-o", "json")
    (row,) = json.loads(got.out)
    assert got.code == 3
    assert (row["reached"], row["state"], row["reason"], row["why"]) == (
        False,
        "answering",
        "suspended",
        "paused or asleep",
    )
    assert got.err.startswith(f"vllm-cp: {worker.target}: not admitting after 0.")
    assert got.err.endswith("last seen: answering, paused or asleep\n")
    got = cli("wait", "--for", "serving", "--timeout", "0.3", "--target", nobody)
    assert got.code == 3
    assert "last seen: Health.Check: worker unreachable (UNAVAILABLE" in got.err


def test_service_that_nobody_knows_is_no_exception(worker: FakeWorker, cli: Cli) -> None:
    """An unknown health name is a state to wait out: 3 at the end, with that as the last state seen."""
    flags = ("--service", "vllm.Nothing", "--target", worker.target, "--timeout", "0.3")
    got = cli("wait", "--for", "serving", *flags)
    assert got.code == 3
    assert "last seen: reachable, health says SERVICE_UNKNOWN" in got.err


def test_rung_that_can_never_be_proved(cli: Cli) -> None:
    """On vLLM 0.27 answering is 7 at once rather than a wait to the end; --canary gets there."""
    with FakeWorker(version="0.27.0") as worker:
        began = time.monotonic()
        got = cli("wait", "--for", "answering", "--target", worker.target)
        assert got.code == 7
        assert time.monotonic() - began < 10
        assert "with --canary a generation of one token may prove it" in got.err
        assert cli("wait", "--for", "answering", "--canary", "--target", worker.target).code == 0


def test_every_target_must_reach_it(worker: FakeWorker, nobody: str, cli: Cli) -> None:
    """Several targets are waited for together; one that never gets there makes it 6, and the others' rows stand."""
    with FakeWorker() as late:
        late.stop()
        timer = _later(late.restart)
        both = ("--target", worker.target, "--target", late.target)
        assert cli("wait", "--for", "serving", *both, "--timeout", "20").code == 0
        timer.join()
        began = time.monotonic()
        got = cli("wait", "--for", "serving", *both, "--target", nobody, "--timeout", "0.5", "-o", "json")
        assert time.monotonic() - began < 5
    assert got.code == 6
    assert [row["reached"] for row in json.loads(got.out)] == [True, True, False]


def test_timeout_is_the_whole_wait(worker: FakeWorker, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    """--timeout bounds the wait, wherever it stands; its variable is about single answers and does not."""
    worker.set(paused=True)
    began = time.monotonic()
    assert cli("--timeout", "0.4", "wait", "--for", "admitting", "--target", worker.target).code == 3
    assert 0.4 <= time.monotonic() - began < 4
    monkeypatch.setenv("VLLM_CP_TIMEOUT", "0.2")
    timer = _later(lambda: worker.set(paused=False), 0.8)
    assert cli("wait", "--for", "admitting", "--target", worker.target).code == 0
    timer.join()
    assert {round(call.deadline_s or 0, 1) for call in worker.calls if call.method == "Health.Check"} >= {0.2}


def test_quiet_in_a_pipe(worker: FakeWorker) -> None:
    """Where nobody watches, nothing is said meanwhile."""
    worker.set(paused=True)
    got = ended(start("wait", "--for", "admitting", "--target", worker.target, "--timeout", "1"))
    assert got.err.count("\n") == 1
    assert "waiting for" not in got.err
    assert "\x1b" not in got.err + got.out


@pytest.mark.parametrize("columns", [80, 40])
def test_progress_on_a_terminal(columns: int, worker: FakeWorker) -> None:
    """On a terminal one line says how it goes, never wider than that, and is gone in the end."""
    worker.set(paused=True)
    with Terminal("wait", "--for", "admitting", "--target", worker.target, columns=columns) as terminal:
        shown = terminal.expect("waiting for admitting: 1 s; answeri")
        assert max(len(line) for line in shown.replace("\x1b[K", "\r").split("\r")) < columns
        worker.set(paused=False)
        assert terminal.end() == 0
    last = terminal.shown.rpartition("\r\x1b[K")[2]
    assert last.splitlines()[0].replace("\x1b[1m", "").startswith("TARGET")


def test_progress_of_a_fleet(worker: FakeWorker, nobody: str) -> None:
    """With several workers the line counts those that are there, and names one that is not."""
    with Terminal("wait", "--for", "serving", "--target", worker.target, "--target", nobody, columns=120) as terminal:
        terminal.expect(f"waiting for serving: 1 s, 1 of 2 there; {nobody}: Health.Check: worker unreachable")
        terminal.press("\x03")
        assert terminal.end() == 130


def test_dumb_terminal_gets_no_progress(worker: FakeWorker) -> None:
    """TERM=dumb can't take a line back, so there is none."""
    worker.set(paused=True)
    args = ("wait", "--for", "admitting", "--target", worker.target, "--timeout", "1")
    with Terminal(*args, env={"TERM": "dumb"}) as terminal:
        assert terminal.end() == 3
    assert "waiting for" not in terminal.shown


@pytest.mark.parametrize("targets", [1, 2])
def test_interrupt(targets: int, nobody: str, worker: FakeWorker) -> None:
    """Ctrl-C ends a wait within three seconds, with 130, one line and no traceback (B15)."""
    worker.hang()
    flags = [part for target in (worker.target, nobody)[:targets] for part in ("--target", target)]
    process: subprocess.Popen[bytes] = start("wait", "--for", "answering", *flags)
    worker.wait_for_call("IsPaused", timeout_s=15.0)
    began = time.monotonic()
    os.kill(process.pid, signal.SIGINT)
    got = ended(process)
    assert (got.code, got.out, got.err) == (130, "", "vllm-cp: interrupted\n")
    assert time.monotonic() - began < 3


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), "Missing option '--for'"),
        (("--for", "lunch"), "'lunch' is not one of"),
        (("--for", "gone", "--timeout", "0"), "--timeout: '0' is no number of seconds"),
        (("--for", "gone", "--timeout", "2m"), "--timeout: '2m' is no number of seconds"),
    ],
)
def test_usage(args: tuple[str, ...], said: str, cli: Cli) -> None:
    """A goal there is not, or a time that is none, is a usage error."""
    got = cli("wait", *args)
    assert (got.code, got.out) == (2, "")
    assert said in got.err
