"""FakeFleet: many workers, one other process, nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.real.waiting import eventually
from vllm_cp import AsyncControlClient, ControlClient, ControlError, HealthStatus, NotSupported, OutOfTime
from vllm_cp.testing import FakeFleet


def gone(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


async def test_a_hundred_workers_answer_side_by_side() -> None:
    """A hundred workers start within seconds, each with an identity of its own, all reachable from one loop."""
    began = time.monotonic()
    async with FakeFleet(100) as fleet:
        assert time.monotonic() - began < 10
        assert len(set(fleet.targets)) == len(fleet) == 100
        clients = [AsyncControlClient(target) for target in fleet.targets]
        infos = await asyncio.gather(*(client.server_info() for client in clients))
        assert len({info.instance_id for info in infos}) == 100
        await asyncio.gather(*(client.close() for client in clients))


def test_each_worker_has_its_own_fate() -> None:
    """One worker's trouble is its own: the verbs are those of a FakeWorker and reach that worker only."""
    with FakeFleet(4, version=["0.33.0", "0.27.0"], ranks=2) as fleet:
        clients = [ControlClient(target) for target in fleet.targets]
        fleet.worker(0).die(reported=True)
        fleet.worker(2).hang(rank=1)
        assert [client.check() for client in clients] == [HealthStatus.NOT_SERVING, *[HealthStatus.SERVING] * 3]
        with pytest.raises(OutOfTime):
            clients[2].is_paused(timeout_s=0.2)
        with pytest.raises(NotSupported):
            clients[1].is_paused()
        fleet.worker(2).unhang()
        assert clients[2].is_paused() is False
        assert [call.method for call in fleet.worker(3).calls] == ["Health.Check"]
        assert fleet.worker(2).calls[-1].deadline_s == pytest.approx(5.0, abs=0.5)
        for client in clients:
            client.close()


def test_a_worker_of_a_fleet_stops_and_comes_back() -> None:
    """Stop and restart keep the address; the watch on it breaks and the new instance is another one."""
    with FakeFleet(2) as fleet, ControlClient(fleet.targets[0]) as client:
        worker = next(iter(fleet))
        before = client.server_info().instance_id
        watch = client.watch()
        assert next(watch) is HealthStatus.SERVING
        worker.stop()
        with pytest.raises(ControlError):
            next(watch)
        worker.restart()
        assert worker.target == fleet.targets[0]

        def back() -> bool:
            try:
                return client.server_info().instance_id != before
            except ControlError:
                return False

        eventually(back, 5.0, "the restarted worker")


def test_waiting_for_one_worker_does_not_hold_up_another() -> None:
    """A wait that takes its time leaves the other verbs free."""
    with FakeFleet(2) as fleet, ControlClient(fleet.targets[1]) as client:
        with pytest.raises(TimeoutError, match="Abort"):
            fleet.worker(0).wait_for_call("Abort", timeout_s=0.05)
        fleet.worker(1).set(paused=True)
        assert client.is_paused()
        assert fleet.worker(1).wait_for_call("IsPaused")[0].code == "OK"


def test_mistakes_cross_the_pipe() -> None:
    """A mistake in a verb is raised here, not lost over there."""
    with FakeFleet(1) as fleet:
        with pytest.raises(TypeError, match="total_kv_blocks"):
            fleet.worker(0).set(total_kv_block=1)
        with pytest.raises(ValueError, match="no rank"):
            fleet.worker(0).hang(rank=5)
    with pytest.raises(RuntimeError, match="not running"):
        fleet.worker(0).hang()
    with pytest.raises(ValueError, match="1 worker"):
        FakeFleet(0)
    with pytest.raises(ValueError, match=r"0\.27\.0"):
        FakeFleet(1, version="0.1.0").start()


def test_closing_leaves_no_process() -> None:
    """The process is gone when the with block is, and closing twice is fine."""
    with FakeFleet(3) as fleet:
        pid = fleet.pid
        assert pid is not None
        assert not gone(pid)
    assert gone(pid)
    fleet.close()


def test_a_fleet_does_not_outlive_its_parent() -> None:
    """A parent that is killed without a chance to clean up takes its fleet with it."""
    script = (
        "import sys, time\nfrom vllm_cp.testing import FakeFleet\n"
        "fleet = FakeFleet(2).start()\nprint(fleet.pid, flush=True)\ntime.sleep(60)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=env) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert not gone(pid)
        parent.send_signal(signal.SIGKILL)
        parent.wait(5)
        eventually(lambda: gone(pid), 5.0, "the fleet to end")
