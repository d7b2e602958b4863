"""Certificate authorities made on the spot."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

__all__ = ["Authority", "Pair", "dns", "ip", "mail", "uri"]

_DAY = dt.timedelta(days=1)
_Key = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey

dns, uri, mail = x509.DNSName, x509.UniformResourceIdentifier, x509.RFC822Name


def ip(text: str) -> x509.IPAddress:
    """Return the name of an address."""
    return x509.IPAddress(ip_address(text))


class Pair(NamedTuple):
    """Files of a certificate and its key."""

    cert: Path
    key: Path

    def put_into(self, other: Pair) -> None:
        """Replace the files of another pair, as orchestrators do it: first one, then the other, each at once."""
        for mine, theirs in zip(self, other, strict=True):
            fresh = theirs.with_suffix(".new")
            fresh.write_bytes(mine.read_bytes())
            fresh.chmod(0o600)
            fresh.replace(theirs)


@dataclass(frozen=True)
class Authority:
    """An authority with files in a directory of its own."""

    directory: Path
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def make(cls, directory: Path, name: str = "authority") -> Authority:
        """Make one, with its certificate in `<name>.pem`."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = _name(name)
        builder = _builder(subject, subject, key, 100 * _DAY)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        certificate = builder.sign(key, hashes.SHA256())
        directory.mkdir(parents=True, exist_ok=True)
        made = cls(directory, certificate, key)
        (directory / f"{name}.pem").write_bytes(made.pem)
        return made

    @property
    def pem(self) -> bytes:
        """Its certificate."""
        return self.certificate.public_bytes(Encoding.PEM)

    @property
    def file(self) -> Path:
        """Where its certificate is."""
        return self.directory / f"{self.certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value}.pem"

    def issue(
        self,
        name: str,
        names: Sequence[x509.GeneralName] = (),
        lasts: dt.timedelta = 90 * _DAY,
        key: _Key | None = None,
    ) -> Pair:
        """Issue a certificate with alternative names; one that lasts less than nothing has ended already."""
        key = key if key is not None else ec.generate_private_key(ec.SECP256R1())
        builder = _builder(_name(name), self.certificate.subject, key, lasts)
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        pair = Pair(self.directory / f"{name}.crt", self.directory / f"{name}.key")
        pair.cert.write_bytes(builder.sign(self.key, hashes.SHA256()).public_bytes(Encoding.PEM))
        pair.key.touch(0o600)
        pair.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return pair

    def server(self, name: str = "server") -> Pair:
        """Issue a certificate for this host."""
        return self.issue(name, [dns("localhost"), ip("127.0.0.1")])


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(subject: x509.Name, issuer: x509.Name, key: _Key, lasts: dt.timedelta) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, now + lasts) - _DAY)
        .not_valid_after(now + lasts)
    )
