"""Accounts of the admin API."""

from __future__ import annotations

import asyncio
from typing import Final

from kvcm.model.accounts import ROLE_OF_ACCOUNT, Account, AccountRole, PasswordHash
from kvcm.model.errors import DuplicateEntityError, InvalidArgumentError
from kvcm.model.names import check_name
from kvcm.model.principals import Role
from kvcm.registry.shelf import Flush, Shelf
from kvcm.registry.validation import require

__all__ = ["AccountRegistry"]


_NOBODY: Final = PasswordHash(b"salt of nobody..", bytes(64))


class AccountRegistry:
    """Accounts by user name.

    Args:
        shelf: where they are kept.
        flush: returns when what was changed is durable.
    """

    def __init__(self, shelf: Shelf[Account], flush: Flush) -> None:
        self._shelf = shelf
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
        _refuse_taken(await self._shelf.read(user_name))
        account = Account(user_name, role, await asyncio.to_thread(PasswordHash.of, password))

        def decide(known: Account | None) -> Account:
            _refuse_taken(known)  # somebody may have added it while the password was hashed
            return account

        await self._shelf.change(user_name, decide)
        await self._flush()

    async def remove(self, user_name: str) -> None:
        """Remove an account.

        Raises:
            InvalidArgumentError: there is no such account.
            StorageIOError: the store cannot be asked.
        """

        def decide(known: Account | None) -> None:
            if known is None:
                raise InvalidArgumentError(f"account {user_name!r} does not exist")

        await self._shelf.change(user_name, decide)
        await self._flush()

    async def proven(self, user_name: str, password: str) -> AccountRole | None:
        """Return the role of an account whose password this is, None when it is not, or there is no such account; it
        takes the same time."""
        known = self._shelf.get(user_name)
        expected = known.password if known is not None else None
        is_right = await asyncio.to_thread((expected or _NOBODY).matches, password)
        return known.role if known is not None and expected is not None and is_right else None

    def role_of(self, user_name: str) -> Role | None:
        """Return what logins of an account may do, None when there is no such account."""
        known = self._shelf.get(user_name)
        return ROLE_OF_ACCOUNT[known.role] if known is not None else None

    def all(self) -> list[Account]:
        """Return all accounts, ordered by name."""
        return self._shelf.all()


def _refuse_taken(known: Account | None) -> None:
    if known is not None:
        raise DuplicateEntityError(f"account {known.user_name!r} exists")
