"""Verbs that change workers: what is sent, that it is sent once, and what is said where it can't be done."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cli.conftest import Cli
from tests.cli.process import run
from vllm_cp.testing import FakeWorker

LOAD = ("lora", "load", "sql", "/adapters/sql")
#: Verb -> its RPC, what the request holds, the word of the result, and the version that brought it.
CHANGES: dict[tuple[str, ...], tuple[str, dict[str, object], str, str]] = {
    ("abort", "a", "b"): ("Abort", {"request_ids": ("a", "b")}, "sent", "0.27"),
    ("pause", "--mode", "abort", "--clear-cache"): (
        "PauseGeneration",
        {"mode": 1, "clear_cache": True},
        "paused",
        "0.28",
    ),
    ("pause", "--mode", "wait", "--keep-cache"): (
        "PauseGeneration",
        {"mode": 2, "clear_cache": False},
        "paused",
        "0.28",
    ),
    ("pause", "--mode", "keep", "--keep-cache"): (
        "PauseGeneration",
        {"mode": 3, "clear_cache": False},
        "paused",
        "0.28",
    ),
    ("resume",): ("ResumeGeneration", {}, "resumed", "0.28"),
    ("sleep", "--level", "2", "--mode", "abort"): ("Sleep", {"level": 2, "mode": 1}, "asleep", "0.28"),
    ("wake", "weights", "kv_cache"): ("WakeUp", {"tags": ("weights", "kv_cache")}, "awake", "0.28"),
    ("wake",): ("WakeUp", {}, "awake", "0.28"),
    LOAD: ("LoadLora", {"lora_name": "sql", "source_path": "/adapters/sql"}, "loaded", "0.29"),
    ("lora", "unload", "sql"): ("UnloadLora", {"lora_name": "sql"}, "unloaded", "0.29"),
    ("weights", "version", "--set", "v2"): ("UpdateWeightVersion", {"weight_version": "v2"}, "set", "0.28"),
    ("shutdown",): ("Shutdown", {}, "acknowledged", "0.32"),
}
ASKING = [verb for verb in CHANGES if verb[0] in ("pause", "sleep", "shutdown") or "unload" in verb]
each_change = pytest.mark.parametrize("verb", CHANGES, ids=" ".join)


@pytest.fixture
def able() -> Iterator[FakeWorker]:
    """A worker that can do all of it."""
    with FakeWorker() as worker:
        worker.set(managed=True, max_loras=4, sleep_mode_enabled=True)
        yield worker


@pytest.fixture
def old() -> Iterator[FakeWorker]:
    """A worker of the first version that had a control plane."""
    with FakeWorker(version="0.27.0") as worker:
        yield worker


def _asked(worker: FakeWorker, rpc: str) -> list[Any]:
    return [call for call in worker.calls if call.method == f"Control.{rpc}"]


@each_change
def test_change_is_sent_once_and_reported(verb: tuple[str, ...], able: FakeWorker, cli: Cli) -> None:
    """With --yes each verb makes its one call, with what was asked for, and reports how it ended."""
    rpc, request, word, _ = CHANGES[verb]
    if "unload" in verb:
        assert cli(*LOAD, "--target", able.target).code == 0
    ended = cli(*verb, "--yes", "--target", able.target, "-o", "json")
    assert (ended.code, ended.err) == (0, "")
    (row,) = json.loads(ended.out)
    assert (row["target"], row["result"]) == (able.target, word)
    (call,) = _asked(able, rpc)
    assert call.request == request
    assert call.deadline_s is not None


@each_change
def test_not_supported_is_said_well(verb: tuple[str, ...], old: FakeWorker, cli: Cli) -> None:
    """On vLLM 0.27 whatever came later exits with 7, in one line with both versions; abort was there."""
    rpc, _, _, since = CHANGES[verb]
    ended = cli(*verb, "--yes", "--target", old.target)
    if since == "0.27":
        assert ended.code == 0
        return
    assert (ended.code, ended.out) == (7, "")
    assert ended.err == (
        f"vllm-cp: {old.target}: Control.{rpc}: not supported by this worker (UNIMPLEMENTED); Control.{rpc} came with"
        f" vLLM {since}, and this worker runs 0.27.0: it takes an upgrade\n"
    )
    assert len(_asked(old, rpc)) == 1


def test_service_that_is_switched_off(able: FakeWorker, cli: Cli) -> None:
    """A worker that is new enough and has no such call has it hidden, and the line says that."""
    able.fail("ResumeGeneration", "UNIMPLEMENTED")
    ended = cli("resume", "--target", able.target)
    assert ended.code == 7
    assert "this worker runs vLLM 0.33.0, which has Control.ResumeGeneration: the service is switched off" in ended.err


@each_change
def test_dry_run_sends_nothing(verb: tuple[str, ...], able: FakeWorker, nobody: str, cli: Cli) -> None:
    """--dry-run names what it would do and to whom, needs neither --all nor --yes, and asks nobody."""
    ended = cli(*verb, "--dry-run", "--target", able.target, "--target", nobody, "-o", "json")
    assert ended.code == 0
    assert [(row["target"], row["result"]) for row in json.loads(ended.out)] == [
        (able.target, "dry run"),
        (nobody, "dry run"),
    ]
    assert ended.err.startswith("vllm-cp: would ")
    assert f"on 2 workers ({able.target}, {nobody}); nothing was sent\n" in ended.err
    assert ended.err.count("\n") == 1
    assert able.calls == []


@each_change
def test_several_workers_take_all(verb: tuple[str, ...], able: FakeWorker, nobody: str, cli: Cli) -> None:
    """Without --all a change of several workers is a usage error that names them, --yes or not."""
    ended = cli(*verb, "--yes", "--target", able.target, "--target", nobody)
    assert (ended.code, ended.out) == (2, "")
    assert f"would change 2 workers ({able.target}, {nobody}): give --all" in ended.err
    assert ended.err.count("\n") == 1
    assert able.calls == []


@pytest.mark.parametrize("verb", CHANGES, ids=" ".join)
def test_nobody_to_ask_takes_yes(verb: tuple[str, ...], able: FakeWorker, cli: Cli) -> None:
    """Where no terminal is, a verb that takes something away needs --yes, and the others just go on."""
    if "unload" in verb:
        assert cli(*LOAD, "--target", able.target).code == 0
    calls = len(able.calls)
    ended = cli(*verb, "--target", able.target)
    if verb not in ASKING:
        assert ended.code == 0
        return
    assert (ended.code, ended.out) == (2, "")
    assert f"on {able.target}, and nobody can be asked here: give --yes to do it, or --dry-run to see it" in ended.err
    assert len(able.calls) == calls


def test_abort_of_several_asks(able: FakeWorker, nobody: str, cli: Cli) -> None:
    """Ids on one worker are never asked about; the same ids on several are."""
    assert cli("abort", "a", "--target", able.target).code == 0
    ended = cli("abort", "a", "--target", able.target, "--target", nobody, "--all")
    assert ended.code == 2
    assert "end 1 request by id on 2 workers" in ended.err


@each_change
def test_change_is_never_repeated(verb: tuple[str, ...], able: FakeWorker, cli: Cli) -> None:
    """A change that came to nothing is not tried again, not even when the worker says it is away for a moment."""
    rpc = CHANGES[verb][0]
    able.fail(rpc, "UNAVAILABLE", "try later")
    ended = cli(*verb, "--yes", "--target", able.target)
    assert (ended.code, ended.out) == (3, "")
    assert len(_asked(able, rpc)) == 1


@pytest.mark.parametrize(
    ("verb", "said"),
    [
        (("pause", "--mode", "wait", "--keep-cache"), "it is probably paused all the same"),
        (("resume",), "it waits behind a pause that is under way"),
        (("sleep", "--level", "1", "--mode", "wait"), "it may still fall asleep"),
        (("wake",), "it may still wake up"),
        (LOAD, "it may still be loaded"),
        (("weights", "version", "--set", "v"), "it may still take effect"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_change_that_is_not_answered(verb: tuple[str, ...], said: str, able: FakeWorker, cli: Cli) -> None:
    """When the time is up nobody knows whether it took effect, and the line says so instead of guessing."""
    able.hang()
    ended = cli(*verb, "--yes", "--timeout", "0.3", "--target", able.target)
    assert (ended.code, ended.out) == (3, "")
    assert said in ended.err
    assert "no answer in time" in ended.err


@pytest.mark.parametrize(
    ("verb", "code", "said"),
    [
        (("sleep", "--level", "1", "--mode", "abort"), 5, "start vLLM with --enable-sleep-mode"),
        (("wake",), 5, "start vLLM with --enable-sleep-mode"),
        (LOAD, 5, "not started with LoRA enabled"),
        (("lora", "list"), 5, "not started with LoRA enabled"),
        (("shutdown",), 5, "does not manage the engine process"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_feature_that_is_not_configured(
    verb: tuple[str, ...], code: int, said: str, worker: FakeWorker, cli: Cli
) -> None:
    """What vLLM was not started with is refused, exit 5, in the worker's own words."""
    flags = () if verb == ("lora", "list") else ("--yes",)
    ended = cli(*verb, *flags, "--target", worker.target)
    assert (ended.code, ended.out) == (code, "")
    assert said in ended.err
    assert ended.err.count("\n") == 1


