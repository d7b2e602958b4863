"""Authentication of a client (API key, client certificate), and verification of the manager's certificate.

Secrets are in files. The client reads them again when a manager rejects its credentials or a connection fails: keys
and certificates are rotated while engines run. No error text and no log line holds a secret.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc

from kvcm.model.errors import InvalidArgumentError

__all__ = ["ClientCredentials", "CredentialFiles", "PresentedCredentials", "add_options", "credentials_of"]

_KEY = re.compile(r"[!-~]{1,512}")
_FLAGS = {"1": True, "0": False, "": False}
_FILES = {
    "key_file": "KVCM_KEY_FILE",
    "ca_file": "KVCM_CA_FILE",
    "cert_file": "KVCM_CERT_FILE",
    "cert_key_file": "KVCM_CERT_KEY_FILE",
}
_OPTIONS = {
    "key_file": "file with the API key of this agent",
    "ca_file": "authorities of the managers' certificates",
    "cert_file": "this agent's certificate",
    "cert_key_file": "its key",
}
_TLS_VARIABLE = "KVCM_TLS"
_NAME_VARIABLE = "KVCM_SERVER_NAME"
_CREDENTIAL_STATUSES = frozenset({grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNAVAILABLE})
_log = logging.getLogger(__name__)
_Contents = tuple[str, bytes | None, bytes | None, bytes | None]


@dataclass(frozen=True, slots=True)
class ClientCredentials:
    """Credentials of a client. Without any it connects in plain text and unauthenticated.

    Attributes:
        key: text of an API key, `kvcm_<id>_<secret>`; "" for none, or that of `key_file`.
        key_file: file with that text.
        ca_file: certificates of trusted authorities, PEM; None for those that gRPC brings along.
        cert_file: the client's own certificate, PEM.
        cert_key_file: its key.
        has_tls: whether connections are encrypted; they also are when a certificate is named.
        server_name: name that the manager's certificate must have, where it is not that of the address.
    """

    key: str = field(default="", repr=False)
    key_file: Path | None = None
    ca_file: Path | None = None
    cert_file: Path | None = None
    cert_key_file: Path | None = None
    has_tls: bool = False
    server_name: str = ""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> ClientCredentials:
        """Read KVCM_KEY_FILE, KVCM_CA_FILE, KVCM_CERT_FILE, KVCM_CERT_KEY_FILE, KVCM_TLS (1 or 0) and KVCM_SERVER_NAME.

        Args:
            environment: variables; None for those of the process.

        Raises:
            InvalidArgumentError: a variable has a value that is not allowed; names it.
        """
        found = os.environ if environment is None else environment
        flag = found.get(_TLS_VARIABLE, "")
        if flag not in _FLAGS:
            raise InvalidArgumentError(f"{_TLS_VARIABLE} is {flag!r}, must be 1 or 0")
        paths = {name: Path(path) for name, variable in _FILES.items() if (path := found.get(variable))}
        return cls(**paths, has_tls=_FLAGS[flag], server_name=found.get(_NAME_VARIABLE, ""))  # type: ignore[arg-type]

    @property
    def is_encrypted(self) -> bool:
        """Whether connections are."""
        return self.has_tls or self.ca_file is not None or self.cert_file is not None

    @property
    def has_files(self) -> bool:
        """Whether something can be read again."""
        return any(path is not None for path in (self.key_file, self.ca_file, self.cert_file, self.cert_key_file))

    def check(self) -> None:
        """Check that the fields fit together.

        Raises:
            InvalidArgumentError: naming the fields.
        """
        if self.key and self.key_file is not None:
            raise InvalidArgumentError(f"key and key_file {str(self.key_file)!r} are both given: give one")
        if (self.cert_file is None) != (self.cert_key_file is None):
            raise InvalidArgumentError("cert_file and cert_key_file belong together: one of them is missing")
        if self.server_name and not self.is_encrypted:
            raise InvalidArgumentError(f"server_name is {self.server_name!r} without TLS: give ca_file or has_tls")


@dataclass(frozen=True, slots=True)
class PresentedCredentials:
    """Credentials as calls and channels present them.

    Attributes:
        metadata: of each call.
        channel: credentials of connections, None for plain text.
    """

    metadata: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    channel: grpc.ChannelCredentials | None = None


class CredentialFiles:
    """The credentials of one client, as their files are now. Safe to use from several threads.

    Args:
        credentials: where the secrets are.

    Attributes:
        presented: credentials that calls use.

    Raises:
        InvalidArgumentError: they do not fit together, or a file cannot be used.
    """

    def __init__(self, credentials: ClientCredentials) -> None:
        credentials.check()
        self._credentials = credentials
        self._contents = self._read()
        self.presented = self._present(self._contents, None)

    @property
    def options(self) -> list[tuple[str, str]]:
        """Options of channels."""
        name = self._credentials.server_name
        return [("grpc.ssl_target_name_override", name)] if name else []

    def may_have_changed(self, status: grpc.StatusCode) -> bool:
        """Return whether to call `reload` after a call ended with this status."""
        return status in _CREDENTIAL_STATUSES and self._credentials.has_files

    def reload(self, shown: PresentedCredentials) -> bool:
        """Return whether there are newer credentials than `shown`, so that the call is retried at once. Reads files."""
        if self.presented is not shown:  # another call found out
            return True
        try:
            contents = self._read()
        except InvalidArgumentError as error:  # being replaced, perhaps
            _log.warning("%s", error)
            return False
        if contents == self._contents:
            return False
        self.presented, self._contents = self._present(contents, shown), contents
        return True

    def _read(self) -> _Contents:
        given = self._credentials
        key = given.key
        if given.key_file is not None:
            key = _read_file("key_file", given.key_file).decode("latin-1").strip()
        if (key or given.key_file is not None) and not _KEY.fullmatch(key):
            where = "key" if given.key_file is None else f"key_file {str(given.key_file)!r}"
            raise InvalidArgumentError(f"{where} holds no key: it must be one line, kvcm_<id>_<secret>")
        return (
            key,
            _optional_pem("ca_file", given.ca_file),
            _optional_pem("cert_file", given.cert_file),
            _optional_pem("cert_key_file", given.cert_key_file),
        )

    def _present(self, contents: _Contents, before: PresentedCredentials | None) -> PresentedCredentials:
        key, ca, cert, cert_key = contents
        metadata = (("authorization", f"Bearer {key}"),) if key else ()
        if not self._credentials.is_encrypted:
            return PresentedCredentials(metadata)
        if before is not None and contents[1:] == self._contents[1:]:  # only the key is new: connections stay
            return PresentedCredentials(metadata, before.channel)
        return PresentedCredentials(metadata, grpc.ssl_channel_credentials(ca, cert_key, cert))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of an agent that name its credentials."""
    for name, about in _OPTIONS.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=Path, metavar="FILE", help=f"{about}, default: {_FILES[name]}")


def credentials_of(found: argparse.Namespace) -> ClientCredentials:
    """Return the credentials that options name, and the environment where they do not.

    Raises:
        InvalidArgumentError: they do not fit together, or a file cannot be used: the start fails, not every call.
    """
    given = {name: path for name in _OPTIONS if (path := getattr(found, name)) is not None}
    credentials = replace(ClientCredentials.from_environment(), **given)
    CredentialFiles(credentials)
    return credentials


def _optional_pem(name: str, path: Path | None) -> bytes | None:
    if path is None:
        return None
    pem = _read_file(name, path)
    if b"-----BEGIN " not in pem:
        raise InvalidArgumentError(f"{name} {str(path)!r} is not PEM: it has no line that begins with -----BEGIN")
    return pem


def _read_file(name: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidArgumentError(f"{name} {str(path)!r} cannot be read: {error.strerror}") from None
