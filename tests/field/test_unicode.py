"""Text of all scripts in ids, status texts, certificate names, tokens and arguments, in locales that know none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.certs import Certs
from tests.cli.process import run
from tests.colours import both
from tests.exporter.process import Exporter
from tests.exporter.process import run as run_exporter
from vllm_cp import ConfigError, Connection, PreconditionFailed, RpcRecord, Tls
from vllm_cp.testing import FakeWorker

#: A C locale in which Python is kept from choosing UTF-8 by itself.
BARE = {"LC_ALL": "C", "LANG": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
IDS = ("漢字", "😀-1", "e\u0301", "\u202etxt", "a\x00b", "a\nb", " ", "\ufeff")


async def test_ids_arrive_unchanged(fake: FakeWorker, colour: str) -> None:
    """Ids in any script, with combining marks, a NUL or a line end, reach the worker as they are."""
    async with both(colour, fake.target) as client:
        await client.abort(IDS)
    assert fake.calls[0].request_ids == IDS


@pytest.mark.parametrize("verb", ["abort", "check", "load_lora", "unload_lora", "update_weight_version", "generate"])
async def test_what_is_no_text_is_not_sent(verb: str, fake: FakeWorker, colour: str) -> None:
    """A lone surrogate, as an undecodable argument becomes, is refused by name and nothing is sent."""
    bad = "req-\udcff"
    arguments = {"abort": ([bad],), "load_lora": (bad, "/a")}.get(verb, (bad,))
    async with both(colour, fake.target) as client:
        with pytest.raises(ValueError, match="is not valid Unicode text and cannot be sent"):
            await getattr(client, verb)(*arguments)
    assert fake.calls == []


async def test_a_status_text_never_hides_its_code(fake: FakeWorker, colour: str) -> None:
    """A status text arrives intact; the error is one printable line that shows the code beside it."""
    told: list[RpcRecord] = []
    text = "désolé 漢 😀\n\x1b[2Jforged: line\x00"
    fake.fail("GetServerInfo", "FAILED_PRECONDITION", text)
    async with both(colour, fake.target, on_rpc=told.append) as client:
        with pytest.raises(PreconditionFailed) as failed:
            await client.server_info()
    assert (failed.value.code, failed.value.detail) == ("FAILED_PRECONDITION", text)
    assert (told[0].code, told[0].detail) == ("FAILED_PRECONDITION", text)
    assert str(failed.value).isprintable()
    assert "(FAILED_PRECONDITION désolé 漢 😀\\n\\x1b[2Jforged: line\\x00)" in str(failed.value)


@pytest.mark.parametrize("name", ["wörker.internal", "a b", "", "w\udcff", "x" * 254])
def test_a_server_name_that_no_certificate_holds(name: str, certs: Certs) -> None:
    """A server name that is no name is refused before anything is sent, and the line shows the form that exists."""
    tls = Tls(ca_file=certs.ca)
    with pytest.raises(ConfigError, match="is no name that a certificate holds: ASCII without spaces"):
        Connection(target="a", tls=tls, server_name=name)
    assert Connection(target="a", tls=tls, server_name="xn--wrker-jua.internal").server_name


def test_a_server_name_on_the_command_lines(certs: Certs) -> None:
    """On both command lines that is a usage error of one line, in any locale."""
    flags = ("--tls-ca", str(certs.ca), "--server-name", "wörker")
    for env in ({}, BARE):
        command, daemon = run("health", *flags, env=env), run_exporter("--target", "a:1", *flags, **env)
        assert (command.code, command.out) == (daemon.returncode, daemon.stdout) == (2, "")
        for line in (command.err, daemon.stderr):
            assert "is no name that a certificate holds" in line
            assert line.count("\n") == 1
            assert "Traceback" not in line


def test_a_token_that_no_header_holds(tmp_path: Path, fake: FakeWorker) -> None:
    """A token with an accent can't be a header: one line that names the file and not the token, before it is sent."""
    token = tmp_path / "token"
    token.write_text("gehéim", encoding="utf-8")
    with pytest.raises(ConfigError, match="holds more than ASCII text"):
        Connection(target=fake.target, token_file=token, insecure_token=True)
    flags = ("--target", fake.target, "--token-file", str(token), "--insecure-token")
    command, daemon = run("health", *flags, env=BARE), run_exporter(*flags, **BARE)
    assert (command.code, daemon.returncode) == (4, 2)
    for line in (command.err, daemon.stderr):
        assert "holds more than ASCII text" in line
        assert line.count("\n") == 1
        assert "hé" not in line
        assert "geh" not in line
    assert fake.calls == []


@pytest.mark.parametrize("form", ["logfmt", "json"])
def test_the_daemon_in_a_bare_locale(form: str, fake: FakeWorker) -> None:
    """In a locale without such characters page and log carry a worker's text all the same; no line is lost."""
    fake.set(served_model_name="模型-é")
    flags = (f"--target=w={fake.target}", f"--log-format={form}", "--probe-interval=0.2")
    with Exporter(*flags, **BARE) as exporter:
        exporter.eventually(lambda text: 'worker_ready{pool="default",worker="w"} 1.0' in text)
        assert 'model_name="模型-é"' in exporter.eventually(lambda text: "worker_model_info{" in text)
        fake.fail("IsPaused", "INTERNAL", "is_paused failed: désolé 漢")
        assert exporter.event("fault_opened")["now"] == "engine_error"
        assert exporter.stop()[0] == 0
        line = next(line for line in exporter.lines if "fault_opened" in line)
        assert line.isascii()
        assert "is_paused failed: d\\" in line
        if form == "json":
            assert json.loads(line)["detail"] == "is_paused failed: désolé 漢"
        assert "Traceback" not in "".join(exporter.lines)
