"""The command line against the genuine server: every verb that changes something, at the oldest and newest version."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.real.stack import EngineFacts, Stack, StackFactory
from vllm_cp.cli import main

OLDEST, NEWEST = "0.27.0", "0.33.0"
#: The path stands for a directory that each test makes.
LOAD = ("lora", "load", "sql", "ADAPTER")
FACTS = EngineFacts(max_loras=4, enable_sleep_mode=True)
#: In an order in which each finds what it needs: verb, the word of its result, and the version that brought it.
CHANGES: list[tuple[tuple[str, ...], str, str]] = [
    (("abort", "cmpl-1", "cmpl-2"), "sent", "0.27"),
    (("pause", "--mode", "keep", "--keep-cache"), "paused", "0.28"),
    (("resume",), "resumed", "0.28"),
    (("pause", "--mode", "abort", "--clear-cache"), "paused", "0.28"),
    (("resume",), "resumed", "0.28"),
    (("pause", "--mode", "wait", "--keep-cache"), "paused", "0.28"),
    (("resume",), "resumed", "0.28"),
    (("sleep", "--level", "1", "--mode", "abort"), "asleep", "0.28"),
    (("wake",), "awake", "0.28"),
    (("sleep", "--level", "2", "--mode", "keep"), "asleep", "0.28"),
    (("wake", "weights", "kv_cache"), "awake", "0.28"),
    (LOAD, "loaded", "0.29"),
    (("lora", "unload", "sql"), "unloaded", "0.29"),
    (("weights", "version", "--set", "step-1200"), "set", "0.28"),
    (("shutdown",), "acknowledged", "0.32"),
]
Cli = Callable[..., tuple[int, list[dict[str, Any]], str]]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Runs a command line in this process: its code, the records, and what it said."""
    monkeypatch.setenv("XDG_CONFIG_HOME", "/nonexistent")

    def run(*args: str) -> tuple[int, list[dict[str, Any]], str]:
        capsys.readouterr()
        code = main([*args, "-o", "json"])
        out, err = capsys.readouterr()
        return int(code), json.loads(out or "[]"), err

    return run


@pytest.fixture
def adapter(tmp_path: Path) -> str:
    """An adapter's directory on this file system, which is the worker's too."""
    path = tmp_path / "sql"
    path.mkdir()
    (path / "adapter_config.json").write_text('{"r": 8, "peft_type": "LORA"}')
    return str(path)


def _on_disk(verb: tuple[str, ...], adapter: str) -> tuple[str, ...]:
    return tuple(adapter if word == "ADAPTER" else word for word in verb)


def _ready(cli: Cli, target: str) -> tuple[int, str | None]:
    code, rows, _ = cli("ready", "--target", target)
    return code, rows[0]["reason"]


def test_every_change_on_the_newest(stack: StackFactory, adapter: str, cli: Cli) -> None:
    """On 0.33 each verb that changes something works on the genuine server, and does what it says."""
    allowed = {"VLLM_RUNTIME_LORA_ALLOWED_PATH_PREFIXES": str(Path(adapter).parent)}
    s = stack(NEWEST, mode="managed", facts=FACTS, env=allowed)
    flags = ("--target", s.target)
    for verb, word, _ in CHANGES:
        code, rows, said = cli(*_on_disk(verb, adapter), "--yes", *flags)
        assert (code, said) == (0, ""), verb
        assert rows[0]["result"] == word
        if verb[0] in ("pause", "sleep"):
            assert _ready(cli, s.target) == (8, "suspended")
        elif verb[0] in ("resume", "wake"):
            assert _ready(cli, s.target) == (0, None)
        elif verb == LOAD:
            assert cli("lora", "list", *flags)[1][0]["adapters"] == [
                {"name": "sql", "lora_id": rows[0]["lora_id"], "source_path": adapter}
            ]
        elif verb[0] == "weights":
            assert cli("weights", "version", *flags)[1][0]["weight_version"] == "step-1200"
    assert cli("wait", "--for", "gone", "--timeout", "20", *flags)[0] == 0


