"""Where to connect for KV-cache events, given what a server advertises and how it was reached."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_cp import Address, KvEventSource
from vllm_cp._target import parse_target
from vllm_cp.models.kv_source import resolve_address

TARGETS = {
    "localhost:8001": "localhost",
    "dns:///worker-0.svc:8001": "worker-0.svc",
    "10.0.0.7": "10.0.0.7",
    "[::1]:8001": "[::1]",
    "[FD00:0::5]": "[fd00::5]",
}


@pytest.mark.parametrize(("target", "host"), TARGETS.items())
@pytest.mark.parametrize("wildcard", ["*", "0.0.0.0", "[::]"])
def test_a_wildcard_gets_the_host_of_the_worker(wildcard: str, target: str, host: str) -> None:
    """The three wildcard forms get the host we reached, bracketed for IPv6, and keep their own port."""
    address = resolve_address(f"tcp://{wildcard}:5557", parse_target(target).host)
    assert address == Address(connect_to=f"tcp://{host}:5557")


@pytest.mark.parametrize("wildcard", ["*", "0.0.0.0", "[::]"])
def test_a_wildcard_behind_a_unix_socket_has_no_host(wildcard: str) -> None:
    """A worker reached over a socket file has no host to put in, and that is said instead of waiting in silence."""
    address = resolve_address(f"tcp://{wildcard}:5557", parse_target("unix:/run/vllm.sock").host)
    assert address == Address(reason="a wildcard address, and the worker was reached over a unix socket: host unknown")


@pytest.mark.parametrize("host", ["worker-0", None])
@pytest.mark.parametrize(
    ("advertised", "address"),
    [
        ("tcp://127.0.0.1:5560", Address(connect_to="tcp://127.0.0.1:5560", publisher_connects=True)),
        ("tcp://10.9.9.9:5561", Address(connect_to="tcp://10.9.9.9:5561", publisher_connects=True)),
        ("tcp://kv.ml.svc:5561", Address(connect_to="tcp://kv.ml.svc:5561", publisher_connects=True)),
        ("tcp://[::1]:5562", Address(connect_to="tcp://[::1]:5562")),
        ("tcp://[fd00::5]:5562", Address(connect_to="tcp://[fd00::5]:5562")),
        ("ipc:///tmp/kv", Address(connect_to="ipc:///tmp/kv")),
        ("ipc://kv.sock", Address(connect_to="ipc://kv.sock")),
        ("inproc://kv", Address(reason="inproc: reachable inside the engine's process only")),
        ("", Address(reason="the server advertises no address")),
        ("tcp://*:0", Address(reason="the server advertises port 0: the real port is not known")),
        ("5557", Address(reason="not a ZeroMQ address: '5557'")),
        ("*:5557", Address(reason="not a ZeroMQ address: '*:5557'")),
        ("tcp://*", Address(reason="not a tcp or ipc address: 'tcp://*'")),
        ("tcp://:5557", Address(reason="not a tcp or ipc address: 'tcp://:5557'")),
        ("tcp://*:x", Address(reason="not a tcp or ipc address: 'tcp://*:x'")),
        ("tcp://*:²", Address(reason="not a tcp or ipc address: 'tcp://*:²'")),
        ("udp://*:5557", Address(reason="not a tcp or ipc address: 'udp://*:5557'")),
    ],
)
def test_anything_else_stays_as_it_is_or_says_why_not(advertised: str, address: Address, host: str | None) -> None:
    """Deliberate addresses and paths are kept verbatim; what nobody can connect to has a reason."""
    assert resolve_address(advertised, host) == address


@pytest.mark.parametrize("transport", ["nats", ""])
def test_only_zeromq_is_read(transport: str) -> None:
    """An address of another transport is not handed to a subscriber that could not read it."""
    address = resolve_address("tcp://*:5557", "worker-0", transport)
    assert address == Address(reason=f"transport {transport!r} cannot be read, only zmq")


@given(st.text(max_size=30), st.sampled_from([None, "worker-0", "::1"]))
def test_any_text_is_usable_or_has_a_reason(advertised: str, host: str | None) -> None:
    """Whatever a server advertises: exactly one of an address and a reason, and never an exception."""
    address = resolve_address(advertised, host)
    assert (address.connect_to is None) is (address.reason is not None)


def test_a_source_shows_both_addresses() -> None:
    """A source keeps what was advertised beside what can be used, for the live and the replay address."""
    source = KvEventSource(
        endpoint="tcp://*:5557",
        replay_endpoint="inproc://replay",
        live=resolve_address("tcp://*:5557", "worker-0"),
        replay=resolve_address("inproc://replay", "worker-0"),
    )
    assert (source.endpoint, source.connect_to, source.reason) == ("tcp://*:5557", "tcp://worker-0:5557", None)
    assert source.replay.connect_to is None
    assert source.replay.reason is not None
