"""Names of block records in Redis: `<deployment>:b{<uid>.<shard>}` and the eight bytes of the key."""

from __future__ import annotations

import re

__all__ = ["BlockKeys"]


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
