"""``probe``: one word, one deadline, and exit codes, its own or grpc_health_probe's."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.certs import Certs
from tests.cli.conftest import Cli
from tests.cli.process import run
from vllm_cp.cli.probe import _varint
from vllm_cp.testing import FakeWorker, TlsFiles

THEIRS = "--grpc-health-probe-codes"
#: What happened -> word, our code, theirs; by rung.
CASES: dict[str, tuple[Callable[[FakeWorker], None], str, tuple[str, int, int]]] = {
    "reachable": (lambda w: None, "reachable", ("reachable", 0, 0)),
    "serving": (lambda w: None, "serving", ("serving", 0, 0)),
    "answering": (lambda w: None, "answering", ("answering", 0, 0)),
    "admitting": (lambda w: None, "admitting", ("admitting", 0, 0)),
    "not serving": (lambda w: w.die(reported=True), "serving", ("not_serving", 8, 4)),
    "not serving, reachable": (lambda w: w.die(reported=True), "reachable", ("reachable", 0, 0)),
    "not serving, admitting": (lambda w: w.die(reported=True), "admitting", ("not_serving", 8, 4)),
    "draining": (lambda w: w.fail("Check", "NOT_FOUND", "gone"), "serving", ("not_serving", 8, 4)),
    "paused, answering": (lambda w: w.set(paused=True), "answering", ("answering", 0, 0)),
    "paused": (lambda w: w.set(paused=True), "admitting", ("suspended", 8, 4)),
    "ranks apart, answering": (lambda w: w.set(paused=True, rank=1), "answering", ("answering", 0, 0)),
    "ranks apart": (lambda w: w.set(paused=True, rank=1), "admitting", ("ranks_disagree", 8, 4)),
    "engine error": (lambda w: w.fail("IsPaused", "INTERNAL", "boom"), "answering", ("engine_error", 8, 4)),
    "frozen": (lambda w: w.hang(), "serving", ("serving", 0, 0)),
    "frozen, answering": (lambda w: w.hang(), "answering", ("engine_silent", 8, 4)),
    "stopped": (lambda w: w.stop(), "serving", ("unreachable", 3, 2)),
    "frontend frozen": (lambda w: w.freeze(), "serving", ("unreachable", 3, 3)),
    "denied": (lambda w: w.fail("Check", "UNAUTHENTICATED", "who?"), "serving", ("denied", 4, 3)),
    "denied, reachable": (lambda w: w.fail("Check", "UNAUTHENTICATED", "who?"), "reachable", ("reachable", 0, 0)),
    "no health service": (lambda w: w.fail("Check", "UNIMPLEMENTED"), "serving", ("failed", 7, 3)),
}


@pytest.mark.parametrize("case", CASES)
def test_word_and_codes(case: str, cli: Cli) -> None:
    """Each state is one word on standard output and one code, ours or theirs; a reason is on standard error."""
    happen, rung, (word, ours, theirs) = CASES[case]
    with FakeWorker(ranks=2) as worker:
        happen(worker)
        flags = ("--rung", rung, "--target", worker.target, "--timeout", "0.4")
        ended = cli("probe", *flags)
        assert (ended.code, ended.out) == (ours, f"{word}\n")
        assert ended.err.count("\n") == (0 if ours == 0 else 1)
        assert cli("probe", *flags, THEIRS)[:2] == (theirs, f"{word}\n")


@pytest.mark.parametrize(
    "args",
    [
        ("--nope",),
        ("--rung", "warm"),
        ("--timeout", "0"),
        ("--target", "h:"),
        ("--target", "a", "--target", "b"),
        ("x",),
    ],
    ids=" ".join,
)
def test_usage(args: tuple[str, ...], cli: Cli) -> None:
    """A wrong command line is 2, and 1 for those who expect grpc_health_probe's codes."""
    ended = cli("probe", *args)
    assert (ended.code, ended.out) == (2, "")
    ended = cli("probe", THEIRS, *args)
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.count("\n") == 1


def test_credentials_that_can_not_be_read(tmp_path: Path, cli: Cli) -> None:
    """A CA file that is not there is 4, and 1 in theirs, where 4 would mean unhealthy."""
    flags = ("--tls-ca", str(tmp_path / "gone.pem"))
    assert cli("probe", *flags).code == 4
    assert cli("probe", *flags, THEIRS).code == 1


