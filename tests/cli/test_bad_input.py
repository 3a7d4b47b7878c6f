"""Bad input: one clear line, the right code, nothing on standard output, nothing sent."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.certs import Certs
from tests.cli.conftest import Cli
from tests.cli.process import run
from vllm_cp.testing import FakeWorker

USAGE = {
    "target without port": (["health", "--target", "host:"], "--target: target 'host:' ends without a port"),
    "http target": (["health", "--target", "http://h:1"], "is a URL; write h:1 without http://"),
    "https target": (["health", "--target", "https://h:1"], "is a URL; write h:1 without https://"),
    "port too high": (["health", "--target", "h:99999"], "a port is a number from 1 to 65535"),
    "empty target": (["health", "--target", ""], "the target is empty"),
    "target with spaces": (["health", "--target", "a b:1"], "holds spaces"),
    "IPv6 without brackets": (["health", "--target", "::1"], "IPv6 without brackets; write [::1]:8001"),
    "one bad target of two": (["health", "--target", "a:1", "--target", "b:"], "'b:' ends without a port"),
    "empty id": (["abort", ""], "a request id is empty"),
    "empty id among good ones": (["abort", "a", "", "b"], "a request id is empty"),
    "no id": (["abort"], "Missing argument 'ID...'"),
    "zero time": (["health", "--timeout", "0"], "--timeout: '0' is no number of seconds"),
    "negative time": (["health", "--timeout=-1"], "--timeout: '-1' is no number of seconds"),
    "time without number": (["health", "--timeout"], "'--timeout' requires an argument"),
    "target without value": (["health", "--target"], "'--target' requires an argument"),
    "format without name": (["health", "-o"], "'-o' requires an argument"),
    "target like a flag": (["health", "--target", "-x"], "'-x' has no usable host name"),
    "endless time": (["health", "--timeout", "inf"], "--timeout: 'inf' is no number of seconds"),
    "no time": (["health", "--timeout", "nan"], "--timeout: 'nan' is no number of seconds"),
    "time with a unit": (["health", "--timeout", "5s"], "--timeout: '5s' is no number of seconds"),
    "unknown format": (["health", "-o", "xml"], "'xml' is not one of"),
    "unknown flag": (["health", "--nope"], "--nope"),
    "unknown noun": (["helth"], "No such command 'helth'"),
    "unknown verb": (["kv", "sorces"], "No such command 'sorces'"),
    "too many arguments": (["health", "a", "b"], "unexpected extra argument"),
    "server name without TLS": (["health", "--server-name", "x"], "give --tls or --tls-ca"),
    "certificate without key": (["health", "--tls-cert", "c.pem"], "belong together"),
    "empty file name": (["health", "--tls-ca", ""], "--tls-ca: the value is empty"),
    "control characters": (["health", "--target", "a\x1b[2J"], "'a\\x1b[2J'"),
}


@pytest.mark.parametrize("case", USAGE)
def test_usage_error(case: str, cli: Cli) -> None:
    """Wrong on the command line is 2, with one line that names the flag and shows the right form."""
    args, said = USAGE[case]
    ended = cli(*args)
    assert (ended.code, ended.out) == (2, "")
    assert said in ended.err
    _one_clear_line(ended.err)
    assert "--help'" in ended.err


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("VLLM_CP_TARGET", "a:1 b:", "VLLM_CP_TARGET: target 'b:' ends without a port"),
        ("VLLM_CP_TIMEOUT", "soon", "VLLM_CP_TIMEOUT: 'soon' is no number"),
        ("VLLM_CP_TLS", "perhaps", "VLLM_CP_TLS: 'perhaps' is neither true nor false"),
        ("VLLM_CP_SERVER_NAME", "w\udcff", "VLLM_CP_SERVER_NAME 'w\\udcff' is not valid UTF-8"),
    ],
)
def test_usage_error_in_the_environment(
    variable: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    """Wrong in the environment is 2 as well, and the line names the variable."""
    monkeypatch.setenv(variable, value)
    ended = cli("health")
    assert (ended.code, ended.out) == (2, "")
    assert said in ended.err
    _one_clear_line(ended.err)


@pytest.mark.parametrize(
    "args", [(b"abort", b"req-\xff"), (b"health", b"\xff"), (b"kv", b"--target", b"h\xff:1", b"sources")]
)
def test_argument_that_is_not_utf8(args: tuple[bytes, ...]) -> None:
    """An undecodable argument is 2 before anything is sent, in whatever locale."""
    for locale in ("C.UTF-8", "C"):
        ended = run(*args, env={"LC_ALL": locale})
        assert (ended.code, ended.out) == (2, "")
        assert "is not valid UTF-8 text" in ended.err
        _one_clear_line(ended.err)


def test_unknown_service(worker: FakeWorker, cli: Cli) -> None:
    """An unknown service is a status, exit 8, and the line names those that exist."""
    ended = cli("health", "vllm.Contorl", "--target", worker.target)
    assert ended.code == 8
    assert "SERVICE_UNKNOWN" in ended.out
    assert "vllm.Control and vllm.Inference" in ended.err
    _one_clear_line(ended.err)


def test_unreadable_files(certs: Certs, tmp_path: Path, cli: Cli) -> None:
    """A certificate, key or token that can't be read is 4, and the line names the file and why."""
    notes = tmp_path / "notes.txt"
    notes.write_text("no PEM in here")
    gone = str(tmp_path / "gone.pem")
    cases = [
        (["--tls-ca", gone], "No such file or directory"),
        (["--tls-ca", str(tmp_path)], "Is a directory"),
        (["--tls-ca", str(notes)], "is not PEM"),
        (["--tls-cert", gone, "--tls-key", str(certs.client_key)], "No such file or directory"),
        (["--tls-cert", str(certs.client_cert), "--tls-key", gone], "No such file or directory"),
        (["--token-file", gone, "--insecure-token"], "No such file or directory"),
        (["--token-file", str(notes), "--insecure-token"], "must hold one token on one line"),
    ]
    for flags, said in cases:
        ended = cli("health", *flags)
        assert (ended.code, ended.out) == (4, ""), flags
        assert said in ended.err
        _one_clear_line(ended.err)


def test_token_over_plaintext(tmp_path: Path, worker: FakeWorker, cli: Cli) -> None:
    """A token without TLS is refused before it leaves, and the line shows both ways out."""
    token = tmp_path / "token"
    token.write_text("s3cret")
    ended = cli("health", "--target", worker.target, "--token-file", str(token))
    assert ended.code == 2
    assert "--tls" in ended.err
    assert "--insecure-token" in ended.err
    assert worker.calls == []


@pytest.mark.parametrize("args", [(), ("kv",)])
def test_noun_alone_shows_help_as_talk(args: tuple[str, ...], cli: Cli) -> None:
    """Without a verb there is no data: the help goes to standard error, and the code is 2."""
    ended = cli(*args)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("Usage: vllm-cp")


def _one_clear_line(err: str) -> None:
    assert err.startswith("vllm-cp: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    assert err.rstrip("\n").isprintable()
    assert "Traceback" not in err
