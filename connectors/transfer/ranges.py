"""Items that load some bytes of a part only: a few layers of a block, or the heads of one rank.

Which bytes those are, `connectors/layout` says (`StoredFormat.reads`); one behind the other in memory they are again
what a stored format describes. An engine that begins with layer 0 while the others still come asks for the layers in
groups, one call each.

A part that is loaded in ranges is not verified, since its checksum is that of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence

from connectors.transfer.mover import TransferItem
from kvcm.model.errors import InvalidArgumentError
from kvcm.model.uri import LocationUri

__all__ = ["range_items"]


def range_items(
    uri: LocationUri, ranges: Sequence[tuple[int, int]], memory: memoryview, checksum: int = 0
) -> list[TransferItem]:
    """Return items that load ranges of a part, one behind the other, into memory.

    Args:
        uri: of the part.
        ranges: first byte in the part and number of bytes of each, `SpecRead.ranges` for example. A single one that is
            the whole part is loaded, and verified, as such.
        memory: flat bytes, as many as all ranges have.
        checksum: of the whole part, 0 when there is none.

    Raises:
        InvalidArgumentError: a range does not lie in the part, or memory has another size.
    """
    for first, count in ranges:
        if first < 0 or not 0 < count <= uri.size - first:
            raise InvalidArgumentError(f"range is {count} bytes from {first} on, must lie in the part's {uri.size}")
    wanted = sum([count for _, count in ranges])
    if memory.nbytes != wanted:
        raise InvalidArgumentError(f"memory has {memory.nbytes} bytes, the ranges have {wanted}; both must be equal")
    if list(ranges) == [(0, uri.size)]:
        return [TransferItem(uri, [memory], checksum=checksum)]
    items, end = [], 0
    for first, count in ranges:
        items.append(TransferItem(uri, [memory[end : end + count]], first))
        end += count
    return items
