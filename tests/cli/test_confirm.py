"""Confirmations on a real terminal: what will happen to whom is shown, and only a yes goes on."""

from __future__ import annotations

import pytest

from tests.cli.process import Terminal
from vllm_cp.testing import FakeWorker

PAUSE = ("pause", "--mode", "abort", "--clear-cache")


@pytest.mark.parametrize("answer", ["y\n", "yes\n", " Y \n"])
def test_yes_goes_on(answer: str, worker: FakeWorker) -> None:
    """The question names the deed and the worker; a yes sends it."""
    with Terminal(*PAUSE, "--target", worker.target) as terminal:
        shown = terminal.expect("Go on? [y/N] ")
        assert "this will pause generation (requests in flight end now, as aborted; the prefix cache is dropped)" in (
            shown.replace("\n", "")
        )
        assert f"  {worker.target}\n" in shown
        assert worker.calls == []
        terminal.press(answer)
        assert terminal.end() == 0
    assert [call.method for call in worker.calls] == ["Control.PauseGeneration"]


@pytest.mark.parametrize(
    "answer", ["\n", "n\n", "yess\n", "\x04", "\xff\n"], ids=["enter", "no", "word", "ctrl-d", "ff"]
)
def test_anything_else_sends_nothing(answer: str, worker: FakeWorker) -> None:
    """Enter, no, another word, the end of input or garbage: nothing is sent, and the exit code is 130."""
    with Terminal(*PAUSE, "--target", worker.target) as terminal:
        terminal.expect("Go on? [y/N] ")
        terminal.press(answer)
        assert terminal.end() == 130
        assert terminal.shown.endswith("\nvllm-cp: not confirmed: nothing was sent\n")
    assert worker.calls == []


def test_ctrl_c_at_the_question(worker: FakeWorker) -> None:
    """Ctrl-C at the question ends it with 130 and no traceback."""
    with Terminal("shutdown", "--target", worker.target) as terminal:
        terminal.expect("Go on? [y/N] ")
        terminal.press("\x03")
        assert terminal.end() == 130
        assert "Traceback" not in terminal.shown
    assert worker.calls == []


def test_every_worker_is_named(worker: FakeWorker, nobody: str) -> None:
    """With --all the question lists each worker on a line of its own."""
    with Terminal(*PAUSE, "--all", "--target", worker.target, "--target", nobody) as terminal:
        shown = terminal.expect("Go on? [y/N] ")
        assert "on 2 workers:" in shown.replace("\n", "")
        assert f"  {worker.target}\n  {nobody}\n" in shown
        terminal.press("n\n")
        assert terminal.end() == 130


@pytest.mark.parametrize("flags", [("--yes",), ("--dry-run",)])
def test_no_question_where_none_is_needed(flags: tuple[str, ...], worker: FakeWorker) -> None:
    """--yes and --dry-run do not ask, also at a terminal."""
    with Terminal(*PAUSE, *flags, "--target", worker.target) as terminal:
        assert terminal.end() == 0
        assert "Go on?" not in terminal.shown


@pytest.mark.parametrize("verb", [("abort", "a"), ("resume",), ("weights", "version", "--set", "v")], ids=" ".join)
def test_harmless_verbs_do_not_ask(verb: tuple[str, ...], worker: FakeWorker) -> None:
    """Ids on one worker, and verbs that take nothing away, never ask."""
    with Terminal(*verb, "--target", worker.target) as terminal:
        assert terminal.end() == 0
        assert "Go on?" not in terminal.shown


def test_interrupted_change_says_that_it_may_have_happened(worker: FakeWorker) -> None:
    """Ctrl-C while the worker is at it: 130, and a line that what was sent is not taken back."""
    worker.hang()
    with Terminal(*PAUSE, "--yes", "--target", worker.target) as terminal:
        worker.wait_for_call("PauseGeneration", timeout_s=15.0)
        terminal.press("\x03")
        assert terminal.end() == 130
        assert "what was sent already is not taken back" in terminal.shown
