"""Base URLs: what people write, and what is refused with the right form shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.certs import Certs
from vllm_cp import Tls
from vllm_cp.errors import ConfigError
from vllm_cp.faults import AsyncFaultTolerance, FaultTolerance, HttpConnection


@pytest.mark.parametrize(
    ("url", "base", "host", "port"),
    [
        ("http://worker:8000", "http://worker:8000", "worker", 8000),
        ("HTTP://Worker:8000/", "http://worker:8000", "worker", 8000),
        ("http://worker", "http://worker", "worker", 80),
        ("https://worker", "https://worker", "worker", 443),
        ("http://[::1]:8000", "http://[::1]:8000", "::1", 8000),
        ("http://10.0.0.1:8000/a/b/", "http://10.0.0.1:8000/a/b", "10.0.0.1", 8000),
    ],
)
def test_urls_have_one_spelling(url: str, base: str, host: str, port: int) -> None:
    """However it is written, labels and errors show one form, and the same port is dialled."""
    connection = HttpConnection.parse(url)
    assert (connection.base, connection.host, connection.port) == (base, host, port)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "empty"),
        ("worker:8000", "http://worker:8000"),
        ("worker", "http://worker"),
        ("grpc://worker:8001", "no HTTP base URL"),
        ("http://", "no usable host"),
        ("http://worker:0", "no usable host and port"),
        ("http://worker:70000", "malformed"),
        ("http://worker:port", "malformed"),
        ("http://[::1:8000", "malformed"),
        ("http://wor ker:8000", "unprintable"),
        ("http://worker:8000\n", "unprintable"),
        ("http://worker:8000/?a=b", "query"),
        ("http://worker:8000/#a", "fragment"),
        ("http://worker:8000/v1", "write http://worker:8000"),
        ("http://worker:8000/v1/", "write http://worker:8000"),
    ],
)
def test_what_is_no_base_url_is_refused(url: str, says: str) -> None:
    """The message shows what to write instead."""
    with pytest.raises(ConfigError) as caught:
        HttpConnection(url=url)
    assert says in str(caught.value)


def test_a_password_in_a_url_is_refused_and_not_repeated() -> None:
    """What stands before the @ is not shown, since it may be a secret."""
    with pytest.raises(ConfigError) as caught:
        HttpConnection(url="http://me:hunter2@worker:8000")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"timeout_s": 0}, "timeout_s"),
        ({"timeout_s": float("nan")}, "timeout_s"),
        ({"max_answer_bytes": 0}, "max_answer_bytes"),
        ({"server_name": "worker"}, "https"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, object], says: str) -> None:
    """Everything is checked when it is built."""
    with pytest.raises(ConfigError, match=says):
        HttpConnection(url="http://worker:8000", **settings)  # type: ignore[arg-type]


def test_tls_files_and_plaintext_contradict_each_other(certs: Certs) -> None:
    """TLS files with http:// would suggest a safety that is not there."""
    with pytest.raises(ConfigError, match="https"):
        HttpConnection(url="http://worker:8000", tls=Tls(ca_file=certs.ca))


@pytest.mark.parametrize("make", [FaultTolerance, AsyncFaultTolerance])
def test_what_only_the_http_library_refuses_is_refused_at_once(make: type) -> None:
    """A host name that can't be encoded is found when the client is made."""
    with pytest.raises(ConfigError, match="malformed"):
        make(f"http://{'ü' * 70}.example:8000")


@given(st.text(max_size=40))
def test_any_text_is_a_connection_or_a_config_error(text: str) -> None:
    """Nothing else ever comes out, whatever is typed."""
    try:
        HttpConnection(url=text)
        HttpConnection(url=f"http://{text}")
    except ConfigError:
        pass
