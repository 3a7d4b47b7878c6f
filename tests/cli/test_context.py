"""Contexts: named fleets in a file that never holds a secret, is never lost, and never sends a token elsewhere."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.certs import Certs
from tests.cli.conftest import Cli
from tests.cli.process import run, start
from vllm_cp import Connection

LOCAL = ("--target", "a", "--target", "b:1")
GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def tls(certs: Certs, tmp_path: Path) -> list[str]:
    """TLS and token flags."""
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    return ["--tls-ca", str(certs.ca), "--token-file", str(token)]


def _file(path: Path) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(path.read_text())
    return made


@pytest.mark.parametrize("output", ["table", "wide", "json", "jsonl", "yaml", "name"])
def test_output_is_as_written_down(output: str, context_file: Path, cli: Cli) -> None:
    """list, in each format, character by character."""
    settings = {
        "local": {"targets": ["localhost"]},
        "prod": {"targets": ["llama-0", "llama-1:9"], "tls": True, "tls_ca": "/pki/ca.pem", "token_file": "/run/token"},
        "mutual": {
            "targets": ["m"],
            "tls_cert": "/c.pem",
            "tls_key": "/k.pem",
            "server_name": "m.internal",
            "timeout": 2,
        },
    }
    context_file.write_text(json.dumps({"version": 1, "current": "prod", "contexts": settings}))
    ended = cli("context", "list", "-o", output)
    path = GOLDEN / f"context-list.{output}"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(ended.out)
    assert (ended.code, ended.out, ended.err) == (0, path.read_text(), "")


def test_add_show_use_remove(context_file: Path, cli: Cli) -> None:
    """A context is added, shown, used and removed; the file is its owner's only and says no more than was given."""
    assert cli("context", "list").out == ""
    assert cli("context", "list", "-o", "json").out == "[]\n"
    assert cli("context", "add", "prod", *LOCAL, "--timeout", "7").code == 0
    assert stat.S_IMODE(context_file.stat().st_mode) == 0o600
    assert _file(context_file) == {
        "version": 1,
        "current": None,
        "contexts": {"prod": {"targets": ["a", "b:1"], "timeout": 7.0}},
    }
    assert cli("context", "show").code == 2
    assert json.loads(cli("context", "show", "prod", "-o", "json").out)[0]["targets"] == ["a", "b:1"]
    assert cli("context", "use", "prod").code == 0
    assert cli("context", "show", "-o", "name").out == "prod\n"
    gone = cli("context", "remove", "prod", "-o", "json")
    assert json.loads(gone.out)[0]["timeout"] == 7.0
    assert gone.err == "vllm-cp: 'prod' was in use: no context is now\n"
    assert _file(context_file) == {"version": 1, "current": None, "contexts": {}}


def test_what_is_there_is_not_overwritten(context_file: Path, cli: Cli) -> None:
    """A name that is taken takes --replace."""
    cli("context", "add", "prod", *LOCAL)
    ended = cli("context", "add", "prod", "--target", "c")
    assert (ended.code, ended.out) == (2, "")
    assert "give --replace" in ended.err
    assert cli("context", "add", "prod", "--target", "c", "--replace", "--use").code == 0
    assert _file(context_file)["contexts"] == {"prod": {"targets": ["c"]}}
    assert _file(context_file)["current"] == "prod"


def test_file_of_its_own_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    """Without VLLM_CP_CONTEXT_FILE it is in XDG_CONFIG_HOME, else in ~/.config, in a directory for its owner only."""
    monkeypatch.delenv("VLLM_CP_CONTEXT_FILE")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    assert cli("context", "add", "x", *LOCAL).code == 0
    assert (tmp_path / "xdg/vllm-cp/contexts.json").is_file()
    assert stat.S_IMODE((tmp_path / "xdg/vllm-cp").stat().st_mode) == 0o700
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative/is/ignored")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cli("context", "list").out == ""
    assert cli("context", "add", "y", *LOCAL).code == 0
    assert (tmp_path / ".config/vllm-cp/contexts.json").is_file()


