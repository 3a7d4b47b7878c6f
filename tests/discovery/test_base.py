"""Targets, sets and what they mean for a connection."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.certs import make_certs
from vllm_cp import ConfigError, Connection, Tls
from vllm_cp.discovery import DiscoveredTarget, Overrides, TargetSet, diff


def target(key: str = "a:1", **fields: object) -> DiscoveredTarget:
    return DiscoveredTarget(**{"key": key, "target": key, **fields})  # type: ignore[arg-type]


@pytest.fixture
def tls(tmp_path: Path) -> Tls:
    return Tls(ca_file=make_certs(tmp_path).ca)


def test_a_targets_connection_is_the_fleets_with_its_own_address() -> None:
    """What the fleet says about time-outs goes for every worker, the address is the worker's own."""
    assert target("w:9").connection(Connection(timeout_s=1.5)) == Connection(target="w:9", timeout_s=1.5)


def test_overrides_win_over_the_fleet(tls: Tls, tmp_path: Path) -> None:
    """A target's own TLS, token and server name replace the fleet's."""
    token = tmp_path / "token"
    token.write_text("secret")
    own = Overrides(tls=tls, token_file=token, server_name="worker.internal")
    made = target(overrides=own).connection(Connection())
    assert (made.tls, made.token_file, made.server_name) == (tls, token, "worker.internal")


def test_a_target_can_be_plaintext_in_a_fleet_with_tls(tls: Tls) -> None:
    """plaintext drops the fleet's TLS and the server name that goes with it."""
    fleet = Connection(tls=tls, server_name="any")
    made = target(overrides=Overrides(plaintext=True)).connection(fleet)
    assert (made.tls, made.server_name) == (None, None)


def test_a_server_name_never_falls_back_to_plaintext() -> None:
    """A target that expects a certificate is refused where there is no TLS, rather than asked without."""
    with pytest.raises(ConfigError, match="give tls"):
        target(overrides=Overrides(server_name="x")).connection()


def test_an_address_from_dns_is_checked_against_its_name(tls: Tls) -> None:
    """gRPC dials the address, the certificate carries the name."""
    found = target("10.0.0.1:1", dns_name="llama-0.ml")
    assert found.connection(Connection(tls=tls)).server_name == "llama-0.ml"
    assert found.connection(Connection(tls=tls, server_name="given")).server_name == "given"
    assert found.connection().server_name is None


def test_a_target_without_an_address_says_why() -> None:
    """Such a target can't be connected to, and its problem is the message."""
    with pytest.raises(ConfigError, match="ml/llama-0: no port"):
        target("ml/llama-0", target=None, problem="no port").connection()


def test_a_missing_address_needs_a_problem_and_the_reverse() -> None:
    """No silent hole: no address without a reason, no reason without effect."""
    with pytest.raises(ValueError, match="problem"):
        target(target=None)
    with pytest.raises(ValueError, match="problem"):
        target(problem="what?")


def test_contradicting_overrides_are_refused(tls: Tls) -> None:
    """TLS and plaintext, or plaintext and a certificate's name, can't both be meant."""
    with pytest.raises(ConfigError, match="exclude each other"):
        Overrides(tls=tls, plaintext=True)
    with pytest.raises(ConfigError, match="no sense with plaintext"):
        Overrides(server_name="x", plaintext=True)


def test_targets_are_values() -> None:
    """Equal facts are equal targets, whatever mapping the labels came in, and can be used as keys."""
    assert target(labels={"a": "1"}) == target(labels={"a": "1"})
    assert target(labels={"a": "1"}) != target(labels={"a": "2"})
    assert len({target(), target()}) == 1


def test_a_set_has_unique_keys() -> None:
    """TargetSet.of keeps the first of each key and hands back the rest; the constructor refuses."""
    first, second = target("a:1"), target("a:1", pool="chat")
    assert TargetSet.of([first, second]) == (TargetSet((first,)), (second,))
    with pytest.raises(ValueError, match="same key"):
        TargetSet((first, second))


def test_the_difference_of_two_sets() -> None:
    """Added, changed with both versions, and removed as it last was, each by key."""
    a, b, c = target("a:1"), target("b:1"), target("c:1")
    moved = target("b:1", target="b:2")
    changes = diff(TargetSet((a, b)), TargetSet((moved, c)))
    assert (changes.added, changes.changed, changes.removed) == ((c,), ((b, moved),), (a,))
    assert changes
    assert not diff(TargetSet((a, b)), TargetSet((b, a)))
