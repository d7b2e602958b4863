"""TLS of the ports: certificates and authorities, replaced while they serve.

A connection keeps the material that it began with. Each new one gets the present material: HTTP an immutable context,
gRPC that of its fetcher. A context that is changed while it is used would pass through states in which key and
certificate do not fit, and would go on to trust removed authorities.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any, Final

import grpc
from cryptography import x509

from kvcm.telemetry import metrics as catalog
from kvcm.telemetry.metrics import Reading

__all__ = [
    "Certificate",
    "ServerTls",
    "TlsMaterial",
    "certificate_ends",
    "certificate_readings",
    "describe_certificate",
    "names_of_peer",
    "read_certificates",
]

# Names in certificates. Only the alternative names identify a client.
#
# The common name does not count: it may hold anything, and authorities check it no longer.

_KINDS: Final = {"DNS", "URI", "email", "IP Address"}  # those that gRPC reports, too


@dataclass(frozen=True, slots=True)
class Certificate:
    """The description of a certificate.

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


def describe_certificate(certificate: x509.Certificate) -> Certificate:
    """Return the description of a certificate."""
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
    """Return a name as gRPC reports it: the ssl module writes addresses at full length."""
    try:
        return str(ip_address(name.strip())) if kind == "IP Address" else name
    except ValueError:
        return name


_SERVER: Final = "server"
_CLIENT_CA: Final = "client_ca"


@dataclass(frozen=True, slots=True)
class TlsMaterial:
    """Certificates, key and trusted authorities of the ports. Its parts fit together.

    Attributes:
        chain_pem: the certificate, and those between it and its authority.
        key_pem: its key.
        client_ca_pem: authorities of clients, b"" to request no certificates of clients.
        requires_client: whether clients without a certificate are refused.
        certificate: that of the ports.
        client_cas: authorities of clients.
    """

    chain_pem: bytes
    key_pem: bytes = field(repr=False)
    client_ca_pem: bytes
    requires_client: bool
    certificate: Certificate
    client_cas: Sequence[Certificate] = ()

    def context(self) -> ssl.SSLContext:
        """Return a context for HTTP.

        Raises:
            ValueError: OpenSSL does not take it.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # its ciphers have forward secrecy
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION
        context.set_alpn_protocols(["http/1.1"])
        try:
            _load_chain(context, self.chain_pem + b"\n" + self.key_pem)
            if self.client_ca_pem:
                context.load_verify_locations(cadata=self.client_ca_pem.decode("ascii"))
        except ssl.SSLError as error:
            raise ValueError(error.reason or str(error)) from error
        if self.client_ca_pem:
            context.verify_mode = ssl.CERT_REQUIRED if self.requires_client else ssl.CERT_OPTIONAL
            # A resumed session is not verified again: its certificate may have expired since.
            context.num_tickets = 0
            context.options |= ssl.OP_NO_TICKET
        return context

    def grpc_configuration(self) -> grpc.ServerCertificateConfiguration:
        """Return the same for gRPC."""
        # gRPC can demand certificates or not ask for them: Python has no access to what lies between.
        roots = self.client_ca_pem if self.requires_client else None
        return grpc.ssl_server_certificate_configuration([(self.key_pem, self.chain_pem)], roots)


class ServerTls:
    """The TLS material in force.

    Args:
        material: at the beginning.

    Raises:
        ValueError: OpenSSL does not take it.
    """

    def __init__(self, material: TlsMaterial) -> None:
        self.material = material
        self.context = material.context()

    def replace(self, material: TlsMaterial) -> None:
        """Have new connections use this.

        Raises:
            ValueError: OpenSSL does not take it; nothing is changed.
        """
        context = material.context()
        self.material, self.context = material, context

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Return credentials for one server of gRPC: each fetches changes by itself."""
        given = self.material

        def fetch() -> grpc.ServerCertificateConfiguration | None:  # for each connection, on threads of gRPC
            nonlocal given
            if self.material is given:
                return None
            given = self.material
            return given.grpc_configuration()

        configuration = given.grpc_configuration()
        # None stands for no change, which the types do not know.
        return grpc.dynamic_ssl_server_credentials(configuration, fetch, given.requires_client)  # type: ignore[arg-type]


def certificate_ends(tls: ServerTls | None) -> dict[str, float]:
    """Return when certificates end, unix seconds, by the file that they are in; 0 for those that there are not."""
    of_server = tls.material.certificate.not_after if tls is not None else 0
    of_clients = (ca.not_after for ca in tls.material.client_cas) if tls is not None else ()
    return {_SERVER: of_server, _CLIENT_CA: min(of_clients, default=0)}


def certificate_readings(tls: ServerTls | None) -> Iterator[Reading]:
    """Yield the same for metrics."""
    for file, ends in certificate_ends(tls).items():
        yield Reading(catalog.CERTIFICATE_EXPIRY, ends, (file,))


def _load_chain(context: ssl.SSLContext, pem: bytes) -> None:
    """Load a chain with its key from memory: the checked one, not the present content of the files."""
    descriptor = os.memfd_create("kvcm-tls")
    try:
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            file.write(pem)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}", password=_no_password)
    finally:
        os.close(descriptor)


def _no_password() -> str:
    """Stand in for OpenSSL's question at the terminal; keys with a password are refused before."""
    return ""
