"""API keys: `kvcm_<id>_<secret>`. The id finds the key, and of the secret only a digest is kept.

A secret has 256 random bits, so a fast digest (SHA-256) is as good as a slow one: there is nothing to guess. Passwords
of people are another matter (`kvcm.model.accounts`).
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvcm.model.principals import Principal, Role, Verb

__all__ = ["ApiKey", "PresentedKey", "hides_keys", "new_key"]

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
        """Return what is kept of the secret."""
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
        verbs: what an engine may do, as values of `Verb` in order.
        created_at: unix seconds.
        expires_at: unix seconds; 0 = never.
        digest: of its secret, empty for one of a certificate; never printed.
        certificate_name: name in client certificates that stands for a secret, "" for none.
        account: that logged in, "" for none.
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

    def is_over(self, now: float) -> bool:
        """Return whether it has ended."""
        return 0 < self.expires_at <= now

    def is_proven_by(self, presented: PresentedKey) -> bool:
        """Compare in constant time."""
        return bool(self.digest) and hmac.compare_digest(self.digest, presented.digest())

    def principal(self) -> Principal:
        """Return who shows it."""
        verbs, groups = frozenset(self.verbs), frozenset(self.groups)
        return Principal.of(self.name, self.role, verbs, groups, self.id, self.account)

    def __repr__(self) -> str:
        return f"ApiKey({self.id!r}, {self.name!r}, {self.role.name}, …)"


def new_key() -> PresentedKey:
    """Return a fresh key."""
    return PresentedKey("".join(secrets.choice(_ALPHABET) for _ in range(16)), secrets.token_urlsafe(32))


def hides_keys(text: str) -> str:
    """Return a text without the secrets of keys in it."""
    return _ANYWHERE.sub(r"\1…", text)