def test_files_are_kept_by_name_and_secrets_are_not(
    tls: list[str], context_file: Path, asked: list[Connection], monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    """Files given by relative names are kept by absolute ones; a token is in no output and not in our file."""
    monkeypatch.chdir(Path(tls[3]).parent)
    said = cli("context", "add", "prod", *LOCAL, *tls[:3], "token", "-o", "json")
    assert said.code == 0
    assert _file(context_file)["contexts"]["prod"]["token_file"] == tls[3]
    assert "s3cret" not in context_file.read_text() + said.out + said.err
    monkeypatch.chdir("/")
    assert cli("--context", "prod", "health").code == 0
    assert {str(c.token_file) for c in asked} == {tls[3]}
    assert {str(c.tls.ca_file) for c in asked if c.tls} == {tls[1]}
    assert [c.target for c in asked] == ["a", "b:1"]


def test_a_token_in_place_of_a_file_is_refused(context_file: Path, cli: Cli) -> None:
    """Somebody who gives the token itself is told that no such file exists, and it is not kept."""
    ended = cli("context", "add", "prod", *LOCAL, "--tls", "--token-file", "s3cret")
    assert ended.code == 4
    assert not context_file.exists()


def test_flag_wins_over_environment_over_context(
    context_file: Path, asked: list[Connection], monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    """Each setting by itself: the flag, else the variable, else the context."""
    cli("context", "add", "prod", *LOCAL, "--timeout", "9", "--use")
    cli("health")
    assert [(c.target, c.timeout_s) for c in asked] == [("a", 9.0), ("b:1", 9.0)]
    monkeypatch.setenv("VLLM_CP_TIMEOUT", "8")
    cli("health")
    assert {c.timeout_s for c in asked} == {8.0}
    cli("health", "--timeout", "7")
    assert {c.timeout_s for c in asked} == {7.0}
    monkeypatch.setenv("VLLM_CP_TARGET", "b:1")
    cli("health")
    assert [c.target for c in asked] == ["b:1"]
    cli("health", "--target", "a")
    assert [c.target for c in asked] == ["a"]
    cli("health", "--context", "prod")
    assert [c.target for c in asked] == ["a", "b:1"]


def test_choosing(context_file: Path, asked: list[Connection], monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    """--context wins over VLLM_CP_CONTEXT, that over the one in use; without any it is localhost."""
    for name in ("one", "two", "three"):
        cli("context", "add", name, "--target", name)

    def chosen(*flags: str) -> str:
        cli("health", *flags)
        return asked[0].target

    assert chosen() == "localhost:8001"
    cli("context", "use", "one")
    assert chosen() == "one"
    monkeypatch.setenv("VLLM_CP_CONTEXT", "two")
    assert chosen() == "two"
    assert cli("context", "show", "-o", "name").out == "two\n"
    assert chosen("--context", "three") == "three"
    monkeypatch.delenv("VLLM_CP_CONTEXT")
    cli("context", "use", "--none")
    assert chosen() == "localhost:8001"


def test_a_token_goes_to_its_own_workers_only(
    tls: list[str], asked: list[Connection], monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    """The context in use lends its token to its own workers; to others only when it is named on the command line."""
    cli("context", "add", "prod", *LOCAL, *tls, "--use")
    for flags, with_token in (
        (("--target", "a:8001"), True),
        (("--target", "a", "--target", "b:1"), True),
        (("--target", "stranger"), False),
        (("--target", "a", "--target", "stranger"), False),
        (("--target", "stranger", "--context", "prod"), True),
    ):
        cli("health", *flags)
        assert {c.token_file is not None for c in asked} == {with_token}, flags
        assert {c.tls is not None for c in asked} == {with_token}, flags
    monkeypatch.setenv("VLLM_CP_CONTEXT", "prod")
    cli("health", "--target", "stranger")
    assert asked[0].token_file is None


BROKEN: dict[str, tuple[str | bytes, str]] = {
    "cut off": ('{"version": 1, "cont', "is no JSON at line 1, column 16"),
    "empty": ("", "is no JSON at line 1, column 1"),
    "not text": (b"\xff\xfe", "is not UTF-8 text"),
    "a list": ("[]", "is no context file"),
    "a newer version": ('{"version": 2}', "has version 2, and this vllm-cp knows version 1 only"),
    "an unknown key": ('{"version": 1, "current": null, "contexts": {}, "x": 1}', "has an unknown key 'x'"),
    "no contexts": ('{"version": 1, "current": null}', "lacks the key 'contexts'"),
    "contexts as a list": ('{"version": 1, "current": null, "contexts": []}', "contexts that are no object"),
    "a current that is none": ('{"version": 1, "current": "x", "contexts": {}}', "names 'x' as current"),
    "a key twice": ('{"version": 1, "version": 1}', "the key 'version' is there twice"),
    "deep": ("[" * 100000, "is broken: "),
}
SETTINGS: dict[str, tuple[object, str]] = {
    "an unknown setting": ({"targets": ["a"], "tsl": True}, "has a context 'p' with an unknown key 'tsl'"),
    "a token": ({"targets": ["a"], "token": "s3cret"}, "with a token in it: take it out, and name a token_file"),
    "no targets": ({"tls": True}, "without a list of targets"),
    "targets as text": ({"targets": "a"}, "whose targets is 'a'"),
    "a number as target": ({"targets": [1]}, "whose targets is no list of words"),
    "a switch as text": ({"targets": ["a"], "tls": "yes"}, "whose tls is 'yes'"),
    "a time as text": ({"targets": ["a"], "timeout": "5"}, "whose timeout is '5'"),
    "an empty file name": ({"targets": ["a"], "tls_ca": ""}, "whose tls_ca is ''"),
    "no object": (1, "that is no object"),
}


@pytest.mark.parametrize("case", [*BROKEN, *SETTINGS])
@pytest.mark.parametrize(
    "args", [("health",), ("context", "list"), ("context", "add", "q", "--target", "a"), ("context", "use", "--none")]
)
def test_broken_file(case: str, args: tuple[str, ...], context_file: Path, cli: Cli) -> None:
    """A broken file is one clear line with its name and the place, exit 2, and stays as it is to the last byte."""
    text: str | bytes
    if case in BROKEN:
        text, said = BROKEN[case]
    else:
        settings, said = SETTINGS[case]
        text = json.dumps({"version": 1, "current": None, "contexts": {"p": settings}})
    data = text.encode() if isinstance(text, str) else text
    context_file.write_bytes(data)
    ended = cli(*args)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith(f"vllm-cp: the context file {context_file} ")
    assert said in ended.err
    assert "s3cret" not in ended.err
    assert ended.err.count("\n") == 1
    assert context_file.read_bytes() == data
    assert os.listdir(context_file.parent) == [context_file.name]


def test_broken_file_does_not_stop_help(context_file: Path, cli: Cli) -> None:
    """Help, version and completion do not care."""
    context_file.write_text("{")
    for args in (("--help",), ("--version",), ("health", "--help"), ("completion", "zsh")):
        assert cli(*args).code == 0


def test_contexts_that_are_not_there(context_file: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    """A context that nobody made is a usage error that names those there are, from flag and variable alike."""
    assert "there are none, see 'vllm-cp context'" in cli("health", "--context", "prod").err
    cli("context", "add", "dev", *LOCAL)
    ended = cli("health", "--context", "prod")
    assert ended.code == 2
    assert "--context: no context is called 'prod': there are dev" in ended.err
    monkeypatch.setenv("VLLM_CP_CONTEXT", "prod")
    assert "VLLM_CP_CONTEXT: no context is called 'prod'" in cli("health").err
    assert cli("health", "--context", "").code == 2


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("add", "x"), "give its workers with --target"),
        (("add", "x", "--target", "h:"), "'h:' ends without a port"),
        (("add", "x y", "--target", "h"), "can't be the name of a context"),
        (("add", "", "--target", "h"), "can't be the name of a context"),
        (("add", "x", "--target", "h", "--context", "y"), "can't be made of another one"),
        (("add", "x", "--target", "h", "--timeout", "-1"), "--timeout: '-1' is no number"),
        (("add", "x", "--target", "h", "--token-file", "t"), "would cross the network in plaintext"),
        (("add", "x", "--target", "h", "--server-name", "s"), "give --tls or --tls-ca"),
        (("use",), "name one context to use, or give --none"),
        (("use", "x", "--none"), "name one context to use, or give --none"),
        (("use", "x"), "no context is called 'x': there are none yet"),
        (("remove", "x"), "no context is called 'x'"),
        (("show", "x"), "no context is called 'x'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_usage(args: tuple[str, ...], said: str, context_file: Path, cli: Cli) -> None:
    """What a verb would refuse is refused when it is to be kept, and no file is made."""
    ended = cli("context", *args)
    assert (ended.code, ended.out) == (2, "")
    assert said in ended.err
    assert not context_file.exists()


def test_variables_are_not_kept(context_file: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    """add keeps what stands on its command line, not what happens to be in the environment."""
    monkeypatch.setenv("VLLM_CP_TIMEOUT", "3")
    monkeypatch.setenv("VLLM_CP_TLS", "1")
    monkeypatch.setenv("VLLM_CP_TARGET", "elsewhere")
    assert cli("context", "add", "x").code == 2
    assert cli("context", "add", "x", "--target", "h").code == 0
    assert _file(context_file)["contexts"] == {"x": {"targets": ["h"]}}


def test_a_link_stays_one(context_file: Path, tmp_path: Path, cli: Cli) -> None:
    """A file that is a link into somebody's repository is written through it."""
    real = tmp_path / "dotfiles"
    real.mkdir()
    context_file.symlink_to(real / "contexts.json")
    assert cli("context", "add", "x", *LOCAL).code == 0
    assert context_file.is_symlink()
    assert _file(real / "contexts.json")["contexts"]["x"]["targets"] == ["a", "b:1"]


def test_place_that_can_not_be_written(context_file: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    """A disk that is full costs the change and nothing else: 1, one line, the old file whole, no debris."""
    cli("context", "add", "x", *LOCAL)
    before = context_file.read_bytes()

    def full(_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    ended = cli("context", "add", "y", *LOCAL)
    assert (ended.code, ended.out) == (1, "")
    assert ended.err == (
        f"vllm-cp: cannot change the context file {context_file}: No space left on device; it is as it was\n"
    )
    assert context_file.read_bytes() == before
    assert os.listdir(context_file.parent) == [context_file.name]


def test_changes_at_the_same_time_lose_nothing(context_file: Path) -> None:
    """Six that add at once leave six contexts."""
    env = {"VLLM_CP_CONTEXT_FILE": str(context_file)}
    runs: list[subprocess.Popen[bytes]] = [
        start("context", "add", f"c{number}", "--target", f"h{number}", env=env) for number in range(6)
    ]
    for process in runs:
        _, err = process.communicate(timeout=30)
        assert (process.returncode, err) == (0, b"")
    assert sorted(_file(context_file)["contexts"]) == [f"c{number}" for number in range(6)]


def test_no_home(context_file: Path) -> None:
    """Without any home verbs work, and contexts say what to set."""
    nowhere = {"XDG_CONFIG_HOME": "", "HOME": "~"}
    ended = run("context", "list", env=nowhere)
    assert ended.code == 2
    assert "set VLLM_CP_CONTEXT_FILE" in ended.err
    assert run("health", "--timeout", "0.2", "--target", "127.0.0.1:1", env=nowhere).code == 3
