"""Principals, roles and permissions.

A role stands for verbs; engines have those that they were given. Whoever is limited to instance groups may do what it
may do only there, and nothing that concerns the whole deployment.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Final, NamedTuple

__all__ = [
    "ALL_GROUPS",
    "ANONYMOUS",
    "ENGINE_VERBS",
    "ROLE_OF_ACCOUNT",
    "UNRESTRICTED",
    "Account",
    "AccountRole",
    "ApiKey",
    "CallContext",
    "PasswordHash",
    "PresentedKey",
    "Principal",
    "Role",
    "Verb",
    "call_context",
    "new_key",
    "redact_keys",
]

ALL_GROUPS: Final = "*"
"""In the place of a group: all of them."""


class Role(IntEnum):
    """Numbers are those of the wire."""

    ROLE_VIEWER = 1
    ROLE_OPERATOR = 2
    ROLE_ADMIN = 3
    ROLE_ENGINE = 4


class Verb(Enum):
    """What a call does."""

    VIEW = "view"
    OPERATE = "operate"
    ADMINISTER = "administer"
    MATCH = "match"
    WRITE = "write"
    REMOVE = "remove"
    PIN = "pin"
    REPORT = "report"
    SCORE = "score"


ENGINE_VERBS: Final = (Verb.MATCH, Verb.WRITE, Verb.REMOVE, Verb.PIN, Verb.REPORT, Verb.SCORE)
"""What engines can be allowed, in the order of the wire's numbers from 1."""
_VIEWER: Final = frozenset({Verb.VIEW})
# What an operator removes can be computed again; what it wrote, everybody would read.
_OPERATOR: Final = frozenset({Verb.VIEW, Verb.OPERATE, Verb.MATCH, Verb.REMOVE, Verb.PIN, Verb.REPORT, Verb.SCORE})
_VERBS: Final[Mapping[Role, frozenset[Verb]]] = {
    Role.ROLE_VIEWER: _VIEWER,
    Role.ROLE_OPERATOR: _OPERATOR,
    Role.ROLE_ADMIN: frozenset(Verb),
}


@dataclass(frozen=True, slots=True)
class Principal:
    """The caller of a request.

    Attributes:
        name: stays when its key is replaced; "" while authentication is disabled.
        verbs: what it may do.
        groups: where: instance groups, or `ALL_GROUPS`.
        key_id: of the key that it showed.
        account: that it is logged in as, "" for none.
    """

    name: str
    verbs: frozenset[Verb]
    groups: frozenset[str]
    key_id: str = ""
    account: str = ""

    @classmethod
    def of(
        cls, name: str, role: Role, verbs: frozenset[Verb], groups: frozenset[str], key_id: str, account: str = ""
    ) -> Principal:
        """Return a principal of a role; `verbs` are those of an engine."""
        return cls(name, _VERBS.get(role, verbs), groups, key_id, account)

    @property
    def has_all_groups(self) -> bool:
        """Whether it may do what concerns the whole deployment."""
        return ALL_GROUPS in self.groups

    def covers(self, group_name: str) -> bool:
        """Return whether it may do something in a group."""
        return group_name in self.groups or ALL_GROUPS in self.groups


UNRESTRICTED: Final = Principal("", frozenset(Verb), frozenset({ALL_GROUPS}))
"""The principal of all calls while authentication is disabled, and of the manager itself."""
ANONYMOUS: Final = Principal("", frozenset(), frozenset())
"""The principal of calls without credentials where authentication is enabled."""


class CallContext(NamedTuple):
    """What the present task works for.

    Attributes:
        principal: on whose behalf.
        call: that it made, "" for none: the manager's own duties.
        peer: address that it came from.
    """

    principal: Principal = UNRESTRICTED
    call: str = ""
    peer: str = ""


call_context: ContextVar[CallContext] = ContextVar("errand", default=CallContext())  # noqa: B039 - it cannot be changed
"""What the present task works for."""

