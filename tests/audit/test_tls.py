"""What TLS ports show to strangers."""

from __future__ import annotations

import datetime
import socket
import ssl
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from tests.certs import Certs
from vllm_cp._audit_net import Endpoint
from vllm_cp._audit_tls import Shown, hello, look, speaks, validity
from vllm_cp.testing import FakeWorker, TlsFiles

Script = Callable[..., Endpoint]


def _endpoint(worker: FakeWorker) -> Endpoint:
    host, _, port = worker.target.rpartition(":")
    return Endpoint(host, int(port))


def _der(path: Path) -> bytes:
    return x509.load_pem_x509_certificate(path.read_bytes()).public_bytes(Encoding.DER)


def test_tls_worker(certs: Certs) -> None:
    """A TLS port shows its version and certificate, whoever signed it, and takes clients without one."""
    with FakeWorker(tls=TlsFiles(cert=certs.expired_cert, key=certs.expired_key)) as worker:
        shown = look(_endpoint(worker), "127.0.0.1", 3)
        assert (shown.tls, shown.version, shown.wants_certificate) == (True, "TLS 1.3", False)
        assert shown.certificate == _der(certs.expired_cert)
        assert speaks(_endpoint(worker), "localhost", 3) == {"TLS 1.0": False, "TLS 1.1": False, "TLS 1.2": True}


def test_mutual_tls_worker(certs: Certs) -> None:
    """A port that wants a client certificate turns us away after the handshake."""
    files = TlsFiles(cert=certs.server_cert, key=certs.server_key, ca=certs.ca, require_client_cert=True)
    with FakeWorker(tls=files) as worker:
        shown = look(_endpoint(worker), "localhost", 3)
    assert (shown.tls, shown.wants_certificate) == (True, True)
    assert shown.certificate == _der(certs.server_cert)


def test_mutual_tls_before_1_3(certs: Certs) -> None:
    """Before TLS 1.3 the handshake itself fails for want of a certificate: still TLS, still demanded."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(certs.server_cert, certs.server_key)
    context.load_verify_locations(certs.ca)
    context.verify_mode = ssl.CERT_REQUIRED
    shown = _looked_at(context, times=4)
    assert (shown.tls, shown.wants_certificate, shown.certificate) == (True, True, None)


def test_no_cipher_in_common_is_no_demand_for_a_certificate(certs: Certs) -> None:
    """The same alert from a server that found no cipher: TLS, and no telling about certificates."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers("ECDHE-RSA-AES128-GCM-SHA256")  # the certificate's key is of another kind
    context.load_cert_chain(certs.server_cert, certs.server_key)
    shown = _looked_at(context, times=4)
    assert (shown.tls, shown.wants_certificate) == (True, None)


def _looked_at(context: ssl.SSLContext, *, times: int) -> Shown:
    """What a server shows that does ``times`` handshakes and nothing else."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for _ in range(times):
                with listener.accept()[0] as client, suppress(OSError):
                    client.settimeout(3)
                    context.wrap_socket(client, server_side=True).close()

        thread = threading.Thread(target=serve)
        thread.start()
        shown = look(Endpoint("127.0.0.1", listener.getsockname()[1]), "localhost", 3)
        thread.join()
    return shown


def test_hanging_up_on_a_word_is_no_demand_for_a_certificate(certs: Certs) -> None:
    """A server that lets strangers in and then does not like HTTP/2 is not taken for one that guards its door."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certs.server_cert, certs.server_key)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for _ in range(2):
                with listener.accept()[0] as raw, suppress(OSError):
                    raw.settimeout(3)
                    with context.wrap_socket(raw, server_side=True) as client:
                        client.recv(1)

        thread = threading.Thread(target=serve)
        thread.start()
        shown = look(Endpoint("127.0.0.1", listener.getsockname()[1]), "localhost", 0.5)
        thread.join()
    assert (shown.tls, shown.wants_certificate, shown.why) == (True, None, "hung up after the handshake")


def test_plaintext_worker() -> None:
    """A plaintext port is no TLS port."""
    with FakeWorker() as worker:
        assert not look(_endpoint(worker), "localhost", 3).tls
        assert True not in speaks(_endpoint(worker), "localhost", 3).values()


