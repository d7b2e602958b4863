"""What certificates say of themselves, and which of it tells who a client is: its alternative names alone.

The common name does not count: anybody may write anything there, and authorities check it no longer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, Final

from cryptography import x509

__all__ = ["Certificate", "described", "names_of_peer", "read_certificates"]

_KINDS: Final = {"DNS", "URI", "email", "IP Address"}  # those that gRPC tells, too


@dataclass(frozen=True, slots=True)
class Certificate:
    """What is told of a certificate.

    Attributes:
        subject: as in RFC 4514.
        names: its alternative names.
        not_before: unix seconds.
        not_after: unix seconds.
    """

    subject: str
    names: tuple[str, ...]
    not_before: float
    not_after: float


def read_certificates(pem: bytes) -> tuple[x509.Certificate, ...]:
    """Return the certificates of a file, in its order; one at least.

    Raises:
        ValueError: there is none, or one is malformed.
    """
    return tuple(x509.load_pem_x509_certificates(pem))


def described(certificate: x509.Certificate) -> Certificate:
    """Return what is told of a certificate."""
    return Certificate(
        certificate.subject.rfc4514_string(),
        _names(certificate),
        certificate.not_valid_before_utc.timestamp(),
        certificate.not_valid_after_utc.timestamp(),
    )


def names_of_peer(certificate: Mapping[str, Any] | None) -> Sequence[str]:
    """Return the names of a certificate that was verified, as the ssl module has it; none where there is none."""
    if not certificate:
        return ()
    return tuple(_plain(kind, name) for kind, name in certificate.get("subjectAltName", ()) if kind in _KINDS)


def _names(certificate: x509.Certificate) -> tuple[str, ...]:
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except (x509.ExtensionNotFound, ValueError):
        return ()
    return tuple(str(name.value) for name in extension.value if not isinstance(name, x509.OtherName))


def _plain(kind: str, name: str) -> str:
    """Return a name as gRPC tells it: the ssl module writes addresses at full length."""
    try:
        return str(ip_address(name.strip())) if kind == "IP Address" else name
    except ValueError:
        return name