# Accounts of the admin API. A password exists only as a salted scrypt hash.

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
        password: None where none was set yet, as after loading a snapshot: then no login succeeds.
    """

    user_name: str
    role: AccountRole
    password: PasswordHash | None


# API keys: `kvcm_<id>_<secret>`. The id finds the key, and of the secret only a digest is kept.
#
# A secret has 256 random bits, so a fast digest (SHA-256) is as good as a slow one: there is nothing to guess.
# Passwords of people are another matter (`kvcm.model.accounts`).

_KEY: Final = re.compile(r"kvcm_([a-z2-7]{16})_([A-Za-z0-9_-]{43})")
_ANYWHERE: Final = re.compile(r"(kvcm_[a-z2-7]{16}_)[A-Za-z0-9_-]{20,}")
_ALPHABET: Final = "abcdefghijklmnopqrstuvwxyz234567"


class PresentedKey(NamedTuple):
    """A key as its owner shows it; never printed.

    Attributes:
        id: names the key.
        secret: proves it.
    """

    id: str
    secret: str

    @classmethod
    def parse(cls, text: str) -> PresentedKey | None:
        """Return the key that a text is, None for one that is none."""
        found = _KEY.fullmatch(text)
        return None if found is None else cls(found[1], found[2])

    @property
    def text(self) -> str:
        """Return what its owner sends."""
        return f"kvcm_{self.id}_{self.secret}"

    def digest(self) -> bytes:
        """Return the digest of the secret."""
        return hashlib.sha256(self.secret.encode()).digest()

    def __repr__(self) -> str:
        return f"PresentedKey({self.id!r}, …)"


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key as it is kept.

    Attributes:
        id: names it.
        name: of the principal.
        role: what it may do.
        groups: where, in order; `ALL_GROUPS` for everywhere.
        verbs: what an engine may do, as values of `Verb` in order; without the permission to report, which releases
            before it had a verb of its own do not know.
        created_at: unix seconds.
        expires_at: unix seconds; 0 = never.
        digest: of its secret, empty for one of a certificate; never printed.
        certificate_name: name in client certificates that stands for a secret, "" for none.
        account: that logged in, "" for none.
        is_reporter: whether an engine may report corrupt bytes; None in keys of releases before there was that verb,
            where it goes with the permission to write.
        is_scorer: whether an engine or a router may ask for scores; None in keys of releases before there was that
            verb, where it goes with the permission to look blocks up.
    """

    id: str
    name: str
    role: Role
    groups: tuple[str, ...]
    verbs: tuple[Verb, ...]
    created_at: float
    expires_at: float
    digest: bytes
    certificate_name: str = ""
    account: str = ""
    is_reporter: bool | None = None
    is_scorer: bool | None = None

    @property
    def engine_verbs(self) -> tuple[Verb, ...]:
        """All that an engine may do, in the order of the wire's numbers."""
        reports = Verb.WRITE in self.verbs if self.is_reporter is None else self.is_reporter
        scores = Verb.MATCH in self.verbs if self.is_scorer is None else self.is_scorer
        return self.verbs + (Verb.REPORT,) * reports + (Verb.SCORE,) * scores

    def is_expired(self, now: float) -> bool:
        """Return whether it has ended."""
        return 0 < self.expires_at <= now

    def is_proven_by(self, presented: PresentedKey) -> bool:
        """Compare in constant time."""
        return bool(self.digest) and hmac.compare_digest(self.digest, presented.digest())

    def principal(self) -> Principal:
        """Return its principal."""
        verbs, groups = frozenset(self.engine_verbs), frozenset(self.groups)
        return Principal.of(
            name=self.name, role=self.role, verbs=verbs, groups=groups, key_id=self.id, account=self.account
        )

    def __repr__(self) -> str:
        return f"ApiKey({self.id!r}, {self.name!r}, {self.role.name}, …)"


def new_key() -> PresentedKey:
    """Return a fresh key."""
    return PresentedKey("".join(secrets.choice(_ALPHABET) for _ in range(16)), secrets.token_urlsafe(32))


def redact_keys(text: str) -> str:
    """Return a text without the secrets of keys in it."""
    return _ANYWHERE.sub(r"\1…", text)
