"""Runs of blocks in Redis: they hold what a plain dict would, whatever came; the layout agrees with itself; a search
cache in front keeps nothing that another manager changed."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
from full_server import FULL, FullServer, full_server
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from index_backends import connected
from index_records import listed
from index_rig import TableView
from redis_servers import Servers, Standalone
from runs_rig import (
    DELETING,
    OTHER,
    SERVING,
    WRITING,
    Model,
    ask,
    begin,
    chain,
    check_layout,
    chunked,
    run_of,
    runs_in,
    serve,
    served,
    stored_tag,
    uniform,
    write,
)
from thoroughness import examples

from kvcm.index.backends import redis_runs
from kvcm.index.backends.backend import Access, Change, StoredRun, is_resident
from kvcm.index.backends.redis_runs import RunsBackend, TagKeys, channel_of, noticed_blocks
from kvcm.index.meta_index import MetaIndex
from kvcm.index.run_codec import decode_runs, encode_blocks, encode_run
from kvcm.index.search_cache import CacheBudget, compose_answer
from kvcm.model.errors import StorageIOError
from kvcm.model.keys import mixed_key, unpack_keys
from kvcm.model.locations import BlockRecord, BlockRun, Location, LocationStatus, StorageKey
from kvcm.model.storages import StorageType
from kvcm.store.redis import tracking
from kvcm.store.redis.client import RedisClient, ScriptCall
from kvcm.store.redis.store import RedisStore
from kvcm.store.redis.tracking import Invalidations

NFS = StorageKey("nfs", StorageType.ST_NFS)
UID = 7


@pytest.fixture
async def client(redis_standalone: Standalone) -> AsyncIterator[RedisClient]:
    async with connected(redis_standalone.uri(f"test-{secrets.token_hex(8)}")) as made:
        yield made


@pytest.fixture(params=[1, 4])
def tags(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def backend(client: RedisClient, tags: int) -> RunsBackend:
    return RunsBackend(client, UID, tags)


# ── Any history: a plain dict ──
#
# Keys of the chains are chosen so that in a row of packed keys one of them stands in between two others, too.

CHAINS: Sequence[Callable[[int], int]] = (
    lambda at: at + 1,
    lambda at: (at + 1) << 8,
    lambda at: -(at + 1),
    lambda at: (at + 1) * 0x9E3779B97F4A7C15 % 2**63,
)
CHAIN_LENGTH = 220
LOCATIONS = [
    WRITING,
    WRITING._replace(id="b", session_id="t", deadline=1700000020.5, written_at=1700000500.25),
    WRITING._replace(id="c", storage="pool", size_bytes=2**40, priority=3, deadline=1700000030.125),
]
AFTER = [served, lambda location: served(location)._replace(deadline=1700009000.0, written_at=1700001000.75)]
SPANS = st.tuples(
    st.integers(0, 3), st.integers(0, CHAIN_LENGTH - 1), st.integers(1, 150), st.sampled_from([1, 1, 1, 2, 7])
)
SELECTIONS = st.lists(SPANS, min_size=1, max_size=3)
LATENESS = st.sampled_from([False, False, False, True])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.lists(SPANS, min_size=1, max_size=2), st.integers(0, 2), st.booleans()),
        st.tuples(st.just("begin"), st.lists(SPANS, min_size=1, max_size=2), st.integers(0, 2), st.booleans()),
        st.tuples(st.just("serve"), SELECTIONS, st.integers(0, 5), st.booleans()),
        st.tuples(st.just("serve"), SELECTIONS, st.integers(0, 5), st.booleans()),
        st.tuples(st.sampled_from(["mark", "remove", "second", "reparent", "chunk"]), SELECTIONS, st.just(0), LATENESS),
        st.tuples(st.sampled_from(["mark runs", "remove runs"]), SELECTIONS, st.just(0), LATENESS),
        st.tuples(st.sampled_from(["touch", "count", "requeue"]), SELECTIONS, st.integers(0, 5), st.booleans()),
        st.tuples(st.just("drop"), st.just([]), st.just(0), st.just(False)),
    ),
    min_size=4,
    max_size=14,
)
Step = tuple[str, list[tuple[int, int, int, int]], int, bool]


def blocks_of(selection: Sequence[tuple[int, int, int, int]]) -> list[int]:
    """The keys of some blocks, each once."""
    positions = [
        (number, at)
        for number, start, length, stride in selection
        for at in range(start, min(start + length, CHAIN_LENGTH), stride)
    ]
    return [mixed_key(CHAINS[number](at)) for number, at in dict.fromkeys(positions)]


class History:
    """A backend and a plain dict that go through the same."""

    def __init__(self, client: RedisClient, tags: int) -> None:
        self.client, self.tags, self.uid = client, tags, secrets.randbits(40)
        self.backend = RunsBackend(client, self.uid, tags)
        self.model = Model()
        self.asked: dict[int, None] = {}  # every key that there ever was
        # What another manager read before the last step.
        self._stale: dict[int, BlockRecord | None] = {}
        self._stale_runs: Sequence[StoredRun] = ()
        self._stale_versions: Counter[int] = Counter()

    async def step(self, step: Step) -> None:
        verb, selection, number, flag = step
        before = dict(zip(self.asked, await self.backend.get_many(list(self.asked)), strict=True))
        versions, runs = Counter(self.model.versions), await self._runs()
        match verb:
            case "begin":
                await self._begin(selection, number, is_branch=flag)
            case "serve":
                await self._serve(blocks_of(selection), number, has_chunks=flag)
            case "touch" | "count" | "requeue":
                await self._read(verb, blocks_of(selection), number, is_late=flag)
            case "drop":
                await self.backend.drop()
                self.model.drop()
            case "mark runs" | "remove runs":
                await self._change_runs(verb, set(blocks_of(selection)), self._stale_runs if flag else runs, flag)
            case _:
                await self._write(verb, blocks_of(selection), is_late=flag)
        self._stale, self._stale_versions, self._stale_runs = before, versions, runs
        await self.check()

    async def _runs(self) -> Sequence[StoredRun]:
        found = await self.backend.runs_around(list(self.asked), 1 << 20)
        return list({run.keys[0]: run for run, _ in found}.values())  # one may come again with the next call

    async def _change_runs(self, verb: str, keys: set[int], runs: Sequence[StoredRun], is_late: bool) -> None:
        chosen = [run.only(some) for run in runs if (some := keys.intersection(run.keys))]
        before = {key: BlockRecord(None, 0, old) for run in chosen for key, old in _blocks(run, run.locations)}
        now = {key: record for key in before if (record := self.model.records.get(key)) is not None}
        verb = verb.removesuffix(" runs")
        changes = []
        for run in chosen:
            locations = _changed(verb, 0, BlockRecord(None, 0, run.locations))
            changes.append((run, locations.locations if locations is not None else ()))
        of_model = [Change(key, old, _changed(verb, key, now.get(key, old))) for key, old in before.items()]
        lost = self.model.write(of_model, self._stale_versions if is_late else Counter(self.model.versions))
        assert sorted((await self.backend.change_runs(changes)).lost) == sorted(lost)

    async def _begin(self, selection: Sequence[tuple[int, int, int, int]], number: int, *, is_branch: bool) -> None:
        runs, known = [], set[int]()
        for which, start, length, _ in selection:
            keys = [key for key in blocks_of([(which, start, length, 1)]) if key not in known]
            if not keys or len(keys) < min(length, CHAIN_LENGTH - start):
                continue  # blocks of a call are distinct
            known.update(keys)
            parent = mixed_key(CHAINS[which](start - 1)) if start else None
            if is_branch:
                parent = mixed_key(CHAINS[(which + 1) % 4](start))
            runs.append(run_of(keys, LOCATIONS[number], parent, start))
        lost = [key for run in runs for key in self.model.begin(run)]
        self.asked |= dict.fromkeys(known)
        assert sorted((await begin(self.client, self.backend, *runs)).lost) == sorted(lost)

    async def _serve(self, keys: Sequence[int], number: int, *, has_chunks: bool) -> None:
        before = LOCATIONS[number // 2]
        runs = [uniform(part, before, AFTER[number % 2](before), chunked(part, "s") if has_chunks else ())
                for part in (keys[: len(keys) // 2], keys[len(keys) // 2 :]) if part]  # fmt: skip
        lost = [key for run in runs for key in self.model.serve(*run)]
        assert sorted((await serve(self.client, self.backend, *runs)).lost) == sorted(lost)

    async def _write(self, verb: str, keys: Sequence[int], *, is_late: bool) -> None:
        records, versions = dict.fromkeys(keys), self.model.versions
        records |= self._stale if is_late else dict(zip(keys, await self.backend.get_many(keys), strict=True))
        if is_late:
            versions = self._stale_versions
        changes = [Change(key, old, _changed(verb, key, old)) for key in keys if (old := records[key]) is not None]
        before = self.model.usage()[0]
        lost = self.model.write(changes, versions)
        written = await self.backend.write_many(changes)
        assert sorted(written.lost) == sorted(lost)
        after = self.model.usage()[0]
        assert {place: size for place, size in written.usage.items() if size} == {
            place: after.get(place, 0) - before.get(place, 0)
            for place in before.keys() | after.keys()
            if after.get(place, 0) != before.get(place, 0)
        }

    async def _read(self, verb: str, keys: Sequence[int], number: int, *, is_late: bool) -> None:
        counts = {key: (1, 3, 5000)[(position // 40 + number) % 3] for position, key in enumerate(keys)}
        at = 1700000000 + (200 if is_late else 100 * number)
        if verb == "requeue":
            await self.backend.requeue(counts, at + 0.75)
        else:
            await self.backend.touch(counts, at + 0.75, moves=verb == "touch")
        self.model.read(verb, counts, at)

    async def check(self) -> None:
        records = await check_layout(self.client, self.uid, self.tags)  # invariant 1: all six agree
        assert records == self.model.records
        keys, model = list(self.asked), self.model
        assert await self.backend.get_many(keys) == [model.records.get(key) for key in keys]
        assert await self.backend.accesses(keys) == [model.accesses.get(key) for key in keys], "invariant 3"
        await self._check_runs(keys[::5])
        await self._check_stored_runs(keys)
        seen = [key async for page in self.backend.scan(50) for key in page]
        assert sorted(seen) == sorted(model.records)
        await self._check_families(keys)
        await self._check_order()
        await self._check_due()
        await self.backend.refresh()
        used, deleting, blocks = model.usage()
        assert {place: size for place, size in self.backend.usage_bytes.items() if size} == used
        assert {place: size for place, size in self.backend.deleting_bytes.items() if size} == deleting
        assert (self.backend.key_count, self.backend.deleting_keys) == (len(model.records), blocks)

    async def _check_runs(self, keys: Sequence[int]) -> None:
        """What is read together has at least what was asked for, and of every block what is stored."""
        runs, others = await self.backend.get_runs(keys)
        found = {key: each.locations for key, each in others.items()}
        for run in runs:
            chunks = zip(run.keys, run.chunks, strict=True)
            found |= {key: (run.location._replace(chunk=chunk),) for key, chunk in chunks}
        assert found == {key: self.model.records[key].locations for key in found}
        assert found.keys() >= self.model.records.keys() & keys

    async def _check_stored_runs(self, keys: Sequence[int]) -> None:
        """Blocks that lie together are what the model says of each, whichever way they are found."""
        model = self.model
        around = await self.backend.runs_around(keys[::5], 1 << 20)
        assert {key for run, _ in around for key in run.keys} >= model.records.keys() & set(keys[::5])
        resident = {key for key, record in model.records.items() if is_resident(record)}
        coldest = await self.backend.coldest_runs(1 << 20, 0)
        assert Counter(key for run, _ in coldest for key in run.keys) == Counter(resident)
        drawn = await self.backend.random_runs(1 << 20, Random(1))
        assert Counter(key for run, _ in drawn for key in run.keys) == Counter(resident)
        due = await self.backend.due_runs(1700000030.125, 1 << 20)
        dues = {key for key, each in model.records.items() if each.due is not None and each.due <= 1700000030.125}
        assert Counter(key for run in due for key in run.keys) == Counter(dues)
        for run, access in [*around, *coldest, *drawn]:
            for key, locations in _blocks(run, run.locations):
                assert locations == model.records[key].locations
                assert access.at == model.accesses[key].at
            assert run.depth == model.records[run.keys[-1]].depth
        runs = [run for run, _ in await self.backend.runs_around(keys, 1 << 20)]
        within = {pair for run in runs for pair in pairwise(run.keys)}
        relations = {(record.parent, key) for key, record in model.records.items() if record.parent is not None}
        families = await self.backend.outer_families(runs, 1 << 10)
        for run, family in zip(runs, families, strict=True):
            assert sorted(family) == sorted(pair for pair in relations - within if pair[0] in run.keys)

    async def _check_families(self, keys: Sequence[int]) -> None:
        families: dict[int, list[int]] = {key: [] for key in keys}
        for key, record in self.model.records.items():
            if record.parent is not None:
                families.setdefault(record.parent, []).append(key)
        assert await self.backend.families(list(families)) == [sorted(each) for each in families.values()]
        for key in list(families)[:2]:
            assert await self.backend.children(key) == sorted(families[key])

    async def _check_order(self) -> None:
        accesses = {key: self.model.accesses[key] for key, each in self.model.records.items() if is_resident(each)}
        for count in (len(accesses) // 2, len(accesses) + 10):
            coldest = await self.backend.coldest(count)
            assert dict(coldest).items() <= accesses.items()
            assert len(dict(coldest)) == len(coldest) == min(count, len(accesses))
            assert [access.at for _, access in coldest] == sorted(each.at for each in accesses.values())[:count]

    async def _check_due(self) -> None:
        dues = {key: each.due for key, each in self.model.records.items() if each.due is not None}
        for most in (1 << 20, 10):
            for now in (1700000030.125, 1.8e9):
                found = await self.backend.due(now, most)
                assert len(set(found)) == len(found)
                assert [dues[key] for key in found] == sorted(due for due in dues.values() if due <= now)[:most]


def _blocks(run: StoredRun, locations: tuple[Location, ...]) -> Iterator[tuple[int, tuple[Location, ...]]]:
    return zip(run.keys, run.locations_by_block(locations), strict=True)


def _changed(verb: str, key: int, old: BlockRecord) -> BlockRecord | None:
    match verb:
        case "remove":
            return None
        case "second":
            return old._replace(locations=(*old.locations[-3:], OTHER._replace(id=f"m{len(old.locations)}")))
        case "reparent":
            return BlockRecord(mixed_key(CHAINS[3](old.depth)) if old.parent is None else None, old.depth + 1, old[2])
        case "chunk":
            first, *rest = old.locations
            return old._replace(locations=(first._replace(chunk=first.chunk + b"+"), *rest))
    deleting = LocationStatus.DELETING
    return old._replace(locations=tuple(each._replace(status=deleting, deadline=1.7e9 + 7) for each in old.locations))


@settings(
    max_examples=examples(150),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(steps=STEPS)
@example(
    steps=[
        ("begin", [(0, 0, 150, 1)], 0, False),
        ("serve", [(0, 0, 150, 1)], 0, False),
        ("begin", [(1, 100, 30, 1)], 0, True),
        ("mark runs", [(0, 40, 60, 1)], 0, False),
        ("mark runs", [(0, 20, 60, 1)], 0, True),
        ("remove runs", [(0, 60, 20, 2)], 0, False),
        ("mark runs", [(0, 0, 150, 1)], 0, True),
    ]
)
async def test_any_history_leaves_what_a_dict_would_hold(client: RedisClient, tags: int, steps: list[Step]) -> None:
    history = History(client, tags)
    for step in steps:
        await history.step(step)
    await history.backend.drop()
    assert await ask(client, "KEYS", f"{client.prefix}:*".encode()) == [], (
        "no key of the deployment is left after a drop"
    )


# ── Runs as they are made, taken apart and cut ──


async def scored(client: RedisClient) -> tuple[list[int], int, int]:
    """How many blocks each run has, and how many members the access order and the pending set have."""
    held = await stored_tag(client, UID, 0)
    return [len(keys) for keys in await runs_in(client, UID)], len(held.order), len(held.pending)


async def test_a_write_of_64_blocks_is_one_run_and_one_member_of_each_sorted_set(client: RedisClient) -> None:
    backend, keys = RunsBackend(client, UID, 1), chain(64)
    assert list((await begin(client, backend, run_of(keys))).lost) == []
    assert await scored(client) == ([64], 1, 1)
    held = await stored_tag(client, UID, 0)
    assert (held.children, held.usage) == (set(), {"4/nfs": 640})
    assert list((await serve(client, backend, uniform(keys))).lost) == []
    assert await scored(client) == ([64], 1, 0)
    await backend.touch(dict.fromkeys(keys, 1), 1700000100.0)
    assert await scored(client) == ([64], 1, 0)
    await write(backend, {key: BlockRecord(None, 0, (DELETING,)) for key in keys})
    await write(backend, dict.fromkeys(keys))
    assert await scored(client) == ([], 0, 0)


async def test_members_that_are_no_runs_hold_up_neither_draws_nor_what_is_due(client: RedisClient) -> None:
    backend, names = RunsBackend(client, UID, 1), TagKeys.of(client.prefix, UID, 0)
    await begin(client, backend, run_of(chain(20)))
    strangers = [score_or_id for number in range(2000) for score_or_id in (1, b"stranger%d" % number)]
    await ask(client, "ZADD", names.order, *strangers)
    await ask(client, "ZADD", names.pending, *strangers)
    assert set(await backend.random_sample(4, Random(1))) <= set(chain(20))
    assert await backend.due(1.0, 10_000) == []
    assert await backend.due(1e12, 10_000) == chain(20)


async def test_keys_have_the_documented_names(client: RedisClient) -> None:
    backend = RunsBackend(client, UID, 1)
    await begin(client, backend, run_of(chain(2, -5), WRITING, mixed_key(12)))
    await begin(client, backend, run_of(chain(1, 9), WRITING))
    prefix, first = client.prefix.encode(), b"\xff" * 7 + b"\xfb"
    ids = [bytes(7) + b"\x01", bytes(7) + b"\x02"]
    assert (await ask(client, "GET", prefix + b":k{7.0}" + ids[0]))[:1] == b"\x02"
    assert await ask(client, "HGET", prefix + b":x{7.0}", first) == ids[0]
    retired = str(1700000000 + 2**33).encode()
    assert await ask(client, "ZRANGE", prefix + b":z{7.0}", 0, -1, "WITHSCORES") == [
        ids[0], retired, ids[1], retired,
    ]  # fmt: skip
    assert await ask(client, "ZRANGE", prefix + b":c{7.0}", 0, -1, "WITHSCORES") == [bytes(7) + b"\x0c" + first, b"0"]
    assert await ask(client, "ZSCORE", prefix + b":p{7.0}", ids[1]) == b"1700000030.125"
    usage = await ask(client, "HGETALL", prefix + b":u{7.0}")
    assert dict(zip(usage[::2], usage[1::2], strict=True)) == {b"4/nfs": b"30", b"#": b"2", b"@": b"2"}


async def test_a_finish_of_some_blocks_takes_them_out_of_their_run(client: RedisClient) -> None:
    backend, keys = RunsBackend(client, UID, 1), chain(64)
    await begin(client, backend, run_of(keys))
    assert list((await serve(client, backend, uniform(keys[:20]))).lost) == []
    assert await runs_in(client, UID) == [keys[20:], keys[:20]]
    assert list((await serve(client, backend, uniform([*keys[30:33], keys[40]]))).lost) == []
    assert await runs_in(client, UID) == [[*keys[20:30], *keys[33:40], *keys[41:]], keys[:20], [*keys[30:33], keys[40]]]
    records = await check_layout(client, UID, 1)
    assert [key for key in keys if records[key].due is None] == [*keys[:20], *keys[30:33], keys[40]]
    assert await backend.families(keys) == [[key] for key in keys[1:]] + [[]]
    lost = (await serve(client, backend, uniform(keys))).lost
    assert sorted(lost) == sorted([*keys[:20], *keys[30:33], keys[40]]), "these serve already"
    assert {each.due for each in (await check_layout(client, UID, 1)).values()} == {None}


async def test_a_key_is_not_found_between_two_others(client: RedisClient) -> None:
    """The bytes of 256 stand where the packed keys 1 and 2 meet, too."""
    backend, keys = RunsBackend(client, UID, 1), [mixed_key(key) for key in (1, 2, 256, 3)]
    await begin(client, backend, run_of(keys))
    assert list((await serve(client, backend, uniform([keys[2]]))).lost) == []
    records = await check_layout(client, UID, 1)
    assert [is_resident(records[key]) for key in keys] == [False, False, True, False]
    lost = (await serve(client, backend, uniform([mixed_key(512)]))).lost
    assert list(lost) == [mixed_key(512)]


@pytest.mark.parametrize("moves", [True, False])
async def test_a_read_of_a_prefix_cuts_the_run_there(client: RedisClient, moves: bool) -> None:
    """Invariants 2 and 3: a cut changes no record, so children and due times stay, and a writer that read before the
    cut still wins."""
    backend, other = RunsBackend(client, UID, 1), RunsBackend(client, UID, 1)
    keys, location = chain(64), SERVING._replace(deadline=1700000090.0)
    await write(backend, {key: BlockRecord(keys[at - 1] if at else 5, at, (location,)) for at, key in enumerate(keys)})
    assert await runs_in(client, UID) == [keys]
    records = await backend.get_many(keys)
    await other.touch(dict.fromkeys(keys[:20], 2), 1700000100.0, moves=moves)
    assert await runs_in(client, UID) == [keys[:20], keys[20:]]
    assert await backend.get_many(keys) == records
    after = await check_layout(client, UID, 1)
    assert {each.stamp for each in after.values()} == {records[0].stamp}  # type: ignore[union-attr]
    assert await backend.families([5, *keys]) == [[key] for key in keys] + [[]]
    assert sorted(await backend.due(1700000090.0, 100)) == sorted(keys)
    at = 1700000100 if moves else 1700000000
    assert await backend.accesses(keys) == [Access(at, 2)] * 20 + [Access(1700000000, 0)] * 44
    changes = [
        Change(key, old, old and old._replace(locations=(DELETING,))) for key, old in zip(keys, records, strict=True)
    ]
    assert list((await backend.write_many(changes)).lost) == []
    assert {each.locations for each in (await check_layout(client, UID, 1)).values()} == {(DELETING,)}


async def test_reads_of_one_block_of_many_runs_cut_them_all(client: RedisClient) -> None:
    """Invariant 1, however many blocks move to new runs in one call."""
    backend, keys = RunsBackend(client, UID, 1), chain(300 * 64)
    for at in range(0, len(keys), 64 * 8):
        await begin(client, backend, run_of(keys[at : at + 64 * 8]))
    assert len(await runs_in(client, UID)) == 300
    await backend.touch(dict.fromkeys(keys[::64], 1), 1700000100.0)
    assert len(await check_layout(client, UID, 1)) == len(keys)
    expected = [Access(1700000000, 0) if at % 64 else Access(1700000100, 1) for at in range(len(keys))]
    assert await backend.accesses(keys) == expected


async def test_changes_of_one_block_of_many_runs_are_one_change(client: RedisClient) -> None:
    backend, keys = RunsBackend(client, UID, 1), chain(300 * 64)
    for at in range(0, len(keys), 64 * 8):
        await begin(client, backend, run_of(keys[at : at + 64 * 8]))
    assert list((await serve(client, backend, uniform(keys[10::64]))).lost) == []
    assert await write(backend, dict.fromkeys(keys[20::64])) == []
    records = await check_layout(client, UID, 1)
    assert len(records) == len(keys) - 300
    assert [key for key in keys if key in records and is_resident(records[key])] == keys[10::64]


async def test_of_two_managers_that_begin_the_same_blocks_one_wins_each(redis_standalone: Servers, tags: int) -> None:
    uri, random = redis_standalone.uri(f"test-{secrets.token_hex(8)}"), Random(3)
    async with connected(uri) as one, connected(uri) as another:
        clients = (one, another)
        backends = [RunsBackend(each, UID, tags) for each in clients]
        locations = [WRITING._replace(id=name, session_id=name) for name in "ab"]
        for turn in range(10):
            keys = chain(200, 1 + 1000 * turn)
            starts = [random.randrange(100) for _ in backends]
            runs = [
                run_of(keys[start : start + 100], location, keys[start - 1] if start else None, start)
                for start, location in zip(starts, locations, strict=True)
            ]
            outcomes = await asyncio.gather(*map(begin, clients, backends, runs))
            lost = [set(outcome.lost) for outcome in outcomes]
            assert lost[0].isdisjoint(lost[1])
            assert lost[0] | lost[1] == set(runs[0].keys) & set(runs[1].keys)
            winners = {key: at for at, run in enumerate(runs) for key in run.keys if key not in lost[at]}
            found = await backends[turn % 2].get_many(list(winners))
            assert [each.locations[0].id for each in found if each is not None] == ["ab"[at] for at in winners.values()]
        records = await check_layout(one, UID, tags)
        for backend in backends:
            await backend.refresh()
            assert (backend.key_count, backend.usage_bytes[NFS]) == (len(records), 10 * len(records))


async def test_a_drop_is_continued_where_it_was_stopped(client: RedisClient, tags: int) -> None:
    class Interrupted(RedisClient):
        """Its caller is cancelled after a few scripts ran."""

        rounds_left = 2

        async def run(self, calls: Sequence[ScriptCall]) -> list[Any]:
            if not self.rounds_left:
                raise asyncio.CancelledError
            self.rounds_left -= 1
            return await super().run(calls)

    backend, keys = RunsBackend(client, UID, tags), chain(300 * 64)
    await begin(client, backend, *(run_of(keys[at : at + 64]) for at in range(0, len(keys), 64)))
    stopping = Interrupted.of(client.settings)
    with pytest.raises(asyncio.CancelledError):
        await RunsBackend(stopping, UID, tags).drop()
    await stopping.close()
    for tag in range(tags):
        held = await stored_tag(client, UID, tag)
        assert held.runs.keys() == held.order.keys() == set(held.index.values())
        assert 0 < len(held.runs) < 300 * (1 + tags) // tags
    await backend.drop()
    await backend.drop()
    assert await ask(client, "KEYS", f"{client.prefix}:*".encode()) == []


async def test_a_change_that_comes_after_a_drop_leaves_nothing(client: RedisClient, tags: int) -> None:
    backend, keys = RunsBackend(client, UID, tags), chain(100)
    await begin(client, backend, run_of(keys))
    records = await backend.get_many(keys)
    await backend.drop()
    for new in (BlockRecord(None, 3, (SERVING,)), None):
        changes = [Change(key, old, new) for key, old in zip(keys, records, strict=True)]
        assert sorted((await backend.write_many(changes)).lost) == sorted(keys)
    assert sorted((await serve(client, backend, uniform(keys))).lost) == sorted(keys)
    await backend.touch(dict.fromkeys(keys, 1), 1700000100.0)
    assert await ask(client, "KEYS", f"{client.prefix}:*".encode()) == []


# ── Reads of any keys in any order ──
#
# Runs of all lengths in one chain: a read of blocks as they lie follows the runs, any other looks up the index.

LENGTHS = st.lists(st.one_of(st.integers(1, 3), st.integers(1, 64)), min_size=1, max_size=45)
ROWS = st.lists(
    st.tuples(st.integers(0, 700), st.integers(1, 300), st.sampled_from([1, 1, 1, -1, 2, 64])), min_size=1, max_size=6
)


def laid(lengths: Sequence[int]) -> list[list[int]]:
    """The keys of runs that follow each other, and of one more that is not there."""
    ends = [sum(lengths[:at]) for at in range(len(lengths) + 1)]
    keys = chain(ends[-1] + 40)
    return [keys[begin:end] for begin, end in zip(ends, [*ends[1:], len(keys)], strict=True)]


def rows_of(keys: Sequence[int], rows: Sequence[tuple[int, int, int]], shuffled: Random | None) -> list[int]:
    """Keys in rows, which may overlap."""
    asked = [keys[at % len(keys)] for start, count, step in rows for at in range(start, start + count * step, step)]
    if shuffled is not None:
        shuffled.shuffle(asked)
    return asked


@settings(
    max_examples=examples(100),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@example(lengths=[2, 1], rows=[(1, 1, 1), (0, 1, 1)], shuffled=None, gone=0, is_fresh=False)
@given(
    lengths=LENGTHS,
    rows=ROWS,
    shuffled=st.none() | st.randoms(use_true_random=False),
    gone=st.integers(0, 60),
    is_fresh=st.booleans(),
)
async def test_any_keys_in_any_order_are_read_as_from_a_dict(
    client: RedisClient, tags: int, lengths: list[int], rows: list[tuple[int, int, int]], shuffled: Random | None,
    gone: int, is_fresh: bool,
) -> None:  # fmt: skip
    """Repeated ones, absent ones, and those of more runs than a call reads; what vanishes meanwhile is there or not."""
    backend = RunsBackend(client, secrets.randbits(40), tags)
    *parts, _ = runs = laid(lengths)
    depths = [sum(lengths[:at]) for at in range(len(parts))]
    written = [run_of(part, SERVING, mixed_key(9), depth) for part, depth in zip(parts, depths, strict=True)]
    await begin(client, backend, *(replace(run, location=WRITING) for run in written))
    await serve(client, backend, *(uniform(run.keys, WRITING, SERVING) for run in written))
    model = {key: record for run in written for key, record in zip(run.keys, run.records(), strict=True)}
    asked = rows_of([key for run in runs for key in run], rows, shuffled)
    expected = [model.get(key) for key in asked]
    assert await backend.get_many(asked) == expected
    for is_head_known in (False, True):
        assert await backend.get_fresh(asked, is_head_known=is_head_known) == expected
    index = MetaIndex(backend, TableView({"nfs": 0}))
    found = [each.locations[0].chunk if each is not None else None for each in expected]
    assert await index.answers(asked) == found
    index.invalidate_all()
    assert await index.answers(asked, stop_at_miss=True) == found[: [*found, None].index(None)]

    name = "execute" if is_fresh else "run"
    gone_keys, send = runs[gone % len(runs)], getattr(client, name)

    async def send_and_remove(sent: Sequence[Any]) -> list[Any]:
        answers: list[Any] = await send(sent)
        setattr(client, name, send)
        await write(backend, dict.fromkeys(gone_keys))
        return answers

    setattr(client, name, send_and_remove)
    left = await (partial(backend.get_fresh, is_head_known=False) if is_fresh else backend.get_many)(asked)
    setattr(client, name, send)
    for key, record, before in zip(asked, left, expected, strict=True):
        assert record == before or (record is None and key in gone_keys)
    await backend.drop()


async def calls_of(client: RedisClient, of: Callable[[], Awaitable[object]]) -> dict[str, int]:
    """How often each command runs in the server meanwhile."""

    async def counts() -> Counter[str]:
        lines = (await ask(client, b"INFO", b"commandstats")).decode().splitlines()[1:]
        return Counter({line.split(":")[0][8:]: int(line.split("calls=")[1].split(",")[0]) for line in lines})

    before = await counts()
    await of()
    return dict(await counts() - before)


async def test_blocks_of_more_runs_than_a_script_takes_are_touched_in_several(client: RedisClient, tags: int) -> None:
    backend, keys = RunsBackend(client, UID, tags), chain(500)
    await begin(client, backend, *(run_of([key], SERVING) for key in keys))
    counts = {key: 1 + at % 3 for at, key in enumerate(reversed(keys))}
    touched = await calls_of(client, lambda: backend.touch(counts, 1700000100.0))
    assert touched["evalsha"] >= 500 // 96
    assert await backend.accesses(keys) == [Access(1700000100, counts[key]) for key in keys]
    assert sorted(map(len, await runs_in(client, UID, tags))) == [1] * 500


async def test_a_prefix_is_read_to_its_end_by_one_script_and_no_further(client: RedisClient) -> None:
    backend, keys = RunsBackend(client, UID, 1), chain(1024)
    index = MetaIndex(backend, TableView({"nfs": 0}))
    await begin(client, backend, run_of(keys[:320]))
    writing = await calls_of(client, lambda: index.answers(keys, stop_at_miss=True))
    assert (writing["evalsha"], writing["hmget"], writing["get"]) == (1, 2, 1 + 1)  # none of it can be read; the fence
    await serve(client, backend, uniform(keys[:320]))
    read = await calls_of(client, lambda: index.answers(keys, stop_at_miss=True))
    assert (read["evalsha"], read["hmget"], read["get"]) == (1, 6, 5 + 1)
    index.invalidate_all()
    assert await index.answers(keys, stop_at_miss=True) == chunked(keys[:320])
    assert await index.answers(keys[300:], stop_at_miss=True) == chunked(keys[:320])[300:]
    absent = await calls_of(client, lambda: index.answers(chain(1024, 5000), stop_at_miss=True))
    assert (absent["evalsha"], absent["hmget"], absent["get"]) == (1, 1, 1)


async def test_blocks_that_are_asked_for_as_they_lie_cost_the_server_one_lookup_a_run(client: RedisClient) -> None:
    backend, keys = RunsBackend(client, UID, 1), chain(1024)
    await begin(client, backend, run_of(keys))
    read = await calls_of(client, lambda: backend.get_many(keys))
    assert (read["hmget"], read["get"]) == (16, 16 + 1), "of each run, and the fence"
    late = await calls_of(client, lambda: backend.get_many(keys[16:]))
    assert (late["hmget"], late["get"]) == (16, 16 + 1)
    # Reads are recorded tail first.
    touched = await calls_of(client, lambda: backend.touch(dict.fromkeys(reversed(keys), 1), 1700000100.0))
    assert (touched["evalsha"], touched["hmget"], touched["zadd"]) == (1, 16, 1)
    absent = await calls_of(client, lambda: backend.get_many(chain(1024, 5000)))
    assert absent["hmget"] <= 12
    assert await backend.accesses(keys) == [Access(1700000100, 1)] * 1024
    assert await runs_in(client, UID) == [keys[at : at + 64] for at in range(0, 1024, 64)]


# ── What a record may be ──

LONG = "x" * 70_000
MANY = tuple(f"spec{number}" for number in range(12_000))
ODD_LOCATIONS = {
    "several locations": (SERVING, DELETING._replace(id="d"), OTHER),
    "as many locations as a list of two bytes has": tuple(SERVING._replace(id=f"l{at}") for at in range(300)),
    "a long storage": (SERVING._replace(storage=LONG),),
    "many specs": (SERVING._replace(spec_names=MANY),),
    "many specs and several locations": (SERVING._replace(spec_names=MANY), OTHER._replace(storage=LONG)),
    "long chunks": (SERVING._replace(chunk=b"\xff" * 70_000), OTHER._replace(chunk=b"")),
    "a long chunk": (SERVING._replace(chunk=bytes(range(256)) * 300),),
    "no names": (SERVING._replace(id="", storage="", spec_names=()),),
    "what is not ASCII": (SERVING._replace(id="ä\x00\n", storage="存储", spec_names=("}{", "'")),),
}


@pytest.mark.parametrize("named", ODD_LOCATIONS)
async def test_records_come_back_as_they_were_stored(client: RedisClient, tags: int, named: str) -> None:
    backend, keys, locations = RunsBackend(client, UID, tags), chain(70), ODD_LOCATIONS[named]
    records = {key: BlockRecord(keys[at - 1] if at else None, at, locations) for at, key in enumerate(keys)}
    await write(backend, dict.fromkeys(keys, BlockRecord(None, 0, (WRITING,))))
    assert await write(backend, dict(records)) == []
    assert await check_layout(client, UID, tags) == records
    await backend.touch(dict.fromkeys(keys[:3], 1), 1700000100.0)
    going = {
        key: each._replace(locations=(*locations[1:], DELETING)) for key, each in records.items() if each.depth % 2
    }
    assert await write(backend, dict(going)) == []
    assert await check_layout(client, UID, tags) == records | going
    assert await backend.get_many(keys) == [(records | going)[key] for key in keys]


@pytest.mark.parametrize("named", ["a long storage", "many specs"])
async def test_blocks_with_large_headers_begin_and_serve(client: RedisClient, tags: int, named: str) -> None:
    backend, keys, (location,) = RunsBackend(client, UID, tags), chain(150), ODD_LOCATIONS[named]
    writing = location._replace(status=LocationStatus.WRITING, session_id="s", deadline=1700000030.0)
    assert list((await begin(client, backend, run_of(keys, writing))).lost) == []
    assert list((await serve(client, backend, uniform(keys[:100], writing))).lost) == []
    assert list((await serve(client, backend, uniform(keys[100:], writing, None, [b"new"] * 50))).lost) == []
    found = await check_layout(client, UID, tags)
    assert [found[key].locations[0]._replace(chunk=b"") for key in keys] == [served(writing)] * 150
    assert [found[key].locations[0].chunk for key in keys] == chunked(keys)[:100] + [b"new"] * 50


async def test_blocks_without_bytes_count_no_bytes(client: RedisClient, tags: int) -> None:
    backend, keys = RunsBackend(client, UID, tags), chain(70)
    location = WRITING._replace(size_bytes=0, deadline=0.0, written_at=-5.0)
    await begin(client, backend, BlockRun(keys, None, 0, location, [b""] * 70))
    assert await serve(client, backend, uniform(keys, location, served(location), [b""] * 70))
    records = await check_layout(client, UID, tags)
    assert {each.locations for each in records.values()} == {(served(location),)}
    assert await backend.accesses(keys) == [Access(0, 0)] * 70


# ── Damaged runs ──

GOOD = encode_run(run_of(chain(5), WRITING, mixed_key(9), 3))
SEVERAL = encode_blocks(chain(3), [BlockRecord(None, 0, (SERVING, OTHER._replace(id=name))) for name in ("a",) * 3])
DAMAGED: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda _: b"",
    "no count": lambda value: value[:9],
    "another version": lambda value: b"\x01" + value[1:],
    "a later version": lambda value: b"\x03" + value[1:],
    "no blocks": lambda value: value[:9] + b"\x00" + value[10:],
    "more blocks": lambda value: value[:9] + b"\x06" + value[10:],
    "most blocks": lambda value: value[:9] + b"\xff" + value[10:],
    "fewer blocks": lambda value: value[:9] + b"\x04" + value[10:],
    "cut in the keys": lambda value: value[:30],
    "cut after the keys": lambda value: value[:50],
    "cut after the parents": lambda value: value[:90],
    "cut after the depths": lambda value: value[:110],
    "cut in the headers": lambda value: value[:140],
    "cut at the end": lambda value: value[:-1],
    "longer": lambda value: value + b"x",
    "headers that are none": lambda value: value[:134] + b"\xc1" * 10 + value[144:],
    "huge sizes": lambda value: value[:110] + b"\xff" * 24 + value[134:],
    "random bytes": lambda value: b"\x02" + Random(5).randbytes(len(value) - 1),
}


@pytest.mark.parametrize("named", DAMAGED)
def test_a_damaged_run_is_an_error_of_the_store(named: str) -> None:
    for value in (GOOD, SEVERAL):
        with pytest.raises(StorageIOError, match=r"damaged .*run `kvcm index verify --repair`"):
            decode_runs([GOOD, DAMAGED[named](value)])


@pytest.mark.parametrize("named", DAMAGED)
async def test_reads_of_a_damaged_run_are_errors_and_other_blocks_are_read(client: RedisClient, named: str) -> None:
    backend, keys = RunsBackend(client, UID, 1), chain(5)
    await begin(client, backend, run_of(keys, WRITING, mixed_key(9), 3))
    await begin(client, backend, run_of(chain(5, 100)))
    name = TagKeys.of(client.prefix, UID, 0).runs + bytes(7) + b"\x01"
    value = await ask(client, "GET", name)
    records = await backend.get_many(keys)
    await ask(client, "SET", name, DAMAGED[named](value))
    before = await stored_tag(client, UID, 0)
    with pytest.raises(StorageIOError, match="damaged"):
        await backend.get_many([keys[2], *chain(5, 100)])
    assert None not in await backend.get_many(chain(5, 100))
    with pytest.raises(StorageIOError, match="damaged"):
        await backend.get_runs([keys[2]])
    searches: list[Callable[[], Awaitable[object]]] = [
        lambda: backend.due(1.8e9, 100),
        lambda: backend.coldest(100),
        lambda: backend.families([*keys, mixed_key(9)]),
        lambda: backend.accesses(keys),
        lambda: backend.random_sample(100, Random(1)),
        lambda: backend.random_sample(1, Random(1)),
        lambda: listed(backend, 10),
        lambda: listed(backend, 1),
    ]
    for search in searches:
        with suppress(StorageIOError):
            await search()
    # Whatever is done to such blocks, it is all or nothing, and no other block is touched.
    changes = [Change(key, old, None) for key, old in zip(keys[:3], records, strict=False)]
    for change in (
        lambda: backend.write_many(changes),
        lambda: serve(client, backend, uniform(keys[:2])),
        lambda: backend.touch(dict.fromkeys(keys[:2], 1), 1.8e9),
    ):
        try:
            await change()
        except StorageIOError:
            after = await stored_tag(client, UID, 0)
            assert after._replace(last_id=0) == before._replace(last_id=0)
        before = await stored_tag(client, UID, 0)
        assert None not in await backend.get_many(chain(5, 100))


@given(data=st.data(), is_several=st.booleans())
@settings(max_examples=examples(1000))
def test_whatever_is_changed_in_a_run_it_is_read_or_an_error(data: st.DataObject, is_several: bool) -> None:
    """A run has no checksum. So bytes that still make sense are read; what is read has the shape of records."""
    value = bytearray(SEVERAL if is_several else GOOD)
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(value) - 1))
        value[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    try:
        records = decode_runs([bytes(value)])
    except StorageIOError:
        return
    assert 1 <= len(records) <= value[9]
    for key, each in records.items():
        assert -(2**63) <= key < 2**63
        assert (each.stamp, type(each.depth)) == (bytes(value[1:9]), int)
        assert each.locations
        assert {type(field) for location in each.locations for field in location[5:6]} == {bytes}


@given(st.binary(max_size=300))
@example(b"")
@example(b"\x02" + bytes(9))
def test_random_bytes_are_no_run(value: bytes) -> None:
    for damaged in (value, b"\x02" + value):
        with pytest.raises(StorageIOError):
            decode_runs([damaged])


@given(st.data())
def test_a_run_that_is_cut_short_is_no_run(data: st.DataObject) -> None:
    value = data.draw(st.sampled_from([GOOD, SEVERAL]))
    with pytest.raises(StorageIOError):
        decode_runs([value[: data.draw(st.integers(0, len(value) - 1))]])


# ── A server at its `maxmemory` ──


@pytest.fixture
async def full(tmp_path: Path) -> AsyncIterator[FullServer]:
    async with full_server(tmp_path) as made:
        yield made


async def test_blocks_serve_are_marked_and_removed_on_a_full_server(full: FullServer, tags: int) -> None:
    """Invariant 1: a rejected script changes nothing, and a script that runs changes all related keys."""
    client, keys = full.client, chain(400)
    backend = RunsBackend(client, UID, tags)
    await begin(client, backend, run_of(keys[:300]))
    await serve(client, backend, uniform(keys[200:300]))
    await backend.touch(dict.fromkeys(keys[200:300], 1), 1700000100.0)
    before = [await stored_tag(client, UID, tag) for tag in range(tags)]
    full.fill()
    with pytest.raises(StorageIOError, match=FULL):
        await begin(client, backend, run_of(keys[290:400], WRITING, keys[289], 290))
    with pytest.raises(StorageIOError, match=FULL):
        await write(backend, dict.fromkeys(keys[300:310], BlockRecord(None, 0, (WRITING,))))
    with pytest.raises(StorageIOError, match=FULL):
        await backend.touch(dict.fromkeys(keys[:10], 1), 1700000200.0)
    assert [await stored_tag(client, UID, tag) for tag in range(tags)] == before
    assert list((await serve(client, backend, uniform(keys[:100]))).lost) == []
    assert list((await serve(client, backend, uniform(keys[110:150], WRITING, None, [b"new"] * 40))).lost) == []
    await backend.requeue(dict.fromkeys(keys[210:220], 0), 1700000300.0)
    marked = [each and each._replace(locations=(DELETING,)) for each in await backend.get_many(keys[200:280])]
    assert await write(backend, dict(zip(keys[200:280], marked, strict=True))) == []
    assert await write(backend, dict.fromkeys(keys[220:250])) == []
    records = await check_layout(client, UID, tags)
    assert [key for key in keys if key in records and is_resident(records[key])] == [
        *keys[:100], *keys[110:150], *keys[280:300],
    ]  # fmt: skip
    await backend.refresh()
    assert (backend.key_count, backend.usage_bytes[NFS], backend.deleting_bytes[NFS]) == (270, 2700, 500)
    full.free()
    assert len((await begin(client, backend, run_of(keys[290:400], WRITING, keys[289], 290))).lost) == 10
    assert len(await check_layout(client, UID, tags)) == 370


async def test_blocks_of_a_removed_instance_go_on_a_full_server(full: FullServer, tags: int) -> None:
    backend = RunsBackend(full.client, UID, tags)
    await begin(full.client, backend, run_of(chain(600)))
    full.fill()
    await backend.drop()
    assert await ask(full.client, "KEYS", f"{full.client.prefix}:*".encode()) == []


# ── A search cache in front: nothing that another manager changed is kept ──

WAIT_SECONDS = 40.0
PROBE = f"{UID + 1}.noticed!".encode()  # a notice of another instance


@pytest.fixture(autouse=True)
def no_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine an answer may be late."""
    monkeypatch.setattr(tracking, "_PING_SECONDS", 600.0)
    monkeypatch.setattr(tracking, "_PONG_SECONDS", 600.0)


