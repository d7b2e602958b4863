"""Accounts of the admin API. A password exists only as a salted scrypt hash."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from kvcm.model.principals import Role

__all__ = ["ROLE_OF_ACCOUNT", "Account", "AccountRole", "PasswordHash"]

# RFC 7914 section 2 with the interactive cost that OWASP recommends: 16 MiB and some 50 ms per hash.
_COST, _BLOCK_SIZE, _PARALLELISM = 1 << 14, 8, 1


class AccountRole(IntEnum):
    """Roles of the original's accounts, and one of ours: users look, operators run the deployment, admins change it."""

    ROLE_USER = 0
    ROLE_ADMIN = 1
    ROLE_OPERATOR = 1000


ROLE_OF_ACCOUNT: Final[Mapping[AccountRole, Role]] = {
    AccountRole.ROLE_USER: Role.ROLE_VIEWER,
    AccountRole.ROLE_ADMIN: Role.ROLE_ADMIN,
    AccountRole.ROLE_OPERATOR: Role.ROLE_OPERATOR,
}
"""What the keys of its logins may do."""


@dataclass(frozen=True, slots=True)
class PasswordHash:
    """A salted scrypt hash (RFC 7914); neither field is ever printed."""

    salt: bytes
    digest: bytes

    @classmethod
    def of(cls, password: str, salt: bytes | None = None) -> PasswordHash:
        """Hash `password`, with a fresh salt unless one is given. Takes tens of milliseconds: never on the loop."""
        salt = os.urandom(16) if salt is None else salt
        digest = hashlib.scrypt(password.encode(), salt=salt, n=_COST, r=_BLOCK_SIZE, p=_PARALLELISM)
        return cls(salt, digest)

    def matches(self, password: str) -> bool:
        """Compare in constant time."""
        return hmac.compare_digest(self.digest, PasswordHash.of(password, self.salt).digest)

    def __repr__(self) -> str:
        return "PasswordHash(…)"


@dataclass(frozen=True, slots=True)
class Account:
    """A user of the admin API.

    Attributes:
        user_name: unique.
        role: what it may do.
        password: None where none was set yet, as after loading a snapshot: then nobody can log in.
    """

    user_name: str
    role: AccountRole
    password: PasswordHash | None
