"""Writes on a Redis that several managers share leave the same as in one memory, and keep the promises in races."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from weakref import WeakKeyDictionary

import pytest
from cache_rig import Rig, group, instance, opened
from redis_servers import Servers

from kvcm.cache.quotas import SharedLedger
from kvcm.cache.shared_writes import Conclusions
from kvcm.cache.write_sessions import FinishedWrite, LocationChecksums, Retention, WriteRequest
from kvcm.index.backends.backend import IndexBackend
from kvcm.index.backends.redis import RedisBackend
from kvcm.index.backends.redis_runs import RunsBackend
from kvcm.model.errors import CapacityError, InvalidArgumentError, KvcmError
from kvcm.model.groups import InstanceGroup
from kvcm.model.instances import Instance, Placement
from kvcm.model.keys import BlockMask
from kvcm.model.locations import BlockRecord, LocationStatus, StorageKey
from kvcm.store.redis.client import RedisClient
from kvcm.store.redis.quota import QuotaCounters
from kvcm.store.redis.store import RedisStore
from kvcm.store.redis.uri import parse_redis_uri

KINDS = {"standalone": 0, "cluster": 0, "sentinel": 0, "standalone-runs": 1, "cluster-runs": 4, "sentinel-runs": 1}
"""Deployments of Redis, and tags of an instance: 0 where it keeps a value per block."""
CHAIN = tuple(range(1, 21))
LONG = tuple(range(1, 601))  # cut: a script takes 160 keys, or 512 blocks in runs
TAGS = WeakKeyDictionary[RedisClient, int]()


@pytest.fixture(params=KINDS)
async def client(request: pytest.FixtureRequest) -> AsyncIterator[RedisClient]:
    """A client of each kind of deployment, under a name of the test's own."""
    servers: Servers = request.getfixturevalue(f"redis_{request.param.removesuffix('-runs')}")
    made = RedisClient.of(parse_redis_uri(servers.uri(secrets.token_hex(8))))
    TAGS[made] = KINDS[request.param]
    yield made
    await made.close()


def shared_rig(
    client: RedisClient,
    configured: InstanceGroup | None = None,
    registered: Instance | None = None,
    first_id: int = 1,
) -> Rig:
    """A manager over Redis. Its registry is its own: made alike, those of two managers say the same."""

    def new_backend(placement: Placement) -> IndexBackend:
        if TAGS[client]:
            return RunsBackend(client, placement.uid, TAGS[client])
        return RedisBackend(client, placement.uid, placement.shard_count)

    class SharedRig(Rig):
        pass

    SharedRig.new_backend = staticmethod(new_backend)

    ledger = SharedLedger(QuotaCounters(client), secrets.token_hex(4))
    return SharedRig(configured or group(), registered or instance(), ledger, RedisStore(client), first_id)


def two_managers(client: RedisClient, blocks: int = 1 << 30) -> tuple[Rig, Rig]:
    """Managers whose group takes so many blocks."""
    first, second = (shared_rig(client, group(capacity=20 * blocks), first_id=number << 32) for number in (1, 2))
    return first, second


async def finish(
    rig: Rig,
    session_id: str,
    success: BlockMask,
    retention: Retention = Retention(),  # noqa: B008 - immutable
    reported: Sequence[LocationChecksums] = (),
) -> FinishedWrite:
    return await rig.manager.finish_write(rig.manager.cache("i"), session_id, success, retention, reported)


async def records(rig: Rig, keys: Sequence[int] = LONG) -> Mapping[int, BlockRecord | None]:
    found = await rig.manager.cache("i").index.get(keys)
    return dict(zip(keys, found, strict=True))


async def plain(rig: Rig) -> None:
    await rig.store(CHAIN)


async def long(rig: Rig) -> None:
    await rig.store(LONG)


async def behind_a_parent(rig: Rig) -> None:
    await rig.store(CHAIN[:4])
    await rig.store(CHAIN[4:], parent_key=CHAIN[3])


async def behind_blocks_that_are_there(rig: Rig) -> None:
    await rig.store(CHAIN[:4])
    await rig.store(CHAIN)


async def of_parts(rig: Rig) -> None:
    await rig.store(CHAIN[:6], spec_groups=["one", "one", "two", "one", "both", "both"])
    await rig.store(CHAIN)


async def twice(rig: Rig) -> None:
    await rig.store(CHAIN)
    await rig.store(CHAIN, min_replica_count=2)