def test_results_are_per_worker(able: FakeWorker, old: FakeWorker, nobody: str, cli: Cli) -> None:
    """One worker that can't and one that is away do not keep the third from being changed: 6, and three results."""
    targets = [part for target in (old.target, nobody, able.target) for part in ("--target", target)]
    ended = cli("pause", "--mode", "keep", "--keep-cache", *targets, "--all", "--yes", "-o", "json")
    assert ended.code == 6
    rows = json.loads(ended.out)
    assert [row["error"]["kind"] if "error" in row else row["result"] for row in rows] == [
        "NotSupported",
        "WorkerUnreachable",
        "paused",
    ]
    assert cli("ready", "--target", able.target).code == 8


def test_slow_changes_have_a_minute(able: FakeWorker, cli: Cli) -> None:
    """What moves weights or waits for requests is given 60 seconds unless somebody chose; the rest 5."""
    deadlines = {}
    for verb, (rpc, *_) in CHANGES.items():
        cli(*verb, "--yes", "--target", able.target)
        if verb == ("shutdown",):
            assert cli("wait", "--for", "gone", "--target", able.target).code == 0
        deadlines[rpc] = _asked(able, rpc)[0].deadline_s
    quick = {rpc for rpc, seconds in deadlines.items() if seconds < 6}
    assert quick == {"Abort", "UpdateWeightVersion", "Shutdown"}
    assert all(seconds > 50 for rpc, seconds in deadlines.items() if rpc not in quick)
    able.restart()
    cli("resume", "--timeout", "7", "--target", able.target)
    assert 6 < _asked(able, "ResumeGeneration")[-1].deadline_s < 8