class CachingManager:
    """The index of one instance with its search cache, as a manager has it: it is notified of changes.

    Attributes:
        meanwhile: runs once during the next read, when its answer is there and nothing has been done with it.
        notices: how many came of the instance while answers were kept.
    """

    def __init__(self, client: RedisClient, tags: int) -> None:
        self.store = RedisStore(client)
        self.client, self.backend = client, RunsBackend(client, UID, tags, self.store.flags)
        self.budget = CacheBudget(1 << 24, lambda _store: self._invalidations.is_live)
        self.index = MetaIndex(self.backend, TableView({"nfs": 0}), budget=self.budget)
        self.meanwhile: Callable[[], Awaitable[object]] | None = None
        self._probes = self.notices = 0
        self._invalidations = Invalidations(
            client,
            self.store.notified_prefixes(have_flags=True),
            self.store.revisions.record,
            self.index.invalidate_all,
            channel=channel_of(client.prefix),
            on_notice=self._on_notice,
        )
        self._run, client.run = client.run, self._run_and_wait  # type: ignore[method-assign]

    async def _run_and_wait(self, calls: Sequence[ScriptCall]) -> list[Any]:
        answers = await self._run(calls)
        if self.meanwhile is not None and calls[0].script is redis_runs.READ:
            meanwhile, self.meanwhile = self.meanwhile, None
            await meanwhile()
        return answers

    def _on_notice(self, notice: bytes) -> None:
        """Forget, as `OpenCaches.invalidate` does."""
        self._probes += notice == PROBE
        members = noticed_blocks(notice).get(UID)
        if members and self.index.has_answers:
            self.notices += 1
            self.index.invalidate(unpack_keys(members))

    async def follow(self, stack: AsyncExitStack) -> None:
        """Receive invalidations until the stack is unwound."""
        running = asyncio.create_task(self._invalidations.run())

        async def end() -> None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

        stack.push_async_callback(end)
        await self._until(lambda: self._invalidations.is_live)

    async def catch_up(self) -> None:
        """Return when it was notified of all that was changed before."""
        before = self._probes
        await self.client.execute([(b"PUBLISH", channel_of(self.client.prefix), PROBE)])
        await self._until(lambda: self._probes > before)

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_SECONDS):
            while not condition():  # noqa: ASYNC110 - connections to a server send no events here
                await asyncio.sleep(0.001)


