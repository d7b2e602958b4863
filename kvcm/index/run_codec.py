"""Runs of blocks as bytes: what Redis holds for up to 64 blocks whose records differ in nothing but their chunks.

::

    version · stamp (8) · count (1) · count keys (8 each) · count parents (8 each) · count depths (4 each) ·
    count sizes (4 each) · size of the headers (4) · headers · count bodies

All numbers are big endian. Keys and parents are not mixed; the highest bit of a depth says that there is no parent.
The headers are msgpack [header, ...], as `codec.py` has them, one per location. A body is the chunk of the only
location, or msgpack [chunk, ...] of several; the sizes are those of the bodies.

Columns of a fixed width come first, so that a script finds the keys without reading the rest, and takes blocks out of a
run without knowing headers or bodies.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from struct import Struct
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from kvcm.index.backends.backend import StoredRun, UniformRun
from kvcm.index.codec import STAMP_SIZE, StampedRecord, decode_header, header_of, new_stamp
from kvcm.model.errors import StorageIOError
from kvcm.model.keys import join_keys, mixed, pack_keys, split_keys
from kvcm.model.locations import BlockRecord, BlockRun, Location

__all__ = [
    "MOST_BLOCKS",
    "RUN_VERSION",
    "decode_runs",
    "decode_stored",
    "decode_uniform",
    "encode_blocks",
    "encode_headers",
    "encode_run",
    "keys_of",
    "new_run_stamp",
]

MOST_BLOCKS: Final = 64
RUN_VERSION: Final = 2
_COUNT_AT: Final = 1 + STAMP_SIZE
_KEYS_AT: Final = _COUNT_AT + 1
_HEADLESS: Final = 1 << 31
_NO_PARENT: Final = bytes(8)
_encode: Final = msgspec.msgpack.Encoder().encode
_decode_list: Final[Callable[[bytes], list[bytes]]] = msgspec.msgpack.Decoder(list[bytes]).decode


def new_run_stamp() -> bytes:
    """Return a stamp that no other write has."""
    return new_stamp()[1:]


def encode_headers(locations: Sequence[Location]) -> bytes:
    """Return what blocks with these locations have in common."""
    return _encode([header_of(location) for location in locations])


def encode_run(run: BlockRun) -> bytes:
    """Return a run of at most `MOST_BLOCKS` blocks, with a new stamp."""
    keys = join_keys(run.keys)
    if run.parent is None:
        head, depths = _NO_PARENT, [_HEADLESS | run.depth, *range(run.depth + 1, run.depth + len(run.keys))]
    else:
        (head,) = pack_keys((run.parent,))
        depths = list(range(run.depth, run.depth + len(run.keys)))
    return _joined(keys, head + keys[:-8], depths, encode_headers((run.location,)), run.chunks)


def encode_blocks(keys: Sequence[int], records: Sequence[BlockRecord]) -> bytes:
    """Return a run of blocks whose records differ in nothing but parents, depths and chunks, with a new stamp."""
    parents = pack_keys([record[0] or 0 for record in records])
    depths = [record[1] | (_HEADLESS if record[0] is None else 0) for record in records]
    bodies = [_body_of(record[2]) for record in records]
    return _joined(join_keys(keys), b"".join(parents), depths, encode_headers(records[0][2]), bodies)


def _joined(keys: bytes, parents: bytes, depths: Sequence[int], headers: bytes, bodies: Sequence[bytes]) -> bytes:
    count = len(depths)
    numbers = _words(2 * count + 1).pack(*depths, *map(len, bodies), len(headers))
    return b"".join((new_stamp(RUN_VERSION), bytes((count,)), keys, parents, numbers, headers, *bodies))


@lru_cache(4 * MOST_BLOCKS)
def _words(count: int) -> Struct:
    return Struct(f">{count}I")


def _body_of(locations: Sequence[Location]) -> bytes:
    return locations[0][5] if len(locations) == 1 else _encode([location[5] for location in locations])


def keys_of(value: bytes) -> bytes:
    """Return the keys of a run, 8 bytes each.

    Raises:
        StorageIOError: another release wrote it, or it is damaged.
    """
    if len(value) <= _KEYS_AT or value[0] != RUN_VERSION:
        raise _damaged(value, f"its version is {value[:1]!r}")
    keys = value[_KEYS_AT : _KEYS_AT + 8 * value[_COUNT_AT]]
    if len(keys) != 8 * value[_COUNT_AT]:
        raise _damaged(value, "its keys are cut off")
    return keys


def decode_runs(runs: Sequence[bytes], wanted: Collection[int] | None = None) -> dict[int, StampedRecord]:
    """Return the records of the blocks in some runs by key.

    Args:
        runs: as they are stored.
        wanted: leave out all other blocks.

    Raises:
        StorageIOError: another release wrote one, or it is damaged.
    """
    columns = [_Columns.of(value) for value in runs]
    keys = mixed([key for each in columns for key in each.keys])
    parents = mixed([parent for each in columns for parent in each.parents])
    found: dict[int, StampedRecord] = {}
    at = 0
    for each in columns:
        end = at + len(each.depths)
        positions = [i for i in range(at, end) if wanted is None or keys[i] in wanted]
        locations = each.locations([i - at for i in positions])
        for i, some in zip(positions, locations, strict=True):
            depth = each.depths[i - at]
            chain = (None, depth - _HEADLESS) if depth >= _HEADLESS else (parents[i], depth)
            found[keys[i]] = record = tuple.__new__(StampedRecord, (*chain, some))
            record.stamp = each.stamp
        at = end
    return found


def decode_uniform(runs: Sequence[bytes]) -> tuple[list[UniformRun], dict[int, StampedRecord]]:
    """Return the runs of blocks with one location each, and the records of the blocks of the others by key.

    Raises:
        StorageIOError: another release wrote one, or it is damaged.
    """
    uniform: list[UniformRun] = []
    others: dict[int, StampedRecord] = {}
    parts = [_split(value) for value in runs]
    keys = split_keys(b"".join(map(keys_of, runs)))
    at = 0
    for (headers, bodies), value in zip(parts, runs, strict=True):
        if len(headers) == 1:
            before, after = headers[0]
            location = tuple.__new__(Location, (*before, b"", *after))
            uniform.append(UniformRun(keys[at : at + len(bodies)], location, bodies))
        else:
            others.update(decode_runs([value]))
        at += len(bodies)
    return uniform, others


def decode_stored(runs: Sequence[bytes]) -> list[StoredRun]:
    """Return runs as they are stored.

    Raises:
        StorageIOError: another release wrote one, or it is damaged.
    """
    found: list[StoredRun] = []
    parts = [_split(value) for value in runs]
    keys = split_keys(b"".join(map(keys_of, runs)))
    heads = split_keys(b"".join([value[at : at + 8] for value in runs for at in [_KEYS_AT + 8 * value[_COUNT_AT]]]))
    at = 0
    for head, (headers, bodies), value in zip(heads, parts, runs, strict=True):
        end = at + len(bodies)
        depths = _words(len(bodies)).unpack_from(value, _KEYS_AT + 16 * len(bodies))
        locations = tuple([tuple.__new__(Location, (*before, b"", *after)) for before, after in headers])
        chunks: Sequence[Sequence[bytes]] = [bodies]
        if len(headers) > 1:
            chunks = list(zip(*[_chunks_of(body, len(headers)) for body in bodies], strict=True))
        parent = None if depths[0] >= _HEADLESS else head
        depth = depths[-1] & ~_HEADLESS
        stamp = value[1:_COUNT_AT]
        found.append(StoredRun(stamp, keys[at:end], parent, depth=depth, locations=locations, chunks=chunks))
        at = end
    return found


_Headers: TypeAlias = Sequence[tuple[tuple[Any, ...], tuple[Any, ...]]]


def _split(value: bytes) -> tuple[_Headers, Sequence[bytes]]:
    """Return headers and bodies of a run."""
    try:
        if value[0] != RUN_VERSION:
            raise _damaged(value, f"its version is {value[0]}")
        count = value[_COUNT_AT]
        headers_at = _KEYS_AT + 24 * count + 4
        *sizes, headers_size = _words(count + 1).unpack_from(value, headers_at - 4 * count - 4)
        at = headers_at + headers_size
        headers = _headers_of(value[headers_at:at])
        if not count or at + sum(sizes) != len(value):
            raise _damaged(value, "its length is wrong")
        bodies = [value[begin:end] for begin, end in pairwise(accumulate(sizes, initial=at))]
    except (msgspec.MsgspecError, struct.error, IndexError, TypeError, ValueError, OverflowError) as error:
        raise _damaged(value, str(error)) from error
    return headers, bodies


class _Columns(NamedTuple):
    """A run, parsed.

    Attributes:
        stamp: of the run.
        keys: of the blocks, not mixed.
        parents: not mixed; meaningless where the depth says that there is none.
        depths: as stored.
        headers: of the locations of each block, without the chunks.
        bodies: by block.
    """

    stamp: bytes
    keys: Sequence[int]
    parents: Sequence[int]
    depths: Sequence[int]
    headers: _Headers
    bodies: Sequence[bytes]

    @classmethod
    def of(cls, value: bytes) -> _Columns:
        """Parse a run."""
        headers, bodies = _split(value)
        count = len(bodies)
        keys = _keys(2 * count).unpack_from(value, _KEYS_AT)
        depths = _words(count).unpack_from(value, _KEYS_AT + 16 * count)
        return cls(value[1:_COUNT_AT], keys[:count], keys[count:], depths, headers, bodies)

    def locations(self, positions: Iterable[int]) -> Iterator[tuple[Location, ...]]:
        """Yield the locations of blocks."""
        if len(self.headers) == 1:
            ((before, after),) = self.headers
            for position in positions:
                # The constructor of a named tuple costs three times as much.
                yield (tuple.__new__(Location, (*before, self.bodies[position], *after)),)
            return
        for position in positions:
            pairs = zip(self.headers, _chunks_of(self.bodies[position], len(self.headers)), strict=True)
            yield tuple(tuple.__new__(Location, (*before, chunk, *after)) for (before, after), chunk in pairs)


def _chunks_of(body: bytes, count: int) -> list[bytes]:
    try:
        chunks = _decode_list(body)
    except msgspec.MsgspecError as error:
        raise _damaged(body, str(error)) from error
    if len(chunks) != count:
        raise _damaged(body, f"it has {len(chunks)} chunks of {count}")
    return chunks


@lru_cache(1 << 12)
def _headers_of(encoded: bytes) -> _Headers:
    return [decode_header(header) for header in _decode_list(encoded)]


@lru_cache(2 * MOST_BLOCKS)
def _keys(count: int) -> Struct:
    return Struct(f">{count}q")


def _damaged(value: bytes, why: str) -> StorageIOError:
    text = f"a stored run of blocks of {len(value)} bytes is damaged ({why}); run `kvcm index verify --repair`"
    return StorageIOError(text)
