"""Stopping while streams are open: signals for the two commands, closing and forgetting for the clients."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.cli.process import COMMAND as CLI
from tests.cli.process import Ended, ended, environment
from tests.exporter.process import COMMAND as EXPORTER
from tests.exporter.process import Exporter
from tests.inprocess.conftest import named_threads
from tests.real.waiting import eventually
from vllm_cp import AsyncControlClient, ControlClient, HealthStatus
from vllm_cp.testing import FakeFleet, FakeWorker

READY = 'vllm_cp_worker_ready{pool="default",worker="%s"} 1.0\n'
#: Everything is promised to be gone by then.
GONE_WITHIN_S = 3.0
AS_PROCESS_ONE = ["unshare", "--pid", "--fork"]


def _can_be_process_one() -> bool:
    try:
        return subprocess.run([*AS_PROCESS_ONE, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


process_one = pytest.mark.skipif(not _can_be_process_one(), reason="unshare --pid is not allowed here")


def _only_child(process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> int:
    """The process that calls itself 1."""
    listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text
    return int(eventually(listed, 5.0, "the child of unshare"))


# -- the command line -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("signals", "as_one", "expected"),
    [
        ([signal.SIGINT], False, Ended(130, "", "vllm-cp: interrupted\n")),
        ([signal.SIGINT, signal.SIGINT], False, Ended(130, "", "vllm-cp: interrupted\n")),
        ([signal.SIGTERM], False, Ended(-signal.SIGTERM, "", "")),
        pytest.param([signal.SIGINT], True, Ended(130, "", "vllm-cp: interrupted\n"), marks=process_one),
        pytest.param([signal.SIGTERM], True, Ended(143, "", ""), marks=process_one),
    ],
)
def test_the_command_line(
    signals: list[signal.Signals], as_one: bool, expected: Ended, fake: FakeWorker, nobody: str
) -> None:
    """Ctrl-C, once or twice, is 130 and one line; SIGTERM is the end without a word, 143 for process 1 too."""
    with FakeWorker() as silent:
        silent.freeze()
        targets = [f"--target={target}" for target in (fake.target, silent.target, nobody)]
        process = subprocess.Popen(
            [*(AS_PROCESS_ONE if as_one else ()), *CLI, "health", "--timeout", "30", *targets],
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        silent.wait_for_call("Check", timeout_s=20)
        pid = _only_child(process) if as_one else process.pid
        began = time.monotonic()
        for number in signals:
            os.kill(pid, number)
        got = ended(process, timeout_s=20)
        assert time.monotonic() - began < GONE_WITHIN_S
    assert got == expected


# -- the daemon -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("signals", "as_one"),
    [
        ([signal.SIGINT, signal.SIGINT], False),
        pytest.param([signal.SIGINT], True, marks=process_one),
        pytest.param([signal.SIGTERM], True, marks=process_one),
    ],
)
def test_the_daemon(signals: list[signal.Signals], as_one: bool, fake: FakeWorker, nobody: str) -> None:
    """Asked twice in a breath, or as process 1, with a healthy, a silent and an absent worker: gone, no traceback."""
    command = [*AS_PROCESS_ONE, *EXPORTER] if as_one else list(EXPORTER)
    with FakeWorker() as silent:
        silent.hang()
        targets = [f"--target={target}" for target in (fake.target, silent.target, nobody)]
        with Exporter(*targets, command=command) as exporter:
            exporter.eventually(lambda text: READY % fake.target in text)
            silent.wait_for_call("IsPaused")
            pid = _only_child(exporter.process) if as_one else exporter.process.pid
            for number in signals[:-1]:
                os.kill(pid, number)
            code, took = exporter.stop(signals[-1], pid)
            assert took < GONE_WITHIN_S
            # The second one comes while the first one is being obeyed, or is merged with it.
            assert code in ((0, 1) if len(signals) > 1 else (0,))
            assert not [line for line in exporter.lines if "Traceback" in line or "rror" in line]


# -- the clients ------------------------------------------------------------------------------


async def test_leaving_by_an_exception_ends_a_watch_elsewhere(fake: FakeWorker) -> None:
    """When an exception leaves the client's block, the task that iterates a watch sees the iteration end."""
    seen: list[HealthStatus] = []
    watching = asyncio.Event()

    async def look(statuses: AsyncIterator[HealthStatus]) -> str:
        async for status in statuses:
            seen.append(status)
            watching.set()
        return "the end"

    looking: list[asyncio.Task[str]] = []

    async def leave() -> None:
        async with AsyncControlClient(fake.target) as client:
            looking.append(asyncio.create_task(look(client.watch())))
            await asyncio.wait_for(watching.wait(), 5)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await leave()
    assert await asyncio.wait_for(looking[0], 5) == "the end"
    assert seen == [HealthStatus.SERVING]


