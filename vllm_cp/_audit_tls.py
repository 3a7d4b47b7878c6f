"""What a TLS port shows to somebody it does not know: versions, certificate, whether it wants one of ours."""

from __future__ import annotations

import contextlib
import os
import ssl
import struct
from dataclasses import dataclass
from datetime import datetime, timezone

from vllm_cp._audit_door import is_about_certificate, stranger, turns_away
from vllm_cp._audit_net import Deadline, Endpoint, words

__all__ = ["Shown", "look", "speaks", "validity"]

#: The versions a hello can offer by itself, as they stand in a record.
OLD_VERSIONS = {"TLS 1.0": 0x0301, "TLS 1.1": 0x0302, "TLS 1.2": 0x0303}
# ECDHE and RSA with AES or ChaCha, for each version something that its servers took.
_CIPHERS = (
    *(0xC02B, 0xC02C, 0xC02F, 0xC030, 0xCCA9, 0xCCA8),
    *(0xC009, 0xC00A, 0xC013, 0xC014, 0x009C, 0x002F, 0x0035, 0x000A),
)
_GROUPS = (0x001D, 0x0017, 0x0018)
_SIGNATURES = (0x0403, 0x0503, 0x0804, 0x0805, 0x0401, 0x0501, 0x0601, 0x0203, 0x0201)
# What an HTTP/2 client says first: preface and empty settings. A server that lets us in answers with its own.
_HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What the port let us see."""

    #: Whether there is TLS at all; ``None``: no telling.
    tls: bool | None
    #: ``TLS 1.3``, the newest both sides speak.
    version: str = ""
    #: The server's certificate, DER.
    certificate: bytes | None = None
    #: Whether clients without a certificate are turned away; ``None``: no telling.
    wants_certificate: bool | None = None
    #: What happened, where there is no telling.
    why: str = ""


def look(endpoint: Endpoint, name: str, timeout_s: float) -> Shown:
    """One handshake without a client certificate. Trusts nobody and sends nothing of ours."""
    deadline = Deadline(timeout_s)
    try:
        with endpoint.connect(deadline) as raw:
            raw.settimeout(deadline.left())
            with stranger("h2").wrap_socket(raw, server_hostname=name) as secure:
                version = (secure.version() or "").replace("TLSv", "TLS ")
                certificate = secure.getpeercert(binary_form=True)
                wants, why = _wants_certificate(secure, deadline)
                if wants is None and turns_away(endpoint, name, timeout_s, protocol="h2"):
                    wants = True
                return Shown(tls=True, version=version, certificate=certificate, wants_certificate=wants, why=why)
    except ssl.SSLError as error:
        reason = error.reason or str(error)
        if any(mark in reason.upper() for mark in ("ALERT", "CERTIFICATE", "UNSUPPORTED_PROTOCOL")):
            # An alert is TLS. Before 1.3 it is also how a missing certificate is answered, and in words as general as
            # those for ciphers: only when the server did agree on a cipher is it the certificate.
            wants = is_about_certificate(reason)
            if wants is None and "HANDSHAKE_FAILURE" in reason.upper():
                wants = speaks(endpoint, name, timeout_s)["TLS 1.2"] or None
            return Shown(tls=True, wants_certificate=wants, why=reason)
        return Shown(tls=False if _is_plaintext(reason) else None, why=reason)
    except OSError as error:
        return Shown(tls=None, why=words(error))


def _wants_certificate(secure: ssl.SSLSocket, deadline: Deadline) -> tuple[bool | None, str]:
    # TLS 1.3 turns a client away only after the handshake, so it takes a first word and the answer to it.
    try:
        secure.settimeout(deadline.left())
        secure.sendall(_HTTP2_HELLO)
        answered = bool(secure.recv(1))
    except (ssl.SSLEOFError, ConnectionResetError, BrokenPipeError):
        answered = False
    except ssl.SSLError as error:
        reason = error.reason or str(error)
        return is_about_certificate(reason), reason
    except OSError as error:
        return None, words(error)
    # Of a connection that is reset because we spoke, an alert that says why can be lost.
    return (False, "") if answered else (None, "hung up after the handshake")


def _is_plaintext(reason: str) -> bool:
    said = reason.upper()
    return any(mark in said for mark in ("WRONG_VERSION", "RECORD_LAYER", "HTTP_REQUEST", "PACKET_LENGTH"))


def speaks(endpoint: Endpoint, name: str, timeout_s: float) -> dict[str, bool | None]:
    """Which of TLS 1.0 to 1.2 a port agrees to, when it is offered that version and no newer one.

    The hello is ours, byte by byte: Python's TLS library may be told by its system not to speak what we ask for.
    """
    agreed: dict[str, bool | None] = {}
    for version, number in OLD_VERSIONS.items():
        try:
            agreed[version] = _agrees(endpoint, name, number, Deadline(timeout_s))
        except TimeoutError:
            # One that waits for more will do so every time.
            return {**dict.fromkeys(OLD_VERSIONS), **agreed}
        except OSError:
            agreed[version] = None
    return agreed


def _agrees(endpoint: Endpoint, name: str, number: int, deadline: Deadline) -> bool | None:
    with endpoint.connect(deadline) as raw:
        raw.settimeout(deadline.left())
        raw.sendall(hello(name, number))
        said = b""
        # A record's head is 5 bytes, that of a server's hello 4 more, then the version it chose.
        while len(said) < 11:
            raw.settimeout(deadline.left())
            try:
                more = raw.recv(11 - len(said))
            except ConnectionResetError:
                more = b""
            if not more:
                break
            said += more
    if not said or said[0] == 0x15:  # hung up, or an alert
        return False
    if len(said) < 11 or said[0] != 0x16 or said[5] != 0x02:
        return None
    return int.from_bytes(said[9:11], "big") == number


def hello(name: str, number: int) -> bytes:
    """A client's hello that offers one version."""
    extensions = [
        (0x000A, _vector(2, struct.pack(f"!{len(_GROUPS)}H", *_GROUPS))),
        (0x000B, b"\x01\x00"),
        (0x000D, _vector(2, struct.pack(f"!{len(_SIGNATURES)}H", *_SIGNATURES))),
        (0x0010, _vector(2, _vector(1, b"h2"))),
        (0x0017, b""),
        (0xFF01, b"\x00"),
    ]
    if not name.replace(".", "").isdigit() and ":" not in name:
        with contextlib.suppress(UnicodeError):
            extensions.append((0x0000, _vector(2, b"\x00" + _vector(2, name.encode("idna")))))
    packed = b"".join(struct.pack("!H", kind) + _vector(2, body) for kind, body in extensions)
    body = (
        struct.pack("!H", number)
        + os.urandom(32)
        + _vector(1, b"")
        + _vector(2, struct.pack(f"!{len(_CIPHERS)}H", *_CIPHERS))
        + b"\x01\x00"
        + _vector(2, packed)
    )
    return b"\x16\x03\x01" + _vector(2, b"\x01" + _vector(3, body))