class Pair:
    """Two managers of one instance.

    Attributes:
        mine: keeps answers, which are compared with the records.
        other: changes blocks.
    """

    def __init__(self, mine: CachingManager, other: CachingManager) -> None:
        self.mine, self.other = mine, other

    async def check(self, keys: Sequence[int]) -> int:
        """Compare all that is answered with the records, and return how many answers were kept."""
        await self.mine.catch_up()
        hits = self.mine.budget.hits
        answers = await self.mine.index.answers(keys)
        hits = self.mine.budget.hits - hits
        view = TableView({"nfs": 0})
        assert await self.mine.index.answers(keys, view=view) == answers, "records are kept for callers on nodes"
        records = await RunsBackend(self.other.client, UID, len(self.mine.backend._tags)).get_many(keys)
        assert answers == [compose_answer(each, view) if each is not None else None for each in records]
        return hits

    async def add(self, keys: Sequence[int], version: str = "a") -> None:
        """The other manager writes blocks, which serve then."""
        location = WRITING._replace(id=version, session_id=version)
        client, backend = self.other.client, self.other.backend
        await begin(client, backend, BlockRun(keys, None, 0, location, [f"{version}{key}".encode() for key in keys]))
        await serve(client, backend, uniform(keys, location))

    async def change(self, verb: str, keys: Sequence[int]) -> None:
        """The other manager changes some blocks, or only cuts their runs."""
        index = self.other.index
        match verb:
            case "mark":
                await index.read_modify_write(keys, lambda _, old: old and old._replace(locations=(DELETING,)))
            case "remove":
                await index.delete(keys)
            case "move":
                moved = SERVING._replace(id="moved", chunk=b"moved")
                await index.read_modify_write(keys, lambda _, old: old and old._replace(locations=(moved,)))
            case "cut":
                await index.touch(dict.fromkeys(keys, 1), 1700000000.0 + secrets.randbelow(1 << 20))
            case "copy":
                copy = WRITING._replace(id="copy")
                await index.read_modify_write(keys, lambda _, old: old and old._replace(locations=(*old[2], copy)))
                copied = (DELETING, SERVING._replace(id="copy", chunk=b"copy"))
                await index.read_modify_write(keys, lambda _, old: old and old._replace(locations=copied))
            case "come back":
                await index.delete(keys)
                await self.add(keys, "b")


