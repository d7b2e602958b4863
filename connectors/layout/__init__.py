"""Describes blocks of KV in engine memory and in storage, and copies between the two where memory cannot be described.

The exports here are plain Python. `tensors`, `gather` and `rows_triton` need torch, `rows_triton` needs Triton as well;
they are imported by name.
"""

from kvcm.connectors.layout.paged import PagedKv
from kvcm.connectors.layout.stored_format import (
    BlockLayout,
    IndexRange,
    Shard,
    StoredFormat,
    contiguous_runs,
    format_text,
    parse_format,
    rank_heads,
)

__all__ = [
    "BlockLayout",
    "IndexRange",
    "PagedKv",
    "Shard",
    "StoredFormat",
    "contiguous_runs",
    "format_text",
    "parse_format",
    "rank_heads",
]
