"""Certificates for TLS tests, made when they are needed and written as PEM files."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAY = datetime.timedelta(days=1)
ROLES = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]


@dataclass(frozen=True, kw_only=True)
class Certs:
    """Paths of PEM files; every key is unencrypted PKCS #8, every leaf good for servers and clients alike."""

    ca: Path  # signed all leaves but the wrong one: what both sides should trust
    server_cert: Path
    server_key: Path
    client_cert: Path
    client_key: Path
    expired_cert: Path  # as the server's, but its time ended yesterday
    expired_key: Path
    renamed_cert: Path  # as the server's, but for elsewhere.internal alone
    renamed_key: Path
    wrong_ca: Path  # a CA of the same name that nobody should trust
    wrong_cert: Path  # as the server's, but signed by the wrong CA
    wrong_key: Path


def make_certs(directory: Path, names: Sequence[str] = ("localhost", "127.0.0.1")) -> Certs:
    """Write a set of certificates into ``directory``; the servers' are for ``names`` (host names and IP addresses)."""
    directory.mkdir(parents=True, exist_ok=True)
    certs = Certs(
        ca=directory / "ca.pem",
        server_cert=directory / "server.pem",
        server_key=directory / "server-key.pem",
        client_cert=directory / "client.pem",
        client_key=directory / "client-key.pem",
        expired_cert=directory / "expired.pem",
        expired_key=directory / "expired-key.pem",
        renamed_cert=directory / "renamed.pem",
        renamed_key=directory / "renamed-key.pem",
        wrong_ca=directory / "wrong-ca.pem",
        wrong_cert=directory / "wrong.pem",
        wrong_key=directory / "wrong-key.pem",
    )
    now = datetime.datetime.now(datetime.timezone.utc)
    ca, wrong = _Authority("vllm-cp test CA", now), _Authority("vllm-cp test CA", now)
    certs.ca.write_bytes(_pem(ca.cert))
    certs.wrong_ca.write_bytes(_pem(wrong.cert))
    ca.issue(certs.server_cert, certs.server_key, names)
    ca.issue(certs.client_cert, certs.client_key, ["vllm-cp-client"])
    ca.issue(certs.expired_cert, certs.expired_key, names, until=now - DAY)
    ca.issue(certs.renamed_cert, certs.renamed_key, ["elsewhere.internal"])
    wrong.issue(certs.wrong_cert, certs.wrong_key, names)
    return certs


def _pem(cert: x509.Certificate) -> bytes:
    return cert.public_bytes(serialization.Encoding.PEM)


def _alternative_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


class _Authority:
    def __init__(self, name: str, now: datetime.datetime) -> None:
        self.now = now
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.cert = (
            self._builder(self.name, self.key, now + DAY)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(signs_certificates=True), critical=True)
            .sign(self.key, hashes.SHA256())
        )

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, until: datetime.datetime
    ) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(self.now - 2 * DAY)
            .not_valid_after(until)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()),
                critical=False,
            )
        )

    def issue(
        self, cert_path: Path, key_path: Path, names: Sequence[str], *, until: datetime.datetime | None = None
    ) -> None:
        """Write a leaf for ``names`` and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
        cert = (
            self._builder(subject, key, until or self.now + DAY)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(ROLES), critical=False)
            .add_extension(x509.SubjectAlternativeName([_alternative_name(name) for name in names]), critical=False)
            .sign(self.key, hashes.SHA256())
        )
        cert_path.write_bytes(_pem(cert))
        # Made private before it holds anything.
        key_path.touch(mode=0o600)
        key_path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
