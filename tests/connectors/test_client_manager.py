"""Both clients against a real manager."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from manager_process import ManagerProcess

from connectors.client import AsyncManagerClient, ManagerClient
from connectors.exchanges import ClientSettings
from connectors.results import MatchMode, MatchResult, MissingReport, Outcome, RegistrationState, WriteGrant
from kvcm.model.errors import ErrorCode, InvalidArgumentError
from kvcm.model.instances import LocationSpecGroup, LocationSpecInfo, ModelDeployment

MODEL = ModelDeployment(model_name="model", dtype="float32", tp_size=2, pp_size=1, dp_size=1, extra="x")
SPECS = [LocationSpecInfo("tp1", 64), LocationSpecInfo("tp0", 64)]
GROUPS = [LocationSpecGroup("first", ("tp0",)), LocationSpecGroup("both", ("tp1", "tp0"))]
KEYS = [11, -12, 13, 1 << 62, -(1 << 63)]
SETTINGS = ClientSettings(timeout_seconds=20.0)


class AsyncAsSync:
    """Calls an async client from a plain test."""

    def __init__(self, addresses: str | list[str], instance_id: str) -> None:
        self._runner = asyncio.Runner()
        self._client = AsyncManagerClient(addresses, instance_id, SETTINGS)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)
        if not asyncio.iscoroutinefunction(method):
            return method
        return lambda *args, **kwargs: self._runner.run(method(*args, **kwargs))

    def finish(self) -> None:
        self._runner.run(self._client.close())
        self._runner.close()


def make_client(kind: str, addresses: str | list[str], instance_id: str) -> tuple[Any, Any]:
    """Return a client and what closes it."""
    if kind == "sync":
        client = ManagerClient(addresses, instance_id, SETTINGS)
        return client, client.close
    wrapped = AsyncAsSync(addresses, instance_id)
    return wrapped, wrapped.finish


@pytest.fixture(params=["sync", "async"])
def client(request: pytest.FixtureRequest, manager: ManagerProcess, instance_id: str) -> Iterator[ManagerClient]:
    """Return a client whose instance is registered."""
    client, close = make_client(request.param, manager.address, instance_id)
    assert client.register_instance("default", 16, SPECS, MODEL, spec_groups=GROUPS).ok
    yield client
    close()


def write(client: ManagerClient, keys: list[int], parent: int | None = None) -> None:
    grant = client.start_write(keys, parent_block_key=parent)
    assert grant is not None
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


def test_what_was_written_is_found(client: ManagerClient) -> None:
    assert found(client.match(KEYS)) == []
    grant = client.start_write(KEYS)
    assert isinstance(grant, WriteGrant)
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


def test_spec_groups(client: ManagerClient) -> None:
    grant = client.start_write(KEYS[:2], spec_groups=["first", "both"])
    assert grant is not None
    assert [sorted(location.uris) for location in grant.locations] == [["tp0"], ["tp0", "tp1"]]
    assert client.finish_write(grant.session_id, [True, True])
    assert found(client.match(KEYS[:2], spec_names=["tp0"])) == [True, True]
    assert found(client.match(KEYS[:2], spec_names=["tp0", "tp1"])) == []


def test_existing_and_reserved_blocks_are_masked(client: ManagerClient) -> None:
    write(client, KEYS[:2])
    first = client.start_write(KEYS[:4])
    assert first is not None
    assert first.mask == (True, True, False, False)
    second = client.start_write(KEYS)
    assert second is not None
    assert second.mask == (True, True, True, True, False)
    assert len(second.locations) == 1


def test_partial_success_publishes_only_what_succeeded(client: ManagerClient) -> None:
    grant = client.start_write(KEYS)
    assert grant is not None
    assert client.finish_write(grant.session_id, [True, True, False, True, False])
    assert found(client.match(KEYS, MatchMode.BATCH)) == [True, True, False, True, False]


def test_an_aborted_session_can_be_repeated_at_once(client: ManagerClient) -> None:
    grant = client.start_write(KEYS)
    assert grant is not None
    assert client.abort_write(grant.session_id)
    assert found(client.match(KEYS)) == []
    again = client.start_write(KEYS)
    assert again is not None
    assert again.mask == (False,) * 5
    assert not client.finish_write(grant.session_id, [True] * 5)  # the old session has ended
    assert client.finish_write(again.session_id, [True] * 5)


def test_a_wrong_number_of_flags_does_not_end_the_session(client: ManagerClient) -> None:
    grant = client.start_write(KEYS)
    assert grant is not None
    assert not client.finish_write(grant.session_id, [True])
    assert client.finish_write(grant.session_id, [True] * 5)


def test_sessions_are_renewed(client: ManagerClient) -> None:
    grant = client.start_write(KEYS, session_seconds=30)
    assert grant is not None
    assert client.renew_write(grant.session_id, 60)
    assert client.finish_write(grant.session_id, [True] * 5)
    assert not client.renew_write(grant.session_id, 60)
    assert client.counters()["renew_write"].ok == 1


def test_a_tail_names_its_parent(client: ManagerClient) -> None:
    write(client, KEYS[:2])
    write(client, KEYS[2:], parent=KEYS[1])
    assert found(client.match(KEYS)) == [True] * 5


def test_read_leases(client: ManagerClient) -> None:
    write(client, KEYS)
    leased = client.match(KEYS, read_lease_ms=5000)
    assert leased.lease_id
    assert leased.lease_deadline_ms > 0
    assert client.release_lease(leased.lease_id)
    assert client.match(KEYS).lease_id == ""


def test_removed_blocks_are_gone(client: ManagerClient) -> None:
    write(client, KEYS)
    assert client.remove([KEYS[1], 99])
    assert found(client.match(KEYS, MatchMode.BATCH)) == [True, False, True, True, True]


def test_a_hint_goes_with_the_finish(client: ManagerClient) -> None:
    grant = client.start_write(KEYS)
    assert grant is not None
    assert client.finish_write(grant.session_id, [True] * 5, priority=-100, ttl_seconds=1)
    deadline = time.monotonic() + 30
    while client.match_length(KEYS):  # they go although there is room
        assert time.monotonic() < deadline
        time.sleep(0.05)


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


def test_a_pin_that_exceeds_the_budget_is_a_miss(client: ManagerClient, manager: ManagerProcess) -> None:
    manager.allow_pins("default", 0)
    write(client, KEYS)
    assert client.pin_prefix(KEYS, "me", 60) is None
    assert client.counters()["pin_prefix"].miss_on_error == 1


def test_missing_parts_are_reported(client: ManagerClient) -> None:
    grant = client.start_write(KEYS[:2])
    assert grant is not None
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
    grant = client.start_write(KEYS[:2])
    assert grant is not None
    told = [{"tp0": 2**64 - 1, "tp1": 0}, {"tp1": 7}]
    assert client.finish_write(grant.session_id, [True, True], checksums=told)
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


def test_wrong_checksums_raise(client: ManagerClient) -> None:
    with pytest.raises(InvalidArgumentError, match="checksums has 1 entries, must have none, or one per location: 2"):
        client.finish_write("s", [True, True], checksums=[{}])
    with pytest.raises(InvalidArgumentError, match="a checksum is 18446744073709551616, must be 0 to"):
        client.finish_write("s", [True], checksums=[{"tp0": 1 << 64}])
    with pytest.raises(InvalidArgumentError, match="a checksum is 0, must be 1 to"):
        client.report_missing([], corrupt=[(1, "file://s/p?size=1", 0)])
    with pytest.raises(InvalidArgumentError, match=r"corrupt\[0\]"):
        client.report_missing([], corrupt=[(1 << 63, "file://s/p?size=1", 1)])


def test_wrong_arguments_of_hints_and_pins_raise(client: ManagerClient) -> None:
    with pytest.raises(InvalidArgumentError, match="priority is 101"):
        client.finish_write("s", [True], priority=101)
    with pytest.raises(InvalidArgumentError, match="ttl_seconds is -1"):
        client.finish_write("s", [True], ttl_seconds=-1)
    with pytest.raises(InvalidArgumentError, match="ttl_seconds is -1"):
        client.pin_prefix([1], "me", -1)
    with pytest.raises(InvalidArgumentError, match="keys"):
        client.report_missing([(1 << 63, "x")])


def test_cluster_info(client: ManagerClient) -> None:
    info = client.cluster_info()
    assert info is not None
    assert info.self_node_id


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_dead_address_is_walked_over(kind: str, manager: ManagerProcess, instance_id: str, closed_port: int) -> None:
    client, close = make_client(kind, [f"127.0.0.1:{closed_port}", manager.address], instance_id)
    assert client.register_instance("default", 16, SPECS, MODEL).ok
    assert client.counters()["register_instance"].retries == 1
    write(client, KEYS)
    assert client.counters()["start_write"].retries == 0  # the living one is remembered
    close()


def test_answers_beyond_the_default_limit_of_grpc_pass(client: ManagerClient) -> None:
    keys = list(range(30_000))  # about 5 MB of locations; gRPC's default limit is 4 MiB
    write(client, keys)
    assert found(client.match(keys)) == [True] * len(keys)