def _vector(size: int, body: bytes) -> bytes:
    return len(body).to_bytes(size, "big") + body


def validity(certificate: bytes) -> tuple[datetime, datetime]:
    """From when and until when a certificate is good. Raises ValueError for what is no certificate.

    Python's TLS library tells only for certificates it trusts, and an audit trusts nobody.
    """
    inside = _inside(_inside(certificate))
    fields = list(_elements(inside))
    if fields and fields[0][0] == 0xA0:  # the version, which the oldest certificates leave out
        del fields[0]
    if len(fields) < 4:
        raise ValueError("no certificate: fields are missing")
    # After serial number, signature algorithm and issuer.
    times = [_time(kind, body) for kind, body in _elements(fields[3][1])]
    if len(times) != 2:
        raise ValueError("no certificate: its validity has no beginning and end")
    return times[0], times[1]


def _inside(data: bytes) -> bytes:
    kind, body = next(iter(_elements(data)), (0, b""))
    if kind != 0x30:
        raise ValueError("no certificate: no sequence where one should be")
    return body


def _elements(data: bytes) -> list[tuple[int, bytes]]:
    found = []
    at = 0
    while at < len(data):
        head = data[at : at + 2]
        if len(head) < 2:
            raise ValueError("no certificate: it ends early")
        kind, size = head
        at += 2
        if size & 0x80:
            count = size & 0x7F
            size = int.from_bytes(data[at : at + count], "big")
            at += count
        if at + size > len(data):
            raise ValueError("no certificate: it ends early")
        found.append((kind, data[at : at + size]))
        at += size
    return found


def _time(kind: int, body: bytes) -> datetime:
    text = body.decode("ascii", "replace")
    if kind == 0x17:  # two digits of the year, which turn over at 50
        text = ("19" if text[:2] >= "50" else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=timezone.utc)