def test_nobody_and_silence(refusing: Endpoint, silent: Endpoint) -> None:
    """Where nothing can be told it says so, in time, and a silent port is asked once."""
    assert look(refusing, "localhost", 1).tls is None
    shown = look(silent, "localhost", 0.1)
    assert (shown.tls, shown.why) == (None, "timed out")
    assert set(speaks(silent, "localhost", 0.1).values()) == {None}
    assert set(speaks(refusing, "localhost", 1).values()) == {None}


def _server_hello(version: int) -> bytes:
    body = struct.pack("!H", version) + bytes(32) + b"\x00\xc0\x13\x00"
    message = b"\x02" + len(body).to_bytes(3, "big") + body
    return b"\x16\x03\x01" + len(message).to_bytes(2, "big") + message


def test_old_versions(scripted: Script) -> None:
    """A server that chooses TLS 1.0 speaks that, and refuses whatever newer version it was offered."""
    assert speaks(scripted(_server_hello(0x0301)), "localhost", 2) == {
        "TLS 1.0": True,
        "TLS 1.1": False,
        "TLS 1.2": False,
    }


@pytest.mark.parametrize(
    ("says", "agreed"),
    [(b"\x15\x03\x01\x00\x02\x02\x46", False), (b"", False), (b"HTTP/1.1 400 Bad Request\r\n", None), (b"\x16", None)],
)
def test_other_answers(says: bytes, agreed: bool | None, scripted: Script) -> None:
    """An alert and hanging up are refusals; what is no TLS is no answer to the question."""
    assert set(speaks(scripted(says), "localhost", 2).values()) == {agreed}


def test_our_hello_is_taken_by_a_real_server(certs: Certs) -> None:
    """OpenSSL reads our hello, name and all, and answers with its own."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certs.server_cert, certs.server_key)
    names: list[str | None] = []
    context.sni_callback = lambda _socket, name, _context: names.append(name)
    ours, theirs = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = context.wrap_bio(ours, theirs, server_side=True)
    ours.write(hello("worker.internal", 0x0303))
    with pytest.raises(ssl.SSLWantReadError):
        server.do_handshake()
    answer = theirs.read()
    assert (answer[0], answer[5], int.from_bytes(answer[9:11], "big")) == (0x16, 0x02, 0x0303)
    assert names == ["worker.internal"]
    assert b"worker" not in hello("127.0.0.1", 0x0303) + hello("::1", 0x0303) + hello("worker..b", 0x0303)


def test_validity(certs: Certs) -> None:
    """From when and until when, as the library that made the certificate says."""
    for path in (certs.server_cert, certs.expired_cert, certs.ca):
        made = x509.load_pem_x509_certificate(path.read_bytes())
        begins, ends = validity(made.public_bytes(Encoding.DER))
        assert begins.replace(tzinfo=None) == made.not_valid_before_utc.replace(tzinfo=None)
        assert ends.replace(tzinfo=None) == made.not_valid_after_utc.replace(tzinfo=None)


def _certificate(*times: bytes) -> bytes:
    def sequence(*parts: bytes) -> bytes:
        return b"\x30" + bytes([sum(map(len, parts))]) + b"".join(parts)

    empty = sequence()
    # The oldest certificates leave the version out.
    return sequence(sequence(b"\x02\x01\x05", empty, empty, sequence(*times), empty))


def _utc(text: bytes, kind: int = 0x17) -> bytes:
    return bytes([kind, len(text)]) + text


def test_both_ways_to_write_a_time() -> None:
    """Two digits of a year mean 1950 to 2049, four digits mean themselves."""
    begins, ends = validity(_certificate(_utc(b"500101000000Z"), _utc(b"491231235959Z")))
    assert (begins.year, ends.year) == (1950, 2049)
    _, ends = validity(_certificate(_utc(b"240101000000Z"), _utc(b"20771231235959Z", 0x18)))
    assert ends == datetime.datetime(2077, 12, 31, 23, 59, 59, tzinfo=datetime.timezone.utc)


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"\x30", b"\x30\x82\xff\xff", b"\x02\x01\x01", b"\x30\x00", b"\x30\x02\x30\x00", b"\x30\x84", bytes(99)),
        *(_certificate(), _certificate(_utc(b"never"), _utc(b"ever"))),
    ],
)
def test_what_is_no_certificate(data: bytes) -> None:
    """Anything else is a ValueError, never a wrong date."""
    with pytest.raises(ValueError, match=r"no certificate|does not match"):
        validity(data)
