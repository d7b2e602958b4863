"""Logins while their account changes, here or at another manager: nobody keeps a key of what is no more."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from registry_rig import Opener, SuspendingTable

from kvcm.model.accounts import AccountRole
from kvcm.model.errors import StorageIOError
from kvcm.protocol.kvcm.v1 import access_service_pb2 as pb
from kvcm.registry.registry import Registry
from kvcm.service.access_api import AccessApi
from kvcm.service.turned_away import UnauthenticatedError
from kvcm.store.memory import MemoryTable

_LOGIN = pb.LoginRequest(user_name="ann", password="old")


class Pair:
    """Two managers on one table, and the way of the second one to it."""

    def __init__(self) -> None:
        table = MemoryTable()
        self.way = SuspendingTable(table)
        self.a, self.b = Registry(Opener(), table), Registry(Opener(), self.way)

    def log_in(self) -> Awaitable[object]:
        """Log in at the second one."""
        return AccessApi(self.b, is_required=True).log_in(_LOGIN)

    async def logins(self) -> list[str]:
        """Return the accounts of all keys that there are."""
        await self.b.refresh()
        return [key.account for key in self.b.keys.all()]


@pytest.fixture
async def pair() -> Pair:
    pair = Pair()
    await pair.a.accounts.add("ann", "old", AccountRole.ROLE_ADMIN)
    return pair


async def _set_password(registry: Registry) -> None:
    await registry.accounts.set_password("ann", "new")
    await registry.end_logins("ann")


async def _remove(registry: Registry) -> None:
    await registry.accounts.remove("ann")
    await registry.end_logins("ann")


@pytest.mark.parametrize("call", ["get", "replace"])
@pytest.mark.parametrize("change", [_set_password, _remove])
async def test_a_login_that_a_change_overtakes_is_refused(
    pair: Pair, change: Callable[[Registry], Awaitable[None]], call: str
) -> None:
    """Its account was read, or its key made, before the change; it goes on behind it."""
    answer = pair.way.hold(call)
    login = asyncio.ensure_future(pair.log_in())
    while call not in pair.way.asked and not login.done():
        await asyncio.to_thread(int)
    for _ in range(2):  # the pause before the call
        await asyncio.sleep(0)
    await change(pair.a)
    answer.set()
    with pytest.raises(UnauthenticatedError):
        await login
    assert await pair.logins() == []


async def test_logins_that_another_manager_made_a_moment_ago_end(pair: Pair) -> None:
    await pair.log_in()
    assert await pair.logins() == ["ann"]
    await pair.a.end_logins("ann")
    assert await pair.logins() == []


async def test_a_password_that_another_manager_set_a_moment_ago_counts(pair: Pair) -> None:
    await pair.b.refresh()
    await pair.a.accounts.set_password("ann", "new")
    assert await pair.b.accounts.proven("ann", "old") is None
    assert await pair.b.accounts.proven("ann", "new") is not None


async def test_of_two_changes_with_one_old_password_one_is_made(pair: Pair) -> None:
    proven = await pair.a.accounts.proven("ann", "old")
    changes = [each.accounts.set_password("ann", password, proven) for each, password in ((pair.a, "1"), (pair.b, "2"))]
    outcomes = await asyncio.gather(*changes)
    assert sorted(outcomes) == [False, True]
    winner = str(outcomes.index(True) + 1)
    assert await pair.a.accounts.proven("ann", winner) is not None


async def test_tries_that_the_store_did_not_hear_are_none(pair: Pair) -> None:
    api = AccessApi(pair.b, is_required=True)
    pair.way.outage = StorageIOError("the store went away")
    for _ in range(20):
        with pytest.raises(StorageIOError):
            await api.log_in(_LOGIN)
    pair.way.outage = None
    await api.log_in(_LOGIN)
    assert await pair.logins() == ["ann"]
