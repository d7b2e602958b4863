"""Blocks that an engine saves and loads with checksums, through a real manager, on a storage that is tampered with.

What must hold whatever is done to the bytes is asserted where the calls are made: a load that counts gives the bytes
that were saved, and no call holds its caller longer than it allowed.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from uuid import uuid4

import grpc
from corruption_media import NODE, Medium
from manager_process import ManagerProcess
from waiting import until

from kvcm.connectors.client import ManagerClient
from kvcm.connectors.exchanges import ClientSettings
from kvcm.connectors.pool_reports import PoolReports
from kvcm.connectors.results import Location, MatchMode, MissingReport, WriteGrant
from kvcm.connectors.transfer import Failure, TransferEngine, TransferItem
from kvcm.model.instances import LocationSpecInfo, ModelDeployment
from kvcm.model.uri import LocationUri
from kvcm.protocol import admin_service_pb2, admin_service_pb2_grpc

SPECS = ("tp0", "tp1")
PART_BYTES = 40_003  # no whole number of pages; parts of one size share a file

Part = tuple[int, str]
"""Key of a block and name of a spec."""
Failures = dict[Part, Failure | None]

_DEADLINE_SECONDS = 20.0
_SPARE_SECONDS = 30.0  # that two busy cores may take beyond a deadline


class BlockSite:
    """An instance with a storage of its own.

    Args:
        client: registered, of the instance.
        engine: of the storage.
        medium: what the storage is made of.
    """

    def __init__(self, client: ManagerClient, engine: TransferEngine, medium: Medium) -> None:
        self.client = client
        self.engine = engine
        self.medium = medium
        self._versions: dict[int, int] = {}
        self._reports = PoolReports(client)

    def report_of_pools(self) -> None:
        """Report memory pools that the manager does not know, as engines do after their transfers."""
        self._reports.report(self._reports.due_pools(self.engine.pools()), _DEADLINE_SECONDS)

    def save(self, keys: Sequence[int]) -> list[int]:
        """Save the blocks that the manager has no location of, and return them; all of it succeeds."""
        grant = self._granted(keys)
        missing = [key for key, is_there in zip(keys, grant.mask, strict=True) if not is_there]
        assert self._saved(grant, missing, _DEADLINE_SECONDS) == missing
        return missing

    def try_to_save(self, keys: Sequence[int], deadline_seconds: float) -> list[int]:
        """Try the same once, and return the blocks that were saved."""
        begin = time.monotonic()
        grant = self.client.start_write(keys, timeout_seconds=deadline_seconds)
        _assert_in_time(begin, deadline_seconds)
        if grant is None:
            return []
        missing = [key for key, is_there in zip(keys, grant.mask, strict=True) if not is_there]
        return self._saved(grant, missing, deadline_seconds)

    def _saved(self, grant: WriteGrant, missing: Sequence[int], deadline_seconds: float) -> list[int]:
        """Save blocks at the granted locations, and finish the write session with the blocks that are whole."""
        for key in missing:
            self._versions[key] = self._versions.get(key, 0) + 1
        places = [
            ((key, spec), uri)
            for key, location in zip(missing, grant.locations, strict=True)
            for spec, uri in location.uris.items()
        ]
        items = [TransferItem(uri, [memoryview(self.content(part))]) for part, uri in places]
        begin = time.monotonic()
        results = self.engine.save(items, deadline_seconds)
        _assert_in_time(begin, deadline_seconds)
        reported: dict[int, dict[str, int]] = {key: {} for key in missing}
        for ((key, spec), _), result in zip(places, results, strict=True):
            assert result.ok == bool(result.checksum), result
            reported[key] |= {spec: result.checksum} if result.ok else {}
        whole = [len(sums) == len(SPECS) for sums in reported.values()]
        is_confirmed = self.client.finish_write(grant.session_id, whole, checksums=list(reported.values()))
        assert is_confirmed, self.client.counters()
        return [key for key, is_whole in zip(missing, whole, strict=True) if is_whole]

    def _granted(self, keys: Sequence[int]) -> WriteGrant:
        """Return where to write, as soon as the manager has looked at the storage."""
        grants: list[WriteGrant] = []

        def is_granted() -> bool:
            grant = self.client.start_write(keys)
            grants.extend([grant] if grant is not None else [])
            return bool(grants)

        until(is_granted, "the manager gives addresses")
        return grants[0]

    def content(self, part: Part) -> bytes:
        """Return the bytes that a part was saved with last."""
        seed = f"{part[0]}/{part[1]}/{self._versions[part[0]]}".encode()
        return (blake2b(seed).digest() * (PART_BYTES // 64 + 1))[:PART_BYTES]

    def match(self, keys: Sequence[int]) -> dict[int, Location]:
        """Return where blocks lie that the manager knows."""
        found = self.client.match(keys, MatchMode.BATCH).locations
        return {key: location for key, location in zip(keys, found, strict=True) if location is not None}

    def load(
        self, locations: Mapping[int, Location], deadline_seconds: float = _DEADLINE_SECONDS, *, checksums: bool = True
    ) -> Failures:
        """Load all parts of some blocks; wrong bytes fail the test, unless they are loaded without checksums."""
        places = self.places(locations)
        blocks = [bytearray(uri.size) for uri in places.values()]
        items = [
            TransferItem(uri, [memoryview(block)], checksum=locations[key].checksums[spec] if checksums else 0)
            for ((key, spec), uri), block in zip(places.items(), blocks, strict=True)
        ]
        begin = time.monotonic()
        results = self.engine.load(items, deadline_seconds)
        _assert_in_time(begin, deadline_seconds)
        for part, block, result in zip(places, blocks, results, strict=True):
            assert not checksums or not result.ok or block == self.content(part), f"wrong bytes of {part} were served"
        return {part: result.failure for part, result in zip(places, results, strict=True)}

    def places(self, locations: Mapping[int, Location]) -> dict[Part, LocationUri]:
        """Return where every part lies."""
        return {(key, spec): uri for key, location in locations.items() for spec, uri in location.uris.items()}

    def report(self, failures: Failures, locations: Mapping[int, Location]) -> MissingReport | None:
        """Report blocks that could not be loaded to the manager, as an engine does."""
        places = self.places(locations)
        lost = [(part[0], places[part]) for part, failure in failures.items() if failure is Failure.LOST]
        corrupt = [
            (part[0], places[part], locations[part[0]].checksums[part[1]])
            for part, failure in failures.items()
            if failure is Failure.CORRUPT
        ]
        return self.client.report_missing(lost, corrupt=corrupt)

    def assert_found_out(
        self, keys: Sequence[int], expected: Mapping[Part, Failure], before: Mapping[int, Location]
    ) -> None:
        """Check that exactly some parts cannot be loaded, that the manager forgets their blocks, and that engines write
        these, and no others, again and load them."""
        failures = self.load(before)
        assert failures == {part: expected.get(part) for part in failures}
        damaged = {key for key, _ in expected}
        report = self.report(failures, before)
        assert report is not None
        assert report == MissingReport(len(damaged), 0)
        assert self.match(keys) == {key: location for key, location in before.items() if key not in damaged}
        assert self.save(keys) == sorted(damaged)
        self.assert_all_load(keys)

    def assert_all_load(self, keys: Collection[int]) -> None:
        """Check that every part of every block is there."""
        after = self.match(list(keys))
        assert set(after) == set(keys)
        assert set(self.load(after).values()) == {None}


@contextmanager
def opened_site(manager: ManagerProcess, medium: Medium) -> Iterator[BlockSite]:
    """Add a storage, a group that uses nothing else, and an instance; one name for all of them."""
    name = f"c-{uuid4().hex[:8]}"
    add_storage(manager, medium.config(name))
    with ManagerClient(manager.address, name, ClientSettings(_DEADLINE_SECONDS, node_id=NODE)) as client:
        specs = [LocationSpecInfo(spec, PART_BYTES) for spec in SPECS]
        registration = client.register_instance(name, 4, specs, ModelDeployment("m", "f"))
        assert registration.ok, registration.message
        engine = TransferEngine.for_storages(registration.storages, 4, checksums=True)
        site = BlockSite(client, engine, medium)
        site.report_of_pools()
        try:
            yield site
        finally:
            engine.close()


def add_storage(manager: ManagerProcess, storage: admin_service_pb2.StorageConfig) -> None:
    """Add a storage, and a group of the same name."""
    with grpc.insecure_channel(f"127.0.0.1:{manager.ports['admin_rpc_port']}") as channel:
        stub = admin_service_pb2_grpc.AdminServiceStub(channel)
        status = stub.AddStorage(admin_service_pb2.AddStorageRequest(storage=storage)).header.status
        assert status.code == admin_service_pb2.OK, status.message
        found = admin_service_pb2.GetInstanceGroupRequest(name="default")
        group = stub.GetInstanceGroup(found).instance_group
        group.name, group.storage_candidates[:] = storage.global_unique_name, [storage.global_unique_name]
        create = admin_service_pb2.CreateInstanceGroupRequest(instance_group=group)
        status = stub.CreateInstanceGroup(create).header.status
        assert status.code == admin_service_pb2.OK, status.message


def _assert_in_time(begin: float, deadline_seconds: float) -> None:
    seconds = time.monotonic() - begin
    assert seconds < deadline_seconds + _SPARE_SECONDS, f"held for {seconds} s"
