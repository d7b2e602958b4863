"""Certificates: whether they can be read, fit their keys, and how long they last.

The standard library shows a certificate only after a handshake that trusted it. So one is held in memory, between a
server with the certificate and a client that trusts exactly that.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvcm.doctor.findings import Finding, fail, ok, warn
from kvcm.spans import shown_span

__all__ = ["check_authorities", "check_certificate", "check_expiry", "shown_certificate"]

_CHECK = "certificates"
_SOON_SECONDS = 14 * 86_400
_MOST_ROUNDS = 10
_EXPIRED = 10  # X509_V_ERR_CERT_HAS_EXPIRED


def check_certificate(cert_file: str, key_file: str, now: float) -> Iterator[Finding]:
    """Yield how the certificate of a server is.

    Args:
        cert_file: path of the certificate and those that lead to its authority.
        key_file: path of its key; "" when it is in the same file.
        now: unix seconds.
    """
    for path in (cert_file, key_file):
        if path and not Path(path).is_file():
            yield fail(_CHECK, f"{path} is not a file", "correct kvcm.tls.cert_file and kvcm.tls.key_file")
            return
    try:
        found = shown_certificate(cert_file, key_file)
    except ssl.SSLCertVerificationError as error:
        if error.verify_code == _EXPIRED:
            yield fail(_CHECK, f"{cert_file} has expired", "renew it")
        else:
            yield fail(_CHECK, f"{cert_file} is of no use to a server: {error.verify_message}", "have a new one issued")
        return
    except (ssl.SSLError, OSError) as error:
        reason = getattr(error, "reason", None) or error
        yield fail(
            _CHECK,
            f"{cert_file} and {key_file or cert_file} cannot be used together: {reason}",
            "give a certificate and the key it was made for, both PEM, the key without a password",
        )
        return
    names = ", ".join(value for _, value in found.get("subjectAltName", ()))
    yield check_expiry(f"{cert_file} for {names or 'no name at all'}", _end(found), now)
    if not names:
        yield warn(_CHECK, f"{cert_file} names no host", "have one issued with the names that clients use (SAN)")


def check_authorities(ca_file: str, now: float) -> Iterator[Finding]:
    """Yield how the authorities of client certificates are."""
    if not Path(ca_file).is_file():
        yield fail(_CHECK, f"{ca_file} is not a file", "correct kvcm.tls.client_ca_file")
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_verify_locations(ca_file)
    except (ssl.SSLError, OSError) as error:
        yield fail(_CHECK, f"{ca_file} cannot be read: {error}", "give certificates of authorities as PEM")
        return
    authorities = context.get_ca_certs()
    if not authorities:
        yield fail(_CHECK, f"{ca_file} has no certificate of an authority", "give those that issue client certificates")
    for authority in authorities:
        yield check_expiry(f"authority {_name(authority)} in {ca_file}", _end(authority), now)


def check_expiry(what: str, end: float, now: float) -> Finding:
    """Return whether a certificate lasts."""
    left = end - now
    if left <= 0:
        return fail(
            _CHECK, f"{what} has expired {shown_span(-left)} ago", "renew it: a manager takes a new file over by itself"
        )
    found = f"{what} ends in {shown_span(left)}"
    return warn(_CHECK, found, "renew it now") if left < _SOON_SECONDS else ok(_CHECK, found)


def shown_certificate(cert_file: str, key_file: str) -> dict[str, Any]:
    """Return the fields of a certificate, as `ssl` names them.

    Raises:
        ssl.SSLCertVerificationError: it has expired, or servers may not show it.
        ssl.SSLError, OSError: it cannot be read, or is not of the key.
    """
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(cert_file, key_file or None, password=lambda: "")
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(cert_file)
    return _shaken(client, server)


def _shaken(client: ssl.SSLContext, server: ssl.SSLContext) -> dict[str, Any]:
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = client.wrap_bio(to_client, to_server)
    answering = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(_MOST_ROUNDS):
        done = [_step(side) for side in (asking, answering)]
        if all(done):
            return dict(asking.getpeercert() or {})
    raise ssl.SSLError("the handshake does not end")


def _step(side: ssl.SSLObject) -> bool:
    try:
        side.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True


def _end(certificate: dict[str, Any]) -> float:
    return float(ssl.cert_time_to_seconds(certificate["notAfter"]))


def _name(certificate: dict[str, Any]) -> str:
    parts = dict(pair for group in certificate.get("subject", ()) for pair in group)
    return parts.get("commonName") or parts.get("organizationName") or "without a name"