@pytest.fixture
async def pair(redis_standalone: Standalone, tags: int) -> AsyncIterator[Pair]:
    uri = redis_standalone.uri(f"test-{secrets.token_hex(8)}")
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connected(uri)) for _ in range(2)]
        made = Pair(*(CachingManager(client, tags) for client in clients))
        for manager in (made.mine, made.other):
            await manager.follow(stack)
        yield made


CHANGES_OF_RECORDS = ["mark", "remove", "move", "copy", "come back"]
VERBS = [*CHANGES_OF_RECORDS, "cut"]


@pytest.mark.parametrize(
    "foreign",
    [b"", b"7", b".12345678", b"7.1234567", b"-7.12345678", b"x.12345678", "٣.12345678".encode(), b"7" * 5000 + b"."],
)
def test_another_message_on_the_channel_is_no_notice(foreign: bytes) -> None:
    """A callback of invalidations must not raise."""
    assert noticed_blocks(foreign) == {}
    assert noticed_blocks(b"7.12345678abcdefgh") == {7: (b"12345678", b"abcdefgh")}


async def test_what_is_new_or_only_lies_elsewhere_costs_the_others_no_notice(pair: Pair) -> None:
    """Many managers may share a store: each would pay for every block that one of them writes."""
    keys = chain(100)
    await pair.add(keys)
    assert await pair.check(keys) == 0
    for first in range(1000, 5000, 1000):
        await pair.add(chain(100, first))
    await pair.change("cut", keys[10:20])
    assert await pair.check(keys) == 100
    assert pair.mine.notices == 0
    await pair.change("mark", keys[10:20])
    await pair.mine.catch_up()
    assert 1 <= pair.mine.notices <= len(pair.mine.backend._tags), "of the ten blocks"


