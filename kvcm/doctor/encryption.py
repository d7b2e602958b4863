"""What to do where a manager cannot be asked: mostly one side speaks TLS as the other does not expect it."""

from __future__ import annotations

import http.client
import ssl
from typing import Final

__all__ = ["advice_on"]

_START: Final = "start it with `kvcm serve`, or correct --manager"
_RENEW: Final = "renew the manager's certificate (kvcm.tls.cert_file): it takes a new file over by itself"
_CLOCKS: Final = "look at the clocks of this host and the manager's: its certificate begins in the future"
_NAME: Final = "ask by a name that its certificate has, or have one issued with this name (SAN)"
_AUTHORITY: Final = "give --ca-file with the authority that issued the manager's certificate"
_ENCRYPT: Final = (
    "if it speaks TLS, ask https:// and give --ca-file; else see whether this is the admin port of a manager"
)
_PLAIN: Final = "it speaks no TLS: ask http://, or set kvcm.tls.cert_file for the manager"
_SHOW: Final = (
    "if it asks clients for certificates (kvcm.tls.client_auth=required), give --cert-file and --cert-key-file"
)
_OTHER: Final = "give a --cert-file that has not ended, of an authority in the manager's kvcm.tls.client_ca_file"

_OF_CERTIFICATE: Final = {9: _CLOCKS, 10: _RENEW, 62: _NAME, 64: _NAME}
"""By numbers of OpenSSL (X509_V_ERR_*)."""

_NO_TLS: Final = {"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "UNKNOWN_PROTOCOL"}
_CLOSED: Final = (ConnectionError, http.client.RemoteDisconnected, ssl.SSLError)


def advice_on(trouble: BaseException | None, *, is_secure: bool, shows_certificate: bool) -> str:
    """Return what to do.

    Args:
        trouble: with which asking ended.
        is_secure: whether TLS was spoken to it.
        shows_certificate: whether it was shown a certificate.
    """
    if isinstance(trouble, ssl.SSLCertVerificationError):
        return _OF_CERTIFICATE.get(trouble.verify_code, _AUTHORITY)
    if isinstance(trouble, ssl.SSLError) and trouble.reason in _NO_TLS:
        return _PLAIN
    if isinstance(trouble, ConnectionRefusedError) or not isinstance(trouble, _CLOSED):
        return _START
    if not is_secure:
        return _ENCRYPT
    return _OTHER if shows_certificate else _SHOW
