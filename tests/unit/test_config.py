"""Settings are checked when they are built, say what is wrong, and never show a token."""

from __future__ import annotations

import dataclasses
import os
import traceback
from pathlib import Path

import pytest

from tests.certs import Certs, make_certs
from vllm_cp import ConfigError, Connection, Retry, Tls, config
from vllm_cp.config import read_token

TOKEN = "s3cret-t0ken"


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Certs:
    return make_certs(tmp_path_factory.mktemp("certs"))


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    return path


def said(error: pytest.ExceptionInfo[ConfigError]) -> str:
    """The whole message."""
    return str(error.value)


def test_defaults_reach_the_local_worker() -> None:
    """Without settings: port 8001 of this host, plaintext, five seconds, three tries of safe reads, no proxy."""
    connection = Connection()
    assert (connection.target, connection.tls, connection.timeout_s) == ("localhost:8001", None, 5.0)
    assert (connection.retry, connection.proxy, connection.keepalive_s) == (Retry(attempts=3), False, None)


def test_settings_are_frozen() -> None:
    """A connection is shared freely, because nobody can change it."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        Connection().target = "elsewhere:1"  # type: ignore[misc]


def test_tls_files_are_read_as_they_are(certs: Certs) -> None:
    """TLS hands gRPC the CA, the key and the certificate as they stand in their files."""
    tls = Tls(ca_file=certs.ca, cert_file=certs.client_cert, key_file=certs.client_key)
    assert tls.read() == (certs.ca.read_bytes(), certs.client_key.read_bytes(), certs.client_cert.read_bytes())


def test_without_a_ca_file_the_systems_are_trusted(certs: Certs, monkeypatch: pytest.MonkeyPatch) -> None:
    """SSL_CERT_FILE goes first, then the system's bundle; where there is none, gRPC's own is left to it."""
    monkeypatch.setenv("SSL_CERT_FILE", str(certs.wrong_ca))
    assert Tls().read() == (certs.wrong_ca.read_bytes(), None, None)
    assert Tls(ca_file=certs.ca).read()[0] == certs.ca.read_bytes()
    monkeypatch.delenv("SSL_CERT_FILE")
    monkeypatch.setattr(config, "_SYSTEM_ROOTS", ("/nowhere/ca.pem", str(certs.ca)))
    assert Tls().read()[0] == certs.ca.read_bytes()
    monkeypatch.setattr(config, "_SYSTEM_ROOTS", ("/nowhere/ca.pem",))
    assert Tls().read() == (None, None, None)


@pytest.mark.parametrize("missing", ["cert_file", "key_file"])
def test_a_certificate_needs_its_key(certs: Certs, missing: str) -> None:
    """Half a client certificate is refused."""
    files = {"cert_file": certs.client_cert, "key_file": certs.client_key}
    with pytest.raises(ConfigError) as caught:
        Tls(**{name: path for name, path in files.items() if name != missing})
    assert said(caught) == "a client certificate and its key belong together: give both files or neither"


def test_a_tls_file_that_is_missing_is_named(tmp_path: Path) -> None:
    """A file that cannot be read is named with its role and the reason."""
    path = tmp_path / "ca.pem"
    with pytest.raises(ConfigError) as caught:
        Tls(ca_file=path)
    assert said(caught) == f"cannot read TLS CA file {str(path)!r}: No such file or directory"
    with pytest.raises(ConfigError) as caught:
        Tls(ca_file=tmp_path)
    assert said(caught) == f"cannot read TLS CA file {str(tmp_path)!r}: Is a directory"


def test_a_tls_file_that_is_no_pem_is_named(tmp_path: Path, certs: Certs) -> None:
    """DER, an empty file or a note to self is no PEM."""
    path = tmp_path / "key.der"
    path.write_bytes(b"\x30\x82\x01\x00")
    with pytest.raises(ConfigError) as caught:
        Tls(cert_file=certs.client_cert, key_file=path)
    assert said(caught) == f"TLS key file {str(path)!r} is not PEM: no BEGIN line in it"


def test_a_tls_file_that_vanishes_later_is_a_config_error(tmp_path: Path, certs: Certs) -> None:
    """Files are read again when a channel is made, and may be gone by then."""
    path = tmp_path / "ca.pem"
    path.write_bytes(certs.ca.read_bytes())
    tls = Tls(ca_file=path)
    path.unlink()
    with pytest.raises(ConfigError, match="cannot read TLS CA file"):
        tls.read()


@pytest.mark.parametrize("text", [TOKEN, f"{TOKEN}\n", f"  {TOKEN}\r\n"])
def test_a_token_is_one_line(tmp_path: Path, text: str) -> None:
    """Line ends and blanks around a token are no part of it."""
    path = tmp_path / "token"
    path.write_bytes(text.encode())
    assert read_token(path) == TOKEN


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        (b"", "must hold one token on one line"),
        (b" \n", "must hold one token on one line"),
        (b"s3cret\nt0ken\n", "must hold one token on one line"),
        (b"s3cret t0ken", "must hold one token on one line"),
        (b"s3cret\x00t0ken", "must hold one token on one line"),
        ("s3crét".encode(), "holds more than ASCII text"),
        (b"\xff\xfes3cret", "holds more than ASCII text"),
    ],
)
def test_a_token_file_with_anything_else_is_refused(tmp_path: Path, content: bytes, wrong: str) -> None:
    """What is no token is refused by the file's name, and what was in it is not shown."""
    path = tmp_path / "token"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        Connection(target="worker-0", token_file=path, insecure_token=True)
    assert said(caught) == f"token file {str(path)!r} {wrong}"
    assert "s3cr" not in "".join(traceback.format_exception(caught.value))


