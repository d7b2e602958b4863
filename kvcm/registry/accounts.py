"""Accounts of the admin API."""

from __future__ import annotations

import asyncio

from kvcm.model.accounts import Account, AccountRole, PasswordHash
from kvcm.model.errors import DuplicateEntityError, InvalidArgumentError
from kvcm.model.names import check_name
from kvcm.registry.validation import require

__all__ = ["AccountRegistry"]


class AccountRegistry:
    """Accounts by user name."""

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}

    async def add(self, user_name: str, password: str, role: AccountRole) -> None:
        """Add an account.

        Raises:
            InvalidArgumentError: user name or password is missing or malformed.
            DuplicateEntityError: the name is taken.
        """
        require(user_name, "AddAccount.user_name")
        check_name("user_name", user_name)
        require(password, "AddAccount.password")
        self._refuse_taken(user_name)
        account = Account(user_name, role, await asyncio.to_thread(PasswordHash.of, password))
        self._refuse_taken(user_name)  # somebody may have added it while the password was hashed
        self._accounts[user_name] = account

    def _refuse_taken(self, user_name: str) -> None:
        if user_name in self._accounts:
            raise DuplicateEntityError(f"account {user_name!r} exists")

    def remove(self, user_name: str) -> None:
        """Remove an account.

        Raises:
            InvalidArgumentError: there is no such account.
        """
        if self._accounts.pop(user_name, None) is None:
            raise InvalidArgumentError(f"account {user_name!r} does not exist")

    def all(self) -> list[Account]:
        """Return all accounts, ordered by name."""
        return [self._accounts[name] for name in sorted(self._accounts)]
