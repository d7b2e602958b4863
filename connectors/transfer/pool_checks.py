"""What an item of a memory pool must be, so that nobody reads or writes what no manager has handed out."""

from __future__ import annotations

from connectors.transfer.mover import Direction, TransferItem
from connectors.transfer.pool_segment import stamps_of
from kvcm.model.errors import InvalidArgumentError
from kvcm.model.memory_pool import PAGE_BYTES, chunk_bytes, extent_bytes, pool_bytes
from kvcm.model.uri import LocationUri

__all__ = ["PartChecks"]

_STAMPS_END = 1 << 64


class PartChecks:
    """Looks at one item after the other, in one thread; what neighbours have in common is looked at once.

    Args:
        node_id: the node that the pool is on.
        capacity_bytes: that the manager hands out.
        direction: of the items.
    """

    __slots__ = ("_capacity_bytes", "_chunk_bytes", "_direction", "_node_id", "_size", "_stamp", "_stamps")

    def __init__(self, node_id: str, capacity_bytes: int, direction: Direction) -> None:
        self._node_id = node_id
        self._capacity_bytes = pool_bytes(capacity_bytes)
        self._chunk_bytes = chunk_bytes(capacity_bytes)
        self._direction = direction
        self._stamp: int | None = None
        self._size = 0
        self._stamps = b""

    def extent_of(self, item: TransferItem) -> tuple[int, bytes]:
        """Return where an item's part begins in the pool, in bytes, and the stamps of its pages.

        Raises:
            InvalidArgumentError: no manager hands that out, the memory is of another length, or a save has a start.
        """
        uri = item.uri
        size = uri.size
        if uri.range_id != self._stamp or size != self._size or uri.node_id != self._node_id:
            self._look_at(uri)
        buffers = item.buffers
        length = buffers[0].nbytes if len(buffers) == 1 else sum([buffer.nbytes for buffer in buffers])
        if length != size or not length or item.start is not None:
            self._check_range(item, length)
        offset = int(uri.path[1:])  # which `uri.offset` is for memory pools, in half the time
        if offset % PAGE_BYTES or not 0 <= offset <= self._capacity_bytes - size:
            raise InvalidArgumentError(
                f"offset {offset} with {size} bytes must begin at a page of {PAGE_BYTES} and end within"
                f" {self._capacity_bytes} bytes"
            )
        if offset % self._chunk_bytes + size > self._chunk_bytes:
            raise InvalidArgumentError(
                f"offset {offset} with {size} bytes goes over the border of two chunks of {self._chunk_bytes}"
            )
        return offset, self._stamps

    def _look_at(self, uri: LocationUri) -> None:
        if uri.node_id != self._node_id:
            raise InvalidArgumentError(f"node_id is {uri.node_id!r}, this node is {self._node_id!r}")
        stamp = uri.range_id
        if stamp is None or not 0 < stamp < _STAMPS_END:
            raise InvalidArgumentError(f"range_id is {stamp}, must be 1 to 2^64 - 1")
        if uri.size > self._chunk_bytes:
            raise InvalidArgumentError(
                f"{uri.size} bytes go over the border of two chunks of {self._chunk_bytes}, wherever they begin"
            )
        self._stamps = stamps_of(stamp, extent_bytes(uri.size))
        self._stamp, self._size = stamp, uri.size

    def _check_range(self, item: TransferItem, length: int) -> None:
        start, size = item.start, item.uri.size
        if start is not None and self._direction is Direction.SAVE:
            raise InvalidArgumentError(f"start is {start}, must be None for a save: a part is saved whole")
        if not length or (length != size if start is None else start < 0 or start + length > size):
            raise InvalidArgumentError(
                f"buffers hold {length} bytes from {start or 0} on, the uri's size is {size}; must be all of it, > 0"
            )