@pytest.mark.parametrize("verb", CHANGES_OF_RECORDS)
async def test_answers_of_blocks_that_another_manager_changed_are_forgotten(pair: Pair, verb: str) -> None:
    keys = chain(100)
    await pair.add(keys)
    assert await pair.check(keys) == 0
    assert await pair.check(keys) == 100, "they are kept"
    await pair.change(verb, keys[10:20])
    assert await pair.check(keys) < 100
    await pair.check(keys)
    await pair.change(verb, keys[:5])
    assert await pair.check(keys) < 100


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("is_noticed_at_once", [True, False])
async def test_nothing_is_kept_of_blocks_that_change_while_they_are_read(
    pair: Pair, verb: str, is_noticed_at_once: bool
) -> None:
    """The invalidation comes before the answer, or after it."""
    keys = chain(100)
    await pair.add(keys)
    await pair.mine.catch_up()

    async def change() -> None:
        await pair.change(verb, keys[10:20])
        if is_noticed_at_once:
            await pair.mine.catch_up()

    pair.mine.meanwhile = change
    await pair.mine.index.answers(keys)
    await pair.check(keys)
    await pair.check(keys)


@pytest.mark.parametrize("verb", VERBS)
async def test_blocks_of_a_run_that_was_cut_are_forgotten(pair: Pair, verb: str) -> None:
    keys = chain(64)
    await pair.add(keys)
    await pair.check(keys)
    for cut in (keys[:20], keys[:10], keys[40:50]):
        await pair.change("cut", cut)
        await pair.mine.catch_up()
        await pair.mine.index.answers(keys[5:25])
    await pair.change(verb, keys[8:15])
    await pair.check(keys)
    await pair.change(verb, keys[45:])
    await pair.check(keys)


