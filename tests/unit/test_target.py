"""Every form of a target that people write, and what is said about those that cannot be meant."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_cp import ConfigError, Connection
from vllm_cp._target import parse_target

FORMS = "host:port, [ipv6]:port, dns:///host:port or unix:/path"


@pytest.mark.parametrize(
    ("written", "name", "dialled", "host", "port"),
    [
        ("worker-0:9001", "worker-0:9001", "dns:///worker-0:9001", "worker-0", 9001),
        ("worker-0", "worker-0:8001", "dns:///worker-0:8001", "worker-0", 8001),
        ("worker_0.ml.svc:1", "worker_0.ml.svc:1", "dns:///worker_0.ml.svc:1", "worker_0.ml.svc", 1),
        ("worker-0.ml.svc.:8001", "worker-0.ml.svc.:8001", "dns:///worker-0.ml.svc.:8001", "worker-0.ml.svc.", 8001),
        ("10.0.0.7:65535", "10.0.0.7:65535", "dns:///10.0.0.7:65535", "10.0.0.7", 65535),
        ("[::1]:50051", "[::1]:50051", "dns:///[::1]:50051", "::1", 50051),
        ("[::1]", "[::1]:8001", "dns:///[::1]:8001", "::1", 8001),
        ("[FD00:0:0::5]:1", "[fd00::5]:1", "dns:///[fd00::5]:1", "fd00::5", 1),
        ("dns:///worker-0:9001", "dns:///worker-0:9001", "dns:///worker-0:9001", "worker-0", 9001),
        ("dns:///worker-0", "dns:///worker-0:8001", "dns:///worker-0:8001", "worker-0", 8001),
        ("dns:worker-0:9001", "dns:///worker-0:9001", "dns:///worker-0:9001", "worker-0", 9001),
        ("dns:///[::1]:9001", "dns:///[::1]:9001", "dns:///[::1]:9001", "::1", 9001),
        ("dns://8.8.8.8/worker-0:9001", "dns://8.8.8.8/worker-0:9001", "dns://8.8.8.8/worker-0:9001", "worker-0", 9001),
        ("unix:/run/vllm.sock", "unix:/run/vllm.sock", "unix:/run/vllm.sock", None, None),
        ("unix:///run/vllm.sock", "unix:/run/vllm.sock", "unix:/run/vllm.sock", None, None),
        ("unix:vllm.sock", "unix:vllm.sock", "unix:vllm.sock", None, None),
        ("unix-abstract:vllm", "unix-abstract:vllm", "unix-abstract:vllm", None, None),
    ],
)
def test_forms_that_are_taken(written: str, name: str, dialled: str, host: str | None, port: int | None) -> None:
    """A target has one canonical spelling, one form for gRPC, and a bare host means port 8001."""
    target = parse_target(written)
    assert (target.name, target.grpc, target.host, target.port) == (name, dialled, host, port)
    assert str(target) == name
    assert parse_target(name) == target


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("", f"the target is empty; write {FORMS}"),
        ("host 1:8001", f"target 'host 1:8001' holds spaces or unprintable characters; write {FORMS}"),
        ("host:8001\n", f"target 'host:8001\\n' holds spaces or unprintable characters; write {FORMS}"),
        ("http://worker-0:8001", "target 'http://worker-0:8001' is a URL; write worker-0:8001 without http://"),
        ("https://worker-0/x", "target 'https://worker-0/x' is a URL; write worker-0:8001 without https://"),
        ("grpc://u:p@h:9/x", "target 'grpc://u:p@h:9/x' is a URL; write h:9 without grpc://"),
        ("worker-0:", "target 'worker-0:' ends without a port; write worker-0:8001, or leave the colon out"),
        ("worker-0:0", "target 'worker-0:0' has port '0'; a port is a number from 1 to 65535"),
        ("worker-0:65536", "target 'worker-0:65536' has port '65536'; a port is a number from 1 to 65535"),
        ("worker-0:http", "target 'worker-0:http' has port 'http'; a port is a number from 1 to 65535"),
        ("worker-0:-1", "target 'worker-0:-1' has port '-1'; a port is a number from 1 to 65535"),
        ("worker-0:٨٠٠١", "target 'worker-0:٨٠٠١' has port '٨٠٠١'; a port is a number from 1 to 65535"),
        ("::1", "target '::1' is IPv6 without brackets; write [::1]:8001 or [::1]"),
        ("::1:50051", "target '::1:50051' is IPv6 without brackets; write [::1]:50051"),
        ("fd00::5:50051", "target 'fd00::5:50051' is IPv6 without brackets; write [fd00::5]:50051"),
        ("fd00::5:8001", "target 'fd00::5:8001' is IPv6 without brackets; write [fd00::5]:8001 or [fd00::5:8001]"),
        ("fd00::a:b", "target 'fd00::a:b' is IPv6 without brackets; write [fd00::a:b]:8001 or [fd00::a:b]"),
        ("a:b:c", f"target 'a:b:c' has too many colons; write {FORMS}"),
        ("[worker-0]:8001", "target '[worker-0]:8001' has no IPv6 address in its brackets; write [::1]:8001"),
        ("[::1", "target '[::1' has no IPv6 address in its brackets; write [::1]:8001"),
        ("[::1]8001", "target '[::1]8001' goes on after the bracket; write [::1]:8001"),
        ("[::1]:", "target '[::1]:' ends without a port; write [::1]:8001, or leave the colon out"),
        (":8001", f"target ':8001' has no usable host name; write {FORMS}"),
        ("-worker:8001", f"target '-worker:8001' has no usable host name; write {FORMS}"),
        ("worker/0:8001", f"target 'worker/0:8001' has no usable host name; write {FORMS}"),
        ("*:8001", f"target '*:8001' has no usable host name; write {FORMS}"),
        (
            "dns://worker-0:8001",
            "target 'dns://worker-0:8001' lacks a host after the authority; write dns:///host:port",
        ),
        ("unix:", "target 'unix:' has no usable path; write unix:/absolute/path"),
        ("unix://run/vllm.sock", "target 'unix://run/vllm.sock' has no usable path; write unix:/absolute/path"),
    ],
)
def test_forms_that_are_refused_show_the_right_one(written: str, said: str) -> None:
    """A target that cannot be meant is refused before anything is dialled, with the form to write instead."""
    with pytest.raises(ConfigError) as caught:
        parse_target(written)
    assert str(caught.value) == said


@given(st.text(max_size=20))
def test_any_text_is_a_target_or_a_config_error(text: str) -> None:
    """No text makes the parser fail otherwise, and what it takes it takes again in its canonical spelling."""
    try:
        target = parse_target(text)
    except ConfigError as error:
        said = str(error)
    else:
        said = ""
        assert parse_target(target.name) == target
    assert said == "" or said.isprintable()


def test_a_connection_checks_its_target_at_once() -> None:
    """A connection with an impossible target is never built; one with any good form knows its address."""
    with pytest.raises(ConfigError, match="is a URL"):
        Connection(target="http://x:1")
    assert Connection.parse("worker-0", timeout_s=2.0).address.name == "worker-0:8001"
    assert Connection().address.name == "localhost:8001"
