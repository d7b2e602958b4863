"""Reads the answers. Whatever a manager sends, what comes out is well formed or a `MalformedAnswerError`."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from google.protobuf.message import DecodeError

from connectors.results import ClusterInfo, Endpoint, Location, MatchMode, WriteGrant
from kvcm.model.errors import InvalidArgumentError
from kvcm.model.uri import LocationUri
from kvcm.protocol import meta_service_pb2 as meta
from kvcm.protocol.kvcm.v1 import unread_pb2 as unread

__all__ = [
    "MalformedAnswerError",
    "decode_locations",
    "encoded_locations",
    "read_cluster_info",
    "read_grant",
    "read_locations",
]


class MalformedAnswerError(Exception):
    """The manager's answer contradicts the request or itself."""


def read_locations(
    answer: meta.GetCacheLocationResponse, mode: MatchMode, asked: int, spec_names: Collection[str]
) -> tuple[Location | None, ...]:
    """Return the locations of a match.

    Args:
        answer: of the manager.
        mode: of the match; prefix modes list what was found, the others one entry per key.
        asked: most locations there may be.
        spec_names: parts that a block must have to count as found; none = at least one part.

    Raises:
        MalformedAnswerError: too many or too few entries, or a uri that cannot be read.
    """
    count = len(answer.locations)
    if count > asked or (count != asked and not mode.is_prefix):
        raise MalformedAnswerError(f"{count} locations for {asked} keys")
    locations = [_location(message, spec_names) for message in answer.locations]
    if mode.is_prefix and None in locations:
        # A prefix ends at the first block that lacks a part.
        del locations[locations.index(None) :]
    return tuple(locations)


def encoded_locations(answer: unread.UnreadCacheLocations, mode: MatchMode, asked: int) -> tuple[bytes, ...]:
    """Return the locations of a match as they are, for `decode_locations`; b"" where nothing is.

    Raises:
        MalformedAnswerError: too many or too few entries, or in a mode with an entry per key one that cannot be read.
    """
    count = len(answer.locations)
    if count > asked or (count != asked and not mode.is_prefix):
        raise MalformedAnswerError(f"{count} locations for {asked} keys")
    if mode.is_prefix:
        return tuple(answer.locations)
    return tuple([location if _is_anywhere(location) else b"" for location in answer.locations])


def decode_locations(encoded: Sequence[bytes], spec_names: Collection[str]) -> tuple[Location | None, ...]:
    """Return locations that `encoded_locations` gave; None for one that cannot be read or lacks a part."""
    return tuple([_decoded(message, spec_names) for message in encoded])


def read_grant(answer: meta.StartWriteCacheResponse, asked: int) -> WriteGrant:
    """Return the grant of a write for `asked` keys.

    Raises:
        MalformedAnswerError: no session, or mask and locations that do not fit the request.
    """
    if not answer.write_session_id:
        raise MalformedAnswerError("write_session_id is empty")
    mask = _mask(answer.block_mask, asked)
    if len(answer.locations) != mask.count(False):
        raise MalformedAnswerError(f"{len(answer.locations)} locations for {mask.count(False)} blocks to write")
    locations = [_location(message, ()) for message in answer.locations]
    complete = tuple(location for location in locations if location is not None)
    if len(complete) != len(locations):
        raise MalformedAnswerError("a block to write has no address")
    return WriteGrant(answer.write_session_id, mask, complete, answer.header.status.message)


def read_cluster_info(answer: meta.GetClusterInfoResponse) -> ClusterInfo:
    """Return who answered and who leads."""
    leader = None
    if answer.HasField("leader_endpoint"):
        end = answer.leader_endpoint
        leader = Endpoint(end.node_id, end.host, end.meta_rpc_port, end.meta_http_port)
    return ClusterInfo(answer.self_node_id, answer.leader_node_id, leader)


def _location(message: meta.CacheLocation, spec_names: Collection[str]) -> Location | None:
    """Return the location, None when one of `spec_names` (or everything) is missing."""
    try:
        uris = {spec.name: LocationUri.parse(spec.uri) for spec in message.location_specs if spec.uri}
    except InvalidArgumentError as error:
        raise MalformedAnswerError(str(error)) from error
    if not uris or not uris.keys() >= set(spec_names):
        return None
    checksums = {spec.name: spec.checksum for spec in message.location_specs if spec.checksum}
    return Location(uris, message.type, message.checksum, checksums)


def _is_anywhere(location: bytes) -> bool:
    try:
        return any(spec.uri for spec in meta.CacheLocation.FromString(location).location_specs)
    except DecodeError as error:
        raise MalformedAnswerError(str(error)) from error


def _decoded(message: bytes, spec_names: Collection[str]) -> Location | None:
    try:
        return _location(meta.CacheLocation.FromString(message), spec_names)
    except (MalformedAnswerError, DecodeError):
        return None


def _mask(mask: meta.BlockMask, count: int) -> tuple[bool, ...]:
    """Return one flag per key; flags that the manager left out at the end are false (wire.md 5.1)."""
    if mask.WhichOneof("info") == "bool_masks":
        flags: Sequence[bool] = mask.bool_masks.values
        if len(flags) > count:
            raise MalformedAnswerError(f"a mask of {len(flags)} flags for {count} keys")
        return tuple(flags) + (False,) * (count - len(flags))
    if not 0 <= mask.offset <= count:
        raise MalformedAnswerError(f"a mask offset of {mask.offset} for {count} keys")
    return (True,) * mask.offset + (False,) * (count - mask.offset)
