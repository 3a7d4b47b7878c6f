"""A client that crosses an event loop, a fork or a thread: it works, or it says at once why not."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from contextlib import aclosing

from vllm_cp import AsyncControlClient, ControlClient, HealthStatus
from vllm_cp.testing import FakeWorker

# -- event loops ------------------------------------------------------------------------------

AT_MODULE_LEVEL = """
import asyncio, sys
from vllm_cp import AsyncControlClient
client = AsyncControlClient(sys.argv[1])

async def ask():
    watch = client.watch()
    said = (await client.server_info(timeout_s=2)).engine_version, (await anext(watch)).value
    await watch.aclose()
    return said

print(*asyncio.run(ask()))
print(*asyncio.run(ask()))
asyncio.run(client.close())
"""


def test_a_client_at_module_level(fake: FakeWorker) -> None:
    """Made at import, outside of any loop, and handed to asyncio.run twice: it works, without a word about loops."""
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", AT_MODULE_LEVEL, fake.target]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "0.33.0 SERVING\n" * 2, "")


def test_made_in_one_run_and_used_in_the_next(fake: FakeWorker) -> None:
    """A client that was made and used inside one asyncio.run serves the next one, watches included."""

    async def make() -> AsyncControlClient:
        client = AsyncControlClient(fake.target)
        assert await client.check() is HealthStatus.SERVING
        return client

    async def use(client: AsyncControlClient) -> HealthStatus:
        async with client:
            assert (await client.server_info(timeout_s=2)).engine_version == "0.33.0"
            async with aclosing(client.watch()) as watch:
                return await anext(watch)

    assert asyncio.run(use(asyncio.run(make()))) is HealthStatus.SERVING


# -- forks ------------------------------------------------------------------------------------

# In processes of their own: forking one that has a gRPC server in it, as this one may have, is more than gRPC survives.
HEAD = """
import asyncio, multiprocessing, os, sys, time
from vllm_cp import AsyncControlClient, ControlClient, ForkedClient
target = sys.argv[1]

def in_a_child(work):
    ours, theirs = multiprocessing.Pipe()
    def child():
        began = time.monotonic()
        try:
            said = work()
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        theirs.send((said, time.monotonic() - began))
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    said, took = ours.recv() if ours.poll(15) else ("hangs", 15)
    process.join(5)
    assert took < 2, (said, took)
    assert process.exitcode == 0, process.exitcode
    return said

client = ControlClient(target)
"""
TOLD = """
client.server_info()
unused = AsyncControlClient(target)
watch = client.watch()
next(watch)
for work in (
    lambda: client.server_info(timeout_s=2),
    lambda: client.abort(["a"], timeout_s=2),
    lambda: next(client.watch()),
    lambda: asyncio.run(unused.server_info(timeout_s=2)),
    lambda: client.close(),
):
    print(in_a_child(work))
print(client.server_info().engine_version)
watch.close()
client.close()
"""
ANEW = """
client.server_info()

def anew():
    client.close()
    with ControlClient(target) as own:
        return own.server_info(timeout_s=2).engine_version, next(own.watch()).value

async def aanew():
    async with AsyncControlClient(target) as own:
        watch = own.watch()
        said = (await own.server_info(timeout_s=2)).engine_version, (await anext(watch)).value
        await watch.aclose()
        return said

print(*in_a_child(anew))
print(*in_a_child(lambda: asyncio.run(aanew())))
print(client.server_info().engine_version)
client.close()
"""
# A server that forks its workers after it asked something, and ends them the way an interpreter ends.
WEB = """
client.server_info()
workers = []
for number in range(3):
    pid = os.fork()
    if pid == 0:
        with client:
            try:
                client.server_info(timeout_s=2)
            except ForkedClient:
                own = ControlClient(target)
                sys.exit(0 if own.check(timeout_s=2).value == "SERVING" else 3)
        sys.exit(4)
    workers.append(pid)
print(*[os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in workers])
"""


def _run(script: str, target: str) -> tuple[int, str, str]:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", HEAD + script, target]
    # gRPC mentions each fork.
    quiet = {**os.environ, "GRPC_VERBOSITY": "NONE"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False, env=quiet)
    return ended.returncode, ended.stdout, ended.stderr


def test_a_forked_child_is_told_at_once(fake: FakeWorker) -> None:
    """A client that was used before a fork refuses in the child, every way; closing it there is fine; the parent's
    goes on."""
    code, out, err = _run(TOLD, fake.target)
    assert (code, err) == (0, "")
    told = f"ForkedClient: {fake.target}: this client was made before fork(); make a new one in the child process"
    assert out.splitlines() == [told, told, told, told, "None", "0.33.0"]


def test_a_child_may_do_as_it_is_told(fake: FakeWorker) -> None:
    """A new client in the child works, in both colours."""
    assert _run(ANEW, fake.target) == (0, "0.33.0 SERVING\n0.33.0 SERVING\n0.33.0\n", "")


def test_forked_web_workers(fake: FakeWorker) -> None:
    """Workers that a web server forks after it used the client are told, make their own, and end in order."""
    assert _run(WEB, fake.target) == (0, "0 0 0\n", "")


# -- threads ----------------------------------------------------------------------------------


def test_twenty_threads_at_once(fake: FakeWorker) -> None:
    """Twenty threads call one client in the same moment, each with reads, a change and a watch: all are served."""
    start = threading.Barrier(20)
    seen: list[tuple[str, HealthStatus]] = []
    with ControlClient(fake.target) as client:

        def ask(number: int) -> None:
            start.wait(10)
            client.abort([f"request-{number}"])
            watch = client.watch()
            seen.append((client.server_info().engine_version, next(watch)))
            watch.close()  # type: ignore[attr-defined]

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert seen == [("0.33.0", HealthStatus.SERVING)] * 20
    aborted = {call.request_ids for call in fake.calls if call.method == "Control.Abort"}
    assert aborted == {(f"request-{number}",) for number in range(20)}
