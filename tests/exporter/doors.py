"""Web config files, and those who come with and without a password."""

from __future__ import annotations

import base64
import ssl
from pathlib import Path
from typing import Any

import bcrypt

from tests.certs import Certs

PASSWORD = "a secret: with a colon"
# A salt of its own would give each test process other test names.
HASH = bcrypt.hashpw(PASSWORD.encode(), b"$2b$04$abcdefghijklmnopqrstuu").decode()
USERS = f"basic_auth_users:\n  prom: {HASH}\n"


class Written:
    """A web config file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def says(self, text: str) -> None:
        """From now on."""
        self.path.write_text(text)


def tls_section(certs: Certs, *more: str, kind: str = "server") -> str:
    cert, key = getattr(certs, f"{kind}_cert"), getattr(certs, f"{kind}_key")
    return (
        "\n".join(["tls_server_config:", f"  cert_file: {cert}", f"  key_file: {key}", *(f"  {m}" for m in more)])
        + "\n"
    )


def trusting(certs: Certs, **client: Any) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(certs.ca))
    if client:
        context.load_cert_chain(client["cert"], client["key"])
    return context


def basic(user: str = "prom", password: str = PASSWORD) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def login() -> dict[str, str]:
    return {"Authorization": basic()}