async def open_for_now(rig: Rig) -> None:
    await rig.start(CHAIN)


async def partly(rig: Rig) -> None:
    started = await rig.start(CHAIN)
    done = await finish(rig, started.session.id, BlockMask(offset=12))
    assert done == FinishedWrite(12, 8, 0)


async def with_holes(rig: Rig) -> None:
    started = await rig.start(CHAIN)
    await finish(rig, started.session.id, BlockMask.of([key % 3 == 0 for key in CHAIN]))


async def with_hints(rig: Rig) -> None:
    started = await rig.start(CHAIN)
    rig.wait(3)
    await finish(rig, started.session.id, BlockMask(offset=len(CHAIN)), Retention(5, 100))


async def with_checksums(rig: Rig) -> None:
    started = await rig.start(CHAIN)
    reported = [LocationChecksums([("tp0", key), ("tp1", 0 if key % 2 else key + 1)]) for key in CHAIN]
    await finish(rig, started.session.id, BlockMask(offset=len(CHAIN)), reported=reported)


async def renewed(rig: Rig) -> None:
    started = await rig.start(CHAIN, timeout_seconds=10)
    await rig.manager.renew_write(rig.manager.cache("i"), started.session.id, 60)
    rig.wait(30)
    await finish(rig, started.session.id, BlockMask(offset=len(CHAIN)))


async def too_late(rig: Rig) -> None:
    started = await rig.start(CHAIN, timeout_seconds=10)
    rig.wait(11)
    with pytest.raises(InvalidArgumentError, match="unknown, finished or expired"):
        await finish(rig, started.session.id, BlockMask(offset=len(CHAIN)))


async def removed_meanwhile(rig: Rig) -> None:
    started = await rig.start(CHAIN)
    await rig.manager.cache("i").index.delete(CHAIN[10:])
    done = await finish(rig, started.session.id, BlockMask(offset=len(CHAIN)))
    assert done == FinishedWrite(10, 0, 10)


async def wrongly_and_then_well(rig: Rig) -> None:
    started = await rig.start(CHAIN)
    with pytest.raises(InvalidArgumentError, match="must be from 0 to 20"):
        await finish(rig, started.session.id, BlockMask(offset=21))
    await finish(rig, started.session.id, BlockMask(offset=len(CHAIN)))


async def again_and_again(rig: Rig) -> None:
    started = await rig.start(CHAIN)
    success = BlockMask(offset=len(CHAIN))
    first = await finish(rig, started.session.id, success)
    assert await finish(rig, started.session.id, success) == first == FinishedWrite(20, 0, 0)
    with pytest.raises(InvalidArgumentError, match="finished before, with other success_blocks"):
        await finish(rig, started.session.id, BlockMask(offset=3))


GROUPS = {"one": ("tp0",), "two": ("tp1",), "both": ("tp0", "tp1")}


@pytest.mark.parametrize(
    "write",
    [
        plain,
        long,
        behind_a_parent,
        behind_blocks_that_are_there,
        of_parts,
        twice,
        open_for_now,
        partly,
        with_holes,
        with_hints,
        with_checksums,
        renewed,
        too_late,
        removed_meanwhile,
        wrongly_and_then_well,
        again_and_again,
    ],
)
async def test_a_write_leaves_what_it_leaves_in_memory(
    client: RedisClient, write: Callable[[Rig], Awaitable[None]]
) -> None:
    """Records, due blocks, families, sums and usage, invariant 4."""
    shared = shared_rig(client, registered=instance(groups=GROUPS))
    with opened(registered=instance(groups=GROUPS)) as alone:
        for rig in (alone, shared):
            await write(rig)
        index, expected = shared.manager.cache("i").index, alone.manager.cache("i").index
        assert await records(shared) == await records(alone)
        assert sorted(await index.due(1e12, 1000)) == sorted(await expected.due(1e12, 1000))
        assert await index.families(LONG) == await expected.families(LONG)
        assert [key for key, _ in sorted(await index.coldest(1000))] == [
            key for key, _ in sorted(await expected.coldest(1000))
        ]
        await index.refresh()
        assert (index.key_count, +Counter(index.usage_bytes)) == (expected.key_count, +Counter(expected.usage_bytes))
        await shared.manager.usage.flush()  # type: ignore[attr-defined]
        await shared.manager.usage.refresh_group("group")
        assert +Counter(shared.manager.usage.used("group")) == +Counter(alone.manager.usage.used("group"))
        assert +Counter(shared.manager.usage.group_bytes("group")) == +Counter(alone.manager.usage.used("group"))
    shared.storages.close_all()