def test_one_deadline_for_all(worker: FakeWorker, cli: Cli) -> None:
    """--timeout, one second by default, bounds the whole run; each call gets what is left, and none is repeated."""
    worker.delay("Check", 0.3)
    assert cli("probe", "--rung", "admitting", "--target", worker.target).code == 0
    check, paused = worker.calls
    assert 0.8 < (check.deadline_s or 0) <= 1.0
    assert (paused.deadline_s or 0) <= 0.72
    worker.fail("Check", "UNAVAILABLE", "try later")
    assert cli("probe", "--target", worker.target).code == 3
    assert len(worker.calls) == 3
    worker.heal()
    worker.freeze()
    began = time.monotonic()
    assert cli("probe", "--timeout", "0.3", "--target", worker.target).code == 3
    assert time.monotonic() - began < 2


def test_service(worker: FakeWorker, cli: Cli) -> None:
    """--service asks about that name, whatever its length and letters; one that nobody knows is not_serving."""
    for name, word in (("vllm.Inference", "serving"), ("x" * 300, "not_serving"), ("漢字", "not_serving")):
        assert cli("probe", "--service", name, "--target", worker.target).out == f"{word}\n"
        assert worker.calls[-1].request == {"service": name}
    assert [_varint(n) for n in (1, 127, 128, 300)] == [b"\x01", b"\x7f", b"\x80\x01", b"\xac\x02"]


def test_old_worker_is_not_failed_for_its_age(cli: Cli) -> None:
    """vLLM 0.27 can't be asked beyond serving: the word is serving, the code 0, and a line says why no more."""
    with FakeWorker(version="0.27.0") as worker:
        ended = cli("probe", "--rung", "admitting", "--target", worker.target)
    assert (ended.code, ended.out) == (0, "serving\n")
    assert "no more than 'serving' can be proved" in ended.err


def test_formats(worker: FakeWorker, cli: Cli) -> None:
    """Without -o it is the bare word; asked for a format, a record in that format."""
    record = {"target": worker.target, "ok": True, "word": "serving", "rung": "serving"}
    flags = ("--target", worker.target)
    assert cli("probe", *flags, "-o", "table").out == "serving\n"
    assert json.loads(cli("probe", *flags, "-o", "json").out) == [record]
    assert json.loads(cli("probe", *flags, "-o", "jsonl").out) == record
    assert yaml.safe_load(cli("probe", *flags, "-o", "yaml").out) == [record]
    assert cli("probe", *flags, "--columns", "word,ok").out.split() == ["WORD", "OK", "serving", "yes"]
    assert cli("probe", *flags, "-o", "name").out == f"{worker.target}\n"
    assert cli("probe", *flags, "-o", "wide").out.splitlines()[0].split() == ["TARGET", "WORD", "OK", "RUNG"]


def test_tls(certs: Certs, cli: Cli) -> None:
    """With TLS it works, without it fails as a connection does, and the line says that TLS is the matter."""
    with FakeWorker(tls=TlsFiles(cert=certs.server_cert, key=certs.server_key)) as worker:
        assert cli("probe", "--tls-ca", str(certs.ca), "--target", worker.target).code == 0
        ended = cli("probe", "--target", worker.target)
        assert (ended.code, ended.out) == (4, "unreachable\n")
        assert "TLS" in ended.err
        assert cli("probe", THEIRS, "--target", worker.target).code == 2
        assert cli("probe", THEIRS, "--tls-ca", str(certs.wrong_ca), "--target", worker.target).code == 2


def test_token(worker: FakeWorker, tmp_path: Path, cli: Cli) -> None:
    """A token travels with every call, and is in no output."""
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    flags = ("--token-file", str(token), "--insecure-token", "--rung", "admitting", "--debug")
    ended = cli("probe", *flags, "--target", worker.target)
    assert ended.code == 0
    assert {call.get("authorization") for call in worker.calls} == {"Bearer s3cret"}
    assert "s3cret" not in ended.out + ended.err
    assert "-> /grpc.health.v1.Health/Check" in ended.err
    assert "<- /vllm.Control/IsPaused, 0 bytes" in ended.err


def test_as_a_process(worker: FakeWorker) -> None:
    """As an exec probe runs it: a word, a code, and nothing else."""
    assert run("probe", env={"VLLM_CP_TARGET": worker.target}) == (0, "serving\n", "")
