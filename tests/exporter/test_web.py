"""The daemon's door: the web config file, passwords, TLS, limits, reload and the settings in force."""

from __future__ import annotations

import asyncio
import os
import shutil
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import pytest

from tests.certs import Certs, make_certs
from tests.exporter.asking import serving, watching
from tests.exporter.doors import HASH, PASSWORD, USERS, Written, basic, login, tls_section, trusting
from vllm_cp import Connection, Tls
from vllm_cp_exporter import basicauth
from vllm_cp_exporter.config import ExporterConfig, ProbeModule, WorkerConfig
from vllm_cp_exporter.web import Door, Limits

#: Every page there is.
PATHS = (
    "/",
    "/metrics",
    "/-/healthy",
    "/-/ready",
    "/config",
    "/api/v1/workers",
    "/api/v1/watch?wait=0",
    "/probe?target=x",
    "/no",
)


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Certs:
    return make_certs(tmp_path_factory.mktemp("certs"))


@pytest.fixture
def file(tmp_path: Path) -> Written:
    return Written(tmp_path / "web.yml")


# -- passwords and headers ------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
async def test_everything_is_behind_the_password(file: Written, path: str) -> None:
    """As with the exporter-toolkit, every path is guarded, /-/healthy and unknown ones included."""
    file.says(USERS)
    async with serving(door=Door(file.path), config=dict) as ask:
        refused = await ask(path)
        assert (refused.status, refused.text, refused.headers["WWW-Authenticate"]) == (401, "Unauthorized\n", "Basic")
        assert (await ask(path, headers=login())).status != 401


@pytest.mark.parametrize(
    "header",
    ["", "Basic", "Basic !", "Bearer abc", "Basic cHJvbQ==", basic(password="wrong"),
     basic("nobody"), basic(password="x" * 100), basic(password=PASSWORD + "\0"),
     "Basic " + "A" * 2000, "Basic //79Og=="],
)  # fmt: skip
async def test_wrong_credentials(file: Written, header: str) -> None:
    """A wrong password, an unknown user, nonsense: all the same 401."""
    file.says(USERS)
    async with serving(door=Door(file.path)) as ask:
        answer = await ask("/metrics", headers={"Authorization": header} if header else {})
    assert (answer.status, answer.text) == (401, "Unauthorized\n")


