"""Every verb in every format, character by character."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import pytest

from tests.cli.conftest import Cli
from tests.cli.facts import RICH, known_fleet
from tests.cli.held import GOLDEN, held
from tests.cli.process import Ended
from vllm_cp.cli import _ladder, _output, _times, _verb, startup, wait
from vllm_cp.cli._table import View
from vllm_cp.testing import FakeWorker

NAMES = ("127.0.0.1:11111", "127.0.0.1:22222", "127.0.0.1:33333")
FORMATS = ("table", "wide", "json", "jsonl", "yaml", "name")
SURE = ("--all", "--yes")
LOAD = ("lora", "load", "sql", "/adapters/sql")
VERBS: dict[str, tuple[str, ...]] = {
    "health": ("health",),
    "health-service": ("health", "vllm.Inference"),
    "info": ("info",),
    "model": ("model",),
    "kv-sources": ("kv", "sources"),
    "abort": ("abort", "cmpl-1", "cmpl-2", *SURE),
    "abort-dry": ("abort", "cmpl-1", "cmpl-2", "--dry-run"),
    "pause": ("pause", "--mode", "wait", "--keep-cache", *SURE),
    "pause-dry": ("pause", "--mode", "abort", "--clear-cache", "--dry-run"),
    "resume": ("resume", "--all"),
    "sleep": ("sleep", "--level", "1", "--mode", "abort", *SURE),
    "wake": ("wake", "weights", "kv_cache", "--all"),
    "lora-list": ("lora", "list"),
    "lora-load": (*LOAD, "--all"),
    "lora-unload": ("lora", "unload", "sql", *SURE),
    "weights-version": ("weights", "version"),
    "weights-set": ("weights", "version", "--set", "step-1200", "--all"),
    "shutdown": ("shutdown", *SURE),
    "ready": ("ready",),
    "ready-paused": ("ready",),
    "wait": ("wait", "--for", "serving", "--timeout", "0.2"),
    "startup": ("startup",),
}
#: What the rich worker goes through before.
BEFORE: dict[str, tuple[str, ...]] = {
    "resume": ("pause", "--mode", "keep", "--keep-cache", "--yes"),
    "wake": ("sleep", "--level", "1", "--mode", "keep", "--yes"),
    "lora-list": LOAD,
    "lora-unload": LOAD,
    "ready-paused": ("pause", "--mode", "keep", "--keep-cache", "--yes"),
}
#: Where the three do not end in three ways.
CODES = {"abort-dry": 0, "pause-dry": 0, "startup": 8}


@pytest.fixture(scope="module")
def fleet() -> Iterator[list[FakeWorker]]:
    """The known fleet."""
    with known_fleet() as workers:
        yield workers


@pytest.fixture(autouse=True)
def _still_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured comes out the same each time."""

    def still(unix: float | None) -> str | None:
        return None if unix is None else "2026-01-02T03:04:05.678Z"

    monkeypatch.setattr(_ladder, "iso", still)
    monkeypatch.setattr(startup, "iso", still)
    monkeypatch.setattr(_times, "local", lambda _: "03:04:05 UTC")
    monkeypatch.setattr(wait, "time", SimpleNamespace(monotonic=lambda: 7.0))  # the ladder has a clock of its own


def _run(verb: str, fleet: list[FakeWorker], cli: Cli, *flags: str) -> Ended:
    """The verb on the fleet as it was in the beginning."""
    fleet[0].restart(instance_id=RICH.instance_id)
    if verb in BEFORE:
        assert cli(*BEFORE[verb], "--target", fleet[0].target).code == 0
    targets = [part for worker in fleet for part in ("--target", worker.target)]
    code, out, err = cli(*VERBS[verb], *targets, *flags)
    if verb == "shutdown":
        assert cli("wait", "--for", "gone", "--target", fleet[0].target, "--timeout", "10").code == 0
    for name, worker in zip(NAMES, fleet, strict=True):
        assert len(worker.target) == len(name)
        out, err = out.replace(worker.target, name), err.replace(worker.target, name)
    return Ended(code, out, err)


@pytest.mark.parametrize("verb", VERBS)
def test_output_is_as_written_down(verb: str, fleet: list[FakeWorker], cli: Cli) -> None:
    """In a pipe, a rich worker, an old one and one that denies give exactly this in each format, and this talk."""
    for output in FORMATS:
        ended = _run(verb, fleet, cli, "-o", output)
        held(f"{verb}.{output}", ended.out)
        assert ended.code == CODES.get(verb, 6)
    held(f"{verb}.talk", ended.err)


@pytest.mark.parametrize("width", [80, 40])
@pytest.mark.parametrize("verb", VERBS)
def test_table_on_a_terminal(
    verb: str, width: int, fleet: list[FakeWorker], cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal no line is wider than that, no number is cut, and the last columns go first."""
    names = {worker.target: name for worker, name in zip(fleet, NAMES, strict=True)}

    def renamed(reports: Sequence[_output.Report], view: View, shape: _output.Shape) -> str:
        # A cut target shows a part of its port, which is another one each time.
        return _output.render([report._replace(target=names[report.target]) for report in reports], view, shape)

    monkeypatch.setattr(_verb, "render", renamed)
    monkeypatch.setattr(_output, "terminal_width", lambda: width)
    ended = _run(verb, fleet, cli)
    held(f"{verb}.{width}", ended.out)
    assert max(map(len, ended.out.splitlines())) <= width


def test_help_is_as_written_down(cli: Cli) -> None:
    """The help of the whole, which names every noun, variable and exit code."""
    ended = cli("--help")
    assert ended.code == 0
    if os.environ.get("UPDATE_GOLDEN"):
        (GOLDEN / "help.txt").write_text(ended.out, "utf-8")
    # click's versions break lines differently.
    assert re.sub(r"\s+", " ", ended.out) == re.sub(r"\s+", " ", (GOLDEN / "help.txt").read_text("utf-8"))
