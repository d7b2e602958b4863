"""Describes blocks of KV in engine memory and in storage, and copies between the two where memory cannot be described.

What is exported here is plain Python. `tensors`, `staging`, `sequence`, `engine_kv`, `gather` and `rows` need torch,
`rows_triton` needs Triton as well; they are imported by name.
"""

from connectors.layout.block import BlockLayout
from connectors.layout.paged import PagedKv
from connectors.layout.runs import contiguous_runs
from connectors.layout.shard import Shard, Span, rank_heads
from connectors.layout.stored import StoredFormat
from connectors.layout.stored_text import format_text, parse_format

__all__ = [
    "BlockLayout",
    "PagedKv",
    "Shard",
    "Span",
    "StoredFormat",
    "contiguous_runs",
    "format_text",
    "parse_format",
    "rank_heads",
]
