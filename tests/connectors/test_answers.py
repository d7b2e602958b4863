"""Answers that make no sense become misses, never half-believed results."""

from __future__ import annotations

import pytest

from connectors.answers import MalformedAnswerError, read_grant, read_locations
from connectors.results import MatchMode
from connectors.storages import read_storage_configs
from kvcm.model.errors import InvalidArgumentError
from kvcm.model.storages import MooncakeStorageSpec, NfsStorageSpec
from kvcm.protocol import meta_service_pb2 as meta

URI = "file://nfs_01/nfs/c/i/tp0/1.a?blkid=3&size=64"


def location(**uris: str) -> meta.CacheLocation:
    specs = [meta.LocationSpec(name=name, uri=uri) for name, uri in uris.items()]
    return meta.CacheLocation(type=meta.ST_NFS, spec_size=len(specs), location_specs=specs)


def match(*locations: meta.CacheLocation) -> meta.GetCacheLocationResponse:
    return meta.GetCacheLocationResponse(locations=locations)


def test_uris_are_read() -> None:
    (found,) = read_locations(match(location(tp0=URI)), MatchMode.PREFIX, 1, ["tp0"])
    assert found is not None
    assert str(found.uris["tp0"]) == URI
    assert (found.uris["tp0"].offset, found.uris["tp0"].size, found.storage_type) == (192, 64, meta.ST_NFS)


def test_checksums_are_read_by_part_and_0_is_none() -> None:
    message = location(tp0=URI, tp1=URI)
    message.location_specs[1].checksum = 2**64 - 1
    (found,) = read_locations(match(message), MatchMode.PREFIX, 1, [])
    assert found is not None
    assert found.checksums == {"tp1": 2**64 - 1}


def test_more_locations_than_keys_are_refused() -> None:
    with pytest.raises(MalformedAnswerError, match="2 locations for 1 keys"):
        read_locations(match(location(tp0=URI), location(tp0=URI)), MatchMode.PREFIX, 1, [])


def test_batch_answers_have_one_entry_per_key() -> None:
    both = read_locations(match(location(tp0=""), location(tp0=URI)), MatchMode.BATCH, 2, ["tp0"])
    assert both[0] is None
    assert both[1] is not None
    with pytest.raises(MalformedAnswerError, match="1 locations for 2 keys"):
        read_locations(match(location(tp0=URI)), MatchMode.BATCH, 2, [])


def test_a_prefix_ends_where_a_part_is_missing() -> None:
    complete, partial = location(tp0=URI, tp1=URI), location(tp0=URI)
    assert len(read_locations(match(complete, partial, complete), MatchMode.PREFIX, 3, ["tp0", "tp1"])) == 1
    assert len(read_locations(match(complete, partial, complete), MatchMode.PREFIX, 3, ["tp0"])) == 3
    assert read_locations(match(location()), MatchMode.PREFIX, 1, []) == ()


@pytest.mark.parametrize("uri", ["nonsense", "file://nfs_01/x", "file://nfs_01/x?size=-1", "file:///x?size=1"])
def test_garbage_uris_are_refused(uri: str) -> None:
    with pytest.raises(MalformedAnswerError):
        read_locations(match(location(tp0=uri)), MatchMode.PREFIX, 1, [])


def grant(mask: meta.BlockMask, locations: int, session: str = "s") -> meta.StartWriteCacheResponse:
    return meta.StartWriteCacheResponse(
        write_session_id=session, block_mask=mask, locations=[location(tp0=URI)] * locations
    )


def flags(*values: bool) -> meta.BlockMask:
    return meta.BlockMask(bool_masks=meta.BoolMasksType(values=values))


def test_masks_of_grants() -> None:
    assert read_grant(grant(meta.BlockMask(offset=1), 2), 3).mask == (True, False, False)
    assert read_grant(grant(flags(False, True), 2), 3).mask == (False, True, False)
    assert read_grant(grant(meta.BlockMask(), 3), 3).mask == (False, False, False)


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
        read_grant(answer, 3)


def test_storage_configs_are_read_and_unknown_kinds_left_out() -> None:
    text = """[{"type":"file","is_available":false,"global_unique_name":"nfs_01",
                "storage_spec":{"root_path":"/nfs/","key_count_per_file":8,"later":1}},
               {"type":"mooncake","global_unique_name":"mc","storage_spec":{"master_server_entry":"10.0.0.1:1"}},
               {"type":"tape","global_unique_name":"t"}]"""
    nfs, mooncake = read_storage_configs(text)
    assert nfs.spec == NfsStorageSpec("/nfs/", 8)
    assert not nfs.is_available
    assert mooncake.spec == MooncakeStorageSpec(master_service_entry="10.0.0.1:1")
    assert read_storage_configs("") == ()


@pytest.mark.parametrize(
    "text",
    ["{", "{}", "[1]", '[{"type":"file","storage_spec":[]}]', '[{"type":"file","storage_spec":{"root_path":1}}]'],
)
def test_malformed_storage_configs_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError):
        read_storage_configs(text)
