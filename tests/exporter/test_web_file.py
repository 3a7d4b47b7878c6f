"""The web config file: what may be in it, and a message for each mistake."""

from __future__ import annotations

import shutil
import ssl
from pathlib import Path

import pytest

from tests.certs import Certs, make_certs
from tests.exporter.doors import HASH, USERS, Written
from tests.exporter.process import run
from vllm_cp import ConfigError
from vllm_cp_exporter.webfile import read_web_file

#: The beginning of a section that goes on.
PAIR = "tls_server_config: {cert_file: a, key_file: b, "


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Certs:
    return make_certs(tmp_path_factory.mktemp("certs"))


@pytest.fixture
def file(tmp_path: Path) -> Written:
    return Written(tmp_path / "web.yml")


# -- the file -------------------------------------------------------------------------------


def test_a_whole_file(file: Written, certs: Certs) -> None:
    """All that is offered, with paths beside the file."""
    for name in ("server.pem", "server-key.pem", "ca.pem"):
        shutil.copy(certs.ca.parent / name, file.path.parent / name)
    file.says(
        "tls_server_config:\n  cert_file: server.pem\n  key_file: server-key.pem\n  client_ca_file: ca.pem\n"
        "  client_auth_type: RequireAndVerifyClientCert\n  min_version: TLS13\n"
        "http_server_config:\n  http2: false\n  headers:\n    X-Frame-Options: deny\n" + USERS
    )
    said = read_web_file(file.path)
    assert said.tls is not None
    assert said.tls.cert_file == file.path.parent / "server.pem"
    assert (said.tls.client_auth, said.tls.min_version) == (ssl.CERT_REQUIRED, ssl.TLSVersion.TLSv1_3)
    assert dict(said.headers) == {"X-Frame-Options": "deny"}
    assert HASH not in repr(said)
    file.says("")
    assert read_web_file(file.path).tls is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tls: {}", "the file: unknown key 'tls'; known are tls_server_config, http_server_config, basic_auth_users"),
        ("- a", "the file holds keys and values"),
        ("\na: [1,\nb: }", "line 3: no YAML"),
        ("tls_server_config: {}", "tls_server_config needs cert_file"),
        ("tls_server_config: {cert_file: a}", "tls_server_config needs key_file"),
        ("tls_server_config: {cert_file: no.pem, key_file: no.pem}", "no.pem are no usable pair: No such file"),
        (PAIR + "cipher_suites: []}", "cipher_suites is the exporter-toolkit's"),
        (PAIR + "min_version: TLS10}", "'TLS10'; write TLS12 or TLS13"),
        (PAIR + "client_auth_type: RequireAnyClientCert}", "nobody verified"),
        (PAIR + "client_auth_type: Nobody}", "write NoClientCert or Verify"),
        (PAIR + "client_auth_type: VerifyClientCertIfGiven}", "needs client_ca_file"),
        (PAIR + "client_ca_file: c}", "of no use with client_auth_type NoClientCert"),
        ("basic_auth_users: {prom: hunter2}", "the password of 'prom' is no bcrypt hash; htpasswd -nBC 10 makes one"),
        ("basic_auth_users: {prom: 7}", "the password of 'prom' is no bcrypt hash"),
        (f"basic_auth_users: {{prom: '{HASH.replace('$04$', '$31$')}'}}", "has cost 31; 4 to 14 are taken"),
        (f"basic_auth_users: {{'a:b': '{HASH}'}}", "'a:b' is no user name"),
        ("basic_auth_users: {7: a}", "the key 7 is no text"),
        ("http_server_config: {http2: 2}", "http2 is true or false"),
        ("http_server_config: {headers: {X-Mine: a}}", "unknown key 'X-Mine'"),
        ('http_server_config: {headers: {X-Frame-Options: "a\\nb"}}', "X-Frame-Options is one line of text"),
    ],
)  # fmt: skip
def test_every_mistake_has_its_message(file: Written, text: str, message: str) -> None:
    """What is wrong is said in one line that names the file and what to write, and never holds a password."""
    file.says(text)
    with pytest.raises(ConfigError) as caught:
        read_web_file(file.path)
    said = str(caught.value)
    assert message in said
    assert str(file.path) in said
    assert "\n" not in said
    assert "hunter2" not in said


def test_a_mistake_ends_the_start(file: Written) -> None:
    """The daemon does not start unguarded: exit code 2 and one line. A missing file is a mistake too."""
    file.says("basic_auth: {}")
    for path in (file.path, file.path.with_name("none.yml")):
        ended = run("--target", "h:1", "--web-config-file", str(path))
        assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
        assert str(path) in ended.stderr
