"""Describes blocks of KV in engine memory as iovecs, and copies where memory cannot be described.

`BlockLayout` and `contiguous_runs` are plain Python and numpy; `connectors.layout.tensors` and
`connectors.layout.staging` need torch and are imported by name.
"""

from connectors.layout.block import BlockLayout
from connectors.layout.runs import contiguous_runs

__all__ = ["BlockLayout", "contiguous_runs"]
