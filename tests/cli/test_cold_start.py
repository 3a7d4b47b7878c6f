"""Cold start: help loads no gRPC, verbs load no more than they need, and every verb's help has examples."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from tests.certs import Certs
from tests.cli.conftest import Cli
from tests.cli.process import environment
from vllm_cp import Connection, ControlClient
from vllm_cp.cli import _app, _change, top
from vllm_cp.testing import FakeWorker

_PROBE = """
import sys
from vllm_cp.cli import main
code = main(sys.argv[1:])
print(" ".join(sorted(sys.modules)), file=sys.stderr)
sys.exit(code)
"""


def _modules(*args: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", _PROBE, *args],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    return set(done.stderr.splitlines()[-1].split())


@pytest.mark.parametrize(
    "args",
    [
        ("--help",),
        ("--version",),
        ("health", "--help"),
        ("kv", "sources", "--help"),
        ("watch", "--help"),
        ("pause", "--help"),
        ("completion", "bash"),
        ("context", "list"),
        ("health", "--target", "h:"),
        ("pause", "--mode", "keep", "--keep-cache", "--target", "h:"),
    ],
)
def test_help_is_light(args: tuple[str, ...]) -> None:
    """Help, version and usage errors load neither gRPC nor protobuf nor rich."""
    loaded = _modules(*args)
    assert "click" in loaded
    assert not loaded & {"grpc", "google.protobuf", "rich", "vllm_cp.client"}


def test_root_help_loads_no_noun() -> None:
    """The help of the whole comes from the table of nouns."""
    assert not _modules("--help") & {f"vllm_cp.cli.{noun}" for noun in _app.NOUNS}


def test_health_is_lean(worker: FakeWorker) -> None:
    """health loads neither protobuf nor rich nor the asynchronous client nor another noun nor a thread pool."""
    loaded = _modules("health", "--target", worker.target)
    assert "grpc" in loaded
    assert not loaded & {"rich", "vllm_cp.aio", "vllm_cp.cli.info", "vllm_cp.cli.kv", "json.tool", "yaml"}
    assert not loaded & {"google.protobuf", "vllm_cp.models.server", "vllm_cp.discovery", "concurrent.futures.thread"}


def test_probe_is_leaner_still(worker: FakeWorker) -> None:
    """probe loads gRPC, and neither protobuf nor the client nor the models nor a thread pool."""
    loaded = _modules("probe", "--rung", "admitting", "--target", worker.target)
    assert "grpc" in loaded
    assert not loaded & {"google.protobuf", "vllm_cp.client", "vllm_cp._wire", "vllm_cp.episodes", "json"}
    assert not [name for name in loaded if name.startswith("vllm_cp.models")]


#: Verbs that ask no worker, and so take no connection flags.
LOCAL = ("completion", "context list", "context show", "context remove", "context use", "context")


def _verbs(command: click.Command, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if not isinstance(command, click.Group):
        return [path]
    context = click.Context(command)
    found = []
    for name in command.list_commands(context):
        inner = command.get_command(context, name)
        assert inner is not None
        found += _verbs(inner, (*path, name))
    return [path, *found] if path else found


@pytest.mark.parametrize("verb", _verbs(_app._root()), ids=" ".join)
def test_every_verb_has_examples(verb: tuple[str, ...], cli: Cli) -> None:
    """Each verb's help shows examples, the connection flags and -o, in ASCII and at most 80 columns wide."""
    ended = cli(*verb, "--help")
    assert (ended.code, ended.err) == (0, "")
    assert cli(*verb, "-h").out == ended.out
    assert f"vllm-cp {' '.join(verb)}" in ended.out.partition("Examples:")[2].partition("Options:")[0]
    assert ("--target HOST:PORT" in ended.out) is (" ".join(verb) not in LOCAL)
    assert ("-o, --output" in ended.out) is (verb != ("completion",))
    assert ended.out.isascii()
    assert max(map(len, ended.out.splitlines())) <= 80


@pytest.mark.parametrize("verb", [(), *_verbs(_app._root())], ids=" ".join)
def test_examples_work(verb: tuple[str, ...], desk: None, asked: list[Connection], cli: Cli) -> None:
    """Each example of each help is a command line that is taken as it stands, at a terminal where it asks."""
    making = verb in (("context",), ("context", "add"))
    for name in ("staging",) if making else ("staging", "prod"):
        assert cli("context", "add", name, "--target", "llama-0", "--use").code == 0
    section = cli(*verb, "--help").out.partition("Examples:\n")[2].partition("\n\n")[0]
    examples = [line for line in section.splitlines() if line.strip()]
    assert len(examples) >= 2
    for line in examples:
        for part in line.split(" && "):
            _example_works(part, verb, asked, cli)


@pytest.fixture
def desk(certs: Certs, worker: FakeWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory with the files that the examples name, and somebody who says yes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_change, "_allowed", lambda *_: True)
    monkeypatch.setattr(top, "_on_terminal", lambda: True)
    Path("ca.pem").write_bytes(certs.ca.read_bytes())
    Path("token").write_text("s3cret\n")
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    Path("tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    from vllm_cp.profile import capture, save

    with ControlClient(worker.target) as client:
        save(capture(client), Path("certified.lock"))


def _example_works(line: str, verb: tuple[str, ...], asked: list[Connection], cli: Cli) -> None:
    words = shlex.split(re.split(r" [|>&]|>>", line)[0], comments=True)
    if "vllm-cp" not in words:
        return
    asked.clear()
    # One that says what it would do says so on standard error.
    ended = cli(*words[words.index("vllm-cp") + 1 :])
    assert ended.code == 0, line
    assert ended.err == "" or "--dry-run" in words or "remove" in words, line
    assert asked or "--dry-run" in words or " ".join(verb) in LOCAL or verb == ("context", "add"), line


def test_nouns_are_described_once(cli: Cli) -> None:
    """The root's table of nouns and the nouns themselves exist for each other."""
    listed = cli("--help").out
    for noun, about in _app.NOUNS.items():
        assert f"{noun} " in listed
        assert about in listed
        assert cli(noun, "--help").code == 0


def test_version(cli: Cli) -> None:
    """--version prints name and version and nothing else."""
    from vllm_cp import __version__

    assert cli("--version") == (0, f"vllm-cp {__version__}\n", "")
