"""Both clients against a real manager."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from blocking_client import BlockingClient
from manager_process import ManagerProcess
from waiting import until

from kvcm.connectors.calls import RetrySettings
from kvcm.connectors.client import AsyncManagerClient, ManagerClient
from kvcm.connectors.exchanges import ClientSettings
from kvcm.connectors.results import MatchMode, MatchResult, MissingReport, Outcome, RegistrationState, WriteGrant
from kvcm.connectors.wire import MalformedAnswerError, parse_match_locations, parse_storage_configs, parse_write_grant
from kvcm.model.errors import ErrorCode, InvalidArgumentError
from kvcm.model.instances import LocationSpecGroup, LocationSpecInfo, ModelDeployment
from kvcm.model.storages import MooncakeStorageSpec, NfsStorageSpec
from kvcm.protocol import meta_service_pb2 as meta

MODEL = ModelDeployment(model_name="model", dtype="float32", tp_size=2, pp_size=1, dp_size=1, extra="x")
SPECS = [LocationSpecInfo("tp1", 64), LocationSpecInfo("tp0", 64)]
GROUPS = [LocationSpecGroup("first", ("tp0",)), LocationSpecGroup("both", ("tp1", "tp0"))]
KEYS = [11, -12, 13, 1 << 62, -(1 << 63)]
SETTINGS = ClientSettings(timeout_seconds=60.0)


BOTH = pytest.mark.parametrize("kind", [ManagerClient, BlockingClient])


@pytest.fixture(params=[ManagerClient, BlockingClient])
def client(request: pytest.FixtureRequest, manager: ManagerProcess, instance_id: str) -> Iterator[ManagerClient]:
    """Return a client whose instance is registered."""
    with closing(request.param(manager.address, instance_id, SETTINGS)) as client:
        assert client.register_instance("default", 16, SPECS, MODEL, spec_groups=GROUPS).ok
        yield client


def granted(client: ManagerClient, keys: list[int], **options: Any) -> WriteGrant:
    grant = client.start_write(keys, **options)
    assert grant is not None
    return grant


def write(client: ManagerClient, keys: list[int]) -> None:
    grant = granted(client, keys)
    assert client.finish_write(grant.session_id, [True] * len(grant.locations))


def found(result: MatchResult) -> list[bool]:
    assert result.outcome is Outcome.OK, result.reason
    return [location is not None for location in result.locations]


def test_registration_returns_storages_and_is_repeatable(client: ManagerClient, manager: ManagerProcess) -> None:
    again = client.register_instance("default", 16, SPECS[::-1], MODEL, spec_groups=GROUPS[::-1])
    assert (again.state, again.code) == (RegistrationState.OK, ErrorCode.OK)
    (storage,) = again.storages
    assert storage.global_unique_name == "nfs_01"
    assert storage.spec.root_path.rstrip("/") == str(manager.data_dir / "nfs")  # type: ignore[union-attr]


def test_a_conflict_is_refused_and_logged_as_an_error(client: ManagerClient, caplog: pytest.LogCaptureFixture) -> None:
    other = ModelDeployment(model_name="other model", dtype="float32")
    with caplog.at_level(logging.ERROR):
        registration = client.register_instance("default", 16, SPECS, other, spec_groups=GROUPS)
    assert (registration.state, registration.code) == (RegistrationState.REFUSED, ErrorCode.DUPLICATE_ENTITY)
    assert registration.message
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_an_unknown_group_is_refused(manager: ManagerProcess, instance_id: str) -> None:
    with ManagerClient(manager.address, instance_id, SETTINGS) as stranger:
        registration = stranger.register_instance("no such group", 16, SPECS, MODEL)
        assert registration.state is RegistrationState.REFUSED
        match = stranger.match(KEYS)
        assert (match.outcome, match.code) == (Outcome.MISS_ON_ERROR, ErrorCode.INSTANCE_NOT_EXIST)


def test_written_blocks_are_found(client: ManagerClient) -> None:
    assert found(client.match(KEYS)) == []
    grant = granted(client, KEYS)
    assert grant.mask == (False,) * 5
    assert all(location.uris.keys() == {"tp0", "tp1"} for location in grant.locations)
    assert found(client.match(KEYS)) == []  # still being written
    assert client.finish_write(grant.session_id, [True] * 5)
    match = client.match(KEYS)
    assert [location.uris if location else None for location in match.locations] == [
        location.uris for location in grant.locations
    ]
    assert {location.uris["tp1"].size for location in grant.locations} == {64}
    assert client.match_length([*KEYS, 99]) == 5
    assert client.match_length([99, *KEYS]) == 0


def test_event_hashes_reach_the_manager(client: ManagerClient) -> None:
    grant = granted(client, KEYS, event_hashes=[1, -(1 << 63), 0, (1 << 63) - 1, -5])
    assert client.finish_write(grant.session_id, [True] * 5)
    match = client.match_encoded(KEYS)
    assert [meta.CacheLocation.FromString(each).event_hash for each in match.locations] == [
        *(1, -(1 << 63), 0, (1 << 63) - 1, -5)
    ]
    assert found(client.match(KEYS)) == [True] * 5


def test_modes_masks_and_parts(client: ManagerClient) -> None:
    write(client, KEYS[:2])
    write(client, KEYS[3:])
    assert found(client.match(KEYS)) == [True, True]
    assert found(client.match(KEYS, mask=1)) == [True]
    assert found(client.match(KEYS, mask=[False, False, True, False, False])) == [True] * 4
    assert found(client.match(KEYS, MatchMode.BATCH)) == [True, True, False, True, True]
    assert found(client.match(KEYS, MatchMode.SLIDING_WINDOW, window=2)) == [False, False, False, True, True]
    assert found(client.match(KEYS, MatchMode.SLIDING_WINDOW, window=3)) == [False] * 5
    (first, *_) = client.match(KEYS, spec_names=["tp1"]).locations
    assert first is not None
    assert list(first.uris) == ["tp1"]
    assert found(client.match(KEYS, spec_names=["no such part"])) == []


def test_of_more_keys_than_a_request_may_have_the_first_are_matched(client: ManagerClient) -> None:
    write(client, KEYS)
    many = [*KEYS, *range(1000, 1000 + 65_536)]
    patient: dict[str, Any] = {"timeout_seconds": 30.0}
    assert found(client.match(many, **patient)) == [True] * 5
    assert len(client.match_encoded(many, **patient).locations) == client.match_length(many, **patient) == 5
    assert found(client.match(many, MatchMode.BATCH, **patient)) == [True] * 5 + [False] * 65_536
    window: dict[str, Any] = {"mode": MatchMode.SLIDING_WINDOW, "window": 2, **patient}
    assert found(client.match(many, **window)) == [False] * 3 + [True] * 2 + [False] * 65_536
    assert len(client.match_encoded(many, **window).locations) == len(many)
    assert found(client.match(many, mask=65_540, **patient)) == []


def test_spec_groups(client: ManagerClient) -> None:
    grant = granted(client, KEYS[:2], spec_groups=["first", "both"])
    assert [sorted(location.uris) for location in grant.locations] == [["tp0"], ["tp0", "tp1"]]
    assert client.finish_write(grant.session_id, [True, True])
    assert found(client.match(KEYS[:2], spec_names=["tp0"])) == [True, True]
    assert found(client.match(KEYS[:2], spec_names=["tp0", "tp1"])) == []


def test_partial_success_publishes_only_what_succeeded(client: ManagerClient) -> None:
    grant = granted(client, KEYS)
    assert client.finish_write(grant.session_id, [True, True, False, True, False])
    assert found(client.match(KEYS, MatchMode.BATCH)) == [True, True, False, True, False]


def test_an_aborted_session_can_be_repeated_at_once(client: ManagerClient) -> None:
    grant = granted(client, KEYS)
    assert client.abort_write(grant.session_id)
    assert found(client.match(KEYS)) == []
    assert granted(client, KEYS).mask == (False,) * 5
    assert not client.finish_write(grant.session_id, [True] * 5)  # the old session has ended


def test_sessions_are_renewed(client: ManagerClient) -> None:
    grant = granted(client, KEYS, session_seconds=30)
    assert client.renew_write(grant.session_id, 60)
    assert client.finish_write(grant.session_id, [True] * 5)
    assert not client.renew_write(grant.session_id, 60)
    assert client.counters()["renew_write"].ok == 1


def test_read_leases(client: ManagerClient) -> None:
    write(client, KEYS)
    leased = client.match(KEYS, read_lease_ms=60_000)
    assert leased.lease_id
    assert leased.lease_deadline_ms > 0
    assert client.release_lease(leased.lease_id)
    assert client.match(KEYS).lease_id == ""


def test_removed_blocks_are_gone(client: ManagerClient) -> None:
    write(client, KEYS)
    assert client.remove([KEYS[1], 99])
    assert found(client.match(KEYS, MatchMode.BATCH)) == [True, False, True, True, True]


def test_a_hint_goes_with_the_finish(client: ManagerClient) -> None:
    grant = granted(client, KEYS)
    assert client.finish_write(grant.session_id, [True] * 5, priority=-100, ttl_seconds=1)
    until(lambda: not client.match_length(KEYS), "they go although there is space")


def test_pins_are_given_listed_and_ended(client: ManagerClient, manager: ManagerProcess) -> None:
    manager.allow_pins("default", 10 << 20)
    write(client, KEYS[:3])
    pin = client.pin_prefix(KEYS, "me", 60)
    assert pin is not None
    assert (pin.blocks, pin.size_bytes, pin.owner) == (3, 3 * 128, "me")
    assert client.list_pins() == (replace(pin, last_key=KEYS[2]),)
    assert client.unpin(pin.id)
    assert client.list_pins() == ()
    nothing = client.pin_prefix([99], "me", 60)
    assert nothing is not None
    assert (nothing.id, nothing.blocks) == ("", 0)


def test_missing_parts_are_reported(client: ManagerClient) -> None:
    grant = granted(client, KEYS[:2])
    first, second = sorted((location.uris["tp0"], key) for location, key in zip(grant.locations, KEYS, strict=False))
    assert first[0].path == second[0].path  # slots of one file, which ends before the second
    path = Path(first[0].path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(second[0].offset))
    assert client.finish_write(grant.session_id, [True, True])
    report = client.report_missing([(first[1], first[0]), (second[1], str(second[0]))])
    assert report == MissingReport(removed_locations=1, unconfirmed_parts=1)
    assert found(client.match(KEYS[:2], MatchMode.BATCH)) == [key == first[1] for key in KEYS[:2]]
    assert client.report_missing([]) is None  # the manager refuses an empty report


def test_checksums_come_back_with_a_match_and_a_corrupt_part_is_forgotten(client: ManagerClient) -> None:
    grant = granted(client, KEYS[:2])
    checksums = [{"tp0": 2**64 - 1, "tp1": 0}, {"tp1": 7}]
    assert client.finish_write(grant.session_id, [True, True], checksums=checksums)
    first, second = client.match(KEYS[:2]).locations
    assert first is not None
    assert second is not None
    assert (first.checksums, second.checksums) == ({"tp0": 2**64 - 1}, {"tp1": 7})
    corrupt = [
        (KEYS[0], first.uris["tp0"], first.checksums["tp0"]),
        (KEYS[1], str(second.uris["tp1"]), 8),  # of other bytes than those that are recorded
    ]
    assert client.report_missing([], corrupt=corrupt) == MissingReport(removed_locations=1, unconfirmed_parts=1)
    assert found(client.match(KEYS[:2], MatchMode.BATCH)) == [False, True]


def test_cluster_info(client: ManagerClient) -> None:
    info = client.cluster_info()
    assert info is not None
    assert info.self_node_id


@BOTH
def test_a_dead_address_is_walked_over(kind: Any, manager: ManagerProcess, instance_id: str, closed_port: int) -> None:
    with closing(kind([f"127.0.0.1:{closed_port}", manager.address], instance_id, SETTINGS)) as client:
        assert client.register_instance("default", 16, SPECS, MODEL).ok
        assert client.counters()["register_instance"].retries == 1
        write(client, KEYS)
        assert client.counters()["start_write"].retries == 0  # the living one is remembered


@pytest.mark.parametrize("client", [ManagerClient, pytest.param(BlockingClient, marks=pytest.mark.ci)], indirect=True)
def test_answers_beyond_the_default_limit_of_grpc_pass(client: ManagerClient) -> None:
    keys = list(range(30_000))  # about 5 MB of locations; gRPC's default limit is 4 MiB
    write(client, keys)
    assert found(client.match(keys)) == [True] * len(keys)


# ---- Without a manager: misses within the deadline, never an exception ----

# Generous, because other work may hold the processor; the deadlines under test are much shorter.
SLACK_SECONDS = 10.0
PATIENT = ClientSettings(timeout_seconds=20.0, retry=RetrySettings(breaker_failures=1000))

CALLS: dict[str, Callable[[ManagerClient], object]] = {
    "register_instance": lambda c: c.register_instance("default", 16, SPECS, MODEL).state is RegistrationState.OK,
    "match": lambda c: c.match([1, 2]).locations,
    "match_batch": lambda c: any(c.match([1, 2], MatchMode.BATCH).locations),
    "match_length": lambda c: c.match_length([1, 2]),
    "start_write": lambda c: c.start_write([1, 2]),
    "finish_write": lambda c: c.finish_write("session", [True]),
    "abort_write": lambda c: c.abort_write("session"),
    "renew_write": lambda c: c.renew_write("session", 30),
    "release_lease": lambda c: c.release_lease("lease"),
    "remove": lambda c: c.remove([1]),
    "pin_prefix": lambda c: c.pin_prefix([1, 2], "me", 60),
    "unpin": lambda c: c.unpin("pin"),
    "list_pins": lambda c: c.list_pins(),
    "report_missing": lambda c: c.report_missing([(1, "file://s/p?size=1")]),
    "cluster_info": lambda c: c.cluster_info(),
}


def elapsed(started: float) -> float:
    return time.monotonic() - started


@BOTH
def test_a_refused_connection_is_a_miss(kind: Any, closed_port: int) -> None:
    settings = replace(PATIENT, timeout_seconds=0.1)
    with closing(kind(f"127.0.0.1:{closed_port}", "i", settings)) as client:
        for name, call in CALLS.items():
            started = time.monotonic()
            assert not call(client), name
            assert elapsed(started) < 0.1 + SLACK_SECONDS, name
        assert all(counters.ok == 0 for counters in client.counters().values())


@BOTH
def test_a_silent_manager_costs_the_deadline(kind: Any, black_hole: int) -> None:
    settings = replace(PATIENT, timeout_seconds=0.1)
    for name, call in CALLS.items():
        with closing(kind(f"127.0.0.1:{black_hole}", "i", settings)) as client:
            started = time.monotonic()
            assert not call(client), name
            assert 0.08 < elapsed(started) < 0.1 + SLACK_SECONDS, name
            (counters,) = client.counters().values()
            assert (counters.ok, counters.miss_on_error, counters.timeout) == (0, 0, 1), name


def test_results_say_what_happened(closed_port: int, black_hole: int) -> None:
    with ManagerClient(f"127.0.0.1:{closed_port}", "i", PATIENT) as client:
        match = client.match([1, 2, 3], MatchMode.BATCH)
        assert (match.outcome, match.locations) == (Outcome.MISS_ON_ERROR, (None, None, None))
        assert "UNAVAILABLE" in match.reason
        registration = client.register_instance("default", 16, SPECS, MODEL)
        assert registration.state is RegistrationState.UNREACHABLE
        assert "UNAVAILABLE" in registration.message
        assert client.counters()["match"].retries > 0
    with ManagerClient(f"127.0.0.1:{black_hole}", "i", PATIENT) as client:
        assert client.match([1], timeout_seconds=0.1).outcome is Outcome.TIMEOUT


def test_a_dead_manager_is_soon_not_asked_any_more(black_hole: int) -> None:
    settings = ClientSettings(timeout_seconds=0.1, retry=RetrySettings(breaker_failures=2, breaker_seconds=600))
    with ManagerClient(f"127.0.0.1:{black_hole}", "i", settings) as client:
        for _ in range(50):
            client.match([1])
        counters = client.counters()["match"]
        assert (counters.timeout, counters.miss_on_error) == (2, 48)


def test_the_log_names_the_reason_once(closed_port: int, caplog: pytest.LogCaptureFixture) -> None:
    settings = replace(PATIENT, retry=RetrySettings(max_rounds=1, breaker_failures=1000))  # lines are 10 s apart
    with ManagerClient(f"127.0.0.1:{closed_port}", "i", settings) as client, caplog.at_level(logging.WARNING):
        for _ in range(3):
            client.match([1])
    assert len(caplog.records) == 1
    assert "match failed, treated as a miss" in caplog.text
    assert "UNAVAILABLE" in caplog.text


async def test_closed_clients_miss(closed_port: int) -> None:
    client, async_client = (
        kind(f"127.0.0.1:{closed_port}", "i", SETTINGS) for kind in (ManagerClient, AsyncManagerClient)
    )
    client.close()
    assert client.match([1]).outcome is Outcome.MISS_ON_ERROR
    await async_client.close()
    assert (await async_client.match([1])).outcome is Outcome.MISS_ON_ERROR


@pytest.mark.parametrize(
    "addresses", ["", "localhost", "localhost:", ":1", "localhost:x", "h:0", "h:65536", [], ["h:1", ""]]
)
def test_addresses_are_checked(addresses: str | list[str]) -> None:
    with pytest.raises(InvalidArgumentError, match="must be host:port"):
        ManagerClient(addresses, "i")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.match([1, 1 << 63]), r"keys\[1\]"),
        (lambda c: c.match([1], mask=2), "mask is 2"),
        (lambda c: c.match([1], mask=[True, False]), "mask has 2 flags"),
        (lambda c: c.match([1], window=3), "window is 3"),
        (lambda c: c.match([1], MatchMode.SLIDING_WINDOW), "window is 0"),
        (lambda c: c.match([1], read_lease_ms=-1), "read_lease_ms is -1"),
        (lambda c: c.start_write([1, 2], spec_groups=["g"]), "spec_groups has 1"),
        (lambda c: c.start_write([1], parent_block_key=-(1 << 63) - 1), "parent_block_key"),
        (lambda c: c.start_write([1], session_seconds=1 << 31), "session_seconds"),
        (lambda c: c.start_write([1, 2], event_hashes=[1]), "event_hashes has 1 entries, must be none or one per key"),
        (lambda c: c.start_write([1, 2], event_hashes=[1, 1 << 63]), r"event_hashes\[1\] is 9223372036854775808"),
        (
            lambda c: c.finish_write("s", [True] * 2, checksums=[{}]),
            "checksums has 1 entries, must have none, or .*: 2",
        ),
        (lambda c: c.finish_write("s", [True], checksums=[{"tp0": 1 << 64}]), "checksum is 18446744073709551616, must"),
        (lambda c: c.finish_write("s", [True], priority=101), "priority is 101"),
        (lambda c: c.finish_write("s", [True], ttl_seconds=-1), "ttl_seconds is -1"),
        (lambda c: c.pin_prefix([1], "me", -1), "ttl_seconds is -1"),
        (lambda c: c.report_missing([(1 << 63, "x")]), "keys"),
        (lambda c: c.report_missing([], corrupt=[(1, "file://s/p?size=1", 0)]), "a checksum is 0, must be 1 to"),
        (lambda c: c.report_missing([], corrupt=[(1 << 63, "file://s/p?size=1", 1)]), r"corrupt\[0\]"),
        (lambda c: c.report_pool("pool", "node", 0, 1), "generation is 0"),
        (lambda c: c.report_pool("pool", "node", 1 << 64, 1), "generation is"),
        (lambda c: c.report_pool("pool", "node", 1, 0), "capacity_bytes is 0"),
        (lambda c: c.report_pool("pool", "node", 1, 1, valid_ms=-1), "valid_ms is -1"),
    ],
)
def test_wrong_arguments_are_named(call: Callable[[ManagerClient], object], message: str, closed_port: int) -> None:
    with ManagerClient(f"127.0.0.1:{closed_port}", "i") as client, pytest.raises(InvalidArgumentError, match=message):
        call(client)


def test_an_instance_id_is_needed() -> None:
    with pytest.raises(InvalidArgumentError, match="instance_id is empty"):
        ManagerClient("localhost:1", "")


# ---- Answers that make no sense become misses, never half-believed results ----

URI = "file://nfs_01/nfs/c/i/tp0/1.a?blkid=3&size=64"


def location(**uris: str) -> meta.CacheLocation:
    specs = [meta.LocationSpec(name=name, uri=uri) for name, uri in uris.items()]
    return meta.CacheLocation(type=meta.ST_NFS, spec_size=len(specs), location_specs=specs)


def match(*locations: meta.CacheLocation) -> meta.GetCacheLocationResponse:
    return meta.GetCacheLocationResponse(locations=locations)


def test_more_locations_than_keys_are_refused() -> None:
    with pytest.raises(MalformedAnswerError, match="2 locations for 1 keys"):
        parse_match_locations(match(location(tp0=URI), location(tp0=URI)), MatchMode.PREFIX, 1, [])


def test_batch_answers_have_one_entry_per_key() -> None:
    both = parse_match_locations(match(location(tp0=""), location(tp0=URI)), MatchMode.BATCH, 2, ["tp0"])
    assert both[0] is None
    assert both[1] is not None
    with pytest.raises(MalformedAnswerError, match="1 locations for 2 keys"):
        parse_match_locations(match(location(tp0=URI)), MatchMode.BATCH, 2, [])


def test_a_prefix_ends_where_a_part_is_missing() -> None:
    complete, partial = location(tp0=URI, tp1=URI), location(tp0=URI)
    assert len(parse_match_locations(match(complete, partial, complete), MatchMode.PREFIX, 3, ["tp0", "tp1"])) == 1
    assert len(parse_match_locations(match(complete, partial, complete), MatchMode.PREFIX, 3, ["tp0"])) == 3
    assert parse_match_locations(match(location()), MatchMode.PREFIX, 1, []) == ()


@pytest.mark.parametrize("uri", ["nonsense", "file://nfs_01/x", "file://nfs_01/x?size=-1", "file:///x?size=1"])
def test_garbage_uris_are_refused(uri: str) -> None:
    with pytest.raises(MalformedAnswerError):
        parse_match_locations(match(location(tp0=uri)), MatchMode.PREFIX, 1, [])


def grant(mask: meta.BlockMask, locations: int, session: str = "s") -> meta.StartWriteCacheResponse:
    return meta.StartWriteCacheResponse(
        write_session_id=session, block_mask=mask, locations=[location(tp0=URI)] * locations
    )


def flags(*values: bool) -> meta.BlockMask:
    return meta.BlockMask(bool_masks=meta.BoolMasksType(values=values))


def test_masks_of_grants() -> None:
    assert parse_write_grant(grant(meta.BlockMask(offset=1), 2), 3).mask == (True, False, False)
    assert parse_write_grant(grant(flags(False, True), 2), 3).mask == (False, True, False)
    assert parse_write_grant(grant(meta.BlockMask(), 3), 3).mask == (False, False, False)


@pytest.mark.parametrize(
    "answer",
    [
        grant(meta.BlockMask(offset=0), 3, session=""),
        grant(meta.BlockMask(offset=0), 2),
        grant(meta.BlockMask(offset=0), 4),
        grant(meta.BlockMask(offset=4), 0),
        grant(meta.BlockMask(offset=-1), 0),
        grant(flags(True, True, True, True), 0),
        meta.StartWriteCacheResponse(write_session_id="s", block_mask=flags(True, True), locations=[location(tp0="")]),
    ],
)
def test_grants_that_contradict_the_request_are_refused(answer: meta.StartWriteCacheResponse) -> None:
    with pytest.raises(MalformedAnswerError):
        parse_write_grant(answer, 3)


def test_storage_configs_are_read_and_unknown_kinds_left_out() -> None:
    text = """[{"type":"file","is_available":false,"global_unique_name":"nfs_01",
                "storage_spec":{"root_path":"/nfs/","key_count_per_file":8,"later":1}},
               {"type":"mooncake","global_unique_name":"mc","storage_spec":{"master_server_entry":"10.0.0.1:1"}},
               {"type":"tape","global_unique_name":"t"}]"""
    nfs, mooncake = parse_storage_configs(text)
    assert nfs.spec == NfsStorageSpec("/nfs/", 8)
    assert not nfs.is_available
    assert mooncake.spec == MooncakeStorageSpec(master_service_entry="10.0.0.1:1")
    assert parse_storage_configs("") == ()


@pytest.mark.parametrize(
    "text",
    ["{", "{}", "[1]", '[{"type":"file","storage_spec":[]}]', '[{"type":"file","storage_spec":{"root_path":1}}]'],
)
def test_malformed_storage_configs_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError):
        parse_storage_configs(text)
