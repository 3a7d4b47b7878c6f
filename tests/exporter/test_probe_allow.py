"""Which targets ``/probe`` may ask, and at which address."""

from __future__ import annotations

import pytest

from tests.exporter.probing import page, probing
from vllm_cp import Connection
from vllm_cp.testing import FakeWorker
from vllm_cp_exporter.allow import NotAllowed, Unresolved, admit

ADDRESSES = {
    "a.internal": ["10.0.0.1"],
    "mixed.internal": ["192.0.2.9", "10.0.0.2", "2001:db8::1"],
    "mapped.internal": ["::ffff:10.0.0.3"],
    "evil.internal": ["169.254.169.254"],
}


async def looked_up(host: str, _: int) -> list[str]:
    if host not in ADDRESSES:
        if host.replace(".", "").isdigit() or ":" in host:
            return [host]
        raise OSError(-2, "Name or service not known")
    return ADDRESSES[host]


@pytest.mark.parametrize(
    ("target", "allow", "addresses"),
    [
        ("a.internal:1", ("10.0.0.0/8",), ["10.0.0.1:1"]),
        ("mixed.internal:1", ("10.0.0.0/8", "2001:db8::/32"), ["10.0.0.2:1", "[2001:db8::1]:1"]),
        ("mapped.internal:1", ("10.0.0.0/8",), ["[::ffff:10.0.0.3]:1"]),
        ("evil.internal:1", ("10.0.0.0/8",), None),
        ("evil.internal:1", ("*.internal",), ["169.254.169.254:1"]),
        ("A.Internal:8001", ("a.*:8001",), None),
        ("a.internal:8001", ("a.*:8001",), ["10.0.0.1:8001"]),
        ("a.internal:8002", ("a.*:8001",), None),
        ("10.0.0.5:1", ("10.0.0.5",), ["10.0.0.5:1"]),
        ("10.0.0.6:1", ("10.0.0.5",), None),
        ("169.254.169.254:1", ("*",), None),
        ("[::ffff:10.0.0.7]:1", ("10.0.0.0/8",), ["[::ffff:a00:7]:1"]),
        ("none.internal:1", ("10.0.0.0/8",), None),
        ("dns://10.0.0.9/a.internal:1", ("10.0.0.0/8",), None),
    ],
)
async def test_names_by_pattern_and_addresses_by_network(
    target: str, allow: tuple[str, ...], addresses: list[str] | None
) -> None:
    """A pattern is about names, a network about the addresses behind them; only what lies inside is dialled."""
    connection = Connection.parse(target)
    if addresses is None:
        with pytest.raises((NotAllowed, Unresolved)):
            await admit(connection, allow, discovered=False, resolve=looked_up)
    else:
        assert list((await admit(connection, allow, discovered=False, resolve=looked_up)).addresses) == addresses


async def test_the_address_that_was_checked_is_dialled() -> None:
    """A name that points elsewhere a moment later is not followed: it is looked up once."""
    with FakeWorker() as fake:
        port = fake.target.rpartition(":")[2]
        answers = [["127.0.0.1"]]

        async def rebinding(_: str, __: int) -> list[str]:
            return answers.pop()

        async with probing(resolve=rebinding) as ask:
            told = (await ask(f"/probe?target=rebind.example:{port}&debug=true")).text
    assert "allowed: network 127.0.0.0/8" in told
    assert f"addresses: 127.0.0.1:{port}" in told
    assert "result: success" in told


async def test_the_address_that_answers_is_taken() -> None:
    """A name with two addresses, of which the first one is nobody's, is still reached."""
    with FakeWorker() as fake:
        port = fake.target.rpartition(":")[2]

        async def two(_: str, __: int) -> list[str]:
            return ["127.0.0.9", "127.0.0.1"]

        async with probing(resolve=two) as ask:
            assert page(await ask(f"/probe?target=two.example:{port}"))["probe_success",] == 1
