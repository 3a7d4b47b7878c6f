"""Connection flags: at every level of the command line, from the environment, and what they turn into."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.certs import Certs
from tests.cli.conftest import Cli
from vllm_cp import Connection
from vllm_cp.cli._flags import CONNECTION
from vllm_cp.testing import FakeWorker


@pytest.mark.parametrize("place", [0, 1, 2])
def test_flags_at_every_level(place: int, worker: FakeWorker, cli: Cli) -> None:
    """--target and -o mean the same before the noun, between noun and verb, and after the verb."""
    words = [["kv"], ["sources"]]
    words.insert(place, ["--target", worker.target, "-o", "name"])
    ended = cli(*[word for part in words for word in part])
    assert (ended.code, ended.out) == (0, f"{worker.target}\n")


def test_later_flag_wins(worker: FakeWorker, nobody: str, cli: Cli) -> None:
    """A flag after the verb replaces the one before it, so an alias with defaults can be overruled."""
    ended = cli("--target", nobody, "-o", "json", "health", "--target", worker.target, "-o", "name")
    assert (ended.code, ended.out) == (0, f"{worker.target}\n")


def test_several_targets_in_order_each_once(asked: list[Connection], cli: Cli) -> None:
    """--target repeats, keeps its order, and one worker written in two ways is asked once."""
    cli("health", "--target", "b:1", "--target", "a", "--target", "a:8001", "--target", "[::1]:1")
    assert [c.address.name for c in asked] == ["b:1", "a:8001", "[::1]:1"]


def test_defaults(asked: list[Connection], cli: Cli) -> None:
    """Without any flag it is localhost:8001, plaintext, five seconds, no proxy."""
    assert cli("health").code == 0
    assert asked == [Connection(target="localhost:8001", timeout_s=5.0)]


@pytest.mark.parametrize("text", ["a:1 b:2", "a:1,b:2", " a:1 ,\tb:2\n"])
def test_targets_from_the_environment(
    text: str, asked: list[Connection], monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    """VLLM_CP_TARGET holds several targets, with spaces or commas between them."""
    monkeypatch.setenv("VLLM_CP_TARGET", text)
    cli("health")
    assert [c.target for c in asked] == ["a:1", "b:2"]


def test_flag_wins_over_environment(asked: list[Connection], monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    """A flag anywhere on the line beats its variable; an empty variable is none."""
    monkeypatch.setenv("VLLM_CP_TARGET", "a:1 b:2")
    monkeypatch.setenv("VLLM_CP_TIMEOUT", "")
    cli("--target", "c:3", "health")
    assert [(c.target, c.timeout_s) for c in asked] == [("c:3", 5.0)]


def test_every_flag_reaches_the_connection_and_has_its_variable(
    certs: Certs, tmp_path: Path, asked: list[Connection], monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    """The same connection comes from flags before the verb, from flags after it, and from the environment."""
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    settings = {
        "--target": "h:1",
        "--timeout": "2.5",
        "--tls-ca": str(certs.ca),
        "--tls-cert": str(certs.client_cert),
        "--tls-key": str(certs.client_key),
        "--server-name": "worker.internal",
        "--token-file": str(token),
    }
    switches = ["--tls", "--insecure-token", "--proxy"]
    flags = [word for pair in settings.items() for word in pair] + switches
    elsewhere = {"--context", "--file-sd", "--dns", "--k8s", "--pool", "--via"}  # test_context, test_sources, test_via
    assert {*settings, *switches, *elsewhere} == {flag.option for flag in CONNECTION}

    assert cli(*flags, "health").code == 0
    before = list(asked)
    assert cli("health", *flags).code == 0
    after = list(asked)
    for option, value in [*settings.items(), *((s, "true") for s in switches)]:
        monkeypatch.setenv("VLLM_CP_" + option[2:].upper().replace("-", "_"), value)
    assert cli("health").code == 0

    assert before == after == asked
    (made,) = asked
    assert made.tls is not None
    assert (made.tls.ca_file, made.tls.cert_file, made.tls.key_file) == (certs.ca, certs.client_cert, certs.client_key)
    assert (made.target, made.timeout_s, made.server_name) == ("h:1", 2.5, "worker.internal")
    assert (made.token_file, made.insecure_token, made.proxy) == (token, True, True)


@pytest.mark.parametrize("word", ["0", "false", "No", "off"])
def test_switch_is_off_in_the_environment(
    word: str, asked: list[Connection], monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    """A variable of a switch may say no."""
    monkeypatch.setenv("VLLM_CP_PROXY", word)
    monkeypatch.setenv("VLLM_CP_TLS", word)
    cli("health")
    assert not asked[0].proxy
    assert asked[0].tls is None


def test_tls_trusts_what_the_system_trusts(
    certs: Certs, asked: list[Connection], monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    """--tls takes the system's CA file, SSL_CERT_FILE before it, and gRPC's own bundle where there is none."""
    monkeypatch.setattr("vllm_cp.config._SYSTEM_ROOTS", ("/nonexistent", str(certs.wrong_ca)))
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    cli("health", "--tls")
    assert asked[0].tls is not None
    assert asked[0].tls.read()[0] == certs.wrong_ca.read_bytes()
    monkeypatch.setenv("SSL_CERT_FILE", str(certs.ca))
    cli("health", "--tls")
    assert asked[0].tls is not None
    assert asked[0].tls.read()[0] == certs.ca.read_bytes()
    monkeypatch.delenv("SSL_CERT_FILE")
    monkeypatch.setattr("vllm_cp.config._SYSTEM_ROOTS", ())
    cli("health", "--tls")
    assert asked[0].tls is not None
    assert asked[0].tls.read()[0] is None


def test_timeout_is_the_deadline_the_worker_sees(worker: FakeWorker, cli: Cli) -> None:
    """--timeout travels with the call."""
    assert cli("info", "--target", worker.target, "--timeout", "7").code == 0
    deadline = worker.calls[0].deadline_s
    assert deadline is not None
    assert 5 < deadline <= 7.1


def test_token_is_sent_and_never_shown(worker: FakeWorker, tmp_path: Path, cli: Cli) -> None:
    """A token over plaintext needs --insecure-token; it is in the metadata and in no output."""
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    worker.fail("GetModelInfo", "UNAUTHENTICATED", "who are you?")
    for verb in ("info", "model"):
        ended = cli(verb, "--target", worker.target, "--token-file", str(token), "--insecure-token", "-o", "json")
        assert "s3cret" not in ended.out + ended.err
    assert {call.get("authorization") for call in worker.calls} == {"Bearer s3cret"}
