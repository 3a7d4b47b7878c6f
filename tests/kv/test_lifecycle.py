"""Beginning, ending, and everything that may go wrong around it: no hang, no leak, no traceback."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.kv.collect import STORED, auntil, batches, fast, seqs, state, until, words
from vllm_cp.errors import ClientClosed, ForkedClient, WorkerUnreachable
from vllm_cp.kv import AsyncSubscriber, NoticeKind, SourceState, StateChange, Subscriber
from vllm_cp.kv._sockets import lease
from vllm_cp.models.kv_source import Address, KvEventSource
from vllm_cp.testing import FakeKvPublisher

#: Nobody listens there: port 1 needs privileges and has no service.
ABSENT = KvEventSource(transport="zmq", endpoint="tcp://*:1", live=Address(connect_to="tcp://127.0.0.1:1"))


def open_files() -> int:
    """File descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """Whatever a test does, no thread of ours outlives it."""
    yield
    gc.collect()
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline:
        left = [thread.name for thread in threading.enumerate() if thread.name.startswith("vllm-cp-kv")]
        if not left:
            return
        time.sleep(0.01)
    raise AssertionError(f"left behind: {left}")


@pytest.mark.parametrize("what", ["healthy", "silent", "absent", "replaying"])
def test_b15_closing_takes_no_time(what: str) -> None:
    """A healthy source, a silent one, one that is not there, one with a replay pending: closed within a second, while
    another thread waits for the next item, which then ends cleanly."""
    with FakeKvPublisher() as kv:
        source = ABSENT if what == "absent" else kv.source
        events = Subscriber([source], settings=fast(replay_idle_s=30.0, replay_total_s=60.0))
        seen: list[object] = []
        reading = threading.Thread(target=lambda: seen.extend(events))
        reading.start()
        if what == "absent":
            _eventually(lambda: SourceState.UNREACHABLE in [getattr(item, "state", None) for item in seen])
        else:
            kv.wait_subscribed()
        if what in ("healthy", "replaying"):
            kv.publish(STORED)
        if what == "replaying":
            kv.deafen()
            kv.drop(1)
            kv.publish(STORED)
            kv.publish(STORED)
            _eventually(lambda: kv.replay_requests)
        began = time.monotonic()
        events.close()
        reading.join(1.0)
        assert time.monotonic() - began < 1.0
        assert not reading.is_alive()
        assert events.over
        assert [stats.state for stats in events.stats().sources] == [SourceState.CLOSED]
        with pytest.raises(ClientClosed):
            events.open()
        events.close()


def _eventually(check: object) -> None:
    deadline = time.monotonic() + 5.0
    while not check():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.005)


async def test_b15_closing_while_a_task_iterates() -> None:
    """The iteration ends, and so does everything else."""
    with FakeKvPublisher() as kv:
        events = AsyncSubscriber([kv.source], settings=fast())

        async def read() -> int:
            return len([item async for item in events])

        reading = asyncio.create_task(read())
        await asyncio.to_thread(kv.wait_subscribed)
        began = time.monotonic()
        await events.close()
        await asyncio.wait_for(reading, 1.0)
        assert time.monotonic() - began < 1.0
        await events.close()
        assert [item async for item in events] == []


async def test_b15_leaving_by_an_exception_and_by_cancellation() -> None:
    """``async with`` cleans up however it is left; a cancelled wait loses no item."""
    with FakeKvPublisher() as kv:
        with pytest.raises(ZeroDivisionError):
            async with AsyncSubscriber([kv.source], settings=fast()):
                raise ZeroDivisionError
        async with AsyncSubscriber([kv.source], settings=fast()) as events:
            await auntil(events, state(SourceState.CONNECTED))
            for _ in range(5):
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(anext(events), 0.01)
            kv.wait_subscribed()
            kv.publish(STORED)
            assert seqs(await auntil(events, batches(1))) == [0]


def test_b15_dropped_without_closing() -> None:
    """Nobody closes it, nobody holds it: it goes, threads and sockets too."""
    with FakeKvPublisher() as kv:
        events = Subscriber([kv.source], settings=fast())
        until(events, state(SourceState.CONNECTED))
        del events


def test_b15_the_process_ends_with_a_subscriber_open() -> None:
    """Interpreter exit with an iteration begun and nothing closed: no hang, no output."""
    code = """
        from vllm_cp.kv import Subscriber
        from vllm_cp.testing import FakeKvPublisher
        kv = FakeKvPublisher().start()
        events = Subscriber([kv.source])
        kv.wait_subscribed if next(events) else None
        kv.close()
    """
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)], capture_output=True, timeout=20, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert time.monotonic() - began < 10