async def test_a_session_is_finished_by_another_manager(client: RedisClient) -> None:
    first, second = two_managers(client)
    started = await first.start(CHAIN)
    success = BlockMask(offset=len(CHAIN))
    assert await finish(second, started.session.id, success) == FinishedWrite(20, 0, 0)
    assert await finish(first, started.session.id, success) == FinishedWrite(20, 0, 0)
    assert all(record is not None and record.due is None for record in (await records(first, CHAIN)).values())


async def test_of_writers_at_two_managers_each_block_is_one_s(client: RedisClient) -> None:
    """Invariant 2, with chains of which each begins like the others: every block is written by one of them."""
    rigs = two_managers(client)
    chains = [(*CHAIN, *range(100 * (number + 1), 100 * (number + 1) + 10)) for number in range(12)]
    starts = [rigs[number % 2].start(chain) for number, chain in enumerate(chains)]
    started = await asyncio.gather(*starts)
    written = Counter(key for each in started for key in each.session.keys)
    assert set(written) == {key for chain in chains for key in chain}
    assert set(written.values()) == {1}
    ends = [
        finish(rigs[(number + number // 3) % 2], each.session.id, BlockMask(offset=len(each.chunks)))
        for number, each in enumerate(started)
    ]
    assert [done.served for done in await asyncio.gather(*ends)] == [len(each.session.keys) for each in started]
    for record in (await records(rigs[0], list(written))).values():
        assert record is not None
        assert [location.status for location in record.locations] == [LocationStatus.SERVING]


async def test_no_limit_is_exceeded_by_writers_that_planned_with_what_they_knew(client: RedisClient) -> None:
    """Invariant 4: 100 blocks fit."""
    rigs = two_managers(client, 100)
    for rig in rigs:
        await rig.store([10_000])  # each knows the counters now
    starts = [rigs[number % 2].start([1000 * number + block for block in range(10)]) for number in range(14)]
    outcomes = await asyncio.gather(*starts, return_exceptions=True)
    taken = sum(0 if isinstance(each, BaseException) else len(each.session.keys) for each in outcomes)
    assert all(isinstance(each, KvcmError) for each in outcomes if isinstance(each, BaseException))
    assert 1 + taken <= 100
    for rig in rigs:
        await rig.manager.usage.flush()  # type: ignore[attr-defined]
    left = 99 - taken
    if left:
        last = await rigs[1].start([50_000 + block for block in range(left + 3)])
        assert (len(last.session.keys), last.rejected) == (left, 3)
    with pytest.raises(CapacityError, match="is full"):
        await rigs[0].start([60_000])


async def test_space_that_another_manager_freed_is_found(client: RedisClient) -> None:
    """A plan that does not fit what is known is made again with what is there."""
    first, second = two_managers(client, 20)
    await first.store(CHAIN)
    with pytest.raises(CapacityError):
        await first.start([500])
    await second.manager.cache("i").index.delete(CHAIN)
    await second.manager.usage.flush()  # type: ignore[attr-defined]
    assert len((await first.start([500])).session.keys) == 1


async def test_a_reservation_that_is_refused_leaves_nothing(client: RedisClient) -> None:
    """The storage's account takes it, the group's does not."""
    first, second = two_managers(client, 30)
    await second.store([10_000])
    await first.store(CHAIN)
    await first.manager.usage.flush()  # type: ignore[attr-defined]
    started = await second.start([20_000 + block for block in range(20)])  # it knows of one block
    assert (len(started.session.keys), started.rejected) == (9, 11)
    await second.manager.usage.flush()  # type: ignore[attr-defined]
    await second.manager.usage.refresh_group("group")
    assert sum(second.manager.usage.group_bytes("group").values()) == 30 * 20
    assert len(await second.manager.open_sessions.find_all()) == 1
    assert (await records(second, [20_009]))[20_009] is None


async def test_a_cancelled_start_leaves_no_session(client: RedisClient) -> None:
    rig = shared_rig(client)
    await rig.store([10_000])
    cache = rig.manager.cache("i")
    for turn in range(20):
        keys = range(100 * turn, 100 * turn + 20)
        task = asyncio.ensure_future(rig.manager.start_write(cache, WriteRequest(keys)))
        for _ in range(turn):
            await asyncio.sleep(0)
        task.cancel()
        outcome = (await asyncio.gather(task, return_exceptions=True))[0]
        if isinstance(outcome, BaseException):
            assert not any((await records(rig, keys)).values()) or all(
                location.status is LocationStatus.DELETING
                for record in (await records(rig, keys)).values()
                for location in (record.locations if record is not None else ())
            )
    begun = await rig.manager.open_sessions.find_all()
    assert all(each.blocks == 20 for each in begun)


@pytest.fixture
def _dying(monkeypatch: pytest.MonkeyPatch) -> None:
    """Managers die, or stand still, between the answer to a finish and its conclusion."""
    monkeypatch.setattr(Conclusions, "add", lambda _self, _conclusion: None)


async def usage_of(rig: Rig) -> Counter[StorageKey]:
    await rig.manager.usage.flush()  # type: ignore[attr-defined]
    await rig.manager.usage.refresh_group("group")
    return +Counter(rig.manager.usage.group_bytes("group"))


@pytest.mark.usefixtures("_dying")
@pytest.mark.parametrize("is_repeated", [False, True])
async def test_a_finish_that_was_not_concluded_is_concluded_by_another_manager(
    client: RedisClient, is_repeated: bool
) -> None:
    """Invariant 3: by one that is asked again, or by the expiry, and both give the first answer."""
    first, second = two_managers(client)
    started = await first.start(LONG)
    success = BlockMask(offset=len(LONG))
    assert await finish(first, started.session.id, success) == FinishedWrite(600, 0, 0)
    used, served = await usage_of(first), await records(first)
    if is_repeated:
        assert await finish(second, started.session.id, success) == FinishedWrite(600, 0, 0)
    for rig in (first, second):
        rig.wait(6)
    await second.manager.expire()
    assert await second.manager.open_sessions.find_all() == []
    assert await second.manager.endings.due_count(-1e9) == 0
    assert await finish(second, started.session.id, success) == FinishedWrite(600, 0, 0)
    assert await usage_of(second) == used
    assert await records(second) == served


@pytest.mark.usefixtures("_dying")
async def test_a_finish_repeated_before_its_conclusion_gets_the_first_answer(client: RedisClient) -> None:
    """Also where blocks are gone by then."""
    rig = shared_rig(client)
    started = await rig.start(LONG)
    success = BlockMask(offset=len(LONG))
    await finish(rig, started.session.id, success)
    await rig.manager.cache("i").index.delete(LONG[500:])
    assert await finish(rig, started.session.id, success) == FinishedWrite(600, 0, 0)
    with pytest.raises(InvalidArgumentError, match="finished before, with other success_blocks"):
        await finish(rig, started.session.id, BlockMask(offset=3))


async def test_a_conclusion_that_the_store_refuses_is_left_to_the_expiry(client: RedisClient) -> None:
    rig = shared_rig(client)
    started = await rig.start(LONG)
    success = BlockMask(offset=len(LONG))
    await finish(rig, started.session.id, success)
    client.gate.closed = "not now"
    await rig.manager.endings.concluded()
    client.gate.closed = ""
    (ending,) = await rig.manager.open_sessions.find_all()
    assert ending.is_ending
    assert await rig.manager.endings.due_count() == 0
    rig.wait(6)
    assert await rig.manager.endings.due_count() == 1
    await rig.manager.expire()
    assert await rig.manager.open_sessions.find_all() == []
    assert await finish(rig, started.session.id, success) == FinishedWrite(600, 0, 0)


async def test_conclusions_of_many_finishes_are_waited_for(client: RedisClient) -> None:
    rig = shared_rig(client)
    chains = [range(1000 * number, 1000 * number + 600) for number in range(1, 9)]
    started = [await rig.start(chain) for chain in chains]
    ends = [finish(rig, each.session.id, BlockMask(offset=600)) for each in started]
    assert await asyncio.gather(*ends) == [FinishedWrite(600, 0, 0)] * 8
    await rig.manager.endings.concluded()
    assert await rig.manager.open_sessions.find_all() == []
    for each in started:
        assert await finish(rig, each.session.id, BlockMask(offset=600)) == FinishedWrite(600, 0, 0)