def test_effects(able: FakeWorker, cli: Cli) -> None:
    """What the verbs say they did is what the worker then says of itself."""
    flags = ("--target", able.target)
    assert cli(*LOAD, *flags).out.splitlines()[1].split()[1:] == ["loaded", "sql", "1", "/adapters/sql"]
    assert cli("lora", "list", *flags).out.splitlines()[1].split()[1:] == ["sql", "1", "/adapters/sql"]
    assert cli(*LOAD, *flags).code == 5
    assert cli("lora", "unload", "sql", "--yes", *flags).code == 0
    assert json.loads(cli("lora", "list", *flags, "-o", "json").out)[0]["adapters"] == []
    assert cli("weights", "version", "--set", "v2", *flags).code == 0
    assert cli("weights", "version", *flags, "-o", "jsonl").out == (
        json.dumps({"target": able.target, "weight_version": "v2"}) + "\n"
    )
    assert cli("sleep", "--level", "1", "--mode", "abort", "--yes", *flags).code == 0
    assert cli("ready", *flags).code == 8
    assert cli("wake", *flags).code == 0
    assert cli("ready", *flags).code == 0


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("pause", "--keep-cache"), "Missing option '--mode'"),
        (("pause", "--mode", "keep", "--yes"), "say what becomes of the prefix cache: --clear-cache or --keep-cache"),
        (("pause", "--mode", "gently", "--keep-cache"), "'gently' is not one of"),
        (("sleep", "--mode", "keep"), "Missing option '--level'"),
        (("sleep", "--level", "1"), "Missing option '--mode'"),
        (("sleep", "--level", "3", "--mode", "keep"), "'3' is not one of"),
        (("wake", ""), "a tag is empty"),
        (("lora", "load", "", "/x"), "the name of the adapter is empty"),
        (("lora", "load", "x", ""), "the path of the adapter is empty"),
        (("lora", "unload"), "Missing argument 'NAME'"),
        (("weights", "version", "--set", ""), "--set: the value is empty"),
        (("weights", "version", "--dry-run"), "without --set nothing is changed"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_usage(args: tuple[str, ...], said: str, cli: Cli) -> None:
    """Choices that nobody made are asked for, wrong ones are named, and nothing is sent."""
    ended = cli(*args)
    assert (ended.code, ended.out) == (2, "")
    assert said in ended.err
    assert ended.err.count("\n") == 1


def test_names_reach_the_worker_unchanged(able: FakeWorker) -> None:
    """Adapter names with CJK, emoji and quotes arrive as they are, and talk of them is one line in any locale."""
    name = "漢字 😀'\"\n"
    bare = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    got = run("lora", "load", name.encode(), b"/x", "--target", able.target, env=bare)
    assert (got.code, got.err) == (0, "")
    assert _asked(able, "LoadLora")[0].request["lora_name"] == name
    dry = run("lora", "unload", name.encode(), "--dry-run", "--target", able.target, env=bare)
    assert dry.code == 0
    assert dry.err.count("\n") == 1
