"""Any source for synchronous code, by a thread that is asked for."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator

import pytest

from vllm_cp.discovery import DiscoveryFailed, DiscoveryStatus, InThread, StaticDiscoverer, SyncDiscoverer, TargetSet


class Scripted:
    name = "scripted"
    status = DiscoveryStatus(error="no such name")

    def __init__(self, *sets: TargetSet | Exception) -> None:
        self._sets = sets

    async def stream(self) -> AsyncIterator[TargetSet]:
        for one in self._sets:
            if isinstance(one, Exception):
                raise one
            yield one


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "vllm-cp-discovery"]


def test_a_source_is_followed_by_one_thread_for_as_long_as_it_is_wanted() -> None:
    """look shows the newest set; the thread has a name and ends with close."""
    source = StaticDiscoverer(["a:1"])
    moved = threading.Event()
    with InThread(source) as followed:
        assert isinstance(followed, SyncDiscoverer)
        assert threads() == ["vllm-cp-discovery"]
        assert [target.key for target in followed.look().targets] == ["a:1"]
        source.replace(["b:1"])
        while [target.key for target in followed.look().targets] != ["b:1"]:
            moved.wait(0.005)
        assert (followed.name, followed.status) == ("static", source.status)
    assert threads() == []
    followed.close()


def test_no_set_in_time_is_an_error_that_says_why() -> None:
    """Nothing known is not an empty fleet."""
    with InThread(Scripted(), first_set_s=0.05) as followed, pytest.raises(DiscoveryFailed, match="no such name"):
        followed.look()


def test_a_thread_that_was_not_started_is_told() -> None:
    """The likely mistake has its own words."""
    with pytest.raises(DiscoveryFailed, match="not started"):
        InThread(_quiet(), first_set_s=0.01).look()


def _quiet() -> Scripted:
    made = Scripted()
    made.status = DiscoveryStatus()
    return made


def test_a_defect_of_the_source_is_raised_where_it_is_looked_for() -> None:
    """A thread must not die in silence."""
    with InThread(Scripted(TargetSet(), ZeroDivisionError())) as followed:
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                look_for_ever(followed)


def look_for_ever(source: InThread) -> None:
    while True:
        source.look()


def test_a_second_start_is_refused() -> None:
    """One thread per source."""
    with InThread(StaticDiscoverer([])) as followed, pytest.raises(RuntimeError, match="already"):
        followed.start()
