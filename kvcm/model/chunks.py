"""Many locations encoded at once: what `encode_chunk` makes of each, in a fraction of its time.

The locations of one write have the same type and the same specs. Their encodings differ in the uris, and before those
in lengths, of which there are few: all bytes between two uris are looked up by the lengths of what follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import add

from kvcm.model.locations import gaps_between_uris
from kvcm.model.storages import StorageType

__all__ = ["encode_chunks"]


def encode_chunks(storage_type: StorageType, spec_names: Sequence[str], uris: Sequence[Sequence[str]]) -> list[bytes]:
    """Encode locations that have no checksums yet.

    Args:
        storage_type: kind of storage that the uris belong to.
        spec_names: of every location, in order.
        uris: a sequence per spec, with one uri per location.

    Returns:
        Each location as field 2 of an answer.
    """
    columns = [list(map(str.encode, of_spec)) for of_spec in uris]
    if len(columns) == 1:
        return _of_one_spec(storage_type, spec_names[0], columns[0])
    names, forms = tuple(spec_names), dict[tuple[int, ...], tuple[bytes, ...]]()
    chunks = []
    for row in zip(*columns, strict=True):
        lengths = tuple(map(len, row))
        gaps = forms.get(lengths)
        if gaps is None:
            gaps = forms[lengths] = gaps_between_uris(storage_type, names, lengths)
        parts = [b""] * (2 * len(row))
        parts[::2], parts[1::2] = gaps, row
        chunks.append(b"".join(parts))
    return chunks


def _of_one_spec(storage_type: StorageType, name: str, uris: Sequence[bytes]) -> list[bytes]:
    lengths = list(map(len, uris))
    heads = {length: gaps_between_uris(storage_type, (name,), (length,))[0] for length in set(lengths)}
    return list(map(add, map(heads.__getitem__, lengths), uris))  # loops in C