def test_a_token_file_that_is_missing_is_named(tmp_path: Path) -> None:
    """A token file that cannot be read is named with the reason."""
    path = tmp_path / "none"
    with pytest.raises(ConfigError) as caught:
        Connection(tls=Tls(), token_file=path)
    assert said(caught) == f"cannot read token file {str(path)!r}: No such file or directory"


def test_a_token_does_not_cross_plaintext_by_accident(token_file: Path) -> None:
    """A token without TLS is refused, unless somebody says that they accept it."""
    with pytest.raises(ConfigError) as caught:
        Connection(target="worker-0:8001", token_file=token_file)
    assert said(caught) == (
        "a token for worker-0:8001 would cross the network in plaintext: give tls,"
        " or say insecure_token=True if you accept that"
    )
    assert Connection(token_file=token_file, insecure_token=True).insecure_token
    assert Connection(token_file=token_file, tls=Tls()).token_file == token_file


def test_no_repr_holds_a_token(token_file: Path) -> None:
    """Neither the connection nor anything in it shows the token; the file's name is all there is."""
    connection = Connection(token_file=token_file, insecure_token=True)
    for text in (repr(connection), str(connection), repr(dataclasses.asdict(connection))):
        assert TOKEN not in text
        assert os.fspath(token_file) in text


@pytest.mark.parametrize("value", [0.0, -1.0, 86401.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["timeout_s", "keepalive_s"])
def test_times_are_positive_seconds(name: str, value: float) -> None:
    """A time that is no number of seconds up to a day is refused by name."""
    with pytest.raises(ConfigError) as caught:
        Connection(**{name: value})
    assert said(caught) == f"{name} must be a number of seconds above 0 and up to 86400, not {value}"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attempts": 0}, "retry attempts must be 1 or more, not 0"),
        ({"initial_s": 0.0}, "retry initial_s must be a number of seconds above 0 and up to 86400, not 0.0"),
        ({"max_s": float("inf")}, "retry max_s must be a number of seconds above 0 and up to 86400, not inf"),
    ],
)
def test_retries_are_checked(settings: dict[str, float], message: str) -> None:
    """A retry that could never be meant is refused."""
    with pytest.raises(ConfigError) as caught:
        Retry(**settings)  # type: ignore[arg-type]
    assert said(caught) == message


def test_a_server_name_is_for_tls() -> None:
    """The name in a certificate means nothing without one."""
    with pytest.raises(ConfigError) as caught:
        Connection(server_name="worker-0")
    assert said(caught) == "server_name is the name in a TLS certificate: give tls too, or drop it"
    assert Connection(server_name="worker-0", tls=Tls()).server_name == "worker-0"
