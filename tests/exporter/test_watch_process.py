"""The daemon as a process in the middle of somebody's outage: restarted, stopped for a while, without a place to write.

Faults are counted after the window of five seconds, which no flag shortens: a test that waits for a count takes longer.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.exporter.pages import FORMS, Page
from tests.exporter.process import Exporter
from tests.recovery.pace import EXACT_S, RETURN_S
from vllm_cp.testing import FakeHttp, FakeWorker

FAST = ("--probe-interval", "0.2", "--answer-within", "1")


def read(text: str) -> Page:
    """A page as Prometheus reads it."""
    return Page(FORMS["text"][1](text))


def page(exporter: Exporter) -> Page:
    """The page as it is now."""
    return read(exporter.get("/metrics"))


def until(exporter: Exporter, check: Callable[[Page], object], timeout_s: float = 15.0) -> Page:
    """The page, once it is so."""
    return read(exporter.eventually(lambda text: bool(check(read(text))), timeout_s=timeout_s))


def stays(exporter: Exporter, check: Callable[[Page], object], for_s: float) -> None:
    """The page is so all the time; fails as soon as it is not."""
    with pytest.raises(TimeoutError):
        until(exporter, lambda seen: not check(seen), for_s)


def total(seen: Page, name: str, worker: str) -> float:
    """All samples of a counter of one worker."""
    return float(sum(sample.value for sample in seen.of(name) if sample.labels["worker"] == worker))


def saved(path: Path, worker: str) -> dict[str, Any]:
    """What the state file says of a worker; nothing yet while there is none."""
    try:
        known: dict[str, Any] = json.loads(path.read_text())["workers"].get(worker, {})
    except FileNotFoundError:
        return {}
    return known


def episodes(exporter: Exporter) -> list[dict[str, Any]]:
    """The ring, newest first."""
    found: list[dict[str, Any]] = json.loads(exporter.get("/api/v1/episodes"))["episodes"]
    return found


OLD = {
    "cause": "engine_silent",
    "start": 1_700_000_000.0,
    "end": 1_700_000_030.0,
    "kind": "resumed",
    "duration_s": 30.0,
    "instance_id": "before",
    "detail": "long ago",
}


def test_b17_c_a_restart_in_the_middle_of_an_outage(tmp_path: Path) -> None:
    """The daemon is killed while a worker is down and started again: the fault goes on from where it began, nothing
    recovers that did not, counters start at zero, what was counted is not counted again, and the ring is kept."""
    state = tmp_path / "state.json"
    past = {"instance_id": "one", "first_ready": 1_690_000_000.0, "was_admitting": True, "counted": False}
    known = {
        "fine": {**past, "open_fault": None, "episodes": []},
        "down": {**past, "open_fault": None, "episodes": [OLD]},
        "lost": {**past, "open_fault": {**OLD, "end": None, "kind": None}, "counted": True, "episodes": []},
    }
    state.write_text(json.dumps({"format": "vllm-cp-exporter-state", "version": 1, "workers": known}))
    with FakeWorker() as fine, FakeWorker() as down:
        for worker in (fine, down):
            worker.set(instance_id="one")
        targets = {"fine": fine.target, "down": down.target, "lost": "127.0.0.1:9"}
        arguments = [*FAST, *(f"--target={name}={where}" for name, where in targets.items()), f"--state-file={state}"]
        with Exporter(*arguments) as first:
            until(first, lambda seen: seen["worker_ready", "fine"] == seen["worker_ready", "down"] == 1)
            began = time.time()
            down.stop()
            seen = until(first, lambda seen: seen["worker_fault_active", "down"] == 1)
            start = seen["worker_fault_start_timestamp_seconds", "down"]
            assert start is not None
            assert abs(start - began) < EXACT_S
            first.eventually(lambda _: bool(saved(state, "down").get("open_fault")))
            first.stop(signal.SIGKILL)
        with Exporter(*arguments) as second:
            seen = until(second, lambda seen: seen["worker_not_ready", "down", "unreachable"] == 1)
            assert seen["worker_fault_active", "down"] == 1
            assert seen["worker_fault_start_timestamp_seconds", "down"] == pytest.approx(start, abs=1e-3)
            assert (total(seen, "worker_faults_total", "down"), total(seen, "worker_fault_ends_total", "down")) == (
                0,
                0,
            )
            assert seen["worker_first_ready_timestamp_seconds", "fine"] == 1_690_000_000.0
            assert [(found["worker"], found["kind"]) for found in episodes(second)] == [
                ("down", None), ("down", "resumed"), ("lost", None)
            ]  # fmt: skip
            stays(second, lambda seen: total(seen, "worker_fault_ends_total", "down") == 0, 1.0)
            down.restart(instance_id="two")
            back = time.time()
            seen = until(second, lambda seen: seen["worker_ready", "down"] == 1)
            assert time.time() - back < RETURN_S + EXACT_S
            seen = until(second, lambda seen: seen["worker_fault_ends_total", "down", "replaced"] == 1)
            assert seen["worker_faults_total", "down", "unreachable"] == total(seen, "worker_faults_total", "down") == 1
            took = seen["worker_last_recovery_duration_seconds", "down"]
            assert took is not None
            assert -EXACT_S < took - (back - began) < RETURN_S + EXACT_S
            assert [found["kind"] for found in episodes(second) if found["worker"] == "down"] == ["replaced", "resumed"]
            assert seen["worker_fault_active", "lost"] == 1
            assert total(seen, "worker_faults_total", "lost") == total(seen, "worker_faults_total", "fine") == 0
            assert second.stop()[0] == 0
        assert saved(state, "down")["open_fault"] is None
        assert len(saved(state, "down")["episodes"]) == 2


def test_a_daemon_that_stood_still_invents_nothing(tmp_path: Path) -> None:
    """The daemon is stopped for longer than any limit and goes on: what it did not watch, it does not accuse. A worker
    that hangs since before it was first seen has no fault either."""
    with FakeWorker() as fine, FakeWorker() as slow, FakeWorker() as broken:
        broken.hang()
        targets = [f"--target={name}={fake.target}" for name, fake in (("fine", fine), ("slow", slow), ("no", broken))]
        with Exporter(*FAST, *targets) as exporter:
            until(exporter, lambda seen: seen["worker_ready", "fine"] == seen["worker_ready", "slow"] == 1)
            until(exporter, lambda seen: seen["worker_not_ready", "no", "engine_silent"] == 1)
            os.kill(exporter.process.pid, signal.SIGSTOP)
            slow.hang()
            time.sleep(2.0)  # more than --answer-within and an interval
            slow.unhang()
            os.kill(exporter.process.pid, signal.SIGCONT)

            def untouched(seen: Page) -> bool:
                counted = sum(total(seen, "worker_faults_total", name) for name in ("fine", "slow", "no"))
                return counted == sum(seen.by("worker_fault_active", "worker").values()) == 0

            stays(exporter, untouched, 2.0)
            seen = page(exporter)
            assert (seen["worker_ready", "fine"], seen["worker_ready", "slow"]) == (1, 1)
            assert seen["worker_health", "no", "serving"] == 1
            assert episodes(exporter) == []
            assert not [line for line in exporter.lines if "event=fault_" in line]


def test_a_state_file_that_is_not_ours(tmp_path: Path) -> None:
    """A corrupt or foreign state file costs one warning and its place; the daemon keeps its own from then on."""
    state = tmp_path / "state.json"
    content = b'{"format": "other", "version": 1, "workers": {}}'
    state.write_bytes(content)
    with FakeWorker() as worker, Exporter(*FAST, f"--target=a={worker.target}", f"--state-file={state}") as exporter:
        until(exporter, lambda seen: seen["worker_ready", "a"] == 1)
        exporter.eventually(lambda _: bool(saved(state, "a").get("was_admitting")))
        assert page(exporter)["state_file_ok",] == 1
        assert len([line for line in exporter.lines if "level=warning" in line]) == 1
        assert exporter.stop()[0] == 0
    assert {entry.read_bytes() for entry in tmp_path.glob("*.unreadable-*")} == {content}


def test_a_full_disk(tmp_path: Path) -> None:
    """Without space to write to the daemon goes on: one warning, and state_file_ok is 0."""
    state = tmp_path / "state.json"
    # A process that may not write a byte to any file: what a full disk is, for whoever writes.
    script = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); import sys;"
    command = (sys.executable, "-c", f"{script} from vllm_cp_exporter.app import main; sys.exit(main())")
    with (
        FakeWorker() as worker,
        Exporter(*FAST, f"--target=a={worker.target}", f"--state-file={state}", command=command) as exporter,
    ):
        seen = until(exporter, lambda seen: seen["state_file_ok",] == 0 and seen["worker_ready", "a"] == 1)
        assert total(seen, "worker_faults_total", "a") == 0
        assert exporter.get("/-/healthy") == "healthy\n"
        stays(exporter, lambda seen: seen["state_file_ok",] == 0, 1.5)
        assert len([line for line in exporter.lines if "level=warning" in line]) == 1
        assert exporter.stop()[0] == 0
        assert not [line for line in exporter.lines if "Traceback" in line]
    assert not state.exists()


def test_b15_stopping_in_the_middle_of_everything(tmp_path: Path) -> None:
    """Asked to stop while one worker is silent, one frozen, one a black hole, one slow over HTTP and a fault is open:
    gone within two seconds, with exit code 0, and the fault is kept."""
    state = tmp_path / "state.json"
    with (
        socket.create_server(("127.0.0.1", 0)) as hole,
        FakeWorker() as silent,
        FakeWorker() as frozen,
        FakeWorker() as dead,
        FakeHttp() as slow,
    ):
        slow.delay("*", 3600)
        targets = {
            "silent": silent.target,
            "frozen": frozen.target,
            "dead": dead.target,
            "hole": f"127.0.0.1:{hole.getsockname()[1]}",
            "slow": slow.url,
        }
        named = [f"--target={name}={where}" for name, where in targets.items()]
        with Exporter(*FAST, *named, f"--state-file={state}") as exporter:
            until(exporter, lambda seen: all(seen["worker_ready", name] for name in ("silent", "frozen", "dead")))
            silent.hang()
            frozen.freeze()
            dead.die(reported=True)
            silent.wait_for_call("IsPaused")
            until(exporter, lambda seen: all(seen["worker_fault_active", n] for n in ("silent", "frozen", "dead")))
            code, took = exporter.stop()
            assert (code, exporter.stdout) == (0, "")
            assert took < 2.0
            exporter.event("stopped")
            assert not [line for line in exporter.lines if "Traceback" in line or "level=error" in line]
        frozen.thaw()
    assert saved(state, "dead")["open_fault"]["cause"] in {"engine_reported", "engine_error"}
    assert saved(state, "silent")["open_fault"]["cause"] == "engine_silent"
    assert saved(state, "hole")["open_fault"] is None
