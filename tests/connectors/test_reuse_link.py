"""The core of connectors with a real manager: sessions, saves, loads and lookups, and the state that failures leave."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from itertools import count
from uuid import uuid4

import grpc
import pytest
from fake_clock import FakeClock
from hypothesis import given
from hypothesis import strategies as st
from manager_process import ManagerProcess
from waiting import until

from kvcm.connectors.calls import RetrySettings
from kvcm.connectors.client import ManagerClient
from kvcm.connectors.exchanges import ClientSettings
from kvcm.connectors.results import CallCounters, MatchMode, RegistrationState
from kvcm.connectors.reuse.loads import (
    Bytes,
    LoadReport,
    PartToLoad,
    StagingTray,
    StagingTrays,
    load_parts,
    missing_report,
)
from kvcm.connectors.reuse.lookups import FoundPrefix, LookupPlan, Lookups, LookupSettings
from kvcm.connectors.reuse.registration import InstanceSpecs, ManagerLink
from kvcm.connectors.reuse.statistics import BUCKETS_SECONDS, ReuseStatistics, Snapshot, merged
from kvcm.connectors.reuse.write_sessions import SavedBlocks, SessionSettings, WriteSessions, save_blocks
from kvcm.connectors.transfer import TransferEngine
from kvcm.model.errors import ErrorCode
from kvcm.model.instances import LocationSpecGroup, LocationSpecInfo, ModelDeployment
from kvcm.model.keys import BlockKey
from kvcm.protocol.kvcm.v1.lease_service_pb2 import RenewReadLeaseRequest
from kvcm.protocol.kvcm.v1.lease_service_pb2_grpc import LeaseServiceStub

PART_BYTES = 64
PARTS = ("full", "window")
SECONDS = 30.0
SESSIONS = SessionSettings(call_seconds=SECONDS)
Link = Callable[..., ManagerLink]
NewLookups = Callable[..., Lookups]


def keys_of(*numbers: int) -> list[BlockKey]:
    return [BlockKey(number) for number in numbers]


def bytes_of(key: int, part: str) -> bytes:
    return bytes([key % 251, len(part)]) * (PART_BYTES // 2)


@pytest.fixture
def new_link(instance_id: str) -> Iterator[Link]:
    def make(
        address: str, model: str = "m", group: str = "default", clock: Callable[[], float] = time.monotonic
    ) -> ManagerLink:
        client = ManagerClient(address, instance_id, ClientSettings(SECONDS, RetrySettings(max_rounds=1)))
        parts = [LocationSpecInfo(name, PART_BYTES) for name in PARTS]
        groups = [LocationSpecGroup("all", PARTS), LocationSpecGroup("full", ("full",))]
        specs = InstanceSpecs(group, 16, parts, ModelDeployment(model, "float32", tp_size=1), groups)
        connect = partial(TransferEngine.for_storages, checksums=True)
        return links.enter_context(closing(ManagerLink(client, specs, SECONDS, connect, clock)))

    with ExitStack() as links:
        yield make


@pytest.fixture
def link(manager: ManagerProcess, new_link: Link) -> ManagerLink:
    return new_link(manager.address)


def engine_of(link: ManagerLink) -> TransferEngine:
    engine = link.engine()
    assert engine is not None
    return engine


def save(link: ManagerLink, keys: Sequence[BlockKey], groups: Sequence[str] = ()) -> SavedBlocks:
    sessions = WriteSessions(link.client, SESSIONS)

    def source(index: int, part: str) -> Sequence[memoryview]:
        return [memoryview(bytes_of(keys[index], part))]

    try:
        return save_blocks(sessions, engine_of(link), keys, None, source, SECONDS, part_groups=groups)
    finally:
        assert sessions.count == 0
        sessions.close()


def load(link: ManagerLink, keys: Sequence[BlockKey]) -> tuple[dict[int, bytes], LoadReport, ReuseStatistics]:
    found = link.client.match(keys, MatchMode.PREFIX, spec_names=["full"])
    parts = [
        PartToLoad(key, location.uris["full"], location.checksums["full"])
        for key, location in zip(keys, found.locations, strict=False)
        if location is not None
    ]
    got: dict[int, bytes] = {}

    def deliver(rows: Bytes, positions: Sequence[int]) -> None:
        got.update({parts[position].key: row.tobytes() for row, position in zip(rows, positions, strict=True)})

    trays, statistics = StagingTrays(3 * PART_BYTES, 1), ReuseStatistics()
    results = load_parts(engine_of(link), trays, parts, PART_BYTES, deliver, SECONDS)
    assert trays.abandoned == 0
    return got, missing_report(parts, results, statistics), statistics


@pytest.mark.parametrize("waits", [True, False])
def test_a_registration_that_was_refused_is_tried_again(manager: ManagerProcess, new_link: Link, waits: bool) -> None:
    """Its group is created a moment after the engine asked for it."""
    clock, group = FakeClock(), f"group-{uuid4().hex}"
    link = new_link(manager.address, group=group, clock=clock.now)

    def is_registered_later(seconds: float = 1.0) -> bool:
        clock.time += seconds
        return link.register() if waits else link.is_ready()

    until(lambda: is_registered_later(0.0) or link.registration.state is RegistrationState.REFUSED)
    assert group in link.registration.message
    manager.add_group(group, "nfs_01")
    until(is_registered_later)


def test_a_manager_that_refuses_is_asked_ever_more_rarely(
    manager: ManagerProcess, new_link: Link, caplog: pytest.LogCaptureFixture
) -> None:
    clock = FakeClock()
    link = new_link(manager.address, group=f"group-{uuid4().hex}", clock=clock.now)
    asked = []
    for _ in range(300):
        assert link.engine() is None
        asked.append(link.client.counters()["register_instance"].miss_on_error)
        clock.time += 1.0
    assert [asked.index(number) for number in range(1, 9)] == [0, 1, 3, 7, 15, 31, 63, 123]
    assert "refuses to register" in caplog.text


def test_saved_blocks_are_loaded_in_trays(link: ManagerLink) -> None:
    keys = keys_of(*range(8))
    saved = save(link, keys)
    assert (saved.stored, saved.saved, saved.saved_bytes, saved.reason) == ((True,) * 8, 8, 8 * 2 * PART_BYTES, "")
    got, report, _ = load(link, keys)
    assert got == {key: bytes_of(key, "full") for key in keys}
    assert not report


def test_stored_blocks_are_not_saved_again(link: ManagerLink) -> None:
    save(link, keys_of(1, 2))
    again = save(link, keys_of(1, 2))
    assert (again.stored, again.saved) == ((True, True), 0)
    more = save(link, keys_of(1, 2, 3))
    assert (more.stored, more.saved) == ((True, True, True), 1)


def test_a_block_with_a_missing_part_is_not_found_and_can_be_completed(link: ManagerLink) -> None:
    keys = keys_of(1, 2, 3)
    assert save(link, keys, ["all", "full", "all"]).saved == 3
    every = link.client.match(keys, spec_names=PARTS)
    assert len(every.locations) == 1
    assert len(link.client.match(keys, spec_names=["full"]).locations) == 3
    assert save(link, keys).saved == 1
    assert len(link.client.match(keys, spec_names=PARTS).locations) == 3


def test_lost_and_corrupt_parts_are_reported_apart_others_arrive(manager: ManagerProcess, link: ManagerLink) -> None:
    keys = keys_of(*range(100, 103))
    before = set(manager.files)
    save(link, keys)
    for path in set(manager.files) - before:
        content = path.read_bytes()
        at = content.find(bytes_of(keys[1], "full"))
        if at >= 0:
            path.write_bytes(content[:at] + bytes(PART_BYTES) + content[at + PART_BYTES :])
    got, report, statistics = load(link, keys)
    assert got == {key: bytes_of(key, "full") for key in (keys[0], keys[2])}
    assert [key for key, _, _ in report.corrupt] == [keys[1]]
    assert statistics.total()["corrupt_parts"] == 1
    reported = link.client.report_missing(report.lost, corrupt=report.corrupt)
    assert reported is not None
    assert reported.removed_locations >= 1
    assert len(link.client.match(keys, spec_names=["full"]).locations) == 1


def test_a_save_that_raises_leaves_no_session(link: ManagerLink) -> None:
    """Invariant 3: the blocks can be written at once by the next one."""
    keys = keys_of(1, 2)
    sessions = WriteSessions(link.client, SESSIONS)

    def raise_it(index: int, part: str) -> Sequence[memoryview]:
        raise RuntimeError("no such block")

    with pytest.raises(RuntimeError, match="no such block"):
        save_blocks(sessions, engine_of(link), keys, None, raise_it, SECONDS)
    assert sessions.count == 0
    assert save(link, keys).saved == 2


def test_a_closed_table_aborts_open_sessions(link: ManagerLink) -> None:
    keys = keys_of(1, 2)
    assert link.register()
    sessions = WriteSessions(link.client, SESSIONS)
    grant = sessions.start(keys, None)
    assert grant is not None
    assert sessions.count == 1
    sessions.close(SECONDS)
    assert not sessions.finish(grant.session_id, [True, True])
    assert sessions.start(keys, None) is None
    assert save(link, keys).saved == 2


def test_an_open_session_is_renewed(link: ManagerLink) -> None:
    """A session of a minute is renewed whenever a third of it has passed; each look at the clock is 10 s later."""
    keys = keys_of(1, 2)
    assert link.register()
    settings = replace(SESSIONS, session_seconds=60, max_seconds=float("inf"))
    sessions = WriteSessions(link.client, settings, count(step=10.0).__next__)
    grant = sessions.start(keys, None)
    assert grant is not None
    until(lambda: link.client.counters().get("renew_write", CallCounters()).ok >= 5)
    assert sessions.finish(grant.session_id, [True, True])
    sessions.close()
    assert len(link.client.match(keys).locations) == 2


def answered(lookups: Lookups, request_id: str) -> FoundPrefix:
    until(lambda: lookups.poll(request_id) is not None)
    found = lookups.poll(request_id)
    assert found is not None
    return found


def is_open(manager: ManagerProcess, instance_id: str, lease_id: str) -> bool:
    with grpc.insecure_channel(manager.address) as channel:
        request = RenewReadLeaseRequest(instance_id=instance_id, read_lease_id=lease_id, read_lease_ms=60_000)
        answer = LeaseServiceStub(channel).RenewReadLease(request, timeout=SECONDS)  # type: ignore[no-untyped-call]
        return bool(answer.header.status.code == ErrorCode.OK)


@pytest.fixture
def new_lookups() -> Iterator[NewLookups]:
    def make(link: ManagerLink, plan: LookupPlan | None = None, **settings: float) -> Lookups:
        plan = plan or LookupPlan(("full", "window"))
        patient = LookupSettings(
            **({"lookup_seconds": SECONDS, "load_seconds": 300.0, "share_seconds": 0.0} | settings)
        )  # type: ignore[arg-type]
        lookups = Lookups(link, plan, patient, ReuseStatistics())
        made.callback(lookups.close, 1.0)
        return lookups

    with ExitStack() as made:
        yield make


def test_a_lookup_finds_the_prefix_and_releases_its_lease(link: ManagerLink, new_lookups: NewLookups) -> None:
    keys = keys_of(1, 2, 3, 4)
    save(link, keys[:3])
    lookups = new_lookups(link)
    lookups.start("r", keys)
    lookups.start("r", keys)  # asked again before it is answered: one lookup, one lease
    found = answered(lookups, "r")
    assert (found.blocks, len(found.locations), found.is_answered) == (3, 3, True)
    assert len(found.lease_ids) == 1
    lookups.release("r")
    lookups.release("r")
    lookups.close(4 * SECONDS)
    counters = link.client.counters()
    assert (counters["match"].ok, counters["release_lease"].ok) == (1, 1)


def test_leases_that_end_together_are_released_with_few_calls(
    manager: ManagerProcess,
    link: ManagerLink,
    instance_id: str,
    new_lookups: NewLookups,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvcm.connectors.reuse.lookups._RELEASE_SECONDS", 600.0)  # or until the lookups are closed
    lookups, leases = new_lookups(link), list[str]()
    for number in range(12):
        keys = keys_of(10 * number + 1, 10 * number + 2)
        save(link, keys)
        lookups.start(f"r{number}", keys)
        leases += answered(lookups, f"r{number}").lease_ids
    assert len(set(leases)) == 12
    assert all(is_open(manager, instance_id, lease_id) for lease_id in leases)
    for number in range(12):
        lookups.release(f"r{number}")
    lookups.close(4 * SECONDS)
    counters = link.client.counters()["release_lease"]
    assert (counters.ok <= 3, counters.miss_on_error, counters.timeout) == (True, 0, 0)
    assert not any(is_open(manager, instance_id, lease_id) for lease_id in leases)


def test_requests_that_ask_for_the_same_share_one_call(link: ManagerLink, new_lookups: NewLookups) -> None:
    keys = keys_of(1, 2)
    save(link, keys)
    lookups = new_lookups(link, share_seconds=60.0)
    for number in range(5):
        lookups.start(f"r{number}", keys)
    assert [answered(lookups, f"r{number}").blocks for number in range(5)] == [2] * 5
    for number in range(5):
        lookups.release(f"r{number}")
    assert link.client.counters()["match"].ok == 1
    assert "release_lease" not in link.client.counters()
    lookups.clear()  # what others publish makes shared answers stale
    lookups.start("later", keys)
    assert answered(lookups, "later").blocks == 2
    assert link.client.counters()["match"].ok == 2


def test_of_a_sliding_window_only_the_last_blocks_are_needed(link: ManagerLink, new_lookups: NewLookups) -> None:
    keys = keys_of(*range(1, 9))
    #            1       2      3      4       5      6       7      8
    groups = ["full", "full", "all", "all", "full", "all", "full", "full"]
    save(link, keys, groups)
    lookups = new_lookups(link, LookupPlan(("full",), ("window",), 2))
    lookups.start("r", keys)
    found = answered(lookups, "r")
    assert found.blocks == 4  # 3 and 4 are the right-most two in a row with their window
    assert (len(found.locations), len(found.window_locations)) == (4, 2)
    lookups.start("short", keys[:2])
    assert answered(lookups, "short").blocks == 0


def test_a_prefix_shorter_than_the_window_needs_all_of_its_blocks(link: ManagerLink, new_lookups: NewLookups) -> None:
    keys = keys_of(1, 2)
    save(link, keys, ["all", "all"])
    lookups = new_lookups(link, LookupPlan(("full",), ("window",), 5))
    lookups.start("r", keys)
    found = answered(lookups, "r")
    assert (found.blocks, len(found.window_locations)) == (2, 2)


def test_without_a_manager_lookups_miss_at_once(closed_port: int, new_link: Link, new_lookups: NewLookups) -> None:
    link = new_link(f"127.0.0.1:{closed_port}")
    lookups = new_lookups(link)
    for number in range(50):
        lookups.start(f"r{number}", keys_of(number))
        found = lookups.poll(f"r{number}")
        assert found is not None
        assert (found.blocks, found.is_answered, found.may_save) == (0, False, False)


def test_a_manager_that_dies_and_comes_back(
    new_manager: Callable[..., ManagerProcess], new_link: Link, new_lookups: NewLookups
) -> None:
    running = new_manager()
    link, keys = new_link(running.address), keys_of(1, 2)
    save(link, keys)
    lookups = new_lookups(link)
    lookups.start("before", keys)
    assert answered(lookups, "before").blocks == 2
    running.kill()
    numbers = count()

    def misses_at_once() -> bool:  # when the breaker has opened, which it does for a while
        is_suspended = link.client.is_suspended
        lookups.start(name := f"dead{next(numbers)}", keys)
        is_at_once = lookups.poll(name) is not None
        assert not answered(lookups, name).is_answered
        return is_suspended and is_at_once

    until(misses_at_once)
    new_manager(running.ports)

    def finds_both() -> bool:
        lookups.start(name := f"back{next(numbers)}", keys)
        return answered(lookups, name).blocks == 2

    until(finds_both)


def test_a_late_answer_is_a_miss_that_costs_no_save_and_its_lease_is_released(
    link: ManagerLink, new_lookups: NewLookups
) -> None:
    keys = keys_of(1, 2)
    save(link, keys)
    lookups = new_lookups(link, lookup_seconds=0.0)
    lookups.start("r", keys)
    found = lookups.poll("r")
    assert found is not None
    assert (found.blocks, found.is_answered, found.may_save) == (0, False, True)
    assert lookups.poll("r") is found


# ---- Staging memory: bounded, reused, and never lent again while a storage may still write to it ----


def test_rows_share_the_memory_and_are_as_many_as_fit() -> None:
    tray = _lend(StagingTrays(64, 1))
    assert tray.rows(16, 10).shape == (4, 16)
    assert tray.rows(16, 2).shape == (2, 16)
    tray.rows(16, 4)[3] = 7
    assert tray.rows(64, 1)[0, 48:].tolist() == [7] * 16


class Storage:
    """Something that may write to memory."""

    def __init__(self) -> None:
        self.hangs = True

    def may_change(self) -> bool:
        return self.hangs


def _lend(trays: StagingTrays) -> StagingTray:
    tray = trays.acquire(0)
    assert tray is not None
    return tray


def test_a_lost_tray_is_replaced_until_too_many_are_lost() -> None:
    trays, storage = StagingTrays(8, 1, most_lost=2), Storage()
    seen = []
    for _ in range(3):
        seen.append(_lend(trays))
        trays.abandon(seen[-1], storage.may_change)
    assert len(set(map(id, seen))) == 3
    assert trays.acquire(0) is None  # three are lost, of which two were replaced
    assert trays.abandoned == 3
    storage.hangs = False
    _lend(trays)
    assert trays.abandoned == 0
    assert trays.acquire(0) is None  # as many as at the beginning


def test_a_tray_is_not_lent_while_the_storage_that_hangs_on_to_it_does() -> None:
    trays = StagingTrays(8, 2, most_lost=0)
    old, new = Storage(), Storage()  # the group's storages were changed while one of them hung
    kept, freed = _lend(trays), _lend(trays)
    trays.abandon(kept, old.may_change)
    trays.abandon(freed, new.may_change)
    new.hangs = False
    assert _lend(trays) is freed
    assert trays.acquire(0) is None
    old.hangs = False
    assert _lend(trays) is kept


def test_after_a_recovery_as_many_may_be_lost_again() -> None:
    trays = StagingTrays(8, 1, most_lost=1)
    for _ in range(5):
        storage = Storage()
        for _ in range(2):
            trays.abandon(_lend(trays), storage.may_change)
        assert trays.acquire(0) is None
        storage.hangs = False


def test_a_caller_that_waits_gets_the_tray_that_comes_back() -> None:
    trays = StagingTrays(8, 1)
    first = _lend(trays)
    got: list[object] = []
    waiter = threading.Thread(target=lambda: got.append(trays.acquire(10)))
    waiter.start()
    trays.release(first)
    waiter.join(10)
    assert got == [first]


# ---- Counts of connectors: nothing is lost or counted twice, in whatever intervals and on whatever ranks ----

NAMES = ("lookups", "saved_blocks")
ACTIONS = st.one_of(
    st.tuples(st.just("add"), st.sampled_from(NAMES), st.integers(0, 9)),
    st.tuples(st.just("observe"), st.just("load_seconds"), st.sampled_from([0.0001, 0.002, 0.5, 99.0])),
    st.tuples(st.just("take"), st.none(), st.none()),
)


@given(st.lists(ACTIONS, max_size=40))
def test_the_takings_add_up_to_the_total(actions: list[tuple[str, str, float]]) -> None:
    counted, taken = ReuseStatistics(), Snapshot()
    model: dict[str, float] = dict.fromkeys(NAMES, 0)
    seconds: list[float] = []
    for deed, name, value in actions:
        if deed == "add":
            counted.add(**{name: int(value)})
            model[name] += value
        elif deed == "observe":
            counted.observe(name, value)
            seconds.append(value)
        else:
            taken = merged(taken, counted.drain())
    taken = merged(taken, counted.drain())
    total = counted.total()
    assert {name: total.get(name, 0) for name in NAMES} == model == {name: taken.get(name, 0) for name in NAMES}
    for snapshot in (total, taken):
        times = snapshot.get("load_seconds", [0.0] * (len(BUCKETS_SECONDS) + 2))
        assert isinstance(times, list)
        assert sum(times[:-1]) == len(seconds)
        assert abs(times[-1] - sum(seconds)) < 1e-6
    assert counted.drain() == {}


def test_a_time_is_counted_in_its_bucket() -> None:
    counted = ReuseStatistics()
    counted.observe("load_seconds", BUCKETS_SECONDS[2])
    counted.observe("load_seconds", BUCKETS_SECONDS[-1] + 1)
    times = counted.total()["load_seconds"]
    assert isinstance(times, list)
    assert [bucket for bucket, count in enumerate(times[:-1]) if count] == [2, len(BUCKETS_SECONDS)]
