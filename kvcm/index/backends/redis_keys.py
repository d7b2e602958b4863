"""Names of what an index keeps in Redis (docs/metadata.md): all keys of a lock shard share one hash tag."""

from __future__ import annotations

import re
from struct import Struct
from typing import Final, NamedTuple

__all__ = ["KEY", "RELATION", "BlockKeys", "ShardKeys"]

KEY: Final = Struct(">q")
"""A block key as part of a name and as a member of the sorted sets."""

RELATION: Final = Struct(">qq")
"""Parent and child, as a member of the sorted set of children."""


class ShardKeys(NamedTuple):
    """Names of the keys of one lock shard; `blocks` is what its records' names begin with."""

    blocks: bytes
    order: bytes
    children: bytes
    pending: bytes
    usage: bytes

    @classmethod
    def of(cls, deployment: str, uid: int, shard: int) -> ShardKeys:
        """Return the names for a shard of an instance's registration."""
        return cls(*(f"{deployment}:{kind}{{{uid}.{shard}}}".encode() for kind in "bzcpu"))

    def block(self, key: int) -> bytes:
        """Return the name of a block's record."""
        return self.blocks + KEY.pack(key)


class BlockKeys:
    """The records of one deployment.

    Attributes:
        prefix: what all of them begin with.

    Args:
        deployment: name that every key of the deployment begins with.
    """

    def __init__(self, deployment: str) -> None:
        self.prefix = f"{deployment}:b{{".encode()
        self._match = re.compile(re.escape(self.prefix) + rb"(\d{1,19})\.\d{1,19}\}(.{8})", re.DOTALL).fullmatch

    def parse(self, name: bytes) -> tuple[int, int] | None:
        """Return uid and block key of a record's name; None for a name that only begins like one."""
        found = self._match(name)
        return (int(found[1]), int.from_bytes(found[2], "big", signed=True)) if found is not None else None
