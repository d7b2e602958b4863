"""What the kernel of hierarchies counts."""

from __future__ import annotations

__all__ = ["ARRIVED", "DEMOTED", "DROPPED", "HITS", "INSERTED", "MOVED", "OBJECTS", "PROMOTED", "SUMS", "TOKENS"]

SUMS = ("prefix_tokens", "object_blocks", "inserted_blocks", "promoted_blocks", "dropped_blocks")
"""Counted for each level."""
TOKENS, OBJECTS, INSERTED, PROMOTED, DROPPED = range(5)

MOVED = ("hits", "arrived", "demoted")
"""Counted for each request and level."""
HITS, ARRIVED, DEMOTED = range(3)
