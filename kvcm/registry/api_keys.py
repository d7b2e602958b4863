"""The API keys of a deployment.

A key that is rotated gets a successor of the same principal name, so that write sessions which the old one started can
be finished with the new one. A login's key counts while its account is there and has the role that the key was made
with: no change of accounts has to care for keys. When keys were used is kept beside them: it
changes all the time, and does not concern readers of the keys.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from kvcm.model.clock import Clock
from kvcm.model.errors import DuplicateEntityError, InvalidArgumentError
from kvcm.model.principals import ALL_GROUPS, ENGINE_VERBS, ApiKey, PresentedKey, Role, Verb, new_key
from kvcm.model.uri import check_name
from kvcm.registry.document_cache import DocumentBatch, DocumentCache, Flush
from kvcm.store.store import Table

__all__ = ["ImportedKey", "ImportedKeys", "KeyDocuments", "KeyRegistry", "KeyUse", "NewKey"]

_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,128}")
_MOST_GROUPS: Final = 1000
_MOST_CERTIFICATE_NAME: Final = 1024
_MOST_TTL_SECONDS: Final = 10 * 365 * 86_400.0
_LATER_VERBS: Final = (Verb.REPORT, Verb.SCORE)  # releases before there were these cannot read their names
_MOST_LOGINS: Final = 32  # of an account
_MADE: Final = "keys_made"
_USE_SECONDS: Final = 60.0  # how exactly it is known when a key was used


@dataclass(frozen=True, slots=True)
class KeyUse:
    """When a key was last used, unix seconds."""

    at: float


@dataclass(frozen=True, slots=True)
class NewKey:
    """What a key is to be.

    Attributes:
        name: of its principal.
        role: what it may do.
        groups: where; none means everywhere, and is not allowed for engines.
        verbs: of an engine; none means all.
        ttl_seconds: how long it lasts; 0 = for ever.
        certificate_name: name in client certificates that stands for a secret, "" for none.
    """

    name: str
    role: Role
    groups: tuple[str, ...] = ()
    verbs: tuple[Verb, ...] = ()
    ttl_seconds: float = 0.0
    certificate_name: str = ""

    def check(self) -> None:
        """Refuse what cannot be.

        Raises:
            InvalidArgumentError: naming the field, the value and the allowed values.
        """
        if not _NAME.fullmatch(self.name):
            raise InvalidArgumentError(f"name {self.name!r} is not 1 to 128 characters of A-Z a-z 0-9 . _ -")
        _check_ttl(self.ttl_seconds)
        self._check_groups()
        if self.verbs and self.role is not Role.ROLE_ENGINE:
            raise InvalidArgumentError(f"verbs are of ROLE_ENGINE, role is {self.role.name}")
        if len(self.certificate_name) > _MOST_CERTIFICATE_NAME:
            raise InvalidArgumentError(f"certificate_name has {len(self.certificate_name)} characters, at most 1024")

    def _check_groups(self) -> None:
        if self.role is Role.ROLE_ENGINE and not self.groups:
            raise InvalidArgumentError('instance_groups is empty: an engine needs those that it works for, or "*"')
        if len(self.groups) > _MOST_GROUPS:
            raise InvalidArgumentError(f"instance_groups has {len(self.groups)} entries, at most {_MOST_GROUPS}")
        for position, group in enumerate(self.groups):
            check_name(f"instance_groups[{position}]", group)


def _check_ttl(seconds: float) -> None:
    """Refuse a time to live that is none.

    Raises:
        InvalidArgumentError: naming the allowed values.
    """
    if not 0 <= seconds <= _MOST_TTL_SECONDS:
        raise InvalidArgumentError(f"ttl_seconds is {seconds:.0f}, must be from 0 (no end) to {_MOST_TTL_SECONDS:.0f}")


class KeyDocuments(NamedTuple):
    """The documents of keys: keys, times of their last uses, and numbers of keys made per name."""

    keys: DocumentCache[ApiKey]
    uses: DocumentCache[KeyUse]
    numbers: DocumentCache[int]


class KeyRegistry:
    """Keys by id.

    Args:
        table: holds them.
        documents: the parts of it; uses are elsewhere.
        refresh_view: brings the keys up to date with the table.
        flush: returns when all changes are durable.
        clock: time source.
        role_of: what logins of an account may do, None when there is no such account.
        fresh: makes a new key.
    """

    def __init__(
        self,
        table: Table,
        documents: KeyDocuments,
        refresh_view: Callable[[], Awaitable[None]],
        flush: Flush,
        clock: Clock,
        role_of: Callable[[str], Role | None],
        fresh: Callable[[], PresentedKey] = new_key,
    ) -> None:
        self._table = table
        self._cache, self._uses, self._numbers = documents
        self._refresh_view = refresh_view
        self._flush = flush
        self._clock = clock
        self._role_of = role_of
        self._fresh = fresh
        self._of_certificates: dict[str, ApiKey] = {}
        self._read_generation = -1
        self._used: dict[str, float] = {}

    @property
    def generation(self) -> int:
        """Grows with every change of a key."""
        return self._cache.generation

    async def create(self, wanted: NewKey) -> tuple[ApiKey, PresentedKey | None]:
        """Make a key.

        Returns:
            The stored key, and the secret that its owner presents; None for a certificate's.

        Raises:
            InvalidArgumentError: a field is malformed.
            DuplicateEntityError: there is a key of that name, or of that certificate's.
            StorageIOError: the store cannot be asked.
        """
        wanted.check()
        groups = tuple(sorted(set(wanted.groups))) or (ALL_GROUPS,)
        verbs = tuple(verb for verb in ENGINE_VERBS if verb in wanted.verbs) or _all_verbs(wanted.role)
        stored_verbs = tuple(verb for verb in verbs if verb not in _LATER_VERBS)
        now = self._clock.now()
        key = ApiKey(
            "",
            name=wanted.name,
            role=wanted.role,
            groups=groups,
            verbs=stored_verbs,
            created_at=now,
            expires_at=_end(now, wanted.ttl_seconds),
            digest=b"",
            is_reporter=Verb.REPORT in verbs,
            is_scorer=Verb.SCORE in verbs,
        )
        made, presented = self._fresh_like(replace(key, certificate_name=wanted.certificate_name))
        while not await self._try_add(made):
            pass  # another key was made meanwhile, perhaps of that name
        await self._flush()
        return made, presented

    async def log_in(self, account: str, role: Role, ttl_seconds: float) -> tuple[ApiKey, PresentedKey | None]:
        """Make a key for an account whose password was right. Of very many the oldest ends."""
        now = self._clock.now()
        key = ApiKey(
            "",
            name=f"account/{account}",
            role=role,
            groups=(ALL_GROUPS,),
            verbs=(),
            created_at=now,
            expires_at=now + ttl_seconds,
            digest=b"",
            certificate_name="",
            account=account,
        )
        made, presented = await self._add(key)
        others = sorted((each for each in self._logins(account) if each.id != made.id), key=lambda key: key.created_at)
        await self._forget_all(others[: 1 - _MOST_LOGINS])
        return made, presented

    async def rotate(
        self, key_id: str, overlap_seconds: float, ttl_seconds: float
    ) -> tuple[ApiKey, PresentedKey | None]:
        """Make a key with the rights of another, which ends after `overlap_seconds`.

        Raises:
            InvalidArgumentError: there is no such key with a secret, or a time is out of range.
            StorageIOError: the store cannot be asked.
        """
        _check_ttl(ttl_seconds)
        if not 0 <= overlap_seconds <= _MOST_TTL_SECONDS:
            raise InvalidArgumentError(f"overlap_seconds is {overlap_seconds:.0f}, must be from 0")
        old = self._existing(key_id, await self._cache.read(key_id))
        if not old.digest or old.account:
            raise InvalidArgumentError(
                f"key {key_id!r} is of {_kind(old)}: only keys with a lasting secret are rotated"
            )
        now = self._clock.now()
        made = await self._add(replace(old, created_at=now, expires_at=_end(now, ttl_seconds)))
        end = now + overlap_seconds

        def decide(known: ApiKey | None) -> ApiKey | None:
            if known is None or not overlap_seconds:
                return None
            return replace(known, expires_at=min(end, known.expires_at or end))

        await self._cache.change(key_id, decide)
        await self._flush()
        return made

    async def revoke(self, key_id: str) -> None:
        """End a key at once; on other managers when they look at the store next.

        Raises:
            InvalidArgumentError: there is no such key.
            StorageIOError: the store cannot be asked.
        """
        self._existing(key_id, await self._cache.read(key_id))
        await self._forget(key_id)
        await self._flush()

    async def log_out(self, key_id: str) -> None:
        """End a key at once if it is of a login; others are used elsewhere, too.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        key = self.find(key_id)
        if key is not None and key.account:
            await self._forget_all([key])

    async def revoke_logins(self, account: str) -> None:
        """Revoke the login keys of an account that are known here."""
        await self._forget_all(self._logins(account))

    def find(self, key_id: str) -> ApiKey | None:
        """Return a key, None when there is none of that id."""
        return self._cache.get(key_id)

    def all(self) -> list[ApiKey]:
        """Return the keys that have not ended, ordered by name and time."""
        now = self._clock.now()
        return sorted(
            (key for key in self._cache.all() if not self._is_over(key, now)),
            key=lambda key: (key.name, key.created_at),
        )

    async def last_used_at(self, key_id: str) -> float:
        """Return when a key was last used by any manager, to about a minute; 0 for never.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        use = await self._uses.read(key_id)
        return max(use.at if use is not None else 0.0, self._used.get(key_id, 0.0))

    def authenticate(self, presented: PresentedKey) -> ApiKey | None:
        """Return the key that somebody proves to have, ended ones included; None when there is no such key."""
        key = self._cache.get(presented.id)
        if key is None or not key.is_proven_by(presented):
            return None
        return key

    def of_certificate(self, names: Sequence[str]) -> ApiKey | None:
        """Return the key of a client certificate's names, None where none is known."""
        self._invalidate_changed()
        return next((key for name in names if (key := self._of_certificates.get(name)) is not None), None)

    def use(self, key: ApiKey) -> bool:
        """Note the use of a key that is right; returns False when it has ended."""
        now = self._clock.now()
        if self._is_over(key, now):
            return False
        self._used[key.id] = now
        return True

    async def tidy(self) -> None:
        """Store the uses, and forget expired keys. To be called now and then."""
        used, self._used = self._used, {}
        for key_id, at in used.items():
            if self._cache.get(key_id) is not None:
                await self._uses.change(key_id, lambda known, at=at: _later(known, at))  # type: ignore[misc]
        now = self._clock.now()
        await self._forget_all([key for key in self._cache.all() if self._is_over(key, now)])

    def _is_over(self, key: ApiKey, now: float) -> bool:
        return key.is_expired(now) or (key.account != "" and self._role_of(key.account) is not key.role)

    def _invalidate_changed(self) -> None:
        """Invalidate derived data of keys that may have changed."""
        if self._cache.generation != self._read_generation:
            self._read_generation = self._cache.generation
            self._of_certificates = {key.certificate_name: key for key in self._certified()}

    def _certified(self) -> list[ApiKey]:
        """Return the keys of certificates, of each name the one that counts last: ended ones are not forgotten yet."""
        now = self._clock.now()
        keys = (key for key in self._cache.all() if key.certificate_name)
        return sorted(keys, key=lambda key: (not self._is_over(key, now), key.created_at))

    async def _try_add(self, made: ApiKey) -> bool:
        """Add a key together with the number of those made; False when that has grown since the names were looked at.

        Raises:
            DuplicateEntityError: there is a key of that name, or of that certificate's.
        """
        number, batch = await self._numbers.read(_MADE), DocumentBatch()
        batch.stage(self._numbers, _MADE, (number or 0) + 1)
        await self._refresh_view()
        self._check_name_is_free(made)
        batch.stage(self._cache, made.id, made)
        return await batch.commit(self._table)

    def _fresh_like(self, key: ApiKey) -> tuple[ApiKey, PresentedKey | None]:
        """Return a key with an id and, unless it is of a certificate, a secret of its own."""
        presented = self._fresh()
        if key.certificate_name:
            return replace(key, id=presented.id), None
        return replace(key, id=presented.id, digest=presented.digest()), presented

    async def _add(self, key: ApiKey) -> tuple[ApiKey, PresentedKey | None]:
        made, presented = self._fresh_like(key)

        def decide(known: ApiKey | None) -> ApiKey:
            assert known is None, "80 random bits came twice"
            return made

        await self._cache.change(made.id, decide)
        await self._flush()
        return made, presented

    def _logins(self, account: str) -> list[ApiKey]:
        return [key for key in self._cache.all() if key.account == account]

    async def _forget_all(self, keys: Sequence[ApiKey]) -> None:
        for key in keys:
            await self._forget(key.id)
        if keys:
            await self._flush()

    async def _forget(self, key_id: str) -> None:
        await self._cache.change(key_id, lambda _known: None)
        await self._uses.change(key_id, lambda _known: None)

    def _existing(self, key_id: str, known: ApiKey | None) -> ApiKey:
        if known is None or self._is_over(known, self._clock.now()):
            raise InvalidArgumentError(f"key {key_id[:64]!r} does not exist; keys are named by their key_id")
        return known

    def _check_name_is_free(self, wanted: ApiKey) -> None:
        for key in self.all():
            if key.name == wanted.name:
                raise DuplicateEntityError(f"name {wanted.name!r} is that of key {key.id!r}; rotate or revoke that one")
            if wanted.certificate_name and key.certificate_name == wanted.certificate_name:
                raise DuplicateEntityError(f"certificate_name {wanted.certificate_name!r} is that of key {key.id!r}")


