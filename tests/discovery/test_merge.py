"""Several sources as one."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.discovery.following import Following, until
from vllm_cp import ConfigError
from vllm_cp.discovery import DiscoveredTarget, DiscoveryStatus, Merged, StaticDiscoverer, TargetSet


class Scripted:
    """A source that yields what it is given and then ends, or fails."""

    def __init__(self, name: str, *sets: TargetSet | Exception, status: DiscoveryStatus | None = None) -> None:
        self.name = name
        self.status = status or DiscoveryStatus()
        self._sets = sets
        self.closed = False

    async def stream(self) -> AsyncIterator[TargetSet]:
        try:
            for one in self._sets:
                if isinstance(one, Exception):
                    raise one
                yield one
        finally:
            self.closed = True


async def test_sources_are_joined_in_order() -> None:
    """The merged set holds every source's targets, and follows each of them."""
    one, two = StaticDiscoverer(["a:1"], name="one"), StaticDiscoverer(["b:1"], name="two")
    merged = Merged([one, two])
    async with Following(merged) as seen:
        await seen.until(lambda targets: len(targets.targets) == 2)
        assert seen.keys == ["a:1", "b:1"]
        assert merged.synced
        one.replace([])
        await seen.until(lambda targets: len(targets.targets) == 1)
        assert seen.keys == ["b:1"]


async def test_the_first_source_wins_a_key_and_the_clash_is_told() -> None:
    """Two sources that give one key are a mistake somewhere: it is shown, and goes away with its cause."""
    one, two = StaticDiscoverer(["a:1"], name="one"), StaticDiscoverer(["a:1"], name="two", pool="other")
    merged = Merged([one, two])
    async with Following(merged) as seen:
        await until(lambda: "a:1: given by more than one source" in (merged.status.error or ""))
        await seen.until(lambda targets: targets.targets[0].pool == "default")
        one.replace([])
        await seen.until(lambda targets: targets.targets[0].pool == "other")
        assert merged.status.error is None


async def test_the_status_is_that_of_the_worst() -> None:
    """The oldest success, none while a source has none, and every error with the name of its source."""
    good = StaticDiscoverer([], name="good")
    bad = Scripted("bad", status=DiscoveryStatus(last_success=5.0, error="no such file"))
    assert Merged([good, bad]).status == DiscoveryStatus(last_success=5.0, error="bad: no such file")
    bad.status = DiscoveryStatus()
    assert Merged([good, bad]).status.last_success is None
    assert set(Merged([good, bad]).statuses) == {"good", "bad"}


async def test_a_source_that_ends_keeps_its_last_set() -> None:
    """Ending isn't an empty set: the others go on and so do its workers."""
    worker = DiscoveredTarget(key="a:1", target="a:1")
    lasting = StaticDiscoverer([], name="lasting")
    async with Following(Merged([Scripted("ending", TargetSet((worker,))), lasting])) as seen:
        await seen.until(lambda targets: len(targets.targets) == 1)
        lasting.replace(["b:1"])
        await seen.until(lambda targets: len(targets.targets) == 2)


async def test_a_defect_of_one_source_is_raised_and_the_others_are_closed() -> None:
    """Trouble is a status; an exception is a bug, and isn't hidden."""
    other = Scripted("other", TargetSet())
    with pytest.raises(ZeroDivisionError):
        async with Following(Merged([other, Scripted("broken", ZeroDivisionError())])) as seen:
            await seen.until(lambda targets: False)
    assert other.closed


def test_sources_have_names_of_their_own() -> None:
    """Else their status could not be told apart."""
    with pytest.raises(ConfigError, match="name of its own"):
        Merged([StaticDiscoverer([]), StaticDiscoverer([])])
    with pytest.raises(ConfigError, match="one or more"):
        Merged([])