def test_a_hundred_subscribers_leave_nothing_behind() -> None:
    """Opened and closed over and over: files and threads stay flat."""
    with FakeKvPublisher() as kv:

        def once() -> None:
            with Subscriber([kv.source], settings=fast()) as events:
                until(events, state(SourceState.CONNECTED))

        once()
        files, threads = open_files(), threading.active_count()
        for _ in range(100):
            once()
        _eventually(lambda: open_files() <= files + 2)
        assert threading.active_count() <= threads


def test_all_subscribers_share_one_context() -> None:
    """However many there are, ZeroMQ's own threads are there once; the last one to close ends them."""
    with lease() as mine:
        with lease() as other:
            assert mine is other
        assert not mine.closed
    assert mine.closed


def test_in_a_forked_child_it_says_so() -> None:
    """Sockets do not survive a fork: the child is told, and the parent goes on."""
    with FakeKvPublisher() as kv, Subscriber([kv.source], settings=fast()) as events:
        until(events, state(SourceState.CONNECTED))
        events._pid += 1
        with pytest.raises(ForkedClient, match="fork"):
            events.poll()
        events._pid -= 1
        kv.wait_subscribed()
        kv.publish(STORED)
        until(events, batches(1))


def test_a_refresh_that_fails_is_said_once_and_tried_again() -> None:
    """The worker is gone too: one notice, growing pauses, and when it is back so are the sources."""
    asked: list[float] = []
    with FakeKvPublisher() as kv:

        def refresh() -> list[KvEventSource]:
            asked.append(time.monotonic())
            if len(asked) < 4:
                raise WorkerUnreachable("w:1", "Control.GetKvEventSources", "UNAVAILABLE")
            return [kv.source]

        with Subscriber([ABSENT], refresh=refresh, settings=fast()) as events:
            seen = until(events, state(SourceState.CONNECTED))
            stats = events.stats()
    notices = [item.kind for item in seen if not isinstance(item, StateChange) and hasattr(item, "kind")]
    assert notices == [NoticeKind.REFRESH_FAILED]
    assert (stats.refreshes, stats.refresh_failures) == (4, 3)
    assert words(seen) == ["departed"]
    assert [source.connects for source in stats.sources] == [1]


async def test_a_refresh_that_hangs_holds_nobody_up() -> None:
    """It is cancelled when the subscriber closes."""
    begun = asyncio.Event()

    async def refresh() -> list[KvEventSource]:
        begun.set()
        await asyncio.sleep(60)
        return []

    async with AsyncSubscriber(None, refresh=refresh, settings=fast()):
        await asyncio.wait_for(begun.wait(), 5.0)


def test_a_bug_in_the_listening_thread_reaches_the_consumer() -> None:
    """It does not end as silence."""
    with FakeKvPublisher() as kv, Subscriber([kv.source], settings=fast()) as events:
        until(events, state(SourceState.CONNECTED))
        assert events._listener is not None
        events._listener._order(lambda: 1 / 0)  # type: ignore[arg-type,return-value]
        with pytest.raises(RuntimeError, match="listening thread"):
            until(events, batches(1))


def test_without_the_extra_it_says_what_to_install() -> None:
    """pyzmq or msgspec is missing: one clear line; the fakes that need neither still work."""
    code = """
        import sys
        sys.modules["zmq"] = None
        import importlib.util
        find = importlib.util.find_spec
        importlib.util.find_spec = lambda name, package=None: None if name == "zmq" else find(name, package)
        from vllm_cp.testing import FakeKvPublisher, FakeWorker
        for use in (lambda: __import__("vllm_cp.kv"), FakeKvPublisher):
            try:
                use()
            except ValueError as error:
                print(type(error).__name__, error)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    line = 'ConfigError reading KV-cache events needs zmq, which is not installed: pip install "vllm-cp[kv]"'
    assert done.stdout.splitlines() == [line, line]


def test_dead_replay_addresses_keep_nobody_from_a_replay() -> None:
    """Three workers whose replay never answers, and one whose does: it does not wait for the patience of the others."""
    slow = fast(replay_idle_s=20.0)
    with ExitStack() as all_of_them:
        fakes = [all_of_them.enter_context(FakeKvPublisher()) for _ in range(4)]
        readers = [all_of_them.enter_context(Subscriber([kv.source], settings=slow)) for kv in fakes]
        for kv, events in zip(fakes, readers, strict=True):
            kv.wait_subscribed()
            if kv is not fakes[-1]:
                kv.deafen()
            kv.publish(STORED)
            until(events, batches(1))
            kv.drop(1)
            kv.publish(STORED)
            kv.publish(STORED)
        assert seqs(until(readers[-1], batches(2), timeout_s=10.0)) == [1, 2]