async def test_blocks_that_were_cut_and_changed_during_one_read_are_not_kept(pair: Pair) -> None:
    keys = chain(64)
    await pair.add(keys)
    await pair.mine.catch_up()

    async def change() -> None:
        await pair.change("cut", keys[:20])
        await pair.mine.catch_up()
        await pair.mine.index.answers(keys[30:40])  # another read knows the new run
        await pair.change("move", keys[25:50])
        await pair.mine.catch_up()

    pair.mine.meanwhile = change
    await pair.mine.index.answers(keys)
    await pair.check(keys)


@pytest.mark.parametrize("named", ["cut in the keys", "nothing", "random bytes", "most blocks"])
async def test_a_damaged_run_does_not_end_the_invalidations(pair: Pair, named: str) -> None:
    """A callback of invalidations must not raise, whatever was read before."""
    keys, other = chain(40), chain(40, 1000)
    await pair.add(keys)
    await pair.add(other)
    await pair.check(other)
    names = TagKeys.of(pair.other.client.prefix, UID, 0)
    run, *_ = await ask(pair.other.client, "ZRANGE", names.order, 0, 0)
    value = await ask(pair.other.client, "GET", names.runs + run)
    await ask(pair.other.client, "SET", names.runs + run, DAMAGED[named](value))

    async def change() -> None:
        await ask(pair.other.client, "SET", names.runs + run, value)
        await pair.mine.catch_up()

    for meanwhile in (None, change):
        pair.mine.meanwhile = meanwhile
        with pytest.raises(StorageIOError):
            await pair.mine.index.answers([*keys, *other])
    pair.mine.meanwhile = None
    await pair.check([*keys, *other])
    await pair.change("move", [keys[0], other[0]])
    await pair.check([*keys, *other])


CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["read", "read", "during", *VERBS]),
        st.integers(0, 150),
        st.integers(1, 80),
        st.sampled_from(VERBS),
        st.booleans(),
    ),
    max_size=12,
)


@settings(
    max_examples=examples(100),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(changes=CHANGES)
async def test_no_answer_outlives_a_change_whatever_happens(
    pair: Pair, changes: list[tuple[str, int, int, str, bool]]
) -> None:
    await pair.other.index.drop()
    await pair.mine.catch_up()
    pair.mine.index.invalidate_all()  # as the end of an instance does
    keys = chain(200)
    await pair.add(keys[:64])
    await pair.add(keys[64:], "b")
    await pair.check(keys)
    for verb, start, length, during, is_noticed in changes:
        part = keys[start : start + length]

        async def change(part: Sequence[int] = part, verb: str = during, is_noticed: bool = is_noticed) -> None:
            await pair.change(verb, part[::2])
            if is_noticed:
                await pair.mine.catch_up()

        if verb in ("read", "during"):
            pair.mine.meanwhile = change if verb == "during" else None
            await pair.mine.index.answers(part, stop_at_miss=is_noticed)
            pair.mine.meanwhile = None
        else:
            await pair.change(verb, part)
        if is_noticed:
            await pair.check(keys)
    await pair.check(keys)