async def test_a_password_is_checked_once(file: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    """bcrypt is slow on purpose: a verdict is remembered, a hundred of them, and made off the loop."""
    checks = []
    real = basicauth._matches
    monkeypatch.setattr(basicauth, "_matches", lambda *words: (checks.append(1), real(*words))[1])
    file.says(USERS)
    door = Door(file.path)
    async with serving(door=door) as ask:
        for _ in range(3):
            assert (await ask("/metrics", headers=login())).status == 200
        assert len(checks) == 1
    auth = basicauth.BasicAuth()
    for number in range(120):
        assert not await auth.allows({"prom": HASH}, basic(password=str(number)))
    assert len(auth._verdicts) == 100
    auth.close()


async def test_headers_of_the_file_are_on_every_answer(file: Written) -> None:
    """On good answers and bad ones; the status page keeps its own policy, which its script needs."""
    file.says("http_server_config:\n  headers:\n    X-Frame-Options: deny\n    Content-Security-Policy: sandbox\n")
    async with serving(door=Door(file.path)) as ask:
        for path in ("/metrics", "/no", "/api/v1/watch?wait=0"):
            answer = await ask(path)
            assert (answer.headers["X-Frame-Options"], answer.headers["Content-Security-Policy"]) == ("deny", "sandbox")
        assert "script-src 'sha256-" in (await ask("/")).headers["Content-Security-Policy"]


# -- TLS ------------------------------------------------------------------------------------


async def test_tls_and_a_client_certificate(file: Written, certs: Certs) -> None:
    """With TLS only TLS is spoken; where a client certificate is required, nobody comes in without one."""
    more = [f"client_ca_file: {certs.ca}", "client_auth_type: RequireAndVerifyClientCert"]
    file.says(tls_section(certs, *more))
    known = trusting(certs, cert=certs.client_cert, key=certs.client_key)
    async with serving(door=Door(file.path), tls=known) as ask:
        assert (await ask("/-/healthy")).status == 200
        with pytest.raises(aiohttp.ClientError):
            await ask("/-/healthy", ssl=trusting(certs))
        async with aiohttp.ClientSession() as plain:
            with pytest.raises(aiohttp.ClientError):
                await plain.get(f"http://127.0.0.1:{ask.port}/-/healthy")


@asynccontextmanager
async def _session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
        yield session


async def _serial(port: int, certs: Certs) -> int | None:
    """The serial number of the certificate that is served now; ``None``: plaintext."""
    from cryptography import x509

    context = ssl.create_default_context(cafile=str(certs.ca))
    context.check_hostname = False
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    except (ssl.SSLError, ConnectionError):
        return None
    try:
        der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return x509.load_der_x509_certificate(der).serial_number
    finally:
        writer.close()
        with suppress(ssl.SSLError, ConnectionError):
            await writer.wait_closed()


async def test_files_are_read_again(file: Written, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A new certificate, other users, TLS that comes: taken over on the same port. A broken file changes nothing."""
    caplog.set_level("INFO")
    first = make_certs(tmp_path / "first")
    file.says("")
    door = Door(file.path, limits=Limits(look_s=3600))
    async with serving(door=door) as ask, _session() as session:

        async def get(scheme: str) -> int:
            context = trusting(first)
            async with session.get(f"{scheme}://127.0.0.1:{ask.port}/-/healthy", ssl=context, headers=known) as answer:
                return answer.status

        known: dict[str, str] = {}
        assert await get("http") == 200
        file.says(USERS)
        await door.look()
        assert await get("http") == 401
        known = login()
        assert await get("http") == 200
        file.says(USERS + tls_section(first))
        await door.look()
        assert await get("https") == 200
        before = await _serial(ask.port, first)

        # As a certificate manager does it: first one file, then the other.
        shutil.copy(first.client_cert, first.server_cert)
        await door.look()
        await door.look()
        assert not door.ok
        assert await _serial(ask.port, first) == before, "the old pair goes on"
        shutil.copy(first.client_key, first.server_key)
        await door.look()
        assert door.ok
        assert await _serial(ask.port, first) not in (None, before)

        file.says("nonsense: 1\n")
        await door.look()
        await door.look()
        assert not door.ok
        assert await _serial(ask.port, first) not in (None, before)
        file.says("")
        await door.look()
        assert await _serial(ask.port, first) is None
    told = [record.message for record in caplog.records if record.name.endswith(".web")]
    assert told == [
        "web_config_read", "web_config_read", "web_config_refused", "web_config_read", "web_config_refused",
        "web_config_read",
    ]  # fmt: skip
    assert HASH not in caplog.text


async def test_the_file_is_looked_at_by_itself(file: Written) -> None:
    """Nobody has to tell the daemon that the file has changed."""
    file.says("")
    async with serving(door=Door(file.path, limits=Limits(look_s=0.02))) as ask:
        file.says(USERS)
        await ask.until("/-/healthy", lambda answer: answer.status == 401)


# -- reload and settings --------------------------------------------------------------------


async def test_reload_is_off_unless_asked_for() -> None:
    """POST /-/reload is refused by default, and says how to have it; GET is not allowed."""
    async with serving() as ask:
        answer = await ask("/-/reload", "POST")
        assert (answer.status, answer.text.count("\n")) == (403, 1)
        assert "--enable-reload" in answer.text
        assert (await ask("/-/reload")).status == 405


async def test_reload_says_how_it_went() -> None:
    """Done is 200; a configuration that is wrong is 500 with the reason, and the old one stays."""
    problems: list[str | None] = [None, "line 3: unknown key 'tragets'"]

    async def reload() -> str | None:
        return problems.pop(0)

    async with serving(reload=reload) as ask:
        good, bad = await ask("/-/reload", "POST"), await ask("/-/reload", "POST")
    assert (good.status, good.text) == (200, "reloaded\n")
    assert (bad.status, bad.text) == (500, "not reloaded, the old configuration stays: line 3: unknown key 'tragets'\n")


async def test_reload_over_http_is_the_daemons() -> None:
    """With --enable-reload the daemon reads its settings again."""
    settings = ExporterConfig(enable_reload=True)
    fresh = ExporterConfig(enable_reload=True, min_ready={"chat": 3})
    async with watching(settings, read=lambda: fresh) as ask:
        assert (await ask("/-/reload", "POST")).status == 200
        assert (await ask("/api/v1/pools/chat")).json["min_ready"] == 3


async def test_the_settings_hold_no_secret(tmp_path: Path, certs: Certs) -> None:
    """/config names the files of secrets, and holds nothing that is in them."""
    token = tmp_path / "token"
    token.write_text("s3cr3t-token")
    tls = Tls(ca_file=certs.ca, cert_file=certs.client_cert, key_file=certs.client_key)
    worker = WorkerConfig(key="a", connection=Connection.parse("127.0.0.1:9", tls=tls, token_file=token))
    module = ProbeModule(tls=tls, token_file=token)
    async with watching(ExporterConfig(workers=(worker,), modules={"m": module}, probe_allow=("10.0.0.0/8",))) as ask:
        answer = await ask("/config")
    assert answer.headers["Content-Type"].startswith("text/plain")
    assert os.fspath(token) in answer.text
    assert "10.0.0.0/8" in answer.text
    assert "s3cr3t" not in answer.text
    assert "PRIVATE KEY" not in answer.text
