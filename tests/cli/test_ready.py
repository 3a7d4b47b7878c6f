"""``ready`` (B16): the ladder, with a reason for each way of not being ready, and no reason to believe otherwise."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.cli.conftest import Cli
from tests.cli.process import run
from vllm_cp import ServerInfo
from vllm_cp.testing import FakeWorker


def _row(cli: Cli, *args: str) -> tuple[int, dict[str, Any]]:
    ended = cli("ready", *args, "-o", "json")
    (row,) = json.loads(ended.out)
    return ended.code, row


def _holds(row: dict[str, Any]) -> list[bool | None]:
    return [step["holds"] for step in row["rungs"].values()]


def test_ready(worker: FakeWorker, cli: Cli) -> None:
    """A worker whose engines answer is ready: 0, nothing on standard error, and each rung says what proved it."""
    code, row = _row(cli, "--target", worker.target)
    assert (code, row["ready"], row["reason"], row["judged_by"]) == (0, True, None, "admitting")
    assert _holds(row) == [True, True, True, True, None]
    assert [step["proof"] for step in row["rungs"].values()] == ["answer", "health", "round trip", "round trip", None]
    for step in list(row["rungs"].values())[:4]:
        assert step["since"].endswith("Z")
        assert step["proved_at"].endswith("Z")
    assert cli("ready", "--target", worker.target).err == ""


#: What happened to it -> reason, exit code, and which rungs still hold.
TROUBLES: dict[str, tuple[Callable[[FakeWorker], None], str, int, list[bool | None]]] = {
    "not serving": (lambda w: w.die(reported=True), "not_serving", 8, [True, False, False, False, False]),
    "frozen": (lambda w: w.hang(), "engine_silent", 8, [True, True, False, False, False]),
    "dead without a word": (lambda w: w.die(reported=False), "engine_silent", 8, [True, True, False, False, False]),
    "paused": (lambda w: w.set(paused=True), "suspended", 8, [True, True, True, False, False]),
    "ranks apart": (lambda w: w.set(paused=True, rank=1), "ranks_disagree", 8, [True, True, True, False, False]),
    "engine error": (
        lambda w: w.fail("IsPaused", "INTERNAL", "is_paused failed: boom"),
        "engine_error",
        8,
        [True, True, False, False, False],
    ),
    "stopped": (lambda w: w.stop(), "unreachable", 3, [False] * 5),
    "frontend frozen": (lambda w: w.freeze(), "unreachable", 3, [False] * 5),
    "denied": (lambda w: w.fail("Check", "PERMISSION_DENIED", "RBAC"), "unprovable", 4, [True, None, None, None, None]),
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_not_ready_has_a_reason(trouble: str, cli: Cli) -> None:
    """Each trouble has its reason and exit code, the rungs above it fall, and one line on standard error says why."""
    happen, reason, code, holds = TROUBLES[trouble]
    with FakeWorker(ranks=2) as worker:
        target = worker.target
        happen(worker)
        ended = cli("ready", "--target", target, "--timeout", "0.4", "-o", "json")
    (row,) = json.loads(ended.out)
    assert (row["ready"], row["reason"], ended.code) == (False, reason, code)
    assert _holds(row) == holds
    assert ended.err.startswith(f"vllm-cp: {target}: not ready: ")
    assert ended.err.count("\n") == 1


def test_a_worker_that_comes_up_in_phases(nobody: str, cli: Cli) -> None:
    """Port closed, service not registered, not serving, then all good: ready at the documented point and not before."""
    assert cli("ready", "--target", nobody).code == 3
    with FakeWorker(info=ServerInfo(total_kv_blocks=0)) as worker:
        flags = ("--target", worker.target, "--service", "vllm.Inference")
        worker.fail("Check", "NOT_FOUND", "service not registered")
        code, row = _row(cli, *flags)
        assert (code, row["reason"], row["why"]) == (8, "not_serving", "health says SERVICE_UNKNOWN")
        worker.heal("Check")
        worker.health("NOT_SERVING", "vllm.Inference")
        code, row = _row(cli, *flags)
        assert (code, row["reason"], row["why"]) == (8, "not_serving", "health says NOT_SERVING")
        assert cli("ready", "--target", worker.target).code == 0
        worker.health("SERVING", "vllm.Inference")
        assert cli("ready", *flags).code == 0


def test_rung_is_selectable(cli: Cli) -> None:
    """--rung says what ready means: a paused worker is ready up to answering, and not at admitting."""
    with FakeWorker() as worker:
        worker.set(paused=True)
        codes = {
            rung: cli("ready", "--rung", rung, "--target", worker.target).code
            for rung in ("reachable", "serving", "answering", "admitting", "warm")
        }
    assert codes == {"reachable": 0, "serving": 0, "answering": 0, "admitting": 8, "warm": 8}


def test_warm_sends_one_token(worker: FakeWorker, cli: Cli) -> None:
    """--rung warm sends one generation of one token; no other rung sends any without --canary."""
    assert cli("ready", "--target", worker.target).code == 0
    assert "Inference.Generate" not in [call.method for call in worker.calls]
    code, row = _row(cli, "--rung", "warm", "--target", worker.target)
    assert (code, row["rungs"]["warm"]["proof"]) == (0, "canary")
    assert [call.method for call in worker.calls].count("Inference.Generate") == 1


def test_worker_that_can_not_be_asked(cli: Cli) -> None:
    """vLLM 0.27 has no round trip: ready falls back to serving, says so, and a canary proves it after all."""
    with FakeWorker(version="0.27.0") as worker:
        ended = cli("ready", "--target", worker.target)
        assert ended.code == 0
        assert "judged by 'serving', 'admitting' can't be proved: this worker's version has no round trip" in ended.err
        code, row = _row(cli, "--target", worker.target)
        assert (code, row["judged_by"], row["rungs"]["answering"]["provable"]) == (0, "serving", False)
        code, row = _row(cli, "--canary", "--target", worker.target)
        assert (code, row["judged_by"], row["rungs"]["answering"]["proof"]) == (0, "admitting", "canary")


def test_a_line_with_what_to_do(nobody: str, cli: Cli) -> None:
    """For a port that refuses, the line is the one that other verbs have, with what to check."""
    ended = cli("ready", "--target", nobody)
    assert "worker unreachable (UNAVAILABLE" in ended.err
    assert "check the address" in ended.err


def test_fleet(worker: FakeWorker, nobody: str, cli: Cli) -> None:
    """One worker ready and one away: 6, and both ladders are shown, five rungs each."""
    ended = cli("ready", "--target", worker.target, "--target", nobody)
    assert ended.code == 6
    assert [line.split()[:2] for line in ended.out.splitlines()[1:]] == [
        [target, rung]
        for target in (worker.target, nobody)
        for rung in ("reachable", "serving", "answering", "admitting", "warm")
    ]


def test_times_are_local_in_tables_and_utc_in_data(worker: FakeWorker) -> None:
    """A table has the reader's own zone, data has ISO 8601 in UTC."""
    env = {"TZ": "XYZ-05:30"}
    table = run("ready", "--target", worker.target, env=env)
    assert " XYZ" in table.out.splitlines()[1]
    (row,) = json.loads(run("ready", "--target", worker.target, "-o", "json", env=env).out)
    assert row["rungs"]["serving"]["since"].endswith("Z")
