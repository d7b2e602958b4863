"""Names of block records in Redis: `<deployment>:b{<uid>.<shard>}` and the eight bytes of the key."""

from __future__ import annotations

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

    def parse(self, name: bytes) -> tuple[int, int]:
        """Return uid and block key of a record's name."""
        return int(name[len(self.prefix) : name.index(b".", len(self.prefix))]), int.from_bytes(
            name[-8:], "big", signed=True
        )
