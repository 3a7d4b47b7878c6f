"""The exit table: every row of it can be reached, and a fleet's code follows from its targets'."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from vllm_cp import errors
from vllm_cp.cli import _app, main
from vllm_cp.cli._exit import MEANINGS, Exit, exit_of, overall
from vllm_cp.testing import FakeWorker

STATUSES = [
    ("UNAVAILABLE", "try later", Exit.UNREACHABLE),
    ("DEADLINE_EXCEEDED", "", Exit.UNREACHABLE),
    ("CANCELLED", "Timeout expired", Exit.UNREACHABLE),
    ("UNAUTHENTICATED", "who?", Exit.CREDENTIALS),
    ("PERMISSION_DENIED", "RBAC: access denied", Exit.CREDENTIALS),
    ("UNIMPLEMENTED", "", Exit.NOT_SUPPORTED),
    ("FAILED_PRECONDITION", "not configured", Exit.REFUSED),
    ("NOT_FOUND", "no such thing", Exit.REFUSED),
    ("INVALID_ARGUMENT", "bad", Exit.REFUSED),
    ("RESOURCE_EXHAUSTED", "message larger than max", Exit.REFUSED),
    ("INTERNAL", "engine failed: gone", Exit.REFUSED),
    ("UNAVAILABLE", "Generation is paused, try again later", Exit.REFUSED),
]


@pytest.mark.parametrize(("status", "detail", "code"), STATUSES, ids=[f"{s}-{d}" for s, d, _ in STATUSES])
def test_status_to_exit(status: str, detail: str, code: Exit, worker: FakeWorker, cli: Cli) -> None:
    """What the worker answers decides the exit code, with one line on standard error and none on the other."""
    worker.fail("GetServerInfo", status, detail)
    ended = cli("info", "--target", worker.target)
    assert (ended.code, ended.out) == (code, "")
    assert ended.err.count("\n") == 1
    assert ended.err.startswith(f"vllm-cp: {worker.target}: Control.GetServerInfo: ")
    assert status in ended.err


@pytest.mark.parametrize(
    ("status", "code"), [("SERVING", Exit.OK), ("NOT_SERVING", Exit.NOT_READY), ("UNKNOWN", Exit.NOT_READY)]
)
def test_health_word_to_exit(status: str, code: Exit, worker: FakeWorker, cli: Cli) -> None:
    """Anything but SERVING exits with 8, and is still data on standard output."""
    worker.health(status)
    ended = cli("health", "--target", worker.target)
    assert ended.code == code
    assert status in ended.out
    assert ended.err.count("\n") == (0 if code is Exit.OK else 1)


def test_file_that_went_away(worker: FakeWorker, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    """A certificate that vanishes between the check and the call is 4, and no defect of ours."""
    from vllm_cp.cli import _fanout

    def gone(_: object, **__: object) -> None:
        raise errors.ConfigError("cannot read TLS CA file 'ca.pem': No such file or directory")

    monkeypatch.setattr(_fanout, "Client", gone)
    ended = cli("health", "--target", worker.target)
    assert ended.code == 4
    assert ended.err == f"vllm-cp: {worker.target}: cannot read TLS CA file 'ca.pem': No such file or directory\n"


def test_unreachable(nobody: str, cli: Cli) -> None:
    """Nobody there is 3, and the line says what to check."""
    ended = cli("info", "--target", nobody)
    assert (ended.code, ended.out) == (3, "")
    assert "worker unreachable" in ended.err
    assert "check the address" in ended.err


def test_out_of_time(silent: str, cli: Cli) -> None:
    """A listener that never speaks is 3, within the time-out."""
    ended = cli("health", "--target", silent, "--timeout", "0.3")
    assert ended.code == 3
    assert "no answer in time" in ended.err


def test_engine_failure_does_not_touch_discovery(worker: FakeWorker, cli: Cli) -> None:
    """A dead engine shows in health; what the frontend knows by heart still answers."""
    worker.die(reported=True)
    assert cli("health", "--target", worker.target).code == 8
    assert cli("info", "--target", worker.target).code == 0


def test_usage(cli: Cli) -> None:
    """A wrong flag is 2."""
    assert cli("health", "--no-such-flag").code == 2


def test_defect_is_one_line(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    """A defect of ours is 1 and one line, not a traceback."""

    def broken(_: list[str]) -> int:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(_app, "_invoke", broken)
    ended = cli("health")
    assert ended.code == 1
    assert ended.err == "vllm-cp: unexpected RuntimeError: two\\nlines; this is a defect: please report it\n"


def test_defect_on_one_target_leaves_the_others(worker: FakeWorker, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    """A defect while reading one worker's answer is that worker's error; the others' rows are printed."""
    from vllm_cp.client import ControlClient

    with FakeWorker() as other:
        good = ControlClient.check

        def check(self: ControlClient, service: str = "", **settings: object) -> object:
            if self.target == other.target:
                raise KeyError("surprise")
            return good(self, service)

        monkeypatch.setattr(ControlClient, "check", check)
        ended = cli("health", "--target", other.target, "--target", worker.target)
        assert ended.code == 6
        assert worker.target in ended.out
        assert "KeyError" in ended.err
        assert cli("health", "--target", other.target).code == 1


