"""Certificates and keys in files: checked as a whole, and read anew when they change.

Orchestrators replace them while the manager runs, some by swapping a symbolic link above them. Nothing is taken over
that does not fit together: a certificate may be seen before its key is there, and then the next look finds both.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import structlog
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from kvcm.config import ConfigError, Settings
from kvcm.exposure import is_exposed
from kvcm.service.certificates import described, read_certificates
from kvcm.service.tls import ServerTls, TlsMaterial

__all__ = ["TlsFiles", "open_tls"]

_LOOK_SECONDS: Final = 2.0
_CERT: Final = "kvcm.tls.cert_file"
_KEY: Final = "kvcm.tls.key_file"
_CLIENT_CA: Final = "kvcm.tls.client_ca_file"
_log = structlog.get_logger("kvcm")

_Stamp = tuple[int, int, int, int] | None


def open_tls(settings: Settings) -> TlsFiles | None:
    """Read what the settings name; None where ports do not speak TLS.

    Raises:
        ConfigError: a file cannot be used, or they do not fit together.
    """
    return TlsFiles(settings) if settings.tls_cert_file else None


class TlsFiles:
    """Keeps what ports use the same as what files hold.

    Args:
        settings: names them.

    Attributes:
        tls: what is in force.

    Raises:
        ConfigError: a file cannot be used, or they do not fit together.
    """

    def __init__(self, settings: Settings) -> None:
        self._paths = {
            key: Path(path)
            for key, path in (
                (_CERT, settings.tls_cert_file),
                (_KEY, settings.tls_key_file),
                (_CLIENT_CA, settings.tls_client_ca_file),
            )
            if path
        }
        self._requires_client = settings.tls_client_auth == "required"
        self._seen = self._stamps()
        material = self._read()
        try:
            self.tls = ServerTls(material)
        except ValueError as error:
            raise self._refused(error) from None
        self._tell(material)

    async def run(self) -> None:
        """Look for changes for good."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            await self.look()

    async def look(self) -> None:
        """Take over what has changed, once."""
        stamps = await asyncio.to_thread(self._stamps)
        if stamps != self._seen:
            self._seen = stamps  # taken before they are read: what changes meanwhile is found by the next look
            await self.reread()

    async def reread(self) -> None:
        """Take over what the files hold. What cannot be used is logged, and what was in force stays."""
        try:
            material = await asyncio.to_thread(self._read)
            if material == self.tls.material:
                return
            try:
                self.tls.replace(material)
            except ValueError as error:
                raise self._refused(error) from None
        except ConfigError as error:
            _log.error("certificate_refused", reason=str(error), in_force=_told_time(self.tls.material))
            return
        self._tell(material)

    def _stamps(self) -> Mapping[str, _Stamp]:
        return {key: _stamp(path) for key, path in self._paths.items()}

    def _read(self) -> TlsMaterial:
        chain_pem, key_pem = self._bytes(_CERT), self._bytes(_KEY)
        chain = self._certificates(_CERT, chain_pem)
        self._check_key(key_pem, chain[0])
        cas = self._certificates(_CLIENT_CA, self._bytes(_CLIENT_CA)) if _CLIENT_CA in self._paths else ()
        return TlsMaterial(
            _pem(chain), key_pem, _pem(cas), self._requires_client, described(chain[0]), tuple(map(described, cas))
        )

    def _bytes(self, key: str) -> bytes:
        try:
            return self._paths[key].read_bytes()
        except OSError as error:
            raise self._bad(key, f"cannot be read: {error.strerror}") from None

    def _certificates(self, key: str, pem: bytes) -> tuple[x509.Certificate, ...]:
        try:
            return read_certificates(pem)
        except ValueError:
            raise self._bad(key, "holds no certificate: it must be PEM, BEGIN CERTIFICATE") from None

    def _check_key(self, pem: bytes, certificate: x509.Certificate) -> None:
        try:
            key = load_pem_private_key(pem, None)
        except TypeError:
            raise self._bad(_KEY, "holds a key with a password: it must be without one") from None
        except Exception:  # the text may hold parts of what was read
            raise self._bad(_KEY, "holds no private key: it must be PEM, BEGIN PRIVATE KEY") from None
        form = Encoding.DER, PublicFormat.SubjectPublicKeyInfo
        if key.public_key().public_bytes(*form) != certificate.public_key().public_bytes(*form):
            raise self._bad(_KEY, f"is not the key of the certificate in {_CERT} {str(self._paths[_CERT])!r}")

    def _bad(self, key: str, text: str) -> ConfigError:
        return ConfigError(f"{key} {str(self._paths[key])!r} {text}")

    def _refused(self, error: ValueError) -> ConfigError:
        return self._bad(_CERT, f"cannot be used with its key and authorities: {error}")

    def _tell(self, material: TlsMaterial) -> None:
        shown = material.certificate
        _log.info(
            "certificate_loaded",
            file=str(self._paths[_CERT]),
            subject=shown.subject,
            names=list(shown.names),
            not_after=_told_time(material),
            client_ca=[ca.subject for ca in material.client_cas],
        )
        now = datetime.now(UTC).timestamp()
        if not shown.not_before <= now <= shown.not_after:
            _log.warning("certificate_not_valid_now", file=str(self._paths[_CERT]), not_after=_told_time(material))
        self._tell_readable(self._paths[_KEY])

    def _tell_readable(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            if is_exposed(path):
                _log.warning("tls_key_readable", file=str(path), reason="others on this host can read it: chmod 600")


def _stamp(path: Path) -> _Stamp:
    """Return what changes with a file, also when a link on its way is turned to another one."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


def _pem(certificates: tuple[x509.Certificate, ...]) -> bytes:
    """Return certificates without the text that files have between them."""
    return b"".join(certificate.public_bytes(Encoding.PEM) for certificate in certificates)


def _told_time(material: TlsMaterial) -> str:
    return datetime.fromtimestamp(material.certificate.not_after, UTC).isoformat()
