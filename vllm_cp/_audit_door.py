"""TLS as somebody without a certificate comes to it."""

from __future__ import annotations

import ssl

from vllm_cp._audit_net import Deadline, Endpoint

__all__ = ["TURNED_AWAY", "is_about_certificate", "stranger", "turns_away"]

#: Evidence of a door that takes a certificate to open.
TURNED_AWAY = "not let in without a certificate"
#: How long a server may take to show somebody the door, seconds.
_DOOR_S = 1.0


def turns_away(endpoint: Endpoint, name: str, timeout_s: float, *, protocol: str) -> bool:
    """Whether a client without a certificate is shown the door before it has said a word.

    Some servers send an alert about the certificate, others hang up; all others wait for what a client has to say.
    """
    deadline = Deadline(min(timeout_s, _DOOR_S))
    try:
        with endpoint.connect(deadline) as raw:
            raw.settimeout(deadline.left())
            with stranger(protocol).wrap_socket(raw, server_hostname=name) as secure:
                secure.settimeout(deadline.left())
                return secure.recv(1) == b""
    except (ssl.SSLEOFError, ConnectionResetError):
        return True
    except ssl.SSLError as error:
        return is_about_certificate(error.reason or str(error)) is True
    except OSError:
        return False


def stranger(protocol: str) -> ssl.SSLContext:
    """Somebody who has no certificate and believes anybody's; nothing secret may be sent with it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols([protocol])
    return context


def is_about_certificate(reason: str) -> bool | None:
    """Whether a refusal is for want of a certificate: ``True``, or no telling."""
    return True if "CERTIFICATE" in reason.upper() else None