def _end(now: float, ttl_seconds: float) -> float:
    return now + ttl_seconds if ttl_seconds else 0.0


def _all_verbs(role: Role) -> tuple[Verb, ...]:
    return ENGINE_VERBS if role is Role.ROLE_ENGINE else ()


def _kind(key: ApiKey) -> str:
    return f"a login of {key.account!r}" if key.account else "a certificate"


def _later(known: KeyUse | None, at: float) -> KeyUse:
    return known if known is not None and known.at + _USE_SECONDS > at else KeyUse(at)


# Administrators' keys that lay in files when a manager started, such as mounted secrets.
#
# Each is taken over once, and that is never forgotten: a key that was revoked or rotated, or has ended, stays ended,
# though it still lies in the file at the next start.


@dataclass(frozen=True, slots=True)
class ImportedKey:
    """That a key was taken over.

    Attributes:
        id: names the key.
        at: when, unix seconds.
    """

    id: str
    at: float


class ImportedKeys:
    """Takes keys over.

    Args:
        table: holds the documents.
        keys: those that there are.
        taken: when keys were taken over, unix seconds by id.
        flush: returns when all changes are durable.
        clock: time source.
    """

    def __init__(
        self, table: Table, keys: DocumentCache[ApiKey], taken: DocumentCache[float], flush: Flush, clock: Clock
    ) -> None:
        self._table = table
        self._keys = keys
        self._taken = taken
        self._flush = flush
        self._clock = clock

    async def import_key(self, name: str, presented: PresentedKey) -> ApiKey | None:
        """Have a key of an administrator, unless it was had before.

        Args:
            name: of its principal.
            presented: the key.

        Returns:
            The stored key, None when it has expired.

        Raises:
            InvalidArgumentError: the key of its id has another secret.
            StorageIOError: the store cannot be asked.
        """
        now = self._clock.now()
        new = ApiKey(
            presented.id,
            name=name,
            role=Role.ROLE_ADMIN,
            groups=(ALL_GROUPS,),
            verbs=(),
            created_at=now,
            expires_at=0.0,
            digest=presented.digest(),
        )
        while await self._taken.read(presented.id) is None:
            await self._import(new)
        known = await self._keys.read(presented.id)
        if known is not None and not known.is_proven_by(presented):
            raise InvalidArgumentError(f"key {presented.id!r} has another secret")
        return known if known is not None and not known.is_expired(now) else None

    async def all(self) -> list[ImportedKey]:
        """Return the imported keys, ordered by id.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        self._taken.refresh_from(await self._table.all(), ())
        return [
            ImportedKey(key_id, at) for key_id in self._taken.names() if (at := self._taken.get(key_id)) is not None
        ]

    async def remember(self, taken: ImportedKey) -> None:
        """Record that a key was imported elsewhere; an earlier record stays.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        await self._taken.change(taken.id, lambda known: known or taken.at)

    async def _import(self, new: ApiKey) -> None:
        known, batch = await self._keys.read(new.id), DocumentBatch()
        if known is None:
            batch.stage(self._keys, new.id, new)
        batch.stage(self._taken, new.id, new.created_at)
        await batch.commit(self._table)  # if somebody else was faster, it is looked at again
        await self._flush()
