"""Every verb in every format, character by character."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Cli
from tests.cli.facts import known_fleet
from vllm_cp.cli import _fanout, _output

NAMES = ("127.0.0.1:11111", "127.0.0.1:22222", "127.0.0.1:33333")
GOLDEN = Path(__file__).parent / "golden"
VERBS = {
    "health": ("health",),
    "health-service": ("health", "vllm.Inference"),
    "info": ("info",),
    "model": ("model",),
    "kv-sources": ("kv", "sources"),
    "abort": ("abort", "cmpl-1", "cmpl-2"),
}


@pytest.fixture(scope="module")
def fleet() -> Iterator[list[str]]:
    """Targets of the known fleet."""
    with known_fleet() as workers:
        yield [worker.target for worker in workers]


def _held(name: str, text: str, targets: list[str]) -> None:
    for name_there, target in zip(NAMES, targets, strict=True):
        assert len(target) == len(name_there)
        text = text.replace(target, name_there)
    path = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, "utf-8")
    assert text == path.read_text("utf-8"), f"UPDATE_GOLDEN=1 writes {path.name} anew"


def _flags(targets: list[str]) -> list[str]:
    return [part for target in targets for part in ("--target", target)]


@pytest.mark.parametrize("output", ["table", "wide", "json", "yaml", "name"])
@pytest.mark.parametrize("verb", VERBS)
def test_output_is_as_written_down(verb: str, output: str, fleet: list[str], cli: Cli) -> None:
    """In a pipe, two workers that answer and one that denies give exactly this, and exit 6."""
    ended = cli(*VERBS[verb], *_flags(fleet), "-o", output)
    _held(f"{verb}.{output}", ended.out, fleet)
    assert ended.code == 6


def test_talk_is_as_written_down(fleet: list[str], cli: Cli) -> None:
    """What each verb says on standard error, in one file."""
    said = [f"# {verb}\n{cli(*VERBS[verb], *_flags(fleet)).err}" for verb in VERBS]
    _held("talk.txt", "".join(said), fleet)


@pytest.mark.parametrize("width", [80, 40])
@pytest.mark.parametrize("verb", VERBS)
def test_table_on_a_terminal(
    verb: str, width: int, fleet: list[str], cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal no line is wider than that, no number is cut, and the last columns go first."""
    ask_all = _fanout.ask_all

    def renamed(*args: Any) -> list[_fanout.Reply[Any]]:
        # A cut target shows a part of its port, which is another one each time.
        return [reply._replace(target=NAMES[fleet.index(reply.target)]) for reply in ask_all(*args)]

    monkeypatch.setattr(_fanout, "ask_all", renamed)
    monkeypatch.setattr(_output, "terminal_width", lambda: width)
    ended = cli(*VERBS[verb], *_flags(fleet))
    _held(f"{verb}.{width}", ended.out, fleet)
    assert max(map(len, ended.out.splitlines())) <= width


def test_help_is_as_written_down(cli: Cli) -> None:
    """The help of the whole, which names every noun, variable and exit code."""
    ended = cli("--help")
    assert ended.code == 0
    if os.environ.get("UPDATE_GOLDEN"):
        (GOLDEN / "help.txt").write_text(ended.out, "utf-8")
    # click's versions break lines differently.
    assert re.sub(r"\s+", " ", ended.out) == re.sub(r"\s+", " ", (GOLDEN / "help.txt").read_text("utf-8"))
