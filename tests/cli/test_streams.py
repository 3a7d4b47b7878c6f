"""Standard streams and signals (B15, B36): pipes that break, disks that are full, streams that are closed, Ctrl-C."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.cli.process import ended, on_terminal, run, shell, start
from vllm_cp.testing import FakeWorker

FULL = Path("/dev/full")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("args", [("info", "-o", "json"), ("--help",)])
def test_reader_that_leaves(args: tuple[str, ...], unbuffered: str, worker: FakeWorker) -> None:
    """A reader that closes the pipe at once costs neither a traceback nor the exit code."""
    env = {"VLLM_CP_TARGET": worker.target, "PYTHONUNBUFFERED": unbuffered}
    reader, writer = os.pipe()
    os.close(reader)
    got = run(*args, env=env, stdout=writer)
    os.close(writer)
    assert (got.code, got.err) == (0, "")


def test_head(worker: FakeWorker) -> None:
    """vllm-cp | head -1 as people type it."""
    got = shell(
        'run info -o json | head -n 1; run "$@" 2>&1 | head -n 1', "--help", env={"VLLM_CP_TARGET": worker.target}
    )
    assert got == (0, "[\nUsage: vllm-cp [OPTIONS] NOUN [VERB] [ARGS]...\n", "")


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full on this system")
@pytest.mark.parametrize("args", [("health",), ("info", "-o", "json"), ("--help",), ("--version",)])
def test_full_disk(args: tuple[str, ...], worker: FakeWorker) -> None:
    """Data that could not be written is 1 and one line: never a silent success."""
    with FULL.open("wb") as full:
        got = run(*args, env={"VLLM_CP_TARGET": worker.target}, stdout=full)
    assert (got.code, got.err) == (1, "vllm-cp: cannot write to standard output: No space left on device\n")


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&- <&-"])
def test_closed_streams(closed: str, worker: FakeWorker, nobody: str) -> None:
    """A closed stream swallows what would go there; the exit code is the verb's, and no socket gets its number."""
    for target, code in ((worker.target, 0), (nobody, 3)):
        got = shell(f'run "$@" {closed}', "health", env={"VLLM_CP_TARGET": target})
        assert got.code == code
        assert got.err.count("\n") == (1 if code and closed == ">&-" else 0)
        assert got.out.count("SERVING") == (1 if closed == "2>&-" and not code else 0)
    assert len(worker.calls) == 1


def test_standard_error_that_is_full(nobody: str) -> None:
    """Talk that can't be written changes nothing."""
    if not FULL.exists():
        pytest.skip("no /dev/full on this system")
    with FULL.open("wb") as full:
        assert run("health", "--target", nobody, stderr=full).code == 3


@pytest.mark.parametrize("targets", [1, 3])
def test_interrupt_while_waiting(targets: int, silent: str) -> None:
    """Ctrl-C ends a run at once with 130 and one line, whether one worker or several are being waited for."""
    with FakeWorker() as frozen, FakeWorker() as second:
        frozen.freeze()
        second.freeze()
        asked = [frozen.target, second.target, silent][:targets]
        flags = [part for target in asked for part in ("--target", target)]
        process = start("health", "--timeout", "20", *flags)
        frozen.wait_for_call("Check")
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        got = ended(process, timeout_s=10)
    assert (got.code, got.out, got.err) == (130, "", "vllm-cp: interrupted\n")
    assert time.monotonic() - began < 5


def test_terminal_gets_colour_and_fits(worker: FakeWorker) -> None:
    """On a terminal the word is green and lines fit; nothing of that in a pipe."""
    worker.set(instance_id="x" * 200)
    shown = on_terminal("health", "--target", worker.target)
    assert "\x1b[32mSERVING\x1b[0m" in shown.out
    narrow = on_terminal("info", "--target", worker.target, columns=60, env={"NO_COLOR": "1"})
    assert max(map(len, narrow.out.splitlines())) <= 60
    wide = on_terminal("info", "-o", "wide", "--target", worker.target, columns=60, env={"NO_COLOR": "1"})
    assert "x" * 200 in wide.out
    assert "x" * 200 in run("info", "-o", "wide", "--target", worker.target).out


COLOURS = [
    ({}, True, True),
    ({"NO_COLOR": "1"}, True, False),
    ({"TERM": "dumb"}, True, False),
    ({}, False, False),
    ({"FORCE_COLOR": "1"}, False, True),
    ({"FORCE_COLOR": "0"}, False, False),
    ({"FORCE_COLOR": "1", "TERM": "dumb"}, True, True),
    ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, True, False),
    ({"FORCE_COLOR": "1", "NO_COLOR": ""}, False, True),
]


@pytest.mark.parametrize(("env", "terminal", "coloured"), COLOURS)
def test_colour_switches(env: dict[str, str], terminal: bool, coloured: bool, worker: FakeWorker) -> None:
    """NO_COLOR wins over FORCE_COLOR, FORCE_COLOR over pipe and dumb terminal; else colour is for terminals."""
    worker.health("NOT_SERVING")
    got = (on_terminal if terminal else run)("health", "--target", worker.target, env=env)
    assert ("\x1b[31mNOT_SERVING\x1b[0m" in got.out) is coloured
    assert ("\x1b" in got.out) is coloured
    assert got.code == 8
