"""Accounts of the admin API: user names, passwords as hashes, roles."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Final

from kvcm.model.errors import DuplicateEntityError, InvalidArgumentError
from kvcm.model.principals import ROLE_OF_ACCOUNT, Account, AccountRole, PasswordHash, Role
from kvcm.model.uri import check_name
from kvcm.registry.document_cache import DocumentCache, Flush
from kvcm.registry.validation import require

__all__ = ["AccountRegistry"]

_DUMMY_HASH: Final = PasswordHash(b"salt of nobody..", bytes(64))


class AccountRegistry:
    """Accounts by user name.

    Args:
        cache: their documents.
        flush: returns when all changes are durable.
    """

    def __init__(self, cache: DocumentCache[Account], flush: Flush) -> None:
        self._cache = cache
        self._flush = flush

    async def add(self, user_name: str, password: str, role: AccountRole) -> None:
        """Add an account.

        Raises:
            InvalidArgumentError: user name or password is missing or malformed.
            DuplicateEntityError: the name is taken.
            StorageIOError: the store cannot be asked.
        """
        require(user_name, "AddAccount.user_name")
        check_name("user_name", user_name)
        require(password, "AddAccount.password")
        _check_name_is_free(await self._cache.read(user_name))
        account = Account(user_name, role, await asyncio.to_thread(PasswordHash.of, password))

        def decide(known: Account | None) -> Account:
            _check_name_is_free(known)  # somebody may have added it while the password was hashed
            return account

        await self._cache.change(user_name, decide)
        await self._flush()

    async def set_password(self, user_name: str, password: str, proven: Account | None = None) -> bool:
        """Change the password of an account, or give it one.

        Args:
            user_name: of the account.
            password: its new one.
            proven: the account with the password that the caller has proven to know, None where it need not.

        Returns:
            Whether it is changed: not when it is not the proven one any more.

        Raises:
            InvalidArgumentError: there is no such account, or the password is missing.
            StorageIOError: the store cannot be asked.
        """
        require(user_name, "SetPassword.user_name")
        require(password, "SetPassword.password")
        fresh = await asyncio.to_thread(PasswordHash.of, password)

        def decide(known: Account | None) -> Account:
            if known is None:
                raise InvalidArgumentError(f"account {user_name!r} does not exist")
            is_proven = proven is None or known.password == proven.password
            return replace(known, password=fresh) if is_proven else known

        changed = await self._cache.change(user_name, decide)
        await self._flush()
        return changed is not None and changed.password == fresh

    async def remove(self, user_name: str) -> None:
        """Remove an account.

        Raises:
            InvalidArgumentError: there is no such account.
            StorageIOError: the store cannot be asked.
        """

        def decide(known: Account | None) -> None:
            if known is None:
                raise InvalidArgumentError(f"account {user_name!r} does not exist")

        await self._cache.change(user_name, decide)
        await self._flush()

    async def authenticate(self, user_name: str, password: str) -> Account | None:
        """Return the account whose password this is, None when it is not, or there is no such account; it takes the
        same time.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        known = await self._cache.read(user_name)  # another manager may have changed it a moment ago
        expected = known.password if known is not None else None
        is_right = await asyncio.to_thread((expected or _DUMMY_HASH).matches, password)
        return known if expected is not None and is_right else None

    async def read(self, user_name: str) -> Account | None:
        """Return an account as it is in the store, None when there is none.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        return await self._cache.read(user_name)

    def role_of(self, user_name: str) -> Role | None:
        """Return what logins of an account may do, None when there is no such account."""
        known = self._cache.get(user_name)
        return ROLE_OF_ACCOUNT[known.role] if known is not None else None

    def all(self) -> list[Account]:
        """Return all accounts, ordered by name."""
        return self._cache.all()


def _check_name_is_free(known: Account | None) -> None:
    if known is not None:
        raise DuplicateEntityError(f"account {known.user_name!r} exists")
