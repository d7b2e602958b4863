"""Who waits for its turn may have lost its key when that comes, or the right to what it asks for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvcm.model.principals import Principal, Role
from kvcm.protocol import meta_service_pb2 as pb
from kvcm.registry.keys import NewKey
from kvcm.registry.registry import Registry
from kvcm.service.access import Credentials, KeyedAccess
from kvcm.service.admission import AdmissionSettings, GuardedAdmission
from kvcm.service.calls import Arrival, Call, Caller, Plane, Reply
from kvcm.service.policies import policy_of
from kvcm.service.turned_away import ForbiddenError, UnauthenticatedError
from kvcm.storage.directory import StorageDirectory
from kvcm.store.memory import MemoryTable

_SERVICE, _NAME = "kv_cache_manager.proto.meta.MetaService", "RemoveCache"


class Site:
    """A caller with one turn for long requests, and a key of the group "a"."""

    def __init__(self) -> None:
        self.registry = Registry(StorageDirectory("cluster"), MemoryTable())
        self.groups = {"i": "a"}
        self.admission = GuardedAdmission(AdmissionSettings(long_keys=1, long_slots=1, long_places=1), lambda: 1000)
        self.access = KeyedAccess(self.registry.keys, self.groups.get)
        self.caller = Caller([], lambda _: None, lambda _: {}, admission=self.admission, access=self.access)
        self.call = Call(_SERVICE, _NAME, Plane.DATA, pb.RemoveCacheRequest, pb.CommonResponse, self._answer)
        self.answered = 0

    async def _answer(self, _request: Any) -> Reply:
        self.answered += 1
        return Reply(pb.CommonResponse())

    async def principal(self) -> Principal:
        _, key = await self.registry.keys.create(NewKey("engine", Role.ROLE_ENGINE, ("a",)))
        assert key is not None
        return self.access.principal(policy_of(_SERVICE, _NAME), Credentials(f"Bearer {key.text}"))

    def ask(self, principal: Principal) -> asyncio.Task[Reply]:
        request = pb.RemoveCacheRequest(instance_id="i", block_keys=[1])
        return asyncio.create_task(self.caller.answer(self.call, request, Arrival(principal=principal)))


@pytest.fixture
async def site() -> Site:
    return Site()


@pytest.fixture
async def waiting(site: Site) -> AsyncIterator[tuple[asyncio.Task[Reply], Principal]]:
    """A request that waits for its turn, which comes after the test's own block."""
    principal = await site.principal()
    turn = await site.admission.enter(site.call, pb.RemoveCacheRequest(block_keys=[1]), Arrival())
    request = site.ask(principal)
    await asyncio.sleep(0)
    assert not request.done()
    yield request, principal
    assert turn is not None


async def _let_in(site: Site) -> None:
    site.admission.leave(0.0)
    await asyncio.sleep(0)


async def test_who_keeps_its_key_is_answered(site: Site, waiting: tuple[asyncio.Task[Reply], Principal]) -> None:
    await _let_in(site)
    await waiting[0]
    assert site.answered == 1


async def test_a_key_that_is_revoked_meanwhile_does_nothing(
    site: Site, waiting: tuple[asyncio.Task[Reply], Principal]
) -> None:
    request, principal = waiting
    await site.registry.keys.revoke(principal.key_id)
    await _let_in(site)
    with pytest.raises(UnauthenticatedError):
        await request
    assert site.answered == 0


async def test_an_instance_that_is_anothers_meanwhile_is_left_alone(
    site: Site, waiting: tuple[asyncio.Task[Reply], Principal]
) -> None:
    request, principal = waiting
    site.groups["i"] = "b"
    await _let_in(site)
    with pytest.raises(ForbiddenError):
        await request
    assert site.answered == 0
    site.groups["i"] = "a"
    await asyncio.wait_for(site.ask(principal), 10)  # the turn was given back
