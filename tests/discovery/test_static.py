"""Targets that are written down."""

from __future__ import annotations

import pytest

from tests.discovery.following import Following
from vllm_cp import ConfigError
from vllm_cp.discovery import DiscoveredTarget, Overrides, StaticDiscoverer, static_target


@pytest.mark.parametrize(
    ("text", "key", "target"),
    [
        ("llama-0", "llama-0:8001", "llama-0:8001"),
        ("llama-0:9", "llama-0:9", "llama-0:9"),
        ("first=llama-0:9", "first", "llama-0:9"),
        ("ml/llama-0=10.0.0.1:9", "ml/llama-0", "10.0.0.1:9"),
        ("[::1]:9", "[::1]:9", "[::1]:9"),
        ("[0:0:0:0:0:0:0:1]:9", "[::1]:9", "[::1]:9"),
        ("six=[fd00::5]", "six", "[fd00::5]:8001"),
        ("unix:/run/a=b.sock", "unix:/run/a=b.sock", "unix:/run/a=b.sock"),
    ],
)
def test_a_target_as_people_write_it(text: str, key: str, target: str) -> None:
    """The key is the name, else the one canonical spelling of the target."""
    assert static_target(text) == DiscoveredTarget(key=key, target=target)


@pytest.mark.parametrize("text", ["=a:1", "a b=c:1", "http://a:1", "x=http://a:1", "a:99999", "", "::1", "a:"])
def test_a_badly_written_target_is_refused(text: str) -> None:
    """At once, with the right form in the message: nothing is discovered later."""
    with pytest.raises(ConfigError, match=r"write|port"):
        static_target(text)


def test_a_worker_named_twice_is_refused() -> None:
    """Two spellings of one address are one worker."""
    with pytest.raises(ConfigError, match=r"\[::1\]:1: this worker is named twice"):
        StaticDiscoverer(["[::1]:1", "[0::1]:1"])


def test_a_text_is_no_list_of_targets() -> None:
    """Else every letter would be a worker."""
    with pytest.raises(ConfigError, match="list"):
        StaticDiscoverer("a:1")


async def test_a_new_set_reaches_the_stream() -> None:
    """replace gives a whole new set, pool and overrides included; look shows it at once."""
    source = StaticDiscoverer(["a:1"], pool="chat", overrides=Overrides(canary=False))
    async with Following(source) as seen:
        await seen.count(1)
        assert seen.targets["a:1"].pool == "chat"
        source.replace(["a:1", DiscoveredTarget(key="b", target="b:1")])
        assert len(source.look().targets) == 2
        await seen.count(2)
        assert seen.keys == ["a:1", "b"]
        assert seen.targets["a:1"].overrides.canary is False
    assert source.status.last_success is not None
    assert source.status.error is None


async def test_a_bad_new_set_keeps_the_old_one() -> None:
    """replace checks before it changes anything."""
    source = StaticDiscoverer(["a:1"])
    with pytest.raises(ConfigError):
        source.replace(["b:1", "http://c"])
    assert [target.key for target in source.look().targets] == ["a:1"]