def test_every_change_on_the_oldest(stack: StackFactory, cli: Cli) -> None:
    """On 0.27 all but abort is not supported, exit 7, in one line with both versions; the reads of later days too."""
    s = stack(OLDEST, facts=FACTS)
    for verb, _, since in CHANGES:
        code, rows, said = cli(*verb, "--yes", "--target", s.target)
        if since == "0.27":
            assert (code, rows[0]["result"], said) == (0, "sent", "")
            continue
        assert (code, rows[0]["error"]["kind"]) == (7, "NotSupported"), verb
        assert f"came with vLLM {since}, and this worker runs {OLDEST}: it takes an upgrade\n" in said
        assert said.count("\n") == 1
    for verb in (("lora", "list"), ("weights", "version")):
        assert cli(*verb, "--target", s.target)[0] == 7
    assert _ready(cli, s.target) == (0, None)


def test_what_is_not_configured_is_refused(stack: StackFactory, cli: Cli) -> None:
    """A server without sleep mode, LoRA and a managed engine refuses those verbs, exit 5, in its own words."""
    s = stack(NEWEST)
    for verb in (
        ("sleep", "--level", "1", "--mode", "abort", "--yes"),
        ("wake",),
        LOAD,
        ("lora", "unload", "sql", "--yes"),
        ("shutdown", "--yes"),
    ):
        code, rows, _ = cli(*verb, "--target", s.target)
        assert (code, rows[0]["error"]["code"]) == (5, "FAILED_PRECONDITION"), verb
    assert _ready(cli, s.target) == (0, None)


def test_two_versions_at_once(stack: StackFactory, cli: Cli) -> None:
    """A fleet in the middle of an upgrade: the new worker is paused, the old one can't be, exit 6."""
    old, new = stack(OLDEST), stack(NEWEST)
    both = ("--target", old.target, "--target", new.target, "--all")
    code, rows, _ = cli("pause", "--mode", "keep", "--keep-cache", "--yes", *both)
    assert code == 6
    assert rows[0]["error"]["kind"] == "NotSupported"
    assert rows[1]["result"] == "paused"


def test_ladder(stack: StackFactory, cli: Cli) -> None:
    """ready, wait and probe on the genuine server: warm by one token, silent when frozen, not serving when dead."""
    s = stack(NEWEST, engines=2)
    flags = ("--target", s.target)
    assert cli("wait", "--for", "warm", "--timeout", "20", *flags)[0] == 0
    assert _word(cli, s) == "admitting"
    s.hang(1)
    assert cli("ready", "--timeout", "1", *flags)[1][0]["reason"] == "engine_silent"
    assert _word(cli, s) == "engine_silent"
    assert _word(cli, s, "serving") == "serving"
    s.unhang(1)
    assert cli("wait", "--for", "admitting", "--timeout", "20", *flags)[0] == 0
    s.die(0)
    code, rows, _ = cli("ready", *flags)
    assert (code, rows[0]["reason"]) == (8, "not_serving")
    assert _word(cli, s, "serving") == "not_serving"


def _word(cli: Cli, s: Stack, rung: str = "admitting") -> str:
    word: str = cli("probe", "--rung", rung, "--timeout", "1", "--target", s.target)[1][0]["word"]
    return word


def test_a_start_is_measured(stack: StackFactory, cli: Cli) -> None:
    """startup reads the clocks of a genuine start, from a closed port to the first token."""
    s = stack(NEWEST)
    s.terminate()
    s.wait_exit()
    timer = threading.Timer(0.5, s.restart)
    timer.start()
    code, rows, said = cli("startup", "--timeout", "30", "--target", s.target)
    timer.join()
    assert (code, said) == (0, "")
    seconds = rows[0]["seconds"]
    assert 0.3 < seconds["to_socket"] <= seconds["to_serving"] <= seconds["to_warm"]


def test_watch_tells_a_death_at_once(stack: StackFactory) -> None:
    """watch writes the death of an engine into a pipe within a second, and Ctrl-C ends it with 130."""
    s = stack(NEWEST)
    command = [sys.executable, "-m", "vllm_cp.cli", "watch", "-o", "jsonl", "--kind", "ready", "--target", s.target]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["now"] == "ready"
        moment = s.die()
        record = json.loads(process.stdout.readline())
        assert record["now"] in ("not_serving", "engine_error")
        told = _unix(record["at"])
        assert told - moment.wall < 1.0
        process.send_signal(signal.SIGINT)
        assert process.wait(3) == 130


def _unix(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