def test_leaving_by_an_exception_ends_a_watch_in_another_thread(fake: FakeWorker) -> None:
    """The same with threads, and none of them is left."""
    seen: list[HealthStatus | str] = []
    watching = threading.Event()

    def look(client: ControlClient) -> None:
        for status in client.watch():
            seen.append(status)
            watching.set()
        seen.append("the end")

    looking: list[threading.Thread] = []

    def leave() -> None:
        with ControlClient(fake.target) as client:
            looking.append(threading.Thread(target=look, args=(client,)))
            looking[0].start()
            assert watching.wait(5)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        leave()
    looking[0].join(5)
    assert seen == [HealthStatus.SERVING, "the end"]
    eventually(lambda: not named_threads("vllm-cp-watch"), 5.0, "the threads to end")


FORGOTTEN = {
    "client": "client = ControlClient(target); client.check()",
    "client, collected": "client = ControlClient(target); client.check(); del client; gc.collect()",
    "watch": "client = ControlClient(target); watch = client.watch(); next(watch)",
    "watch, collected": "watch = ControlClient(target).watch(); next(watch); del watch; gc.collect()",
    "watch in a thread": """
client = ControlClient(target)
seen = threading.Event()
threading.Thread(target=lambda: [seen.set() for _ in client.watch()], daemon=True).start()
assert seen.wait(10)
""",
    "ladder": "client = ControlClient(target); ladder = Ladder(client); ladder.observe()",
    "async client": """
async def main():
    await AsyncControlClient(target).check()
asyncio.run(main())
""",
    "async watch": """
async def main():
    client = AsyncControlClient(target)
    watch = client.watch()
    await anext(watch)
asyncio.run(main())
""",
    "async watch in a task": """
async def main():
    client = AsyncControlClient(target)
    seen = asyncio.Event()
    async def look():
        async for _ in client.watch():
            seen.set()
    task = asyncio.create_task(look())
    await seen.wait()
asyncio.run(main())
""",
    "async client of two loops": """
client = AsyncControlClient(target)
asyncio.run(client.check())
asyncio.run(client.check())
""",
}
HEAD = """
import asyncio, gc, sys, threading
from vllm_cp import AsyncControlClient, ControlClient
from vllm_cp.readiness import Ladder
target = sys.argv[1]
"""
TAIL = """
print([t.name for t in threading.enumerate() if not t.daemon])
"""


@pytest.mark.parametrize("what", FORGOTTEN)
def test_what_nobody_closed(what: str, fake: FakeWorker) -> None:
    """A client that is dropped without being closed costs no warning, no word and no hang at the end of the process.

    Each several times at once: what hangs at the end hangs by chance.
    """
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", HEAD + FORGOTTEN[what] + TAIL, fake.target]
    runs = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(4 if what == "watch" else 1)
    ]
    try:
        for run in runs:
            out, err = run.communicate(timeout=30)
            assert (run.returncode, out, err) == (0, "['MainThread']\n", "")
    finally:
        for run in runs:
            run.kill()
            run.communicate()


def test_many_streams_are_let_go(nobody: str) -> None:
    """Stopping takes no longer with many streams open."""
    with FakeFleet(50) as fleet:
        flags = [f"--target={target}" for target in (*fleet.targets, nobody)]
        with Exporter(*flags, "--probe-interval", "1") as exporter:
            exporter.eventually(lambda text: text == "ready\n", "/-/ready", 30)
            exporter.eventually(lambda text: 'state="ready"} 50.0' in text, timeout_s=30)
            code, took = exporter.stop()
            assert code == 0
            assert took < GONE_WITHIN_S