@pytest.mark.parametrize("early", [True, False])
def test_interrupt(early: bool, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    """Ctrl-C is 130, while things are still being imported as well as later."""

    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(_app, "run" if early else "_invoke", interrupted)
    assert cli("health").code == 130


def test_fleet_that_fails_alike(cli: Cli) -> None:
    """All targets failing the same way give that way's code."""
    with FakeWorker() as one, FakeWorker() as two:
        for worker in (one, two):
            worker.fail("GetModelInfo", "UNIMPLEMENTED")
        assert cli("model", "--target", one.target, "--target", two.target).code == 7


def test_fleet_that_fails_in_part(worker: FakeWorker, nobody: str, cli: Cli) -> None:
    """One bad target among good ones is 6: the good rows are printed, the bad one has a line of its own."""
    ended = cli("info", "--target", nobody, "--target", worker.target)
    assert ended.code == 6
    assert worker.target in ended.out
    assert nobody not in ended.out
    assert ended.err.startswith(f"vllm-cp: {nobody}: ")


def test_fleet_that_fails_differently(worker: FakeWorker, nobody: str, cli: Cli) -> None:
    """Two different failures are 6."""
    worker.fail("GetServerInfo", "UNAUTHENTICATED")
    assert cli("info", "--target", nobody, "--target", worker.target).code == 6


def test_every_row_is_documented_and_total() -> None:
    """Each code has a meaning in the help, and each error of the SDK a code of its own choosing."""
    assert set(MEANINGS) == set(Exit)
    for name in errors.__all__:
        kind = getattr(errors, name)
        if not issubclass(kind, errors.ControlError):
            continue
        expected = Exit.UNEXPECTED if kind is errors.ControlError else None
        code = exit_of(kind("t", "m", "c"))
        assert (code is expected) if expected else code not in (Exit.UNEXPECTED, Exit.OK), name


def test_overall() -> None:
    """The law of the fleet, by itself."""
    assert overall([]) is Exit.OK
    assert overall([Exit.OK, Exit.OK]) is Exit.OK
    assert overall([Exit.UNREACHABLE] * 3) is Exit.UNREACHABLE
    assert overall([Exit.OK, Exit.UNREACHABLE]) is Exit.MIXED
    assert overall([Exit.NOT_READY, Exit.UNREACHABLE]) is Exit.MIXED


def test_main_reads_the_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without arguments of its own, main takes the process's."""
    monkeypatch.setattr(sys, "argv", [str(Path("vllm-cp")), "--version"])
    assert main() == 0
    assert capsys.readouterr().out.startswith("vllm-cp ")
